"""A benchmark run: its records, files, tables and plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria import native
from equilibria._core.packing import State
from equilibria.lab.bench import command, report
from equilibria.lab.bench.cases import contraction, two_scales
from equilibria.lab.bench.driver import BenchResults, CaseResults, MethodResult, run
from equilibria.lab.bench.methods import COMPILED, DEFAULT, PLAIN, TORCHDEQ, Method, Ours, ours
from equilibria.lab.bench.rules import Judge, Work, tighten
from equilibria.solvers.picard import Picard


class Standing(Method):
    """Our method under the name of another library."""

    library, name = TORCHDEQ, f"{TORCHDEQ} stand-in"

    def __init__(self) -> None:
        self.inner = Ours(solver=Picard())

    def solve(self, case: Any, tol: float) -> State:
        return self.inner.solve(case, tol)

    def step(self, case: Any, tol: float) -> tuple[State, Sequence[Tensor]]:
        return self.inner.step(case, tol)


class Lazy(Standing):
    name = f"{TORCHDEQ} lazy"

    def solve(self, case: Any, tol: float) -> State:
        return case.start


class Broken(Standing):
    name = f"{TORCHDEQ} broken"

    def step(self, case: Any, tol: float) -> tuple[State, Sequence[Tensor]]:
        raise RuntimeError("no gradient today in /home/somebody/code.py")


class NotFinite(Standing):
    name = f"{TORCHDEQ} not finite"

    def step(self, case: Any, tol: float) -> tuple[State, Sequence[Tensor]]:
        z, gradients = super().step(case, tol)
        return z, [gradient * float("nan") for gradient in gradients]


@pytest.fixture(scope="module")
def results() -> BenchResults:
    return run([contraction(4, 0.9)], [Ours(), Standing(), Lazy(), Broken(), NotFinite()], rounds=2, budget=0.0)


def test_a_run_records_all_measurements(results: BenchResults) -> None:
    (case,) = results.cases
    default = case.named(DEFAULT)
    assert default is not None and default.failure is None and len(default.times) == 2
    assert default.residual is not None and default.residual <= case.rtol
    assert default.cosine is not None and default.cosine > 0.999
    assert default.work is not None and default.overhead is not None and default.time is not None
    assert default.overhead == pytest.approx(default.time / default.work.calls)
    assert case.fastest(TORCHDEQ) is case.named(Standing.name)
    assert len(default.forward) == 2 and case.fastest(TORCHDEQ, forward=True) is case.named(Standing.name)


def test_a_failing_method_is_recorded_with_the_reason_and_not_timed(results: BenchResults) -> None:
    (case,) = results.cases
    reasons = {outcome.method: outcome.failure for outcome in case.outcomes if outcome.failure}
    assert reasons == {
        Lazy.name: "not reached: residual 1.0e+00, required 1e-03",
        Broken.name: "RuntimeError: no gradient today in ...",
        NotFinite.name: "its gradient is not finite",
    }
    assert not any(outcome.times for outcome in case.outcomes if outcome.failure)


def test_json_round_trips_with_versions_and_without_paths(results: BenchResults) -> None:
    text = results.to_json()
    assert BenchResults.from_json(text) == results
    setting = json.loads(text)["setting"]
    assert setting["torch"] == torch.__version__ and {"python", "machine", "processor", "cpus", "date"} <= set(setting)
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


def test_the_report_names_ratios_and_failures(results: BenchResults) -> None:
    text = report.text(results)
    (case,) = results.cases
    ratio = report.ratio(case.named(DEFAULT), case)
    assert ratio is not None
    row = next(line for line in report.summary(results).splitlines() if DEFAULT in line)
    assert f"| {ratio:.2f} |" in row
    assert f"- {Broken.name}: RuntimeError: no gradient today" in text


def outcome(method: str, library: str, *times: float) -> MethodResult:
    forward = tuple(time / 4 for time in times)
    return MethodResult(method, library, None, 1e-3, 5e-4, Work(8, 2, 10, 640), 0.99, 0.1, times, forward)


MADE = BenchResults(
    {"torch": "2"},
    (
        CaseResults(
            "a",
            "",
            32,
            1e-3,
            (
                outcome(DEFAULT, "equilibria", 40, 60, 50),
                outcome("equilibria fast", "equilibria", 20, 30, 25),
                outcome(f"{TORCHDEQ} x", TORCHDEQ, 100, 100, 100),
                outcome(f"{TORCHDEQ} y", TORCHDEQ, 200, 200, 200),
            ),
        ),
        CaseResults("b", "", 32, 1e-3, (outcome(DEFAULT, "equilibria", 40.0),)),
    ),
)


def test_ratios_are_medians_over_the_fastest_torchdeq() -> None:
    summary = report.summary(MADE).splitlines()
    assert "| a | TorchDEQ x | 100 | 1.00 | 1.00 | 10 | 10 | 5.00 | 5.0e-04 | 0.9900 | 1.0e-01 |" in summary
    assert "| a | equilibria default | 50 | 0.50 | 1.50 | 10 | 10 | 2.50 | 5.0e-04 | 0.9900 | 1.0e-01 |" in summary
    assert any(line.startswith("| a | equilibria fast | 25 | 0.25 |") for line in summary)
    assert any(line.startswith("| b | equilibria default | 40 | – |") for line in summary)  # nobody to compare with
    assert not any(f"{TORCHDEQ} y" in line for line in summary)


def test_the_table_of_ratios_has_native_plain_and_compiled() -> None:
    case = MADE.cases[0]
    forms = (outcome(PLAIN, "equilibria", 75), outcome(COMPILED, "equilibria", 30))
    table = report.ratios(BenchResults({}, (dataclasses.replace(case, outcomes=(*case.outcomes, *forms)),))).splitlines()
    assert table[-1] == "| a | x | 20 | 20 | 0.50 | 0.75 | 0.30 | 0.50 | 0.75 | 0.30 |"
    assert report.ratios(MADE).splitlines()[-1] == "| b | – | – | 20 | – | – | – | – | – | – |"


def test_a_page_gets_the_table_between_its_marks() -> None:
    page = f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n"
    written = report.with_ratios(page, MADE)
    assert report.ratios(MADE) in written and "old" not in written
    assert written.startswith("before\n") and written.endswith("\nafter\n")
    assert report.with_ratios(written, MADE) == written
    with pytest.raises(ValueError, match="has no lines <!-- ratios -->"):
        report.with_ratios("nothing", MADE)


def test_the_page_on_speed_and_stored_results_can_be_read() -> None:
    root = Path(__file__).parents[3]
    stored = BenchResults.from_json((root / "benchmarks/results/full.json").read_text())
    assert stored.cases and report.MARKS[0] in report.with_ratios((root / "docs/speed.md").read_text(), stored)


def test_plain_steps_are_those_of_torch() -> None:
    method = next(method for method in ours() if method.name == PLAIN)
    seen = []

    class Asking(torch.nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            seen.append(native.available())
            return 0.5 * z + x

    method.solve(dataclasses.replace(contraction(4, 0.9), cell=Asking()), 1e-3)
    assert seen and not any(seen)


def test_the_plot_has_a_bar_per_case_and_form_that_was_run_and_the_line_at_one() -> None:
    pytest.importorskip("matplotlib")
    first = MADE.cases[0]
    plain = outcome(PLAIN, "equilibria", 20, 30, 25)
    axes = report.plot(dataclasses.replace(MADE, cases=(dataclasses.replace(first, outcomes=(*first.outcomes, plain)),)))
    assert sorted(patch.get_height() for patch in axes.patches) == [0.25, 0.5]  # type: ignore[attr-defined]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["default, native steps", "steps in torch"]
    assert torch.tensor(axes.lines[0].get_ydata()).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("method", ours(), ids=lambda method: method.name)
def test_every_configuration_of_ours_reaches_the_tolerance(method: Method) -> None:
    case = two_scales(2, channels=16, size=16)
    judge = Judge(case)
    found = tighten(case, method, judge)
    assert found.reached
    assert judge.gradient(method.step(case, found.tol)[1]).cosine > 0.95


def test_a_compiled_method_is_counted_uncompiled() -> None:
    compiled = ours(compile=True)[-1]
    counted = compiled.counted()
    assert isinstance(compiled, Ours) and compiled.compile
    assert isinstance(counted, Ours) and not counted.compile and counted.solver is compiled.solver


def test_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of all tests that follow
    found, picture = tmp_path / "results.json", tmp_path / "ratios.png"
    arguments = ["--cases", "mlp-b32", "--only", DEFAULT, "Picard", "--budget", "0"]
    assert command.main([*arguments, "--json", str(found), "--plot", str(picture)]) == 0
    assert "| mlp-b32 | equilibria default |" in capsys.readouterr().out
    assert BenchResults.from_json(found.read_text()).cases[0].case == "mlp-b32"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_names_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "nobody"])
    assert "--only nobody selects no method" in capsys.readouterr().err
