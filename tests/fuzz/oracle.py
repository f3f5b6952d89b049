"""What is true of a solution: residuals in float64, gradients by dense algebra; and where the library says otherwise.

A row is judged if its status or its adjoint's is "converged": its residual must be within the tolerance, and its gradient
must be that of (I - J') u = v at the returned state. For other rows only a finite state and a true residual are required.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import equilibria as eq
from tests.fuzz.dense import Dense, evaluate
from tests.fuzz.forward_checks import compare_forward, same_form
from tests.fuzz.gradient_checks import compare_gradients, compare_tangents
from tests.fuzz.problems import FACTOR_BEFORE, STRONG_COUPLING, Cell, Problem, build
from tests.fuzz.strategies import Case
from tests.fuzz.verdict import Run, Verdict, samples_of

CHANGED_IN_PLACE = "modified by an inplace operation"  # torch's message if a weight changes between forward and backward
PACKAGE = str(Path(eq.__file__).parent)
for _path in Path(PACKAGE).rglob("*.py"):
    linecache.getlines(str(_path))  # a long run must not read files that have changed since they were imported


def judge(case: Case) -> Verdict:
    """Run a case and compare all reported statistics and gradients with the truth; returns the findings."""
    verdict = Verdict()
    problem = build(case)
    case = problem.case
    problems = [problem]
    for thread in range(1, case.threads):
        other = build(replace(case, seed=case.seed + thread))
        other.cell, other.deq, other.z0 = problem.cell, problem.deq, problem.z0  # the layer makes the start
        problems.append(other)
    weight = problem.cell.w
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _before(problem)
        if case.threads > 1:
            with ThreadPoolExecutor(case.threads) as pool:
                outcomes = list(pool.map(attempt, problems))
        else:
            outcomes = [attempt(problem)]
        if problem.cell.w is not weight:
            verdict.add("weight replaced", "the module holds another tensor as its weight after the call")
        for outcome in outcomes:
            verdict.merge(outcome if isinstance(outcome, Verdict) else compare(outcome))
    return verdict


def _before(problem: Problem) -> None:
    """Make the first of two calls, for cases that change something in between."""
    case, cell = problem.case, problem.cell
    if case.change not in ("coupling", "gain", "weight"):
        return
    final = cell.coupling, cell.factor
    if case.change == "coupling":
        cell.coupling = 0.0
        final = STRONG_COUPLING, cell.factor
    elif case.change == "gain":
        cell.factor = FACTOR_BEFORE
    with contextlib.suppress(Exception), _mode(case):  # an error comes again in the call that is judged
        problem.solve(problem.x)
    cell.coupling, cell.factor = final
    if case.change == "weight":
        with torch.no_grad():
            cell.w.mul_(0.5)


def _mode(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.mode == "no_grad":
        return torch.no_grad()
    return torch.inference_mode() if case.mode == "inference" else contextlib.nullcontext()


def attempt(problem: Problem) -> Run | Verdict:
    """Solve, and run backward if there is a graph; errors that are raised are checked here."""
    case = problem.case
    as_it_was = copy.deepcopy(problem.cell)
    try:
        with warnings.catch_warnings() if case.threads == 1 else contextlib.nullcontext():
            if case.threads == 1:
                warnings.simplefilter("ignore")
            with _mode(case), problem.autocast():
                run = _forward_mode(problem, as_it_was) if case.mode == "forward" else _plain(problem, as_it_was)
            if case.mode in ("grad", "eval"):
                _change_before_backward(problem)
                _backward(run)
        return run
    except Exception as error:
        return judge_error(error, problem, as_it_was)


def _plain(problem: Problem, cell: Cell) -> Run:
    run = Run(problem, cell, problem.solve(problem.x))
    if run.solution.stats.extra_steps:
        run.measured = run.solution.measure_residual()
    return run


def _forward_mode(problem: Problem, cell: Cell) -> Run:
    with forward_ad.dual_level():
        solution = problem.solve(forward_ad.make_dual(problem.x, problem.tangent()))
        leaves, spec = pytree.tree_flatten(solution.z)
        parts = [forward_ad.unpack_dual(leaf) for leaf in leaves]
        tangents = [torch.zeros_like(part.primal) if part.tangent is None else part.tangent for part in parts]
        z = pytree.tree_unflatten([part.primal.detach() for part in parts], spec)
        run = Run(problem, cell, replace(solution, z=z))
        run.tangents = pytree.tree_unflatten(tangents, spec)
    return run


def _change_before_backward(problem: Problem) -> None:
    case, cell = problem.case, problem.cell
    if case.change == "gain-before-backward":
        cell.factor = 2.0
    elif case.change == "weight-before-backward":
        with torch.no_grad():
            cell.w.mul_(0.5)
    elif case.change == "eval-between":
        assert problem.deq is not None
        problem.deq.train(not problem.deq.training)


def _backward(run: Run) -> None:
    problem = run.problem
    pairs = [
        (z, v)
        for z, v in zip(pytree.tree_leaves(run.solution.z), pytree.tree_leaves(problem.cotangents), strict=True)
        if z.requires_grad
    ]
    if pairs:
        run.grad_x, run.grad_w = torch.autograd.grad(
            [z for z, _ in pairs], [problem.x, problem.cell.w], [v for _, v in pairs], allow_unused=True
        )


def judge_error(error: Exception, problem: Problem, cell: Cell) -> Verdict:
    verdict = Verdict(samples=samples_of(problem))
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    ours = last.filename.startswith(PACKAGE) and "raise" in "".join(
        linecache.getline(last.filename, number) for number in range(last.lineno or 0, (last.end_lineno or 0) + 1)
    )
    clear = ours and isinstance(error, (ValueError, TypeError, RuntimeError))
    if isinstance(error, eq.ConvergenceError) and not bool(error.stats.failed.any()):
        verdict.add("refusal", "a ConvergenceError whose statistics name no sample")
    elif clear:
        verdict.refused = text
    elif _is_the_cells(error, problem, cell):
        verdict.refused = f"the cell by itself: {text}"
    elif CHANGED_IN_PLACE in text and problem.case.change == "weight-before-backward":
        verdict.refused = "torch: a weight was changed in place between forward and backward"
    else:
        inside = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
        where = f"{Path(inside[-1].filename).relative_to(PACKAGE)}:{inside[-1].name}" if inside else "outside of the package"
        verdict.add("unclear crash", f"{text[:160]} ({where})")
    return verdict


def _is_the_cells(error: Exception, problem: Problem, cell: Cell) -> bool:
    """Return True if the cell itself raises this error when it is called directly."""
    try:
        with problem.autocast():
            evaluate(copy.deepcopy(cell), problem.z0, problem.x)
    except Exception as own:
        return type(own) is type(error) and str(own) == str(error)
    return False


def compare(run: Run) -> Verdict:
    problem, stats = run.problem, run.solution.stats
    verdict = Verdict(samples=samples_of(problem), converged=int(stats.converged.sum()))
    if not same_form(run, verdict):
        return verdict
    dense = Dense(run)
    compare_forward(run, dense, verdict)
    if dense.z.numel() and (run.grad_x is not None or run.grad_w is not None):
        compare_gradients(run, dense, verdict)
    if dense.z.numel() and run.tangents is not None:
        compare_tangents(run, dense, verdict)
    return verdict
