"""SHINE: the backward pass reuses the inverse Jacobian that Broyden's method estimated in the forward solve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core import autodiff_modes
from equilibria._core.adjoint import backward_first_order
from equilibria._core.checks import require
from equilibria._core.maps import FlatMap
from equilibria._core.problem import LinearSolve, Problem
from equilibria.gradients.approximations import Approximation
from equilibria.gradients.base import Gradient, check_first_order
from equilibria.solvers.broyden import Broyden, BroydenState
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.restart import Restart, RestartState
from equilibria.solvers.rowwise import combine, products, solve_small
from equilibria.stop import Stop, euclidean_norm

OUT_OF_REACH = (
    "Shine works on cells whose tensors are inputs or parameters and whose samples do not depend on each other: no closures "
    "over tensors that need gradients, no sharded weights, no batch statistics. Take eq.Implicit()."
)


@dataclass(frozen=True, kw_only=True)
class Shine(Gradient):
    """u = B'v with the estimate B of (I - J)^{-1} from the forward Broyden solve (Ramzi et al. 2022).

    It needs no products with the Jacobian and gives first-order gradients only. The forward solver must be Broyden.

    refine    number of GMRES steps that improve u
    fallback  samples with |u| > fallback |v| use u = v, as in JFB; None always uses the estimate
    """

    refine: int = 0
    fallback: float | None = 3.0

    def __post_init__(self) -> None:
        require(self.refine >= 0, f"Shine's refine must not be negative, got {self.refine}.")
        require(
            self.fallback is None or self.fallback > 0, f"Shine's fallback must be positive or None, got {self.fallback}."
        )

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve with Broyden; backward applies its estimate of the inverse Jacobian."""
        check_first_order("Shine")
        solver = problem.solver.solver if isinstance(problem.solver, Restart) else problem.solver
        if not isinstance(solver, Broyden):
            raise TypeError(
                f"Shine reuses the Jacobian estimate of Broyden's method, and the solver is {problem.solver!r}: "
                "take solver=eq.Broyden(), or another gradient such as eq.NeumannPhantom()."
            )
        if problem.opaque or problem.equation.identity.coupled:
            raise TypeError(OUT_OF_REACH)
        if not torch.is_grad_enabled():
            return problem.run(z0, args).z
        return _Shine.apply(problem.changed(keep_state=True), self, z0, *args)


class _Shine(Function):
    """Forward solves and keeps the solver's state besides z and the inputs; backward applies the estimate."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, shine: Shine, z0: Tensor, *args: Tensor) -> Tensor:
        """Solve with Broyden and keep its estimate of the inverse Jacobian."""
        result = problem.run(z0, args)
        if result.state is None:  # the solve found that samples depend on each other and solved them as one system
            raise TypeError(OUT_OF_REACH)
        # the problem with an adjoint that is solved from the estimate, in at most `refine` steps; failures are ignored
        stop = Stop(rtol=0.0, atol=0.0, max_steps=shine.refine, on_failure="ignore", norm=problem.stop.norm)
        with_adjoint = problem.changed(linear=LinearSolve(GMRES(), stop, when=0.0 if shine.refine else None))
        ctx.problem, ctx.estimate = with_adjoint, Estimate.of(result.state, shine.fallback)
        ctx.save_for_backward(result.z, result.stats.status, *args)
        return result.z

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the args with the cotangent that the stored estimate gives."""
        # the estimate is a constant of the forward solve, so that its derivative is not known
        check_first_order("Shine", differentiable=torch.is_grad_enabled())
        z, status, *args = ctx.saved_tensors
        linear = dataclasses.replace(ctx.problem.linear, approximation=ctx.estimate)
        problem = dataclasses.replace(ctx.problem, linear=linear)
        needs = ctx.needs_input_grad[3:]
        grads = autodiff_modes.pull_each(lambda v: backward_first_order(problem, z, status, args, needs, v), cotangents[0])
        return (None, None, None, *grads)


@dataclass(frozen=True)
class Estimate(Approximation):
    """v -> v - S' core^{-T} (S + Y) v, the transpose of Broyden's inverse Jacobian.

    The rows of `steps` are S, those of `sums` are S + Y.
    """

    steps: Tensor  # (batch, k, n)
    sums: Tensor  # (batch, k, n)
    core: Tensor  # (batch, k, k)
    fallback: float | None

    @staticmethod
    def of(state: Any, fallback: float | None) -> Estimate:
        """Return the estimate that a Broyden state holds."""
        if isinstance(state, RestartState):
            state = state.inner
        assert isinstance(state, BroydenState)
        # slots that a sample did not fill before it stopped get 1 on the diagonal, which keeps its core invertible
        empty = (euclidean_norm(state.steps.flatten(0, 1)) == 0).view(state.core.shape[:2])
        return Estimate(state.steps, state.sums, state.core + torch.diag_embed(empty.to(state.core.dtype)), fallback)

    def __call__(self, product: FlatMap, right: Tensor) -> Tensor:
        """Return the estimate applied to `right`; `right` itself for samples where the result is too long relative to it."""
        if self.steps.shape[1] == 0:  # the start was the answer: no step has measured the Jacobian
            return right
        weights = solve_small(self.core.transpose(1, 2), products(self.sums, right))
        u = right - combine(weights, self.steps)
        if self.fallback is None:
            return u
        wild = euclidean_norm(u) > self.fallback * euclidean_norm(right)
        return torch.where(wild.unsqueeze(1), right, u)
