"""The common layers of sequence models: linear layers with small initial weights, weight norm, weight drop."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from equilibria._core.checks import require

SPREAD = 0.01  # standard deviation of all initial weights

M = TypeVar("M", bound=nn.Module)


class WeightNorm(nn.Module):
    """W = g v / |v| with a length g and a direction v for every row of W; a parametrization, computed once per solve.

    It replaces torch.nn.utils.parametrizations.weight_norm, with the same names in the state dict. That one runs a fused
    kernel on CPUs whose second derivative is wrong: it fails gradgradcheck.
    """

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return direction * (length / _row_norms(direction))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return _row_norms(weight), weight


class WeightDrop(nn.Module):
    """Sets entries of W to zero in training; a parametrization, so a solve draws one mask and keeps it until its backward.

    p        share of the entries that is dropped; the others are scaled by 1 / (1 - p)
    columns  drop only in this many first columns of W; None: in all
    """

    def __init__(self, p: float, columns: int | None = None) -> None:
        super().__init__()
        require(0 <= p < 1, f"p, the share of the weights that WeightDrop drops, must lie in [0, 1), got {p}.")
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
    """Return a linear layer with weights from N(0, 0.01) and zero biases; `norm` adds weight norm."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=SPREAD)
    if bias:
        nn.init.zeros_(layer.bias)
    return normalized(layer) if norm else layer


def normalized(layer: M) -> M:
    """Add weight norm to the `weight` of a layer, and return the layer."""
    parametrize.register_parametrization(layer, "weight", WeightNorm())
    return layer


def _row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each row, (rows, 1)."""
    return torch.linalg.vector_norm(weight, dim=1, keepdim=True)
