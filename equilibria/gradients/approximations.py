"""Formulas that approximate the solution of the adjoint system u = J'u + v."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria._core.maps import FlatMap


class Approximation(ABC):
    """A formula for a vector close to the fixed point of u -> M u + right."""

    @abstractmethod
    def __call__(self, product: FlatMap, right: Tensor) -> Tensor:
        """Return a vector close to (I - M)^{-1} right, (batch, n); `product` is t -> M t."""


@dataclass(frozen=True)
class Neumann(Approximation):
    """damping (1 + B + ... + B^(steps - 1)) right with B = damping M + (1 - damping) I.

    This is the partial sum of a damped Neumann series, and equals `steps` damped iterations of u -> M u + right from 0.
    """

    steps: int
    damping: float

    def __call__(self, product: FlatMap, right: Tensor) -> Tensor:
        """Return the partial sum of the Neumann series applied to `right`."""
        term, total = right, self.damping * right
        for _ in range(self.steps - 1):
            term = torch.lerp(term, product(term), self.damping)
            total = total + self.damping * term
        return total
