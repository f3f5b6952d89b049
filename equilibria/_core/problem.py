"""The problem of one solve: an equation with its solver, tolerances and result, and how its derivatives are solved.

`Problem.run` solves it without a graph. Rows are solved separately. If rows depend on each other, as with batch statistics,
the batch is solved as one system: Krylov spaces and mixing weights per sample are not valid there, because J is not block
diagonal, and a sample that is frozen when it converges does not stay converged while the other samples change. Whether
rows depend on each other is found out by the loop, and kept by the equation for the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from equilibria._core.compaction import ROUNDING, remember_measured, rows_mix
from equilibria._core.compile import Compiler
from equilibria._core.failures import report_failures
from equilibria._core.loop import measure, solve
from equilibria._core.maps import Equation, FlatMap, LinearEquation, LinearMap, Map
from equilibria._core.results import VERIFICATIONS
from equilibria.native import measures
from equilibria.solution import SolveResult, Stats, Status
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.krylov import GMRES
from equilibria.stop import Stop, rms_norm

if TYPE_CHECKING:
    from equilibria.gradients.approximations import Approximation

AdjointFailure = Literal["ignore", "warn", "raise", "fall_back"]
TIGHTER = 2.0  # factor by which the tolerance is tightened beyond what the worst row needs


@dataclass(frozen=True)
class LinearSolve:
    """Settings of the linear systems of the derivatives of a problem.

    solver, stop, on_failure  for the exact solution
    approximation             a formula used in place of the exact solution; None: no formula
    when                      the largest relative residual at which the formula is used; None: it is always used
    """

    solver: AnySolver = dataclasses.field(default_factory=GMRES)
    stop: Stop = Stop()
    on_failure: AdjointFailure | None = None  # None uses `stop.on_failure`
    approximation: Approximation | None = None
    when: float | None = None

    @property
    def formula(self) -> Approximation | None:
        """The formula for derivatives of any order: `approximation` if it is always used, else None."""
        return self.approximation if self.when is None else None


@dataclass(eq=False)
class Problem:
    """The problem z = equation(z, *args) with its solver and stop, and the result of its solve.

    what    "forward" for a cell; "adjoint" or "tangent" for a linear system of its derivatives, whose args are
            (z, right-hand side, *args) and whose tolerance is relative to that right-hand side
    known   F(z0) if it has been computed already
    opaque  True if the equation depends on tensors that are not among its args
    """

    equation: Equation
    solver: AnySolver
    stop: Stop
    result: SolveResult = dataclasses.field(default_factory=SolveResult)
    what: Literal["forward", "adjoint", "tangent"] = "forward"
    on_failure: AdjointFailure | None = None  # None uses `stop.on_failure`
    known: Tensor | None = None
    opaque: bool = False
    keep_state: bool = False  # return the state of the solver in the SolveResult
    solves: int = 0  # number of earlier solves of the layer in training mode
    verify: bool = True  # measure the residual of the result if the solver updates its residual by a recurrence
    linear: LinearSolve = LinearSolve()  # for the linear systems of the derivatives
    compiler: Compiler | None = None  # the layer's compiler; None if its solves are not compiled
    measured_later: bool = False  # True if backward evaluates the cell at the result and measures the residual there

    def changed(self, **settings: Any) -> Problem:
        """Return this problem with other settings. It has the same result; the problem itself is not changed."""
        other = object.__new__(Problem)
        vars(other).update(vars(self) | settings)  # a sixth of the time of dataclasses.replace, several times per solve
        return other

    def run(
        self, z0: Tensor, args: Sequence[Tensor] = (), *, f: Map | None = None, rhs: Tensor | None = None
    ) -> SolveResult:
        """Solve from z0, (batch, n), without a graph; keep what was found in `self.result` and report failures.

        f    the map in which the args are bound already, which may record a graph; None binds `args`
        rhs  what the tolerance of a linear system is relative to; None uses its right-hand side
        """
        equation = self.equation
        with torch.set_grad_enabled(f is not None and torch.is_grad_enabled()):
            f = equation.bind(args) if f is None else f
            scale = None if rhs is None else self.stop.norm(rhs)
            if rhs is None and isinstance(f, LinearMap):
                rhs, scale = f.rhs, f.size(self.stop.norm)
            if equation.identity.coupled and z0.shape[0] > 1:
                result = self._solve_coupled(f, z0, rhs)
            else:
                run = solve if self.compiler is None else self.compiler.solve
                result = run(
                    f,
                    z0,
                    self.solver,
                    self.stop,
                    scale=scale,
                    precision=equation.precision,
                    known=self.known,
                    keep_state=self.keep_state,
                    verify=self.verify,
                    measured_later=self.measured_later,
                )
                if result.coupled is not None:  # backward and later solves need not find it out again
                    equation.separable = not result.coupled
                    equation.set_coupled(result.coupled, warn=self.stop.compact)  # compact=False accepts the cost
                if result.coupled:
                    result = self._go_on_as_one(f, z0, result)
        if self.what == "forward":
            result.version = version(f.args) if result.unmeasured else 0
            result.nonfinite = result.failed and result.stats.count(Status.NONFINITE) > 0
            # all but z: the graph of z refers to the kept result
            vars(self.result).update(vars(result), z=None, state=None, adjoint=self.result.adjoint)
        else:
            self.result.adjoint = result.stats
        if result.failed and self.on_failure != "ignore":  # `failed` is on the host: a good solve waits for nothing here
            self.report_failures(result.stats, "warn" if self.on_failure == "fall_back" else self.on_failure)
        if rhs is not None and self.on_failure == "fall_back":  # failed rows get the Jacobian-free cotangent g = v
            return dataclasses.replace(result, z=torch.where(result.stats.failed.unsqueeze(1), rhs, result.z))
        return result

    def _go_on_as_one(self, f: Map, z0: Tensor, result: SolveResult) -> SolveResult:
        """Continue a solve that found that rows depend on each other, with the batch as one system."""
        left = self.stop.max_steps - result.taken
        if left <= 0 or not f.any(result.stats.failed):
            return result
        stop, start = dataclasses.replace(self.stop, max_steps=left), result.z
        if result.sound is not None:  # rows that diverged while solved separately start again
            kept = result.sound | result.stats.converged | ~torch.isfinite(z0).all(dim=1)
            start = torch.where(kept.unsqueeze(1), start, z0)
        return go_on(result, solve_rows_as_one(f, start, self.solver, stop, precision=self.equation.precision))

    def _solve_coupled(self, f: Map, z0: Tensor, rhs: Tensor | None) -> SolveResult:
        """Solve the batch as one system; a cell that may have changed is checked again afterwards."""
        equation, precision = self.equation, self.equation.precision
        if self.what == "forward" and equation.identity.coupled and not equation.identity.statistics:
            result = solve_rows_as_one(f, z0, self.solver, self.stop, precision=precision)
            equation.set_coupled(bool(rows_mix(f.raw, result.z, precision)))
            return result
        return solve_coupled(f, z0, self.solver, self.stop, right=rhs, precision=precision, known=self.known)

    def derived(self, kind: type[LinearEquation]) -> Problem:
        """Return the problem of the adjoint or tangent equation, which is solved by the settings in `linear`."""
        by, equation = self.linear, kind(self.equation)
        return Problem(
            equation, by.solver, by.stop, self.result, kind.what, by.on_failure, linear=by, compiler=self.compiler
        )

    def report_failures(self, stats: Stats, action: Any = None) -> None:
        """Report failed samples of this problem; None uses `stop.on_failure`."""
        owner = self.equation.identity.owner
        report_failures(stats, self.stop, self.solver, what=self.what, owner=owner, on_failure=action)

    def measure(self, z: Tensor, fz: Tensor, args: Sequence[Tensor], *, trust: bool = True) -> None:
        """Check the residuals of the result z, (batch, n), by fz = F(z); rows wrongly marked CONVERGED become STALLED.

        The tolerance has a margin for rounding, which differs in a batch of another size. With `trust`, later training
        steps of the cell skip the comparison of rows in the forward pass as long as this check finds no wrong row.
        """
        stats, stop, precision = self.result.stats, self.stop, self.equation.precision
        self.result.unmeasured = False
        # ratios of root mean squares are those of lengths. This runs in every training step: few operations, one read-back
        norm = partial(torch.linalg.vector_norm, dim=1) if stop.norm is rms_norm else stop.norm
        rounding = ROUNDING * precision
        found = measures.ratios(fz, z, fz, told=stats.residual) if stop.norm is rms_norm else None
        agreed = found is not None and found[1] <= rounding
        if not agreed:
            residual = norm(fz - z) / norm(fz)
            agreed = float(torch.dist(residual, stats.residual, float("inf"))) <= rounding
            # nan is a row of zeros, or in quarantine
            agreed = agreed or not bool(((residual - stats.residual).abs() > rounding).any())
        cell = self.equation.identity
        if trust and self.equation.separable and not cell.coupled and cell.trusted is not agreed:
            remember_measured(cell, agreed)
        if agreed:
            return
        length, size = stop.norm(fz - z), stop.norm(fz)
        wrong = stats.converged & (length > stop.atol + (stop.rtol + rounding) * size)
        status, residual = stats.status.masked_fill(wrong, Status.STALLED), torch.where(size > 0, residual, stats.residual)
        self.result.stats = dataclasses.replace(stats, status=status, residual=residual)
        if bool(wrong.any()):
            equation = self.equation
            with torch.no_grad():
                equation.set_coupled(bool(rows_mix(lambda y: equation(y, *args).detach(), z, precision)))
            self.report_failures(self.result.stats)

    def measure_again(self, z: Tensor, args: Sequence[Tensor]) -> None:
        """Evaluate the answer z, (batch, n), and check its residuals, unless the args were written to since the solve."""
        self.result.unmeasured, args = False, [arg.detach() for arg in args]
        if version(args) == self.result.version:  # else the cell has changed, as by an optimizer step
            with torch.no_grad():
                self.result.add_evaluations(1, len(z))
                self.measure(z, self.equation(z, *args), args, trust=False)


def version(args: Sequence[Tensor]) -> int:
    """Return a number that changes if one of these tensors is written to in place."""
    return sum(arg._version for arg in args if not arg.is_inference())


def solve_coupled(
    f: FlatMap, z0: Tensor, solver: AnySolver, stop: Stop, *, right: Tensor | None, precision: float, known: Tensor | None
) -> SolveResult:
    """Solve the batch as one row of batch * n numbers; every sample gets the statistics of that row.

    right  (batch, n), the right-hand side of a linear equation, to which the tolerance is relative
    known  (batch, n), f(z0) if it has been evaluated
    """
    batch, n = z0.shape

    def join(x: Tensor) -> Tensor:
        return x.reshape(1, batch * n)

    def joined(g: FlatMap) -> FlatMap:
        return lambda x: join(g(x.reshape(batch, n)))

    whole = joined(f)
    if isinstance(f, LinearMap):
        whole = LinearMap(joined(f.product), joined(f.transposed), join(f.rhs))
    scale = None if right is None else stop.norm(join(right))
    result = solve(
        whole, join(z0), solver, stop, scale=scale, precision=precision, known=None if known is None else join(known)
    )
    row = result.stats
    stats = dataclasses.replace(
        row,
        status=row.status.repeat(batch),
        steps=row.steps.repeat(batch),
        rejected=row.rejected.repeat(batch),
        best=row.best.repeat(batch),
        residual=row.residual.repeat(batch),
        sample_evaluations=row.sample_evaluations * batch,
        trace=None if row.trace is None else row.trace * batch,
        iterates=tuple(z.reshape(batch, -1) for z in row.iterates),
    )
    return dataclasses.replace(result, z=result.z.reshape(batch, n), stats=stats)


def solve_rows_as_one(f: FlatMap, z0: Tensor, solver: AnySolver, stop: Stop, *, precision: float) -> SolveResult:
    """Repeat `solve_coupled` with tighter tolerances until every row meets its own; status is per row."""
    result = solve_coupled(f, z0, solver, stop, right=None, precision=precision, known=None)
    factor = 1.0
    for _ in range(VERIFICATIONS):
        claimed, left = result.stats.converged, stop.max_steps - result.taken
        result = measure(result, f, stop, precision)
        short = claimed & result.stats.failed
        if left <= 0 or not bool(short.any()):
            return result
        # the batch as one vector meets the tolerance, but some row does not
        factor *= TIGHTER * max(float(result.stats.residual[short].max()) / max(stop.rtol, precision), 1.0)
        tighter = dataclasses.replace(stop, rtol=stop.rtol / factor, atol=stop.atol / factor, max_steps=left)
        result = go_on(result, solve_coupled(f, result.z, solver, tighter, right=None, precision=precision, known=None))
    return measure(result, f, stop, precision)


def go_on(first: SolveResult, then: SolveResult) -> SolveResult:
    """Join two successive solves: the result and status of the second one, the steps and evaluations of both."""
    a, b = first.stats, then.stats
    trace = None
    if a.trace is not None and b.trace is not None:
        trace = tuple(torch.cat([x, y[1:]]) for x, y in zip(a.trace, b.trace, strict=True))
    stats = dataclasses.replace(
        b,
        steps=a.steps + b.steps,
        rejected=a.rejected + b.rejected,
        best=a.steps + b.best,
        evaluations=a.evaluations + b.evaluations,
        sample_evaluations=a.sample_evaluations + b.sample_evaluations,
        products=a.products + b.products,
        trace=trace,
        iterates=a.iterates + b.iterates,
        handovers=a.handovers + b.handovers,
    )
    return dataclasses.replace(then, stats=stats, taken=first.taken + then.taken, coupled=True)
