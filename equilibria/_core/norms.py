"""Per-sample norms: (batch, n) -> (batch,). Tolerances in the RMS norm do not depend on the size of the state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def usual_range(dtype: torch.dtype) -> tuple[float, float]:
    """(least, most): norms between which neither the squares of a vector nor those of its residuals leave the dtype."""
    info = torch.finfo(dtype)
    least = float(info.tiny**0.5 / info.eps)
    return least, 1 / least


def binary_size(*vectors: Tensor) -> Tensor:
    """(batch,), a power of two close to the largest absolute entry of each row; 1 for rows that are zero or not finite.

    Division by a power of two is exact, so that a scaled problem is solved with the same mantissas.
    """
    largest = torch.stack([max_norm(x.detach()) for x in vectors]).amax(dim=0)
    _, exponent = torch.frexp(largest)
    bound = 120 if largest.dtype == torch.float32 else 1000  # keeps the reciprocal finite too
    power = torch.ldexp(torch.ones_like(largest), exponent.clamp(-bound, bound))
    return torch.where((largest > 0) & (largest < float("inf")), power, torch.ones_like(largest))


def scaled_norm(norm: Norm, x: Tensor) -> Tensor:
    """(batch,), `norm` of each row without overflow or underflow: rows are divided by their `binary_size` first."""
    size = binary_size(x)
    return norm(x / size.unsqueeze(1)) * size


def rms_norm(x: Tensor) -> Tensor:
    """Root mean square of each row; a tolerance then does not depend on the number of entries."""
    return torch.linalg.vector_norm(x, dim=1) / max(x.shape[1], 1) ** 0.5


def euclidean_norm(x: Tensor) -> Tensor:
    """Euclidean norm of each row, in which most of the literature states its tolerances."""
    return torch.linalg.vector_norm(x, dim=1)


def max_norm(x: Tensor) -> Tensor:
    """Largest entry of each row in absolute value."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    return x.abs().amax(dim=1)  # several times faster on a CPU than vector_norm
