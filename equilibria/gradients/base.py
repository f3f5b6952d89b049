"""The base class of gradients: a gradient runs the forward solve and returns a differentiable equilibrium."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.compaction import ROUNDING, rows_mix
from equilibria._core.compile import Compiler
from equilibria._core.coupled import go_on, solve_coupled, solve_rows_as_one
from equilibria._core.failures import report_failures
from equilibria._core.loop import SolveResult, solve
from equilibria._core.maps import Map
from equilibria._core.problem import Equation
from equilibria.solution import Report, Status
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop, rms_norm

AdjointFailure = Literal["ignore", "warn", "raise", "fall_back"]


@dataclass(frozen=True)
class Problem:
    """The problem z = equation(z, *args) with its solver, stop and report.

    what    "forward" for a cell; "adjoint" or "tangent" for a linear system of its derivatives, whose args are
            (z, right-hand side, *args) and whose tolerance is relative to that right-hand side
    known   F(z0) if it has been computed already
    opaque  True if the equation depends on tensors that are not among its args
    """

    equation: Equation
    solver: AnySolver
    stop: Stop
    report: Report
    what: Literal["forward", "adjoint", "tangent"] = "forward"
    on_failure: AdjointFailure | None = None  # None uses `stop.on_failure`
    known: Tensor | None = None
    opaque: bool = False
    keep_state: bool = False  # return the state of the solver in the SolveResult
    solves: int = 0  # number of earlier solves of the layer in training mode
    verify: bool = True  # measure the residual of the result if the solver updates its residual by a recurrence
    compiler: Compiler | None = None  # the layer's compiler; None if its solves are not compiled
    measured_later: bool = False  # True if backward evaluates the cell at the result and measures the residual there

    def run(self, z0: Tensor, args: Sequence[Tensor]) -> SolveResult:
        """Solve from z0, (batch, n), without a graph; store the statistics in `report` and report failures."""
        with torch.no_grad():
            return self.run_map(self.equation.bind(args), z0, self.equation.right(*args))

    def run_map(self, f: Map, z0: Tensor, right: Tensor | None) -> SolveResult:
        """As `run`, for the bound map `f` and its right-hand side if it is linear."""
        result = self._solve(f, z0, right)
        if self.what == "forward":
            self.report.stats = result.stats
            self.report.nonfinite = result.failed and result.stats.count(Status.NONFINITE) > 0
            self.report.unmeasured = result.unmeasured
        else:
            self.report.adjoint = result.stats
        action = "warn" if self.on_failure == "fall_back" else self.on_failure
        if result.failed and action != "ignore":
            report_failures(
                result.stats, self.stop, self.solver, what=self.what, owner=self.equation.identity.owner, on_failure=action
            )
        if right is not None and self.on_failure == "fall_back":  # failed rows get the Jacobian-free cotangent g = v
            return dataclasses.replace(result, z=torch.where(result.stats.failed.unsqueeze(1), right, result.z))
        return result

    def _solve(self, f: Map, z0: Tensor, right: Tensor | None) -> SolveResult:
        """Solve row by row, or as one system if rows depend on each other; switch if the solve finds that they do."""
        equation, precision = self.equation, self.equation.precision
        if equation.coupled and z0.shape[0] > 1:
            if self.what == "forward" and equation.may_uncouple:
                result = solve_rows_as_one(f, z0, self.solver, self.stop, precision=precision)
                equation.set_coupled(bool(rows_mix(f.raw, result.z, precision)))
                return result
            return solve_coupled(f, z0, self.solver, self.stop, right=right, precision=precision, known=self.known)
        scale = None if right is None else self.stop.norm(right)
        options: dict[str, Any] = {"scale": scale, "precision": precision, "known": self.known}
        options |= {"keep_state": self.keep_state, "verify": self.verify, "measured_later": self.measured_later}
        run = solve if self.compiler is None else self.compiler.solve
        result = run(f, z0, self.solver, self.stop, **options)
        if result.coupled is not None:
            equation.separable = not result.coupled
            equation.set_coupled(result.coupled, warn=self.stop.compact)  # without compaction the cost is accepted
        left = self.stop.max_steps - result.taken
        if not result.coupled or left <= 0 or not bool(result.stats.failed.any()):
            return result
        stop = dataclasses.replace(self.stop, max_steps=left)
        return go_on(result, solve_rows_as_one(f, result.z, self.solver, stop, precision=precision))

    def measure(self, z: Tensor, fz: Tensor, args: Sequence[Tensor]) -> None:
        """Check the residuals of the result z, (batch, n), by fz = F(z); rows wrongly marked CONVERGED become STALLED.

        An evaluation in a batch of another size rounds differently, which is allowed for.
        """
        stats, stop, precision = self.report.stats, self.stop, self.equation.precision
        assert stats is not None
        self.report.unmeasured = False
        length, size = stop.norm(fz - z), stop.norm(fz)
        residual, rounding = length / size, ROUNDING * precision
        if not bool(((residual - stats.residual).abs() > rounding).any()):  # nan is a row of zeros, or in quarantine
            return
        wrong = stats.converged & (length > stop.atol + (stop.rtol + rounding) * size)
        status, residual = stats.status.masked_fill(wrong, Status.STALLED), torch.where(size > 0, residual, stats.residual)
        self.report.stats = dataclasses.replace(stats, status=status, residual=residual)
        if bool(wrong.any()):
            equation = self.equation
            with torch.no_grad():
                equation.set_coupled(bool(rows_mix(lambda y: equation(y, *args).detach(), z, precision)))
            report_failures(self.report.stats, stop, self.solver, what="forward", owner=equation.identity.owner)


class Gradient(ABC):
    """A method to differentiate an equilibrium. It stores nothing between calls, so a DEQ may be solved many times before
    `backward()`."""

    follows_start: ClassVar[bool] = False
    """True if gradients reach the starting point: an equilibrium does not depend on it, the steps of a solver do."""

    exports_loop: ClassVar[bool] = False
    """True for the one that `eq.export` uses, which records the solve as a loop."""

    @abstractmethod
    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve the problem from z0 and return the differentiable equilibrium, (batch, n); fills in `problem.report`."""


