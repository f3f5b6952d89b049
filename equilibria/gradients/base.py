"""What a gradient is: it runs the forward solve and returns an equilibrium that carries derivatives."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.compaction import rows_mix
from equilibria._core.compile import Compiler
from equilibria._core.coupled import go_on, solve_rows_as_one, solve_whole
from equilibria._core.failures import report_failures
from equilibria._core.loop import Flat, Stop, solve
from equilibria._core.maps import FlatMap
from equilibria._core.norms import rms_norm
from equilibria._core.problem import Equation
from equilibria.solution import Report, Status
from equilibria.solvers.fallback import AnySolver

AdjointFailure = Literal["ignore", "warn", "raise", "fall_back"]


@dataclass(frozen=True)
class Problem:
    """An equilibrium to be found: z = equation(z, *args).

    what    "forward" for a cell; "adjoint" or "tangent" for a linear system of its derivatives, whose args are
            (z, right-hand side, *args) and whose tolerance is relative to that right-hand side
    known   F(z0), where it has been computed already
    opaque  does the equation depend on tensors that are not among its args?
    """

    equation: Equation
    solver: AnySolver
    stop: Stop
    report: Report
    what: Literal["forward", "adjoint", "tangent"] = "forward"
    on_failure: AdjointFailure | None = None  # None: as `stop` says
    known: Tensor | None = None
    opaque: bool = False
    keep_state: bool = False  # of the solver, in the Flat
    solves: int = 0  # how many times the layer was solved in training before
    verify: bool = True  # look at the answer of a solver that carries its residual by recurrence
    compiler: Compiler | None = None  # of the layer, where its solves are to be compiled
    measured_later: bool = False  # backward evaluates the cell at the answer, and measures its residual there

    def run(self, z0: Tensor, args: Sequence[Tensor]) -> Flat:
        """Solve without a graph; statistics are filed, the failure policy applied."""
        with torch.no_grad():
            return self.run_map(self.equation.bind(args), z0, self.equation.right(*args))

    def run_map(self, f: FlatMap, z0: Tensor, right: Tensor | None) -> Flat:
        flat = self._solve(f, z0, right)
        if self.what == "forward":
            self.report.stats = flat.stats
            self.report.nonfinite = flat.failed and flat.stats.count(Status.NONFINITE) > 0
            self.report.unmeasured = flat.unmeasured
        else:
            self.report.adjoint = flat.stats
        action = "warn" if self.on_failure == "fall_back" else self.on_failure
        if flat.failed:
            report_failures(flat.stats, self.stop, self.solver, what=self.what, owner=self.equation.owner, on_failure=action)
        if right is not None and self.on_failure == "fall_back":  # to the Jacobian-free answer, g = v
            return dataclasses.replace(flat, z=torch.where(flat.stats.failed.unsqueeze(1), right, flat.z))
        return flat

    def _solve(self, f: FlatMap, z0: Tensor, right: Tensor | None) -> Flat:
        equation, precision = self.equation, self.equation.precision
        if equation.coupled and z0.shape[0] > 1:
            if self.what == "forward" and equation.may_uncouple:
                flat = solve_rows_as_one(f, z0, self.solver, self.stop, precision=precision)
                equation.set_coupled(rows_mix(f, flat.z, precision))
                return flat
            return solve_whole(f, z0, self.solver, self.stop, right=right, precision=precision, known=self.known)
        scale = None if right is None else self.stop.norm(right)
        options: dict[str, Any] = {"scale": scale, "precision": precision, "known": self.known}
        options |= {"keep_state": self.keep_state, "verify": self.verify, "measured_later": self.measured_later}
        run = solve if self.compiler is None else self.compiler.solve
        flat = run(f, z0, self.solver, self.stop, **options)
        if flat.coupled is not None:
            equation.set_coupled(flat.coupled)
        left = self.stop.max_steps - flat.taken
        if not flat.coupled or left <= 0 or not bool(flat.stats.failed.any()):
            return flat
        stop = dataclasses.replace(self.stop, max_steps=left)
        return go_on(flat, solve_rows_as_one(f, flat.z, self.solver, stop, precision=precision))

    def measure(self, z: Tensor, fz: Tensor) -> None:
        """File the measured residuals of the answer z; a sample that claimed to be converged and is not, is STALLED."""
        stats, stop = self.report.stats, self.stop
        assert stats is not None
        self.report.unmeasured = False
        length, size = stop.norm(fz - z), stop.norm(fz)
        short = length > stop.atol + stop.within(self.equation.precision) * size
        if bool(short.any()) and bool((short & stats.converged).any()):
            self.equation.set_coupled(True)
            status = stats.status.masked_fill(short & stats.converged, Status.STALLED)
            residual = length / size.clamp_min(torch.finfo(size.dtype).tiny)
            self.report.stats = dataclasses.replace(stats, status=status, residual=residual)
            report_failures(self.report.stats, stop, self.solver, what="forward", owner=self.equation.owner)


class Gradient(ABC):
    """How derivatives flow. Keeps nothing between calls: one DEQ may be solved many times before a backward."""

    follows_start: ClassVar[bool] = False
    """Does a derivative flow to the starting point? The equilibrium has none in it, the steps of a solver have."""

    @abstractmethod
    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve; the equilibrium (batch, n) with its derivatives, `problem.report` filled in."""


