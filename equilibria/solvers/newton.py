"""Newton-Krylov: Newton's method with an inexact, matrix-free linear solve, per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import LinearMap, Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.line_search import backtrack
from equilibria.solvers.rowwise import divide, solve_small

LOOSEST = 0.5  # largest forcing term
HALVINGS = 10  # of a step by the line search, at most
SPARE = 8  # inner steps allowed beyond twice the dimension, because rounding delays convergence


@dataclass(frozen=True)
class NewtonState(Iterate):
    forcing: Tensor  # (batch,) relative tolerance of the next linear system


@dataclass(frozen=True, kw_only=True)
class Newton(Solver[NewtonState]):
    """z <- z + t delta with (I - J) delta = f(z) - z solved until |f(z) - z + (J - I) delta| <= forcing |f(z) - z|.

    Products J t are forward-mode derivatives, one evaluation of the cell each. The forcing follows Eisenstat and Walker's
    second choice (1996); t backtracks from 1. It converges quadratically near a root, also where plain iteration diverges.

    linear        the solver of the linear systems; "dense" forms the Jacobian, n products per step, and factorises it.
                  Such steps are differentiable: `Unrolled` works with them, with the memory of n evaluations each
    linear_steps  its largest number of steps per Newton step
    line_search   False takes full steps, t = 1, even if the residual rises: such steps leave local minima of the residual
    """

    linear: Solver[Any] | Literal["dense"] = field(default_factory=GMRES)
    linear_steps: int = 100
    line_search: bool = True

    def __post_init__(self) -> None:
        if self.linear != "dense":
            check_linear("Newton", self.linear, self.linear_steps, ' or "dense"')

    @property
    def differentiable(self) -> bool:  # type: ignore[override]  # Krylov solvers write over what they have computed
        """True if the linear systems are solved densely, by operations that autograd follows."""
        return self.linear == "dense"

    def init(self, f: Map, z0: Tensor) -> NewtonState:
        """Evaluate the start, and set the first tolerance of the linear systems."""
        return NewtonState(z0, f(z0), z0.new_full((z0.shape[0],), 0.1))

    def step(self, f: Map, state: NewtonState) -> NewtonState:
        """Solve the linear system of the step, and shorten the step by the line search if there is one."""
        if isinstance(self.linear, str):
            direction = dense_step(f, state)
        else:
            direction, _ = inexact_step(f, state, state.forcing, self.linear, self.linear_steps, start=state.residual)
        if self.line_search:
            z, fz = backtrack(f, state.z, state.fz, direction, HALVINGS, state.active)
        else:
            z = state.z + direction
            fz = f(z)
        # linear systems are solved more accurately as the residual falls: early accuracy is wasted
        forcing = next_forcing(state.forcing, state.length, torch.linalg.vector_norm(fz - z, dim=1))
        return NewtonState(z, fz, forcing, active=state.active)


def dense_step(f: Map, state: Iterate) -> Tensor:
    """Return delta with (I - J) delta = f(z) - z, by elimination; 0 for samples whose matrix is singular."""
    jacobian, n = f.jacobian(state.z), state.z.shape[1]
    eye = torch.eye(n, dtype=state.z.dtype, device=state.z.device)
    columns = [jacobian.product(unit.expand_as(state.z)) for unit in eye]
    return solve_small(eye - torch.stack(columns, dim=2), state.residual)


def inexact_step(
    f: Map,
    state: Iterate,
    forcing: Tensor,
    linear: Solver[Any],
    linear_steps: int,
    *,
    start: Tensor,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solve ((1 + shift) I - J) delta = f(z) - z to each sample's forcing term; returns delta and the linear residual.

    Runs the steps of the linear solver on delta = J delta / (1 + shift) + residual / (1 + shift). Samples whose residual is
    zero or not finite, or for which no linear step was finite, get `start` and keep their residual. shift is (batch, 1).
    """
    residual, jacobian = state.residual, f.jacobian(state.z)
    product, transposed, scale = jacobian.product, jacobian.transposed, None if shift is None else 1 + shift
    right = residual if scale is None else residual / scale
    if scale is not None:
        system = LinearMap(lambda t: product(t) / scale, lambda t: transposed(t) / scale, right)
    else:
        system = LinearMap(product, transposed, right)
    before = torch.linalg.vector_norm(right, dim=1)
    zero = torch.zeros_like(residual)
    inner = linear.init(system.remember(zero, right), zero)
    # samples whose residual is zero or not finite must not prolong the linear solve of the others
    active = torch.isfinite(before) & (before > 0)
    active = active if state.active is None else active & state.active
    delta, left = start, right
    # the Krylov space of a small state is complete after n steps; further steps do not help with a singular system
    for _ in range(min(linear_steps, 2 * residual.shape[1] + SPARE)):
        if not f.any(active):
            break
        inner = linear.step(system, inner)
        error = torch.linalg.vector_norm(inner.residual, dim=1)
        usable = active & torch.isfinite(error)
        delta = torch.where(usable.unsqueeze(1), inner.z, delta)
        left = torch.where(usable.unsqueeze(1), inner.residual, left)
        active = usable & (error > forcing * before)
    return delta, left if scale is None else left * scale


def next_forcing(forcing: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return (batch,), the relative tolerance of the next linear system by Eisenstat and Walker's second choice (1996)."""
    chosen = (0.9 * divide(after, before).square()).clamp(max=LOOSEST)
    safe = 0.9 * forcing.square()  # Eisenstat and Walker's safeguard against tightening too fast
    return torch.where(safe > 0.1, chosen.maximum(safe), chosen)


def check_linear(solver: str, linear: Any, linear_steps: int, other: str = "") -> None:
    """Raise unless the solver and the number of steps of inner linear solves are valid."""
    if not isinstance(linear, Solver):
        raise TypeError(f"{solver}'s linear must be a solver such as GMRES(){other}, got {linear!r}.")
    require(linear_steps >= 1, f"{solver}'s linear_steps must be at least 1, got {linear_steps}.")
