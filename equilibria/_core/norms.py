"""Per-sample norms: (batch, n) -> (batch,). A norm of rms kind keeps its meaning when the state grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


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