def check_first_order(name: str, *, differentiable: bool = False) -> None:
    """Refuse what a gradient without derivatives of its own cannot give."""
    if differentiable or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level():
        raise RuntimeError(
            f"{name} gives first-order gradients by plain backward(): for torch.func, forward mode or second derivatives "
            "take eq.Implicit()."
        )


def cotangent_scale(equation: Equation, v: Tensor, *, measured: bool) -> Tensor:
    """(batch, 1), what a right-hand side is divided by: its solution then does not depend on the scale of the loss.

    Where samples are coupled they share one divisor, or the solution would not be that of the system. They also share it
    where that is not known and the solution is not `measured` afterwards.
    """
    if v.numel() == 0:
        return v.new_ones(v.shape[0], 1)
    v = v.detach()
    largest = _sound(v.abs().amax(dim=1, keepdim=True))
    # the squares of very small or large numbers are 0 or inf: these are divided first
    size = _usual(rms_norm(v).unsqueeze(1), largest * rms_norm(v / largest).unsqueeze(1))
    if equation.coupled or (equation.coupled is None and not measured):
        most = _sound(size.amax(dim=0, keepdim=True))
        apart = most * (size / most).square().mean(dim=0, keepdim=True).sqrt()
        size = _usual(size.square().mean(dim=0, keepdim=True).sqrt(), apart).expand_as(size)
    return _sound(size)


def _usual(size: Tensor, otherwise: Tensor) -> Tensor:
    """A size that was computed by squares, where these are far from the ends of the dtype."""
    least = float(torch.finfo(size.dtype).tiny ** 0.5 / torch.finfo(size.dtype).eps)
    return torch.where((size > least) & (size < 1 / least), size, otherwise)


def _sound(size: Tensor) -> Tensor:
    """With ones for what cannot be divided by."""
    return size.masked_fill(~((size > 0) & (size < float("inf"))), 1.0)  # nan is neither


def quarantine(
    equation: Equation, z: Tensor, args: Sequence[Tensor], v: Tensor, good: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """In place of every bad sample a good one, with a cotangent of zero.

    A zero cotangent alone does not do: 0 * nan is nan, and the gradient of shared weights sums over the batch.
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
    """`z`, from which backward() sends zeros to the args: without a graph it would raise."""
    followed = [arg for arg in args if arg.requires_grad]
    if z.requires_grad or not followed or not torch.is_grad_enabled():
        return z
    zeros = [arg.reshape(-1)[:0].sum().real.to(z.dtype) for arg in followed]  # empty sums: nothing that is nan takes part
    return z + torch.stack(zeros).sum()


def _args_with_rows(equation: Equation, z: Tensor, args: Sequence[Tensor], index: Tensor, good: Tensor) -> Sequence[bool]:
    """Which args really have a row per sample: a weight of as many rows as the batch has samples only looks like it.

    Exchanging the rows of bad samples changes nothing for the good ones, unless the rows are not the samples'.
    """
    if getattr(equation, "opaque", False):  # to run it is a collective, which other ranks would not join
        return equation.rowwise
    rows = list(equation.rowwise)
    with torch.no_grad():
        # beside the state itself another one: a weight that is multiplied by a state of zero could be any
        for state in (z, _another_state(z)):
            expected = equation(state, *args)[good]
            for i, looks_like in enumerate(rows):
                if looks_like:
                    exchanged = [*args[:i], args[i][index], *args[i + 1 :]]
                    rows[i] = torch.equal(equation(state, *exchanged)[good].nan_to_num(), expected.nan_to_num())
    return rows


def _another_state(z: Tensor) -> Tensor:
    """A state of about the size of `z` without a zero in it."""
    largest = _sound(torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dim=1, keepdim=True))
    return largest * (1 + torch.arange(z.shape[1], device=z.device, dtype=z.dtype) / z.shape[1])
