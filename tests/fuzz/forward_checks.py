"""Checks of a solution without its gradient: form, residuals, status and reported numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import equilibria as eq
from tests.fuzz.dense import Dense, rms
from tests.fuzz.problems import Problem, rows_of
from tests.fuzz.strategies import SOLVERS
from tests.fuzz.tolerances import GROWTH, NORM_SLACK, TOLD_SLACK
from tests.fuzz.verdict import Run, Verdict, samples_of


def same_form(run: Run, verdict: Verdict) -> bool:
    """Check structure, shapes, dtypes and numbers of steps; returns False if the solution cannot be compared further."""
    problem, solution = run.problem, run.solution
    expected, spec = pytree.tree_flatten(problem.z0)
    got, got_spec = pytree.tree_flatten(solution.z)
    if spec != got_spec or [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in got]:
        verdict.add("form", f"z has {got_spec} of {[(tuple(t.shape), t.dtype) for t in got]}")
        return False
    stats = solution.stats
    chain = getattr(SOLVERS[problem.case.solver], "solvers", None)
    links = 1 if chain is None else 2 * len(chain)  # each from the best iterate, and once more from the start
    for name, part, most in (("forward", stats, problem.case.max_steps * links), ("adjoint", solution.adjoint, None)):
        if part is None:
            continue
        if part.status.shape != (samples_of(problem),):
            verdict.add("form", f"{name} status of shape {tuple(part.status.shape)}")
            return False
        fixed = problem.case.gradient in ("unrolled-depth", "warmup")  # a fixed number of steps, whatever the stop says
        if most is not None and not fixed and part.steps.numel() and int(part.steps.max()) > most:
            verdict.add("steps", f"{name}: {int(part.steps.max())} steps of at most {most}")
    if stats.trace is not None and [len(t) for t in stats.trace] != [int(s) + 1 for s in stats.steps]:
        verdict.add("form", "trace and steps disagree")
    return True


def compare_forward(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Compare status and residual of every row with the measured residual."""
    case, stats = run.problem.case, run.solution.stats
    if not bool(torch.isfinite(dense.z).all()):
        verdict.add("non-finite state", "z holds nan or inf")
        return
    if stats.extra_steps:  # documented: status and residual are those of the iterate before
        if run.measured is not None:
            dense.norm = rms
            told = run.measured.double() * rms(dense.rough)
            _compare_told(run, dense, told, stats.status != eq.Status.NONFINITE, verdict)
        return
    residual, size, rounding = dense.norm(dense.f - dense.z), dense.norm(dense.f), dense.rounding()
    tolerance = NORM_SLACK * (case.atol + run.problem.rtol * size)
    finite = torch.isfinite(dense.rough).all(dim=1)
    true = residual <= tolerance + rounding
    # the statistics of JFB and UnrolledPhantom describe the state before their steps, and say so
    told = residual if stats.extra_steps else stats.residual.double() * dense.norm(dense.rough)
    as_one = len(size) > 1 and bool((stats.residual == stats.residual[0]).all())
    if dense.whole and as_one:  # coupled samples may be solved as one problem, and then have equal statistics
        all_size, all_residual = (dense.norm(t.reshape(1, -1)) for t in (dense.f, dense.f - dense.z))
        all_rounding = torch.linalg.vector_norm(rounding)
        true = true | bool(all_residual <= NORM_SLACK * (case.atol + run.problem.rtol * all_size) + all_rounding)
        shared = (stats.residual.double() * all_size - all_residual).abs() <= TOLD_SLACK * all_residual + all_rounding
        told = torch.where(shared, residual, told)
    for row in ((not stats.extra_steps) & stats.converged & ~(true & finite)).nonzero().flatten().tolist():
        verdict.add(
            "converged beyond tolerance",
            f"true |f(z) - z| {float(residual[row]):.2e}, tolerance {float(tolerance[row]):.2e}, rounding "
            f"{float(rounding[row]):.2e}, |f(z)| {float(size[row]):.2e}, told {float(stats.residual[row]):.2e}",
            row,
        )
    _compare_told(run, dense, told, (stats.status != eq.Status.NONFINITE) & (stats.converged <= true), verdict)
    _compare_growth(run, dense, verdict)


def _compare_growth(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Report converged rows of z -> z + x, which has no fixed point: only growth makes its residual relatively small."""
    problem, cell, stats = run.problem, dense.cell, run.solution.stats
    shift = (
        cell.kind == "affine" and not cell.coupling and torch.equal(cell.factor * cell.w, torch.eye(len(cell.w)).to(cell.w))
    )
    if not shift or problem.case.gradient in ("unrolled-depth", "warmup"):
        return  # these take a fixed number of steps, whatever the stop says
    start = dense(torch.nan_to_num(rows_of(problem.z0, problem.whole)), dense.x)
    grown = dense.norm(dense.f) > GROWTH * dense.norm(start)
    asked = dense.norm(dense.f - dense.z) > NORM_SLACK * problem.case.atol + dense.rounding()
    for row in (stats.converged & grown & asked).nonzero().flatten().tolist():
        verdict.add("converged by growth", f"|f(z)| {float(dense.norm(dense.f)[row]):.2e}", row)


def _compare_told(run: Run, dense: Dense, told: Tensor, rows: Tensor, verdict: Verdict) -> None:
    """Compare the reported residuals of these rows with the measured ones."""
    residual, rounding = dense.norm(dense.f - dense.z), dense.rounding()
    # a residual relative to a size below the normal numbers is too large for the dtype
    normal = dense.norm(dense.rough) >= torch.finfo(matrix_dtype(run.problem)).smallest_normal
    known = rows & normal & torch.isfinite(dense.rough).all(dim=1) & torch.isfinite(told)
    slack = TOLD_SLACK * residual + rounding
    for row in (known & ((told - residual).abs() > slack)).nonzero().flatten().tolist():
        verdict.add("residual told", f"told {float(told[row]):.2e}, true {float(residual[row]):.2e}", row)


def matrix_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype in which the library keeps states and residuals."""
    return torch.float64 if problem.dtype in (torch.float64, torch.complex128) else torch.float32
