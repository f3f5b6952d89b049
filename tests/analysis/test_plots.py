"""Plots of solves, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import equilibria as eq
from tests.problems import TanhCell, inputs

pytest.importorskip("matplotlib")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


TRACED = eq.Stop(rtol=1e-6, atol=0, max_steps=15, trace=True, on_failure="ignore")


def solution(stop: eq.Stop = TRACED) -> eq.Solution:
    return eq.DEQ(TanhCell(5, norm=0.6), solver=eq.Picard(), stop=stop).solve(inputs(7, 5))


def test_a_trace_has_a_line_per_sample_on_a_logarithmic_scale() -> None:
    s = solution()
    axes = eq.analysis.plot_trace(s)
    assert axes.get_yscale() == "log"
    assert s.stats.trace is not None
    lines = [torch.tensor(line.get_ydata()) for line in axes.lines]
    assert [len(line) for line in lines] == [len(trace) for trace in s.stats.trace]
    assert eq.analysis.plot_trace(s.stats, axes) is axes


def test_a_solve_without_a_trace_raises() -> None:
    with pytest.raises(ValueError, match=r"Stop\(trace=True\)"):
        eq.analysis.plot_trace(solution(eq.Stop()))


def test_steps_are_counted_per_sample() -> None:
    s = solution()
    axes = eq.analysis.plot_steps(s)
    assert sum(patch.get_height() for patch in axes.patches) == 7  # type: ignore[attr-defined]


def test_a_spectrum_is_drawn_with_the_unit_circle() -> None:
    axes = eq.analysis.plot_spectrum(eq.analysis.jacobian_spectrum(solution()))
    _, points = axes.lines
    assert len(points.get_xdata()) == 7 * 5  # type: ignore[arg-type]
    assert axes.dataLim.x1 == pytest.approx(1)


def test_plots_are_figures_of_pyplot_which_notebooks_show() -> None:
    axes = eq.analysis.plot_steps(solution())
    assert plt.gcf() is axes.figure
