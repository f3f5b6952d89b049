"""A wrapper that restarts a solver periodically."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver


@dataclass(frozen=True)
class RestartState(Iterate):
    inner: Iterate
    count: int


@dataclass(frozen=True)
class Restart(Solver[RestartState]):
    """Restart `solver` at its current iterate after every `every` steps, which discards its history.

    Old history is misleading on strongly nonlinear maps. A restart costs no evaluation.
    """

    solver: Solver[Any]
    every: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise TypeError(f"Restart wraps one solver such as Anderson(), got {self.solver!r}.")
        require(self.every >= 1, f"Restart's every must be at least 1, got {self.every}.")

    @property
    def evaluates_residual(self) -> bool:  # type: ignore[override]
        """Return the property of the wrapped solver."""
        return self.solver.evaluates_residual

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """Return the property of the wrapped solver."""
        return self.solver.differentiable

    def init(self, f: Map, z0: Tensor) -> RestartState:
        """Evaluate the start by the wrapped solver."""
        inner = self.solver.init(f, z0)
        return RestartState(inner.z, inner.fz, inner, count=0)

    def step(self, f: Map, state: RestartState) -> RestartState:
        """Take a step of the wrapped solver, which begins anew after every `every` steps."""
        # the loop may have frozen rows of this state, and the state inside must agree with it
        inner = replace(state.inner, z=state.z, fz=state.fz, active=state.active)
        if state.count and state.count % self.every == 0:
            inner = self.solver.init(f.remember(state.z, state.fz), state.z)
        inner = self.solver.step(f, inner)
        return RestartState(inner.z, inner.fz, inner, state.count + 1, active=state.active)
