"""Newton-Krylov: Newton's method with an inexact, matrix-free linear solve, per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from equilibria._core.maps import Affine, Map
from equilibria.solvers.base import Iterate, Solver, divide, require
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.line_search import backtrack

LOOSEST = 0.5  # of the forcing terms: solving the linear system better than it describes the map is wasted
HALVINGS = 10


@dataclass(frozen=True)
class NewtonState(Iterate):
    forcing: Tensor  # (batch,) how well the next linear system is to be solved


@dataclass(frozen=True, kw_only=True)
class Newton(Solver[NewtonState]):
    """z <- z + t delta with (I - J) delta = f(z) - z solved until |f(z) - z + (J - I) delta| <= forcing |f(z) - z|.

    Products J t are forward-mode derivatives, one run of the cell each. The forcing follows Eisenstat and Walker's
    second choice (1996), t backtracks from 1. Converges quadratically near a root, also where plain iteration
    diverges.

    linear        the solver of the linear systems
    linear_steps  its steps at most, per Newton step
    """

    differentiable: ClassVar[bool] = False
    linear: Solver[Any] = field(default_factory=GMRES)
    linear_steps: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.linear, Solver):
            raise TypeError(f"Newton's linear must be a solver such as GMRES(), got {self.linear!r}.")
        require(self.linear_steps >= 1, f"Newton's linear_steps must be at least 1, got {self.linear_steps}.")

    def init(self, f: Map, z0: Tensor) -> NewtonState:
        return NewtonState(z0, f(z0), z0.new_full((z0.shape[0],), 0.1))

    def step(self, f: Map, state: NewtonState) -> NewtonState:
        before = torch.linalg.vector_norm(state.fz - state.z, dim=1)
        direction = self._direction(f, state, before)
        z, fz = backtrack(f, state.z, state.fz, direction, HALVINGS, state.active)
        ratio = divide(torch.linalg.vector_norm(fz - z, dim=1), before)
        forcing = (0.9 * ratio.square()).clamp(max=LOOSEST)
        safe = 0.9 * state.forcing.square()  # never tighten faster than the forcing itself has shown to pay
        forcing = torch.where(safe > 0.1, forcing.maximum(safe), forcing)
        return NewtonState(z, fz, forcing, active=state.active)

    def _direction(self, f: Map, state: NewtonState, before: Tensor) -> Tensor:
        """Solve delta = J delta + residual with the linear solver's own steps, each sample to its forcing term."""
        residual, jacobian = state.fz - state.z, f.jacobian(state.z)
        system = Map(Affine(jacobian.product, jacobian.transposed, residual))
        zero = torch.zeros_like(residual)
        inner = self.linear.init(system.remember(zero, residual), zero)
        # a sample with nothing to solve, or with nothing finite to solve for, must not keep the others waiting
        active = torch.isfinite(before) & (before > 0)
        active = active if state.active is None else active & state.active
        delta = residual
        for _ in range(self.linear_steps):
            if not f.any(active):
                break
            inner = self.linear.step(system, inner)
            error = torch.linalg.vector_norm(inner.residual, dim=1)
            usable = active & torch.isfinite(error)
            delta = torch.where(usable.unsqueeze(1), inner.z, delta)
            active = usable & (error > state.forcing * before)
        return delta
