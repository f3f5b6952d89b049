"""Per-sample norms: (batch, n) -> (batch,). A norm of rms kind keeps its meaning when the state grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def usual_range(dtype: torch.dtype) -> tuple[float, float]:
    """Sizes of vectors whose squares, and those of residuals down to rounding, are far from the ends of the dtype."""
    info = torch.finfo(dtype)
    least = float(info.tiny**0.5 / info.eps)
    return least, 1 / least


def binary_size(*vectors: Tensor) -> Tensor:
    """(batch,), a power of two next to the largest entry of each row; 1 for rows that are zero or not finite.

    To divide by a power of two is exact: a problem of another size is then solved by the same numbers.
    """
    largest = torch.stack([max_norm(x.detach()) for x in vectors]).amax(dim=0)
    _, exponent = torch.frexp(largest)
    bound = 120 if largest.dtype == torch.float32 else 1000  # so that the reciprocal is a number as well
    power = torch.ldexp(torch.ones_like(largest), exponent.clamp(-bound, bound))
    return torch.where((largest > 0) & (largest < float("inf")), power, torch.ones_like(largest))


def scaled_norm(norm: Norm, x: Tensor) -> Tensor:
    """`norm` of vectors of any size: divided by their size before their entries are squared."""
    size = binary_size(x)
    return norm(x / size.unsqueeze(1)) * size


def rms_norm(x: Tensor) -> Tensor:
    """Root mean square of each row: a tolerance then does not depend on the size of the state."""
    return torch.linalg.vector_norm(x, dim=1) / max(x.shape[1], 1) ** 0.5


def euclidean_norm(x: Tensor) -> Tensor:
    """Length of each row, as most of the literature states its tolerances."""
    return torch.linalg.vector_norm(x, dim=1)


def max_norm(x: Tensor) -> Tensor:
    """Largest entry of each row in absolute value."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    return x.abs().amax(dim=1)  # several times faster on a CPU than vector_norm
