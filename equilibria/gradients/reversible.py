"""A reversible solver: backward recomputes its iterates by inverting its steps instead of storing them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria._core.failures import report_failures
from equilibria._core.maps import Linearisation, Map
from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria._core.search import all_finite, sum_finite_shares
from equilibria.gradients.base import Gradient, check_first_order
from equilibria.solution import Status, empty_stats
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.picard import Picard

LEFT = 1e-3  # largest relative rounding error of a recomputed state
WIDE = torch.float64  # inverting a step multiplies rounding errors by 1 / (1 - damping), which float32 cannot afford

OUT_OF_REACH = (
    "Reversible works on cells whose tensors are inputs or parameters and whose samples do not depend on each other: no "
    "closures over tensors that need gradients, no sharded weights, no batch statistics. Take eq.Implicit()."
)


@dataclass(frozen=True, kw_only=True)
class Reversible(Gradient):
    """The exact gradient of the computed iterate in constant memory, by a solver whose steps are invertible.

    A step updates two states in turn, with d = damping:

        y <- (1 - d) y + d f(z),   z <- (1 - d) z + d f(y)

    Its inverse is z <- (z - d f(y)) / (1 - d), y <- (y - d f(z)) / (1 - d). Backward inverts the steps one by one. A step
    takes two evaluations of the cell in each direction.

    Inverting a contractive step amplifies rounding errors, by up to (1 + d) / (1 - d) per step. The states are float64,
    with 16 digits. Backward stops when three digits are left (26 steps at d = 1/2). `Solution.adjoint.residual` is the
    share of the cotangent that remains there; a sample fails if it exceeds `Stop.rtol`.

    As with Unrolled, a sample that takes no step has no gradient. The DEQ's solver must be Picard(), of which these steps
    are the reversible form.

    damping  in (0, 1); larger values converge faster, smaller values lose fewer digits in backward
    """

    damping: float = 0.5

    def __post_init__(self) -> None:
        require(
            0 < self.damping < 1,
            f"Reversible's damping must lie in (0, 1), got {self.damping}: at 1 a step has no inverse.",
        )

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve by reversible steps; backward takes them back."""
        check_first_order("Reversible")
        if not isinstance(problem.solver, Picard):
            raise TypeError(
                f"Reversible replaces plain iteration by its reversible form, and the solver is {problem.solver!r}: "
                "take solver=eq.Picard(), or another gradient."
            )
        if problem.opaque or problem.equation.identity.coupled:
            raise TypeError(OUT_OF_REACH)
        # a finished sample must stop at once, or it would take more steps than backward inverts
        stop = dataclasses.replace(problem.stop, check_every=1)
        solver = ReversiblePicard(damping=self.damping)
        problem = problem.changed(solver=solver, stop=stop, known=None, keep_state=True)
        return _Reversible.apply(problem, z0, *args)


@dataclass(frozen=True)
class ReversibleState(Iterate):
    """z and fz belong to the second state of a step, y is the first; `wide` is z in float64."""

    y: Tensor  # (batch, n), double
    wide: Tensor  # (batch, n), double

    def rescaled(self, unit: Tensor) -> Self:
        """Return the state with both iterates times `unit`, (batch, 1)."""
        state = super().rescaled(unit)
        return dataclasses.replace(state, y=self.y * unit, wide=self.wide * unit)


@dataclass(frozen=True, kw_only=True)
class ReversiblePicard(Solver[ReversibleState]):
    """The forward steps of `Reversible`."""

    damping: float

    def init(self, f: Map, z0: Tensor) -> ReversibleState:
        """Return the start, with both iterates in the wide dtype."""
        return ReversibleState(z0, f(z0), z0.to(WIDE), z0.to(WIDE))

    def step(self, f: Map, state: ReversibleState) -> ReversibleState:
        """Take one step of the reversible iteration on the pair of iterates."""
        y = torch.lerp(state.y, state.fz.to(WIDE), self.damping)
        wide = torch.lerp(state.wide, f(y.to(state.z.dtype)).to(WIDE), self.damping)
        if state.active is not None:  # a finished sample must not change in any bit, or its steps could not be inverted
            keep = state.active.unsqueeze(1)
            y, wide = torch.where(keep, y, state.y), torch.where(keep, wide, state.wide)
        z = wide.to(state.z.dtype)
        return ReversibleState(z, f(z), y, wide, active=state.active)


