"""Checks of gradients and tangents: finite values, dense adjoint systems, and gradients that are defined by steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import equilibria as eq
from tests.fuzz.dense import Dense, real
from tests.fuzz.problems import Problem, rows_of, wide
from tests.fuzz.tolerances import ADJOINT_SPACINGS, CELL_ROUNDING, CONDITION, NORM_SLACK, STEPS_SLACK, SUBNORMALS
from tests.fuzz.verdict import Run, Verdict, samples_of

# Gradients that are defined by steps taken, not by a linear system: (I - J')^{-1} does not describe them.
OWN_FORMULA = ("jfb", "phantom", "phantom-checkpointed", "unrolled", "unrolled-sqrt", "unrolled-truncated", "unrolled-depth")


def compare_gradients(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Compare the gradients of x and of the weight with those of the dense adjoint systems, where these are known."""
    case, stats, adjoint = run.problem.case, run.solution.stats, run.solution.adjoint
    _check_finite(run, dense, verdict)
    if adjoint is None or case.gradient in OWN_FORMULA or case.gradient == "reversible":
        _compare_steps(run, dense, verdict)
        return
    if run.grad_x is None or run.grad_w is None:
        verdict.add("no gradient", f"x: {run.grad_x is not None}, weight: {run.grad_w is not None}")
        return
    bad = (stats.status == eq.Status.NONFINITE) | (adjoint.status == eq.Status.NONFINITE)
    if case.call == "closure" and bool(bad.any()):
        return  # docs/concepts.md: rows that a closure captured cannot be exchanged, and 0 * nan is nan in its graph
    systems = _solved_systems(run, dense, bad, verdict)
    if systems is None:
        return
    check = _GradientCheck(run, dense, verdict, systems)
    if dense.whole:
        check.compare_joint()
    else:
        check.compare_rows(bad)
    check.compare_weight()


@dataclass
class _Systems:
    """The systems (I - J') u = v of the rows that can be compared, and their dense solutions; one system if rows depend."""

    rows: Tensor  # (systems,), or all rows of one joint system
    u: Tensor  # (systems, n, 1)
    inverse: Tensor  # (systems,) norm of (I - J)^{-1}
    slope: Tensor  # (systems,) norm of the derivative in x
    error: Tensor  # (systems,) largest allowed distance from u
    complete: bool  # False if systems with too large a condition were left out; the weight's gradient contains their shares


def _solved_systems(run: Run, dense: Dense, bad: Tensor, verdict: Verdict) -> _Systems | None:
    """Solve the adjoint systems of all rows that are not `bad`; None if there is no row whose gradient is known."""
    v = rows_of(run.problem.cotangents, run.problem.whole)
    good = ~bad & torch.isfinite(dense.rough).all(dim=1) & torch.isfinite(dense.z).all(dim=1)
    rows = good.nonzero().flatten()
    if (dense.whole and not bool(good.all())) or not len(rows):
        return None  # in a joint system with rows that are not finite it is not defined which system the others belong to
    J, B = dense.jacobian(rows)
    if not bool(torch.isfinite(J).all()):
        return None
    slope = torch.linalg.matrix_norm(B, 2)
    right = (v if dense.whole else v[rows]).reshape(J.shape[0], -1, 1)
    if not bool(torch.isfinite(right).all()):
        verdict.add("non-finite cotangent", "the adjoint of a sample whose cotangent is not finite is not flagged")
        return None
    M = torch.eye(J.shape[1], dtype=torch.float64) - J.mT
    inverse = 1 / torch.linalg.svdvals(M)[:, -1]
    usable = torch.isfinite(inverse) & (inverse < CONDITION)
    if dense.whole and not bool(usable.all()):
        return None
    J, M, right, inverse, slope = J[usable], M[usable], right[usable], inverse[usable], slope[usable]
    rows = rows if dense.whole else rows[usable]
    if not len(rows):
        return None
    u = torch.linalg.solve(M, right)
    return _Systems(rows, u, inverse, slope, _adjoint_error(run.problem, J, u, right, inverse), bool(usable.all()))


