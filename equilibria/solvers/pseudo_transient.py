"""Pseudo-transient continuation, per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.newton import check_linear, inexact_step
from equilibria.solvers.rowwise import divide

FORCING = 0.01  # relative tolerance of the linear systems; loose, because a step is only first order in time
CHANGE = (0.1, 10.0)  # bounds of the ratio of successive dt


@dataclass(frozen=True)
class PseudoTransientState(Iterate):
    dt: Tensor  # (batch, 1), the next time step


@dataclass(frozen=True, kw_only=True)
class PseudoTransient(Solver[PseudoTransientState]):
    """Linearly implicit Euler steps on dz/dt = f(z) - z, longer as the residual falls (Kelley and Keyes 1998).

        z <- z + s  with  (I - J + I / dt) s = f(z) - z,     dt <- dt |f(z) - z| / |f(z + s) - z - s|

    With a small dt a step follows the differential equation, however stiff; with a large dt it is a Newton step. The solver
    reaches the steady state of the equation, also if the residual rises first. A step whose value is not finite is repeated
    with a tenth of dt. One product per inner step and one evaluation per step.

    first_step    dt of the first step
    linear        the solver of the linear systems
    linear_steps  its largest number of steps per step
    """

    differentiable: ClassVar[bool] = False
    first_step: float = 1.0
    linear: Solver[Any] = field(default_factory=GMRES)
    linear_steps: int = 100

    def __post_init__(self) -> None:
        check_linear("PseudoTransient", self.linear, self.linear_steps)
        require(
            0 < self.first_step < math.inf,
            f"PseudoTransient's first_step must be positive and finite, got {self.first_step}.",
        )

    def init(self, f: Map, z0: Tensor) -> PseudoTransientState:
        """Evaluate the start, and set the first pseudo time step."""
        nobody = torch.zeros(z0.shape[0], dtype=torch.bool, device=z0.device)
        return PseudoTransientState(z0, f(z0), z0.new_full((z0.shape[0], 1), self.first_step), rejected=nobody)

    def step(self, f: Map, state: PseudoTransientState) -> PseudoTransientState:
        """Solve (I / dt + I - J) delta = residual, and change dt by the ratio of the residuals."""
        forcing, shift = torch.full_like(state.length, FORCING), state.dt.reciprocal()
        zero = torch.zeros_like(state.z)
        delta, _ = inexact_step(f, state, forcing, self.linear, self.linear_steps, start=zero, shift=shift)
        trial = state.z + delta
        value = f(trial)
        after = torch.linalg.vector_norm(value - trial, dim=1)
        taken = torch.isfinite(after).unsqueeze(1)
        ratio = divide(state.length, after).unsqueeze(1)
        change = torch.where(taken, ratio, 0.0).clamp(*CHANGE)  # a trial that is not finite shortens dt the most
        dt = (state.dt * change).clamp(torch.finfo(trial.dtype).eps, torch.finfo(trial.dtype).max)
        z, fz = torch.where(taken, trial, state.z), torch.where(taken, value, state.fz)
        return PseudoTransientState(z, fz, dt, active=state.active, rejected=~taken.squeeze(1))
