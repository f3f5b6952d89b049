"""Inexact gradients: Jacobian-free, unrolled phantom and Neumann phantom."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as run_checkpointed

from equilibria._core import autodiff_modes
from equilibria._core.attach import attach
from equilibria._core.checks import require
from equilibria._core.primitive import differentiable_fixed_point
from equilibria._core.problem import LinearSolve, Problem
from equilibria._core.quarantine import quarantine
from equilibria.gradients.approximations import Neumann
from equilibria.gradients.base import Gradient, with_zero_gradient
from equilibria.gradients.watched import guarded, watched
from equilibria.solution import Status


@dataclass(frozen=True, kw_only=True)
class UnrolledPhantom(Gradient):
    """Backpropagation through `steps` damped steps from the equilibrium, h <- h + damping (f(h) - h) (Geng et al. 2021).

    The layer returns the last h. The graph of `steps` evaluations of the cell is kept. `Stats` describes the equilibrium
    before these steps; `Solution.measure_residual()` measures the last h.

    steps          number of steps; more steps are closer to the exact gradient
    damping        smaller values are better conditioned, and approach the exact gradient more slowly
    checkpoint     keep only the states h and run the cell again in backward, with the memory of one evaluation
    training_only  take the steps only where autograd records, as the released code does. Without gradients the layer then
                   returns the equilibrium itself, `steps` evaluations cheaper
    """

    steps: int = 5
    damping: float = 0.5
    checkpoint: bool = False
    training_only: bool = False

    def __post_init__(self) -> None:
        _check("UnrolledPhantom", self.steps, self.damping)

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve without a graph, then take the damped steps with one."""
        z, status = solve_detached(problem, z0, args)
        if self.training_only and not _recording():
            return z
        return unroll_from(problem, z, status, args, self._advance, replays=self.checkpoint)

    def _advance(self, f: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        """Take the damped steps from h, (batch, n)."""
        for _ in range(self.steps):
            fh = run_checkpointed(f, h, use_reentrant=False) if self.checkpoint and torch.is_grad_enabled() else f(h)
            h = fh if self.damping == 1 else torch.lerp(h, fh, self.damping)
        return h


@dataclass(frozen=True, kw_only=True)
class JFB(Gradient):
    """Jacobian-free backpropagation: one step from the equilibrium with a graph, (I - J)^{-1} replaced by I.

    (Fung et al. 2022.) The layer returns f(z). `Stats` describes z; `Solution.measure_residual()` measures f(z). The
    gradient is a descent direction if the cell is a contraction and its parameters are well conditioned. It needs no
    linear solve and the memory of one evaluation of the cell.

    training_only  take the step only where autograd records. Without gradients the layer then returns z itself, an
                   evaluation cheaper
    """

    training_only: bool = False

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve without a graph, then take one step with one."""
        z, status = solve_detached(problem, z0, args)
        return z if self.training_only and not _recording() else unroll_from(problem, z, status, args, lambda f, h: f(h))


@dataclass(frozen=True, kw_only=True)
class NeumannPhantom(Gradient):
    """The partial sum damping (I + B + ... + B^(steps - 1)), B = damping J + (1 - damping) I, in place of (I - J)^{-1}.

    (Geng et al. 2021.) The layer returns the equilibrium and keeps only the equilibrium and the inputs for backward. At an
    exact equilibrium the gradient equals that of UnrolledPhantom. `Solution.adjoint.residual` is the relative residual of
    the approximate cotangent.

    steps, damping  as in UnrolledPhantom
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        _check("NeumannPhantom", self.steps, self.damping)

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve; backward uses the partial sum in place of the adjoint solution."""
        linear = LinearSolve(stop=problem.stop, approximation=Neumann(self.steps, self.damping))
        problem = problem.changed(linear=linear)
        return attach(problem, z0, args) if problem.opaque else differentiable_fixed_point(problem, z0, *args)[0]


def solve_detached(problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the equilibrium without a graph, (batch, n), and its status; uses the primitive, which supports torch.func."""
    if torch.is_grad_enabled() and not autodiff_modes.inside_transform():
        problem = problem.changed(measured_later=True)  # by `unroll_from`
    with torch.no_grad():  # gradients flow through the steps that follow, not through the solve
        z, status = differentiable_fixed_point(problem, z0.detach(), *[arg.detach() for arg in args])
    return z.detach(), status


def unroll_from(
    problem: Problem,
    z: Tensor,
    status: Tensor,
    args: Sequence[Tensor],
    advance: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
    *,
    replays: bool = False,
) -> Tensor:
    """Return `advance(f, z)` with a graph for finite samples; samples that are not finite keep z and get no gradient.

    replays  True if backward runs the cell again
    """
    result, good = problem.result, status != Status.NONFINITE
    concrete = autodiff_modes.has_values(z, good, *args)  # under vmap no value can be looked at
    if result.nonfinite and not autodiff_modes.inside_transform() and not bool(good.any()):
        return with_zero_gradient(z, args)  # no good sample is left to replace the bad ones
    steps = _Advance(advance, good)
    out = watched(steps, problem, z, args, replays=replays)
    if concrete and not bool(torch.isfinite(out.detach().sum())):
        finite = torch.isfinite(out.detach()).all(dim=1)
        if not bool(finite.all()):  # steps from an iterate that has not converged may overflow
            marked = result.stats.status.masked_fill(~finite, Status.NONFINITE)
            result.stats, result.nonfinite = dataclasses.replace(result.stats, status=marked), True
            problem.report_failures(result.stats)
            return unroll_from(problem, z, status.masked_fill(~finite, Status.NONFINITE), args, advance, replays=replays)
    problem.result.add_evaluations(steps.runs, len(z))
    result.stats = dataclasses.replace(result.stats, extra_steps=steps.runs)
    return out


class _Advance:
    """Applies `advance` to the good samples and counts its evaluations of the cell."""

    def __init__(self, advance: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], good: Tensor) -> None:
        self.advance, self.good, self.runs = advance, good, 0

    def __call__(self, problem: Problem, z: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Take the steps from z with a graph; samples that are not good keep z."""
        start, inputs, _ = quarantine(problem.equation, z, args, z, self.good)
        self.runs = 0

        def f(h: Tensor) -> Tensor:
            """Evaluate the cell and count it; an evaluation at the equilibrium measures the residual."""
            self.runs += 1
            out = guarded(problem, problem.equation(h, *inputs))
            if problem.result.unmeasured and start is z:  # the first evaluation is at the equilibrium itself
                problem.measure(z.detach(), out.detach(), inputs)
            return out

        return torch.where(self.good.unsqueeze(1), self.advance(f, start), z)


def _recording() -> bool:
    """Return True if autograd or forward mode may differentiate what is computed now."""
    return torch.is_grad_enabled() or autodiff_modes.inside_dual_level()


def _check(name: str, steps: int, damping: float) -> None:
    """Raise ValueError for invalid settings of the gradient `name`."""
    require(steps >= 1, f"{name}'s steps must be at least 1, got {steps}; for no gradient use torch.no_grad().")
    require(0 < damping <= 1, f"{name}'s damping must lie in (0, 1], got {damping}.")
