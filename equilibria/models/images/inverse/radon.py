"""The Radon transform of small images from few directions, as a dense matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria.models.images.inverse.operators import Operator


class Radon(Operator):
    """Sums along parallel rays: (batch, channels, n, n) -> (batch, channels, angles, bins), with bins of one pixel's width.

    The value of a pixel is divided linearly between the two bins nearest to its projection. The dense matrix suits images of
    up to about 64 x 64 pixels. `regularized_inverse` computes the eigenvalues of A'A at its first call.

    angles  number of directions, evenly spread over 180 degrees
    """

    matrix: Tensor

    def __init__(self, size: int, angles: int) -> None:
        super().__init__()
        require(size >= 2, f"size must be at least 2, got {size}.")
        require(angles >= 1, f"angles must be at least 1, got {angles}.")
        self.size, self.angles = size, angles
        self.bins = 2 * math.ceil(size / math.sqrt(2)) + 1
        # the scale brings |A| to the order of 1, where default step lengths and weights fit
        self.register_buffer("matrix", _matrix(size, angles, self.bins) / math.sqrt(size * angles))
        self._eigen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(-2) @ self.matrix.T).unflatten(-1, (self.angles, self.bins))

    def adjoint(self, y: Tensor) -> Tensor:
        return (y.flatten(-2) @ self.matrix).unflatten(-1, (self.size, self.size))

    def squared_norm(self) -> float:
        return float(self.matrix.abs().sum(dim=0).max() * self.matrix.abs().sum(dim=1).max())

    def regularized_inverse(self, v: Tensor, weight: Tensor | float) -> Tensor:
        values, vectors = self._decomposed()
        return ((v.flatten(-2) @ vectors) / (1 + weight * values) @ vectors.T).unflatten(-1, (self.size, self.size))

    def _decomposed(self) -> tuple[Tensor, Tensor]:
        found = self._eigen
        if found is None or found[0].dtype != self.matrix.dtype or found[0].device != self.matrix.device:
            values, vectors = torch.linalg.eigh(self.matrix.T @ self.matrix)
            found = self._eigen = values.clamp_min(0), vectors
        return found


def _matrix(size: int, angles: int, bins: int) -> Tensor:
    """Return the matrix of the transform, (angles * bins, size²), without the scale."""
    place = torch.arange(size, dtype=torch.get_default_dtype()) - (size - 1) / 2
    rows, columns = torch.meshgrid(place, place, indexing="ij")
    theta = math.pi * torch.arange(angles, dtype=place.dtype) / angles
    # (angles, pixels): position of each pixel's projection, in bins from the first one
    at = theta.cos().unsqueeze(1) * columns.flatten() + theta.sin().unsqueeze(1) * rows.flatten() + (bins - 1) / 2
    lower = at.floor().long().clamp(0, bins - 2)
    share = at - lower
    matrix = torch.zeros(angles, bins, size * size)
    matrix.scatter_add_(1, lower.unsqueeze(1), (1 - share).unsqueeze(1))
    matrix.scatter_add_(1, lower.unsqueeze(1) + 1, share.unsqueeze(1))
    return matrix.flatten(0, 1)
