"""What is true of a solution: residuals in float64, gradients by dense algebra; and where the library says otherwise.

A row is judged if its status or its adjoint's says "converged": the promised residual must be there, and the gradient must
be that of (I - J') u = v at the returned state. Rows that say they failed promise a finite state and a true residual.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import equilibria as eq
from tests.fuzz.problems import FACTOR_BEFORE, STRONG_COUPLING, Cell, Problem, build, rows_of, wide
from tests.fuzz.strategies import SOLVERS, Case

# The library takes norms in the dtype of its matrices, at least float32: a sum of 231 squares is off by less than this.
NORM_SLACK = 1 + 2e-5
# The state is handed out in its own dtype, half a spacing away from the float32 number the residual was taken of; an
# evaluation in a batch of another size (compaction) may round differently by another spacing.
STATE_SPACINGS = 2.0
# Of the cell's own rounding, |f in its dtype - f in float64| at the returned state, a solver knows nothing. It is measured.
# Another evaluation may be off to the other side.
CELL_ROUNDING = 2.0
# Products with J' are computed in the cell's dtype, each with an error of a few spacings of |J| |u|; the adjoint solve stops
# at its tolerance or at 8 spacings, whichever is larger. Both are multiplied by |(I - J)^{-1}|.
ADJOINT_SPACINGS = 24.0
# Below the normal numbers spacings do not shrink any more: sums of up to 33 * 7 terms are off by so many of the smallest.
SUBNORMALS = 512.0
# Beyond, float64 itself has too few digits for the dense solution.
CONDITION = 1e8
# A residual that is told may differ from the one measured by this share, besides rounding.
TOLD_SLACK = 1e-3
# A state that is larger by this factor than at the start has grown; the library takes 2, in its own dtype.
GROWTH = 2.1
# Gradients by steps are compared in double precision, where rounding of a few hundred products is far below this share.
STEPS_SLACK = 1e-6
# Gradients that are defined by steps taken, not by a linear system: (I - J')^{-1} does not describe them.
OWN_FORMULA = ("jfb", "phantom", "phantom-checkpointed", "unrolled", "unrolled-sqrt", "unrolled-truncated", "unrolled-depth")
# torch's own words for a weight that was changed in place between forward and backward
CHANGED_IN_PLACE = "modified by an inplace operation"
PACKAGE = str(Path(eq.__file__).parent)
for _path in Path(PACKAGE).rglob("*.py"):
    linecache.getlines(str(_path))  # a long run must not read files that have changed since they were imported


@dataclass
class Finding:
    """A false statement of the library, or a crash whose message has no remedy."""

    kind: str
    detail: str
    row: int | None = None


@dataclass
class Verdict:
    samples: int = 0  # rows judged
    converged: int = 0  # of these, rows that say so
    gradients: int = 0  # rows whose gradient was compared
    findings: list[Finding] = field(default_factory=list)
    refused: str | None = None  # the clear error, where there was one

    def add(self, kind: str, detail: str, row: int | None = None) -> None:
        self.findings.append(Finding(kind, detail, row))

    def merge(self, other: Verdict) -> None:
        self.samples += other.samples
        self.converged += other.converged
        self.gradients += other.gradients
        self.findings += other.findings
        self.refused = self.refused or other.refused


@dataclass
class Run:
    """The result of one call, with the cell as it was during the forward pass."""

    problem: Problem
    cell: Cell
    solution: eq.Solution
    grad_x: Tensor | None = None
    grad_w: Tensor | None = None
    measured: Tensor | None = None  # residuals of the returned state, where the statistics describe the one before
    tangents: Any = None  # of z, in forward mode, for the cotangents taken as tangents of x


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
    verdict = Verdict(samples=_samples(problem))
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
            _evaluate(copy.deepcopy(cell), problem.z0, problem.x)
    except Exception as own:
        return type(own) is type(error) and str(own) == str(error)
    return False


def _samples(problem: Problem) -> int:
    return 1 if problem.whole else problem.case.batch


def _evaluate(cell: Cell, z: Any, x: Tensor) -> Any:
    with torch.no_grad():
        state = pytree.tree_map(lambda leaf: leaf.detach().clone(), z)
        return cell(state, x.detach().clone())


def compare(run: Run) -> Verdict:
    problem, stats = run.problem, run.solution.stats
    verdict = Verdict(samples=_samples(problem), converged=int(stats.converged.sum()))
    if not _same_form(run, verdict):
        return verdict
    dense = Dense(run)
    _compare_forward(run, dense, verdict)
    if dense.z.numel() and (run.grad_x is not None or run.grad_w is not None):
        _compare_gradients(run, dense, verdict)
    if dense.z.numel() and run.tangents is not None:
        _compare_tangents(run, dense, verdict)
    return verdict


def _same_form(run: Run, verdict: Verdict) -> bool:
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
        if part.status.shape != (_samples(problem),):
            verdict.add("form", f"{name} status of shape {tuple(part.status.shape)}")
            return False
        fixed = problem.case.gradient in ("unrolled-depth", "warmup")  # so many steps, whatever the stop says
        if most is not None and not fixed and part.steps.numel() and int(part.steps.max()) > most:
            verdict.add("steps", f"{name}: {int(part.steps.max())} steps of at most {most}")
    if stats.trace is not None and [len(t) for t in stats.trace] != [int(s) + 1 for s in stats.steps]:
        verdict.add("form", "trace and steps disagree")
    return True


class Dense:
    """The equation in float64 at the returned state: value, Jacobian and rounding of the cell's dtype."""

    def __init__(self, run: Run) -> None:
        self.problem, self.cell = run.problem, run.cell.widened()
        problem = self.problem
        self.norm = {"rms": _rms, "euclidean": _length, "max": _most}[problem.case.norm]
        self.z = rows_of(run.solution.z, problem.whole)
        self.x = problem.x.detach().to(wide(problem.dtype))
        with torch.no_grad():
            self.f = self(self.z, self.x)
        with problem.autocast():
            self.rough = rows_of(_evaluate(copy.deepcopy(run.cell), run.solution.z, problem.x), problem.whole)
        self.whole = problem.whole or self.cell.couples

    def __call__(self, z: Tensor, x: Tensor) -> Tensor:
        """Return the map on float64 rows, with complex numbers as pairs."""
        y = z.reshape(*x.shape, 2) if x.is_complex() else z.reshape(x.shape)
        out = self.cell.core(torch.view_as_complex(y.contiguous()) if x.is_complex() else y, x, self.cell.w)
        return (torch.view_as_real(out) if out.is_complex() else out).reshape(z.shape)

    def rounding(self) -> Tensor:
        """Return the rounding of the residual in the cell's dtype, (rows,)."""
        own = self.norm((self.rough - self.f).nan_to_num(0.0, 0.0, 0.0))  # a cell that is not finite is found elsewhere
        # |f(z + d) - f(z)| <= slope |d|: z is handed out rounded, f was evaluated before. Batch norm may have a larger slope
        slope = max(1.0, self.problem.case.gain + self.cell.coupling)
        size = slope * self.norm(self.z) + self.norm(self.f)
        smallest = min(torch.finfo(leaf.dtype).smallest_normal for leaf in pytree.tree_leaves(self.problem.z0))
        return STATE_SPACINGS * self.problem.precision * (size + SUBNORMALS * smallest) + CELL_ROUNDING * own

    def jacobian(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return J of each of these rows, (rows, n, n), or of all as one, (1, m, m), and the derivative in x likewise."""
        x = self.x if self.whole else self.x[rows]
        z = (self.z if self.whole else self.z[rows]).clone().requires_grad_()
        x = x.clone().requires_grad_()
        out = self(z, x)
        if self.whole:
            columns = [torch.autograd.grad(part, (z, x), retain_graph=True) for part in out.flatten()]
            J = torch.stack([gz.flatten() for gz, _ in columns])[None]
            B = torch.stack([_real(gx).flatten() for _, gx in columns])[None]
        else:
            each = [torch.autograd.grad(out[:, k].sum(), (z, x), retain_graph=True) for k in range(out.shape[1])]
            J = torch.stack([gz for gz, _ in each], dim=1)
            B = torch.stack([_real(gx).flatten(1) for _, gx in each], dim=1)
        return J, B

    def pull(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight for cotangents u of the output, without rows of u that are nan."""
        good = ~torch.isnan(u).any(dim=1)
        rows = slice(None) if self.whole else good
        x, z = self.x[rows].clone().requires_grad_(), self.z[rows]
        gx, gw = torch.autograd.grad(self(z, x), (x, self.cell.w), u[good])
        full = torch.full_like(self.x, float("nan"))
        full[rows] = gx
        return full, gw

    def pull_rounding(self, run: Run, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows,), (rows,) and a scalar: how far the cell's own dtype is off in pulling u back to z, to x and to the weight.

        A solver knows nothing of it. Batch norm of equal rows divides by a variance that is rounding in single precision.
        """
        problem, cell = self.problem, copy.deepcopy(run.cell)
        unit = float(u.abs().max().clamp_min(1e-300))
        leaves, spec = pytree.tree_flatten(run.solution.z)
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        x = problem.x.detach().clone().requires_grad_()
        with problem.autocast():
            out = cell(pytree.tree_unflatten([leaf * 1 for leaf in leaves], spec), x * 1)
        cotangents = self.as_state(u / unit)
        rough = torch.autograd.grad(pytree.tree_leaves(out), [*leaves, x, cell.w], cotangents, allow_unused=True)
        *gz, gx, gw = [torch.zeros_like(t) if g is None else g for g, t in zip(rough, [*leaves, x, cell.w], strict=True)]
        z, wide_x = self.z.clone().requires_grad_(), self.x.clone().requires_grad_()
        exact = torch.autograd.grad(self(z, wide_x), (z, wide_x, self.cell.w), u / unit)
        rows = rows_of(pytree.tree_unflatten(gz, spec), problem.whole)
        off_x = _real(gx.to(wide(problem.dtype)) - exact[1]).reshape(len(self.z), -1)
        off_w = torch.linalg.vector_norm(gw.to(wide(problem.dtype)) - exact[2])
        return (
            unit * torch.linalg.vector_norm(rows - exact[0], dim=1),
            unit * torch.linalg.vector_norm(off_x, dim=1),
            unit * off_w,
        )

    def as_state(self, u: Tensor) -> list[Tensor]:
        """Return rows as the tensors of a state, in their dtypes."""
        parts, place = [], 0
        for leaf in pytree.tree_leaves(self.problem.z0):
            numbers = (leaf.numel() if self.problem.whole else prod(leaf.shape[1:])) * (2 if leaf.is_complex() else 1)
            part, place = u[:, place : place + numbers], place + numbers
            part = part.reshape(*leaf.shape, 2) if leaf.is_complex() else part.reshape(leaf.shape)
            parts.append((torch.view_as_complex(part.contiguous()) if leaf.is_complex() else part).to(leaf.dtype))
        return parts


def _compare_forward(run: Run, dense: Dense, verdict: Verdict) -> None:
    case, stats = run.problem.case, run.solution.stats
    if not bool(torch.isfinite(dense.z).all()):
        verdict.add("non-finite state", "z holds nan or inf")
        return
    if stats.extra_steps:  # documented: status and residual are those of the iterate before
        if run.measured is not None:
            dense.norm = _rms
            told = run.measured.double() * _rms(dense.rough)
            _compare_told(run, dense, told, stats.status != eq.Status.NONFINITE, verdict)
        return
    residual, size, rounding = dense.norm(dense.f - dense.z), dense.norm(dense.f), dense.rounding()
    tolerance = NORM_SLACK * (case.atol + run.problem.rtol * size)
    finite = torch.isfinite(dense.rough).all(dim=1)
    true = residual <= tolerance + rounding
    # the statistics of JFB and UnrolledPhantom describe the state before their steps, and say so
    told = residual if stats.extra_steps else stats.residual.double() * dense.norm(dense.rough)
    as_one = len(size) > 1 and bool((stats.residual == stats.residual[0]).all())
    if dense.whole and as_one:  # coupled samples may be solved as one, and then share what is said about it
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
    """z + x has no fixed point: its residual is |x| everywhere, and only growth of the state makes it relatively small."""
    problem, cell, stats = run.problem, dense.cell, run.solution.stats
    shift = (
        cell.kind == "affine" and not cell.coupling and torch.equal(cell.factor * cell.w, torch.eye(len(cell.w)).to(cell.w))
    )
    if not shift or problem.case.gradient in (
        "unrolled-depth",
        "warmup",
    ):  # which take so many steps, whatever the stop says
        return
    start = dense(torch.nan_to_num(rows_of(problem.z0, problem.whole)), dense.x)
    grown = dense.norm(dense.f) > GROWTH * dense.norm(start)
    asked = dense.norm(dense.f - dense.z) > NORM_SLACK * problem.case.atol + dense.rounding()
    for row in (stats.converged & grown & asked).nonzero().flatten().tolist():
        verdict.add("converged by growth", f"|f(z)| {float(dense.norm(dense.f)[row]):.2e}", row)


def _compare_told(run: Run, dense: Dense, told: Tensor, rows: Tensor, verdict: Verdict) -> None:
    """Compare the reported residuals of these rows with the measured ones."""
    residual, rounding = dense.norm(dense.f - dense.z), dense.rounding()
    # a residual relative to a size below the normal numbers is too large for the dtype
    normal = dense.norm(dense.rough) >= torch.finfo(_matrix_dtype(run.problem)).smallest_normal
    known = rows & normal & torch.isfinite(dense.rough).all(dim=1) & torch.isfinite(told)
    slack = TOLD_SLACK * residual + rounding
    for row in (known & ((told - residual).abs() > slack)).nonzero().flatten().tolist():
        verdict.add("residual told", f"told {float(told[row]):.2e}, true {float(residual[row]):.2e}", row)


def _compare_gradients(run: Run, dense: Dense, verdict: Verdict) -> None:
    problem, case, stats, adjoint = run.problem, run.problem.case, run.solution.stats, run.solution.adjoint
    _check_finite(run, dense, verdict)
    if adjoint is None or case.gradient in OWN_FORMULA or case.gradient == "reversible":
        _compare_steps(run, dense, verdict)
        return
    if run.grad_x is None or run.grad_w is None:
        verdict.add("no gradient", f"x: {run.grad_x is not None}, weight: {run.grad_w is not None}")
        return
    bad = (stats.status == eq.Status.NONFINITE) | (adjoint.status == eq.Status.NONFINITE)
    gx = _real(run.grad_x.to(wide(problem.dtype))).reshape(_samples(problem), -1)
    gw = run.grad_w.to(wide(problem.dtype))
    v = rows_of(problem.cotangents, problem.whole)
    good = ~bad & torch.isfinite(dense.rough).all(dim=1) & torch.isfinite(dense.z).all(dim=1)
    if dense.whole and not bool(good.all()):
        return  # which system the others belong to is not defined
    if case.call == "closure" and bool(bad.any()):
        return  # docs/concepts.md: rows that a closure captured cannot be exchanged, and 0 * nan is nan in its graph
    index = good.nonzero().flatten()
    if not len(index):
        return
    J, B = dense.jacobian(index)
    if not bool(torch.isfinite(J).all()):
        return
    slope = torch.linalg.matrix_norm(B, 2)
    right = (v if dense.whole else v[index]).reshape(J.shape[0], -1, 1)
    if not bool(torch.isfinite(right).all()):
        verdict.add("non-finite cotangent", "the adjoint of a sample whose cotangent is not finite is not flagged")
        return
    M = torch.eye(J.shape[1], dtype=torch.float64) - J.mT
    inverse = 1 / torch.linalg.svdvals(M)[:, -1]
    usable = torch.isfinite(inverse) & (inverse < CONDITION)
    if dense.whole and not bool(usable.all()):
        return
    whole_batch = bool(usable.all())  # else the gradient of the weight has shares that cannot be told
    J, M, right, inverse, slope = J[usable], M[usable], right[usable], inverse[usable], slope[usable]
    index = index if dense.whole else index[usable]
    if not len(index):
        return
    u = torch.linalg.solve(M, right)
    error = _adjoint_error(problem, J, u, right, inverse)
    full = torch.full_like(v, float("nan"))
    full[index] = u.reshape(v.shape if dense.whole else (len(index), -1))
    expected_x, expected_w = dense.pull(full)
    expected = _real(expected_x).reshape(_samples(problem), -1)
    smallest = SUBNORMALS * torch.finfo(problem.dtype).smallest_normal
    # a small slope is computed as a difference, 1 - tanh^2: its error is of the size of the spacings at 1
    own = ADJOINT_SPACINGS * problem.precision * torch.linalg.vector_norm(u.flatten(1), dim=1)
    allowed_x = slope * NORM_SLACK * error + own + smallest * (1 + inverse)
    allowed_w = (allowed_x * _states(dense, index)).sum() + smallest
    most = torch.finfo(problem.dtype).max / 16
    claims = adjoint.converged
    if dense.whole:
        off, allowed = torch.linalg.vector_norm(gx - expected), allowed_x[0]
        if bool(claims.all()) and float(expected.abs().max()) < most:
            verdict.gradients += _samples(problem)
            if not bool(off <= allowed):
                own_z, own_x, _ = dense.pull_rounding(run, full)
                allowed = allowed + CELL_ROUNDING * (own_x.norm() + slope[0] * inverse[0] * own_z.norm())
            if not bool(off <= allowed):
                verdict.add("gradient of x", _numbers(off, allowed, expected.norm()), 0)
    else:
        off = torch.linalg.vector_norm(gx[index] - expected[index], dim=1)
        judged = claims[index] & (expected[index].abs().amax(dim=1) < most)
        verdict.gradients += int(judged.sum())
        for i in (judged & ~(off <= allowed_x)).nonzero().flatten().tolist():
            verdict.add("gradient of x", _numbers(off[i], allowed_x[i], expected[index[i]].norm()), int(index[i]))
        lost = (stats.status == eq.Status.NONFINITE) & ~(gx == 0).all(dim=1)
        for row in lost.nonzero().flatten().tolist():
            verdict.add("quarantine", "a sample that is not finite has a gradient", row)
        for row in (bad & ~torch.isfinite(gx).all(dim=1)).nonzero().flatten().tolist():
            verdict.add("quarantine", "a sample whose adjoint is not finite has such a gradient", row)
    if whole_batch and bool(claims[index].all()) and expected_w.numel() and float(expected_w.abs().max()) < most:
        off = torch.linalg.vector_norm(gw - expected_w)
        if not bool(off <= allowed_w) and len(index) == len(full) and dense.whole:
            own_z, _, own_w = dense.pull_rounding(run, full)
            allowed_w = allowed_w + CELL_ROUNDING * (own_w + own_z.norm() * inverse[0] * _states(dense, index).sum())
        if not bool(off <= allowed_w):
            verdict.add("gradient of the weight", _numbers(off, allowed_w, expected_w.norm()))


def _compare_tangents(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Compare tangents with dz = J dz + B dx, for systems that were reported as converged."""
    problem, stats, solved = run.problem, run.solution.stats, run.solution.adjoint
    if solved is None or problem.case.cotangent == "nan-row":
        return
    good = (stats.status != eq.Status.NONFINITE) & (solved.status != eq.Status.NONFINITE)
    good = good & torch.isfinite(dense.rough).all(dim=1) & torch.isfinite(dense.z).all(dim=1)
    if (dense.whole and not bool(good.all())) or not bool(good.any()):
        return
    index = good.nonzero().flatten()
    J, B = dense.jacobian(index)
    if not bool(torch.isfinite(J).all()):
        return
    dx = rows_of(problem.tangent(), problem.whole)
    right = B @ (dx if dense.whole else dx[index]).reshape(J.shape[0], -1, 1)
    M = torch.eye(J.shape[1], dtype=torch.float64) - J
    inverse = 1 / torch.linalg.svdvals(M)[:, -1]
    if not bool((torch.isfinite(inverse) & (inverse < CONDITION)).all()):
        return
    exact = torch.linalg.solve(M, right)
    size = torch.linalg.vector_norm(dx if dense.whole else dx[index])
    own = ADJOINT_SPACINGS * problem.precision * inverse * size
    smallest = SUBNORMALS * torch.finfo(problem.dtype).smallest_normal * (1 + inverse)
    allowed = NORM_SLACK * _adjoint_error(problem, J, exact, right, inverse) + own + smallest
    ours = rows_of(run.tangents, problem.whole)
    ours = (ours if dense.whole else ours[index]).reshape(exact.shape)
    off = torch.linalg.vector_norm((ours - exact).flatten(1), dim=1)
    most = torch.finfo(problem.dtype).max / 16
    claims = solved.converged.all()[None] if dense.whole else solved.converged[index]
    judged = claims & (exact.flatten(1).abs().amax(dim=1) < most)
    verdict.gradients += int(judged.sum()) * (_samples(problem) if dense.whole else 1)
    for i in (judged & ~(off <= allowed)).nonzero().flatten().tolist():
        verdict.add("tangent of z", _numbers(off[i], allowed[i], exact[i].norm()), int(index[i]))


def _adjoint_error(problem: Problem, J: Tensor, u: Tensor, v: Tensor, inverse: Tensor) -> Tensor:
    """Return the largest allowed distance of u from the exact solution of its system, (systems,)."""
    case = problem.case
    rtol = 1e-2 if case.gradient == "implicit-loose" else problem.rtol
    root = v.shape[1] ** 0.5 if case.norm == "max" else 1.0  # |r|_2 <= sqrt(n) |r|_max <= sqrt(n) rtol |v|_2
    length_u, length_v = (torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (u, v))
    products = ADJOINT_SPACINGS * problem.precision * (1 + torch.linalg.matrix_norm(J, 2)) * (length_u + length_v)
    return inverse * (root * rtol * length_v + products)


def _states(dense: Dense, index: Tensor) -> Tensor:
    """Return the factor by which an error in a cotangent is multiplied on its way to the weight."""
    if dense.whole:
        return torch.linalg.vector_norm(dense.z)[None]
    return torch.linalg.vector_norm(dense.z[index], dim=1)


def _check_finite(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Check that gradients are finite except for samples reported NONFINITE, and for the weight unless all are."""
    stats, adjoint, problem = run.solution.stats, run.solution.adjoint, run.problem
    flagged = stats.status == eq.Status.NONFINITE
    if adjoint is not None:
        flagged = flagged | (adjoint.status == eq.Status.NONFINITE)
    if problem.case.call == "closure" and not bool(_closure_is_clean(run, dense)):
        return  # documented: rows that a closure captured cannot be taken out of its graph
    if run.grad_x is not None and problem.case.memory != "expanded":  # whose gradient is summed over the rows
        rows = torch.isfinite(_real(run.grad_x)).reshape(len(flagged), -1).all(dim=1)
        for row in (~rows & ~flagged).nonzero().flatten().tolist():
            verdict.add("non-finite gradient", "of x, without a flag", row)
    if run.grad_w is not None and not bool(torch.isfinite(run.grad_w).all()) and not bool(flagged.all()):
        verdict.add("non-finite gradient", "of the weight, without a flag on every sample")


def _closure_is_clean(run: Run, dense: Dense) -> bool:
    """Return True if state, cotangents and their products, which a closure captured, are within the range of the dtype."""
    finite = bool((run.solution.stats.status != eq.Status.NONFINITE).all()) and bool(torch.isfinite(dense.rough).all())
    v = rows_of(run.problem.cotangents, run.problem.whole)
    sizes = [torch.linalg.vector_norm(t) for t in (v, dense.z, dense.x)]
    return finite and float(sizes[0] * (1 + sizes[1] + sizes[2])) < 1e-4 * torch.finfo(run.problem.dtype).max


def _compare_steps(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Compare gradients that are defined by steps of the cell with the same steps in double precision."""
    problem, case, stats = run.problem, run.problem.case, run.solution.stats
    plain = case.gradient == "unrolled-depth" or case.solver in ("picard", "picard-damped")
    if case.gradient not in ("unrolled", "unrolled-sqrt", "unrolled-depth") or not plain:
        return
    doubles = case.dtype in ("float64", "complex128") and not case.autocast and case.structure != "mixed"
    if not doubles or run.grad_x is None or run.grad_w is None or dense.whole:
        return
    if bool((stats.status == eq.Status.NONFINITE).any()) or run.solution.adjoint is not None:
        return
    damping = 0.5 if case.gradient != "unrolled-depth" and case.solver == "picard-damped" else 1.0
    x = dense.x.clone().requires_grad_()
    chosen = z = torch.nan_to_num(rows_of(problem.z0, problem.whole))
    for step in range(1, int(stats.best.max()) + 1):
        z = torch.lerp(z, dense(z, x), damping)
        chosen = torch.where((stats.best == step)[:, None], z, chosen)
    if not chosen.requires_grad or not bool(torch.isfinite(chosen).all()):
        return
    v = rows_of(problem.cotangents, problem.whole)
    expected = torch.autograd.grad(chosen, (x, dense.cell.w), v)
    verdict.gradients += _samples(problem)
    for name, found, exact in zip(("x", "the weight"), (run.grad_x, run.grad_w), expected, strict=True):
        off, size = (float(torch.linalg.vector_norm(t)) for t in (found - exact, exact))
        if not off <= STEPS_SLACK * size + SUBNORMALS * torch.finfo(torch.float64).smallest_normal:
            verdict.add(f"gradient of {name} by steps", f"off by {off:.2e}, size {size:.2e}")


def _matrix_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype in which the library keeps states and residuals."""
    return torch.float64 if problem.dtype in (torch.float64, torch.complex128) else torch.float32


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _numbers(off: Tensor, allowed: Tensor, size: Tensor) -> str:
    return f"off by {float(off):.2e}, allowed {float(allowed):.2e}, size {float(size):.2e}"


def _length(x: Tensor) -> Tensor:
    """Return the norm of each row, scaled by its largest entry, since squares of 1e307 overflow in float64 too."""
    largest = _most(x)
    usable = (largest > 0) & (largest < float("inf"))
    unit = torch.where(usable, largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(x / unit.unsqueeze(1), dim=1) * unit


def _rms(x: Tensor) -> Tensor:
    return _length(x) / max(x.shape[1], 1) ** 0.5


def _most(x: Tensor) -> Tensor:
    return x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