class _GradientCheck:
    """The gradients of a run beside those that follow from the dense solutions u, and the allowed differences."""

    def __init__(self, run: Run, dense: Dense, verdict: Verdict, systems: _Systems) -> None:
        self.run, self.dense, self.verdict, self.systems = run, dense, verdict, systems
        problem, adjoint = run.problem, run.solution.adjoint
        assert adjoint is not None and run.grad_x is not None and run.grad_w is not None
        self.claims = adjoint.converged
        self.grad_x = real(run.grad_x.to(wide(problem.dtype))).reshape(samples_of(problem), -1)
        self.grad_w = run.grad_w.to(wide(problem.dtype))
        v = rows_of(problem.cotangents, problem.whole)
        self.u = torch.full_like(v, float("nan"))  # nan in rows that cannot be compared
        self.u[systems.rows] = systems.u.reshape(v.shape if dense.whole else (len(systems.rows), -1))
        exact_x, self.exact_w = dense.pull(self.u)
        self.exact_x = real(exact_x).reshape(samples_of(problem), -1)
        self.smallest = SUBNORMALS * torch.finfo(problem.dtype).smallest_normal
        self.most = torch.finfo(problem.dtype).max / 16  # larger gradients may overflow
        # a small slope is computed as a difference, 1 - tanh^2: its error is of the size of the spacings at 1
        own = ADJOINT_SPACINGS * problem.precision * torch.linalg.vector_norm(systems.u.flatten(1), dim=1)
        self.allowed_x = systems.slope * NORM_SLACK * systems.error + own + self.smallest * (1 + systems.inverse)

    def compare_joint(self) -> None:
        """Compare the gradient of x of a joint system."""
        off, allowed = torch.linalg.vector_norm(self.grad_x - self.exact_x), self.allowed_x[0]
        if not bool(self.claims.all()) or not float(self.exact_x.abs().max()) < self.most:
            return
        self.verdict.gradients += samples_of(self.run.problem)
        if not bool(off <= allowed):
            own_z, own_x, _ = self.dense.pull_rounding(self.run, self.u)
            allowed = allowed + CELL_ROUNDING * (
                own_x.norm() + self.systems.slope[0] * self.systems.inverse[0] * own_z.norm()
            )
        if not bool(off <= allowed):
            self.verdict.add("gradient of x", _numbers(off, allowed, self.exact_x.norm()), 0)

    def compare_rows(self, bad: Tensor) -> None:
        """Compare the gradient of x row by row; rows that are `bad` must have a finite one, lost samples zero."""
        rows, exact = self.systems.rows, self.exact_x
        off = torch.linalg.vector_norm(self.grad_x[rows] - exact[rows], dim=1)
        judged = self.claims[rows] & (exact[rows].abs().amax(dim=1) < self.most)
        self.verdict.gradients += int(judged.sum())
        for i in (judged & ~(off <= self.allowed_x)).nonzero().flatten().tolist():
            self.verdict.add("gradient of x", _numbers(off[i], self.allowed_x[i], exact[rows[i]].norm()), int(rows[i]))
        lost = (self.run.solution.stats.status == eq.Status.NONFINITE) & ~(self.grad_x == 0).all(dim=1)
        for row in lost.nonzero().flatten().tolist():
            self.verdict.add("quarantine", "a sample that is not finite has a gradient", row)
        for row in (bad & ~torch.isfinite(self.grad_x).all(dim=1)).nonzero().flatten().tolist():
            self.verdict.add("quarantine", "a sample whose adjoint is not finite has such a gradient", row)

    def compare_weight(self) -> None:
        """Compare the gradient of the weight, if every row's share of it is known."""
        rows, exact, joint = self.systems.rows, self.exact_w, self.dense.whole
        if not self.systems.complete or not bool(self.claims[rows].all()) or not exact.numel():
            return
        if not float(exact.abs().max()) < self.most:
            return
        states = _states(self.dense, rows)
        allowed = (self.allowed_x * states).sum() + self.smallest
        off = torch.linalg.vector_norm(self.grad_w - exact)
        if not bool(off <= allowed) and len(rows) == len(self.u) and joint:
            own_z, _, own_w = self.dense.pull_rounding(self.run, self.u)
            allowed = allowed + CELL_ROUNDING * (own_w + own_z.norm() * self.systems.inverse[0] * states.sum())
        if not bool(off <= allowed):
            self.verdict.add("gradient of the weight", _numbers(off, allowed, exact.norm()))


def _check_finite(run: Run, dense: Dense, verdict: Verdict) -> None:
    """Check that gradients are finite except for samples reported NONFINITE, and for the weight unless all are."""
    stats, adjoint, problem = run.solution.stats, run.solution.adjoint, run.problem
    flagged = stats.status == eq.Status.NONFINITE
    if adjoint is not None:
        flagged = flagged | (adjoint.status == eq.Status.NONFINITE)
    if problem.case.call == "closure" and not bool(_closure_is_clean(run, dense)):
        return  # documented: rows that a closure captured cannot be taken out of its graph
    if run.grad_x is not None and problem.case.memory != "expanded":  # whose gradient is summed over the rows
        rows = torch.isfinite(real(run.grad_x)).reshape(len(flagged), -1).all(dim=1)
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
    verdict.gradients += samples_of(problem)
    for name, found, exact in zip(("x", "the weight"), (run.grad_x, run.grad_w), expected, strict=True):
        off, size = (float(torch.linalg.vector_norm(t)) for t in (found - exact, exact))
        if not off <= STEPS_SLACK * size + SUBNORMALS * torch.finfo(torch.float64).smallest_normal:
            verdict.add(f"gradient of {name} by steps", f"off by {off:.2e}, size {size:.2e}")


def compare_tangents(run: Run, dense: Dense, verdict: Verdict) -> None:
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
    verdict.gradients += int(judged.sum()) * (samples_of(problem) if dense.whole else 1)
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


def _numbers(off: Tensor, allowed: Tensor, size: Tensor) -> str:
    return f"off by {float(off):.2e}, allowed {float(allowed):.2e}, size {float(size):.2e}"
