"""Plain and damped fixed-point iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver


@dataclass(frozen=True, kw_only=True)
class Picard(Solver[Iterate]):
    """z <- z + damping (f(z) - z). It converges if the damped map is a contraction. One evaluation per step.

    damping  1 is plain iteration, smaller values take shorter steps
    """

    damping: float = 1.0
    steps_finished_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 < self.damping <= 1, f"Picard's damping must lie in (0, 1], got {self.damping}.")

    def init(self, f: Map, z0: Tensor) -> Iterate:
        """Evaluate the start."""
        return Iterate(z0, f(z0))

    def step(self, f: Map, state: Iterate) -> Iterate:
        """Move by the damped residual."""
        z = state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        return Iterate(z, f(z))

    def fixed_shape_state(self, state: Iterate) -> Iterate:
        """Return the state itself: no step changes its shapes."""
        return state