class _Reversible(Function):
    """Forward solves without a graph; backward inverts the steps."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, z0: Tensor, *args: Tensor) -> Tensor:
        """Solve without a graph and keep the last pair of iterates."""
        result = problem.run(z0, args)
        if problem.equation.identity.coupled:
            raise TypeError(OUT_OF_REACH)
        ctx.problem = problem
        stats = result.stats
        ctx.save_for_backward(result.state.y, result.state.wide, stats.steps, stats.best, stats.status, *args)
        return result.z

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Take the steps back; raises for derivatives of higher order."""
        check_first_order("Reversible", differentiable=torch.is_grad_enabled())
        return (None, None, *autodiff_modes.pull_each(lambda v: _Reversible._pull(ctx, v), cotangents[0]))

    @staticmethod
    def _pull(ctx: Any, cotangent: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients of the args for a cotangent, (batch, n), without samples whose derivatives are not finite."""
        y, z, steps, best, status, *args = ctx.saved_tensors
        equation, needs = ctx.problem.equation, ctx.needs_input_grad[2:]
        good, lost = status != Status.NONFINITE, torch.zeros_like(status, dtype=torch.bool)
        zero = [torch.zeros_like(arg) if need else None for arg, need in zip(args, needs, strict=True)]

        def undo(good: Tensor) -> tuple[list[Tensor | None], Tensor, Tensor]:
            """Take the steps of the good samples back; the others are replaced by good ones."""
            rows = _same(good)
            _, taken, v = quarantine(equation, z.to(cotangent.dtype), args, cotangent, good)
            return _undo(ctx.problem, y[rows], z[rows], v, steps[rows], best[rows], taken, needs)

        while bool(good.any()):
            grads, left, finite = undo(good)
            bad = good & ~finite
            if not bool(bad.any()):
                sound: Sequence[Tensor | None] = grads
                if not all_finite(grads):
                    sound, spoilt = sum_finite_shares(good, lambda rows: undo(rows)[0], zero)
                    # if a sum of finite gradients overflows, no single sample is the cause, and all are marked
                    lost = lost | (spoilt if all_finite(sound) else good)
                _file_rest(
                    ctx.problem, left, torch.where(good.unsqueeze(1), cotangent, torch.zeros_like(cotangent)), steps, lost
                )
                return sound
            good, lost = good & ~bad, lost | bad
        if len(lost):
            _file_rest(ctx.problem, torch.zeros_like(z), cotangent, steps, lost)
        return zero


def _same(good: Tensor) -> Tensor:
    """Return (batch,), the index of the row that `quarantine` uses for each sample."""
    return torch.where(good, torch.arange(len(good), device=good.device), good.to(torch.int8).argmax())


def _undo(
    problem: Problem,
    y: Tensor,
    z: Tensor,
    v: Tensor,
    steps: Tensor,
    best: Tensor,
    args: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Invert the steps in reverse order and pull the cotangents of both states through each.

    The cotangent of a sample enters at its best iterate, which for a sample that did not converge may precede the last.
    Returns the gradients of the args; the part of the cotangents, (batch, n), that remained where the inversion stopped
    before the start; and (batch,) True for samples whose cotangents stayed finite.
    """
    equation, d = problem.equation, problem.solver.damping  # type: ignore[union-attr]  # a ReversiblePicard
    total: list[Tensor | None] = [torch.zeros_like(arg) if need else None for arg, need in zip(args, needs, strict=True)]
    vy, vz = torch.zeros_like(z), torch.zeros_like(z)

    def back(at: Tensor, state: Tensor, cotangent: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state before state <- (1 - d) state + d f(at), and the cotangent that reaches `at`."""
        here = Linearisation(equation, at.to(v.dtype), args, needs)
        value = here.run()[1].detach().to(WIDE)
        sent = torch.where(rows, d * cotangent, torch.zeros_like(cotangent)).to(v.dtype)
        grads, product = here.pull(sent)
        for i, grad in enumerate(grads):
            if grad is not None and total[i] is not None:
                total[i] = total[i] + grad  # type: ignore[operator]
        return torch.where(rows, (state - d * value) / (1 - d), state), product.to(WIDE)

    # every inversion multiplies rounding errors by (1 + d) / (1 - d); beyond the horizon they exceed LEFT
    horizon = math.floor(math.log(LEFT / torch.finfo(WIDE).eps) / math.log((1 + d) / (1 - d)))
    for step in range(int(steps.max()) if steps.numel() else 0, 0, -1):
        rows = ((steps >= step) & (step > steps - horizon)).unsqueeze(1)
        vz = torch.where((best == step).unsqueeze(1), v.to(WIDE), vz)
        z, through = back(y, z, vz, rows)
        vz, vy = torch.where(rows, (1 - d) * vz, vz), vy + through
        y, through = back(z, y, vy, rows)
        vy, vz = torch.where(rows, (1 - d) * vy, vy), vz + through
    cut = (steps > horizon).unsqueeze(1)
    finite = (torch.isfinite(vy) & torch.isfinite(vz)).all(dim=1)
    return total, torch.where(cut, vy.abs() + vz.abs(), torch.zeros_like(vz)), finite


def _file_rest(problem: Problem, left: Tensor, v: Tensor, steps: Tensor, lost: Tensor) -> None:
    """Store adjoint statistics: the relative norm of the cotangent `left` over, and NONFINITE for the samples in `lost`."""
    norm = problem.stop.norm
    residual = (norm(left) / norm(v).clamp_min(torch.finfo(v.dtype).tiny)).to(v.dtype)
    status = torch.where(residual <= problem.stop.rtol, Status.CONVERGED, Status.STALLED).to(torch.int8)
    status, residual = status.masked_fill(lost, Status.NONFINITE), residual.masked_fill(lost, float("inf"))
    stats = dataclasses.replace(empty_stats(len(steps), steps.device), status=status, steps=steps, residual=residual)
    problem.result.adjoint = stats
    report_failures(stats, problem.stop, problem.solver, what="adjoint", owner=problem.equation.identity.owner)
