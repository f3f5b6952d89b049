"""The cells of equilibrium fields (Huang, Bai and Kolter 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equilibria.constraints import spectral_norm
from equilibria.models.fields.filters import FieldKind, Waves, make_filter


class SirenCell(nn.Module):
    """f(z, x) = sin(W (z + g(x)) + U x + c) with g(x) = sin(V x + d): a SIREN layer with itself as its input.

    |sin'| <= 1, so f contracts in the Euclidean norm if |W| < 1.
    """

    def __init__(self, inputs: int, width: int, scale: float, bound: float | None) -> None:
        super().__init__()
        self.state = _state_map(width, bound, bias=False)
        self.waves = Waves(inputs, width, scale)
        self.first = make_filter("siren", inputs, width, scale)

    def prepare(self, x: Tensor) -> Tensor:
        """Return W g(x) + U x + c, which does not depend on z."""
        injected: Tensor = self.state(self.first(x)) + self.waves(x)
        return injected

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.sin(self.state(z) + injected)


class FilterCell(nn.Module):
    """f(z, x) = h(x) * (W (z + g(x)) + b) with filters g and h: a multiplicative filter layer as an equilibrium.

    f is affine in z. |h| <= 1, so f contracts in the Euclidean norm if |W| < 1.
    """

    def __init__(self, kind: FieldKind, inputs: int, width: int, scale: float, bound: float | None) -> None:
        super().__init__()
        self.state = _state_map(width, bound, bias=True)
        self.first = make_filter(kind, inputs, width, scale)
        self.second = make_filter(kind, inputs, width, scale)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return h(x) and h(x) * (W g(x) + b), which do not depend on z."""
        filters: Tensor = self.second(x)
        return filters, filters * self.state(self.first(x))

    def forward(self, z: Tensor, filters: Tensor, injected: Tensor) -> Tensor:
        return torch.addcmul(injected, filters, nn.functional.linear(z, self.state.weight))


def make_cell(kind: FieldKind, inputs: int, width: int, scale: float, bound: float | None) -> nn.Module:
    """Return the cell of a kind of field; `scale` is divided between its two functions of the coordinates."""
    each = scale / math.sqrt(2)
    if kind == "siren":
        return SirenCell(inputs, width, each, bound)
    return FilterCell(kind, inputs, width, each, bound)


def _state_map(width: int, bound: float | None, bias: bool) -> nn.Linear:
    """Return the map z -> W z with entries drawn from ±1 / sqrt(width); `bound` is the largest spectral norm of W."""
    linear = nn.Linear(width, width, bias=bias)
    limit = 1 / math.sqrt(width)
    nn.init.uniform_(linear.weight, -limit, limit)
    return linear if bound is None else spectral_norm(linear, bound=bound, clip=True)
