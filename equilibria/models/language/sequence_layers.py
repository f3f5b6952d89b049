"""The common layers of sequence models: small weights, weight norm, weight drop."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from equilibria._core.checks import require

SPREAD = 0.01  # standard deviation of all weights at the start

M = TypeVar("M", bound=nn.Module)


class WeightNorm(nn.Module):
    """W = g v / |v|, a length g and a direction v for every row of W; a parametrization, computed once per solve.

    As torch.nn.utils.parametrizations.weight_norm, and with the same names. That one runs a fused kernel on CPUs whose
    second derivative is wrong: it fails gradgradcheck.
    """

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return direction * (length / _row_norms(direction))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return _row_norms(weight), weight


class WeightDrop(nn.Module):
    """W with entries set to zero in training, a parametrization: a solve draws the mask once and keeps it to its backward.

    p        the share that is dropped; what is kept is scaled by 1 / (1 - p)
    columns  only the first so many columns of W are dropped; None: all
    """

    def __init__(self, p: float, columns: int | None = None) -> None:
        super().__init__()
        require(0 <= p < 1, f"WeightDrop's p is the share of the weights that is dropped and must lie in [0, 1), got {p}.")
        self.p, self.columns = p, columns

    def forward(self, weight: Tensor) -> Tensor:
        if self.columns is None:
            return F.dropout(weight, self.p, self.training)
        return torch.cat([F.dropout(weight[:, : self.columns], self.p, self.training), weight[:, self.columns :]], dim=1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def extra_repr(self) -> str:
        return f"p={self.p}, columns={self.columns}"


def linear(inputs: int, outputs: int, *, bias: bool = True, norm: bool = False) -> nn.Linear:
    """Weights N(0, 0.01), biases 0; `norm` adds weight norm."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=SPREAD)
    if bias:
        nn.init.zeros_(layer.bias)
    return normalized(layer) if norm else layer


def normalized(layer: M) -> M:
    """The layer with weight norm on its `weight`."""
    parametrize.register_parametrization(layer, "weight", WeightNorm())
    return layer


def _row_norms(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=1, keepdim=True)
