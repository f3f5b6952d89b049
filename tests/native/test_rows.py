"""The result of a row depends on the row alone: not on the other rows, its position, or the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import native
from equilibria._core.loop import solve
from equilibria.solution import SolveResult
from tests.problems import generator, name

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason() or "native")

SOLVERS: list[Any] = [eq.Picard(damping=0.7), eq.Anderson(), eq.Anderson(history=2, damping=0.8), eq.Broyden(), eq.GMRES()]


class Rows:
    """An elementwise map, slope z + x or with a sine: a row gives the same bits in every batch."""

    def __init__(self, slope: Tensor, x: Tensor, linear: bool) -> None:
        self.slope, self.x, self.linear = slope, x, linear

    def __call__(self, z: Tensor) -> Tensor:
        return self.slope * (z if self.linear else torch.sin(z)) + self.x

    def take(self, index: Tensor) -> Rows:
        return Rows(self.slope[index], self.x[index], self.linear)


def rows(batch: int, n: int, dtype: torch.dtype, linear: bool) -> Rows:
    """Return a map whose rows converge at different rates."""
    draw = generator(batch + n)
    slope = (2 * torch.rand(batch, n, generator=draw) - 1) * torch.linspace(0.3, 0.97, batch).unsqueeze(1)
    return Rows(slope.to(dtype), torch.randn(batch, n, generator=draw).to(dtype), linear)


def solved(f: Rows, solver: Any, stop: eq.Stop) -> SolveResult:
    with torch.no_grad():
        return solve(f, torch.zeros_like(f.x), solver, stop)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 100, 1500])
def test_a_batch_equals_its_rows_bit_for_bit(solver: Any, dtype: torch.dtype, n: int) -> None:
    f = rows(9, n, dtype, linear=isinstance(solver, eq.GMRES))
    stop = eq.Stop(rtol=1e-5, max_steps=60, on_failure="ignore")
    together = solved(f, solver, stop)
    for i in range(9):
        alone = solved(f.take(torch.tensor([i])), solver, stop)
        assert together.stats.status[i] == alone.stats.status[0] and together.stats.steps[i] == alone.stats.steps[0]
        assert torch.equal(together.z[i], alone.z[0])


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_threads_change_no_bit(solver: Any, threads: None) -> None:
    f = rows(64, 40_000, torch.float32, linear=isinstance(solver, eq.GMRES))
    stop = eq.Stop(rtol=1e-4, max_steps=12, on_failure="ignore")
    torch.set_num_threads(1)
    one = solved(f, solver, stop)
    torch.set_num_threads(3)
    several = solved(f, solver, stop)
    assert torch.equal(one.z, several.z)
    assert torch.equal(one.stats.steps, several.stats.steps) and torch.equal(one.stats.residual, several.stats.residual)


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_rows_that_are_dropped_change_no_bit_of_the_others(solver: Any) -> None:
    f = rows(64, 130, torch.float64, linear=isinstance(solver, eq.GMRES))
    dropped = solved(f, solver, eq.Stop(rtol=1e-6, max_steps=80, on_failure="ignore"))
    kept = solved(f, solver, eq.Stop(rtol=1e-6, max_steps=80, on_failure="ignore", compact=False))
    assert dropped.stats.sample_evaluations < kept.stats.sample_evaluations
    assert torch.equal(dropped.z, kept.z) and torch.equal(dropped.stats.steps, kept.stats.steps)