def check_first_order(name: str, *, differentiable: bool = False) -> None:
    """Raise under torch.func, forward mode and double backward, for gradients that are not differentiable themselves."""
    if differentiable or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level():
        raise RuntimeError(
            f"{name} gives only first-order gradients, by plain backward(). For torch.func, forward mode or second "
            "derivatives, take eq.Implicit()."
        )


def cotangent_scale(equation: Equation, v: Tensor, *, measured: bool) -> Tensor:
    """(batch, 1), the RMS of each row of the right-hand side v, by which it is divided before the solve.

    The solution then does not depend on the scale of the loss. Coupled samples share one divisor, because dividing rows
    by different numbers would change a coupled system. Samples also share it if it is not known whether they are coupled
    and the solution is not `measured` afterwards.
    """
    if v.numel() == 0:
        return v.new_ones(v.shape[0], 1)
    v = v.detach()
    largest = _sound(v.abs().amax(dim=1, keepdim=True))
    # squares of very small or very large numbers underflow or overflow, so these rows are divided first
    size = _usual(rms_norm(v).unsqueeze(1), largest * rms_norm(v / largest).unsqueeze(1))
    if equation.coupled or (equation.coupled is None and not measured):
        most = _sound(size.amax(dim=0, keepdim=True))
        apart = most * (size / most).square().mean(dim=0, keepdim=True).sqrt()
        size = _usual(size.square().mean(dim=0, keepdim=True).sqrt(), apart).expand_as(size)
    return _sound(size)


def _usual(size: Tensor, otherwise: Tensor) -> Tensor:
    """`size`, which was computed from squares, where they neither underflow nor overflow; `otherwise` elsewhere."""
    least = float(torch.finfo(size.dtype).tiny ** 0.5 / torch.finfo(size.dtype).eps)
    return torch.where((size > least) & (size < 1 / least), size, otherwise)


def _sound(size: Tensor) -> Tensor:
    """`size` with 1 in place of entries that are zero or not finite."""
    return size.masked_fill(~((size > 0) & (size < float("inf"))), 1.0)  # nan is neither


def quarantine(
    equation: Equation, z: Tensor, args: Sequence[Tensor], v: Tensor, good: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Replace every sample that is not `good` by a good one with a cotangent of zero; returns z, args and v.

    A zero cotangent alone does not suffice: 0 * nan is nan, and gradients of shared weights sum over the batch.
    """
    concrete = autodiff_modes.has_values(z, good, *args)
    if z.shape[0] == 0 or (concrete and bool(good.all())):
        return z, list(args), v
    own = torch.arange(z.shape[0], device=z.device)
    index = torch.where(good, own, good.to(torch.int8).argmax())
    rows = _args_with_rows(equation, z, args, index, good) if concrete else equation.rowwise
    taken = [arg[index] if with_rows else arg for arg, with_rows in zip(args, rows, strict=True)]
    return z[index], taken, torch.where(good.unsqueeze(1), v, torch.zeros_like(v))


def with_zero_gradient(z: Tensor, args: Sequence[Tensor]) -> Tensor:
    """`z` with a graph that gives the args zero gradients, because backward() raises for a tensor without a graph."""
    followed = [arg for arg in args if arg.requires_grad]
    if z.requires_grad or not followed or not torch.is_grad_enabled():
        return z
    zeros = [arg.reshape(-1)[:0].sum().real.to(z.dtype) for arg in followed]  # empty sums, which no nan enters
    return z + torch.stack(zeros).sum()


def _args_with_rows(equation: Equation, z: Tensor, args: Sequence[Tensor], index: Tensor, good: Tensor) -> Sequence[bool]:
    """True for each arg that has a row per sample; a weight may have as many rows by coincidence.

    The test replaces the rows of bad samples. The outputs of good samples change only if the rows belong to a weight.
    """
    if getattr(equation, "opaque", False):  # evaluating it is a collective operation that other ranks would not join
        return equation.rowwise
    rows = list(equation.rowwise)
    with torch.no_grad():
        # a second state without zeros is tested too: a state of zero hides a change of the weight that multiplies it
        for state in (z, _another_state(z)):
            expected = equation(state, *args)[good]
            for i, looks_like in enumerate(rows):
                if looks_like:
                    exchanged = [*args[:i], args[i][index], *args[i + 1 :]]
                    rows[i] = torch.equal(equation(state, *exchanged)[good].nan_to_num(), expected.nan_to_num())
    return rows


def _another_state(z: Tensor) -> Tensor:
    """A state of about the magnitude of `z` without zero entries."""
    largest = _sound(torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dim=1, keepdim=True))
    return largest * (1 + torch.arange(z.shape[1], device=z.device, dtype=z.dtype) / z.shape[1])
