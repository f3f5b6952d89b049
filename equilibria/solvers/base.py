"""The base classes of solvers and of their states."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from equilibria._core.maps import Map


@dataclass(frozen=True)
class Iterate:
    """The state of a solver. A solver with a history extends this class.

    Every tensor has the batch dimension first, so that the loop can freeze and drop rows of any solver's state.
    """

    z: Tensor  # (batch, n)
    fz: Tensor  # (batch, n), f(z)
    active: Tensor | None = dataclasses.field(default=None, kw_only=True)  # (batch,) rows still running; None for all
    rejected: Tensor | None = dataclasses.field(default=None, kw_only=True)  # (batch,) rows whose step was discarded

    @cached_property
    def residual(self) -> Tensor:
        """(batch, n), f(z) - z."""
        return self.fz - self.z

    @cached_property
    def length(self) -> Tensor:
        """(batch,), Euclidean norm of the residual."""
        return torch.linalg.vector_norm(self.residual, dim=1)

    def rescaled(self, unit: Tensor) -> Self:
        """Return the state with its iterates multiplied by `unit`, (batch, 1), by which the problem was divided.

        A history is not rescaled: the Jacobian estimated from it does not depend on the scale.
        """
        return dataclasses.replace(self, z=self.z * unit, fz=self.fz * unit)


S = TypeVar("S", bound=Iterate)


class Solver(ABC, Generic[S]):
    """An update rule. The solver holds the settings; everything that changes during a solve is in the state."""

    evaluates_residual: ClassVar[bool] = True
    """True if `fz` is an evaluation of the map; False if it is updated by a recurrence, as in Krylov methods. The loop then
    checks the result."""

    differentiable: ClassVar[bool] = True
    """True if autograd can differentiate a step; False if inner loops write in place."""

    steps_finished_rows: ClassVar[bool] = False
    """True if steps may change rows that have stopped, whose results are already stored; freezing them would cost more."""

    @abstractmethod
    def init(self, f: Map, z0: Tensor) -> S:
        """Evaluate the start and return the first state."""

    @abstractmethod
    def step(self, f: Map, state: S) -> S:
        """Take one step and return the next state."""

    def fixed_shape_state(self, state: S) -> S | None:
        """Return the state with fixed shapes and tensor counters, for the compiled loop; None if there is none."""
        return None
