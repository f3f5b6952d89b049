"""No status may lie: a small budget of the fuzzer, and lies that it must find."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings

import equilibria as eq
from tests.fuzz.oracle import attempt, compare, judge, judge_error
from tests.fuzz.problems import build
from tests.fuzz.strategies import Case, cases, numbered
from tests.fuzz.verdict import Run, Verdict

EXAMPLES = int(os.environ.get("EQUILIBRIA_EXAMPLES", "60"))
SOLVED = Case(cell="tanh", batch=3, width=4, gain=0.9, solver="anderson", rtol=1e-8, max_steps=200, cotangent="random")


@settings(derandomize=True, deadline=None, max_examples=EXAMPLES, database=None, phases=[Phase.generate])
@given(cases)
def test_every_status_is_true(case: Case) -> None:
    verdict = judge(case)
    assert not verdict.findings, f"{case}: {verdict.findings}"


# Minimal cases of what the fuzzer has found: each was a lie, a crash or a backward without an end.
FOUND = [
    Case(structure="tuple", in_place="state", seed=31446),
    Case(cell="batch-norm", batch=0, seed=33417),
    Case(batch=2, start="expanded", solver="newton", seed=8327),
    Case(in_place="state", mode="inference", solver="newton", seed=15206),
    Case(in_place="state", mode="inference", batch=4, width=3, solver="broyden"),
    Case(cell="batch-norm", mode="inference", batch=3, seed=2585),
    Case(cell="batch-norm", batch=3, call="closure", mode="no_grad", solver="newton", seed=3459),
    Case(batch=0, width=5, gradient="reversible", seed=35571),
    Case(special="nan", gradient="unrolled-depth", seed=28925),
    Case(dtype="bfloat16", batch=0, width=3),
    Case(dtype="float32", width=2, special="denormal", solver="anderson", gradient="unrolled-sqrt", seed=11009),
    Case(gain=0.0, special="denormal", solver="anderson-3", gradient="unrolled-sqrt", seed=18896),
    Case(cell="tanh", dtype="float16", batch=33, width=5, gain=1.0, scale=1000.0, solver="gmres", seed=11674),
    Case(cell="tanh", width=2, scale=1e-30, start="input", special="huge", solver="fallback", atol=1e-6, seed=40941),
    Case(
        dtype="complex128", batch=2, width=3, structure="tuple", start="nan-row", in_place="state", solver="Robust", seed=5
    ),
    Case(dtype="float32", batch=2, start="far", special="denormal", solver="bicgstab", seed=32325),
    Case(dtype="float32", width=2, scale=1e-30, start="nan-row", solver="gmres", atol=1e-6, seed=62068),
    Case(gain=4.0, start="input", special="huge", gradient="phantom", max_steps=0, seed=64006),
    Case(call="closure", gradient="neumann", cotangent="nan-row", seed=40244),
    Case(batch=2, special="nan", coupling=0.4, seed=63286),
    Case(batch=2, special="nan", coupling=0.4, solver="steady-state", seed=63286),
    Case(batch=3, width=2, special="huge", coupling=0.4, solver="anderson", change="weight", norm="max", seed=49879),
    Case(batch=3, width=2, special="huge", coupling=0.4, solver="fallback", change="weight", norm="max", seed=49879),
    Case(batch=2, gain=0.9, change="coupling", seed=2615),
    Case(dtype="float32", batch=3, width=5, gain=1.0, scale=1e30, solver="gmres", change="coupling", rtol=1e-8, seed=13541),
    Case(cell="tanh", batch=2, special="zero", coupling=0.001, compact=False, seed=903),
    Case(cell="tanh", batch=2, scale=1e-30, mode="forward", change="coupling", atol=1e-6, seed=29019),
    Case(cell="tanh", batch=3, gain=1.5, spread=3, special="inf", coupling=0.4, max_steps=5, seed=21952),
    Case(cell="tanh", dtype="float16", batch=2, width=3, scale=1e3, call="closure", cotangent="rows", seed=17240),
    Case(cell="bounded", batch=7, width=5, gain=0.9, solver="newton-bicgstab", change="coupling", seed=57226),
    Case(dtype="float16", batch=33, special="huge", change="coupling", max_steps=5, seed=5837),
    Case(batch=2, gain=0.3, special="zero", coupling=0.4, solver="fallback", rtol=1e-5, max_steps=1, seed=7235),
    Case(cell="bounded", dtype="bfloat16", batch=3, gain=0.9, solver="picard-damped", change="coupling", seed=63626),
    Case(cell="tanh", dtype="complex64", batch=2, scale=1e-30, coupling=0.4, mode="forward", seed=41297),
    numbered(19, 722),
    numbered(19, 1396),
    numbered(19, 6221),
    numbered(19, 11689),
    numbered(19, 13042),
    numbered(19, 8684),
    numbered(20, 3186),
    numbered(20, 3944),
    numbered(41, 4435),
    numbered(41, 5165),
    numbered(41, 5216),
    numbered(41, 5264),
    numbered(41, 5369),
    numbered(41, 6600),
    numbered(41, 11280),
    numbered(61, 1489),
    numbered(61, 1630),
    numbered(61, 5436),
    numbered(61, 6362),
    numbered(61, 6589),
    numbered(83, 3479),
    numbered(19, 4938),
    numbered(19, 7127),
    Case(change="gain-before-backward", seed=29256),
    # no fixed point: states that grow until any residual is small beside them
    Case(batch=5, gain=1.0, scale=1e30, start="random", solver="broyden-search", rtol=1e-2, max_steps=100, seed=45770),
    Case(dtype="float16", batch=9, width=2, gain=1.0, memory="expanded", solver="fallback", rtol=1e-2, seed=40148),
    Case(dtype="float16", batch=16, width=5, gain=1.0, spread=3, start="far", solver="newton", rtol=1e-2, seed=27358),
    Case(batch=33, width=5, gain=1.0, scale=1e-3, special="zero", solver="anderson", rtol=1e-2, check_every=3, seed=52652),
    Case(cell="batch-norm", batch=2, gradient="phantom-checkpointed", change="eval-between", seed=52426),
]


@pytest.mark.parametrize("case", FOUND, ids=str)
def test_cases_that_once_failed_pass(case: Case) -> None:
    assert not judge(case).findings


def test_the_stored_run_found_nothing_and_the_page_has_its_figures() -> None:
    root = Path(__file__).parent.parent.parent
    run = json.loads((root / "tests" / "fuzz" / "figures.json").read_text())
    assert run["samples"] >= 100_000 and run["lies"] == run["unclear"] == 0
    shown = f"seed {run['seed']}: {run['samples']:,} samples, {run['gradients']:,} gradients compared, 0 findings"
    assert shown in (root / "docs" / "evidence.md").read_text()


def solved() -> Run:
    run = attempt(build(SOLVED))
    assert isinstance(run, Run)
    return run


def kinds(verdict: Verdict) -> set[str]:
    return {finding.kind for finding in verdict.findings}


def test_a_true_solution_passes() -> None:
    verdict = judge(SOLVED)
    assert not verdict.findings
    assert (verdict.samples, verdict.converged, verdict.gradients) == (3, 3, 3)


def test_a_status_that_claims_too_much_is_found() -> None:
    run = solved()
    assert run.solution.result.stats is not None
    z = run.solution.z + 1e-6
    run.solution = dataclasses.replace(run.solution, z=z)
    assert "converged beyond tolerance" in kinds(compare(run))


def test_a_residual_that_is_not_that_of_the_state_is_found() -> None:
    run = solved()
    stats = run.solution.result.stats
    assert stats is not None
    run.solution.result.stats = dataclasses.replace(
        stats, status=torch.full_like(stats.status, eq.Status.MAX_STEPS), residual=stats.residual + 1e-3
    )
    assert kinds(compare(run)) == {"residual told"}


def test_a_state_that_only_grew_is_found() -> None:
    run = attempt(build(Case(batch=2, gain=1.0, seed=1)))
    assert isinstance(run, Run)
    stats = run.solution.result.stats
    assert stats is not None
    run.solution = dataclasses.replace(run.solution, z=run.solution.z * 1e6)
    run.solution.result.stats = dataclasses.replace(stats, status=torch.zeros_like(stats.status))
    assert "converged by growth" in kinds(compare(run))


@pytest.mark.parametrize("name", ["grad_x", "grad_w"])
def test_a_wrong_gradient_is_found(name: str) -> None:
    run = solved()
    setattr(run, name, getattr(run, name) * (1 + 1e-5))
    assert kinds(compare(run)) == {"gradient of x" if name == "grad_x" else "gradient of the weight"}


def test_an_error_from_elsewhere_is_unclear_and_ours_is_clear() -> None:
    problem = build(SOLVED)
    try:
        torch.zeros(3)[3]
    except IndexError as error:
        assert kinds(judge_error(error, problem, problem.cell)) == {"unclear crash"}
    refused = judge(dataclasses.replace(SOLVED, gradient="shine"))  # which needs Broyden's method
    assert not refused.findings and refused.refused is not None and "Broyden" in refused.refused


def test_a_numbered_case_is_the_same_every_time_and_prints_what_makes_it_again() -> None:
    case = numbered(0, 17)
    assert case == numbered(0, 17) != numbered(1, 17)
    assert eval(str(case)) == case
