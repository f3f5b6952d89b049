"""Filters of fields: sinusoids and Gabor wavelets of the coordinates."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

FieldKind = Literal["siren", "fourier", "gabor"]
SHAPE = 3  # shape of the gamma distribution of γ, divided between the two filters of a cell


class Waves(nn.Module):
    """The phases U x + c of sinusoids, (points, inputs) -> (points, width).

    Initial frequencies U are uniform in ±scale / sqrt(inputs), initial offsets c are uniform in ±π.
    """

    def __init__(self, inputs: int, width: int, scale: float) -> None:
        super().__init__()
        self.map = nn.Linear(inputs, width)
        bound = scale / math.sqrt(inputs)
        nn.init.uniform_(self.map.weight, -bound, bound)
        nn.init.uniform_(self.map.bias, -math.pi, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        phases: Tensor = self.map(x)
        return phases


class FourierFilter(nn.Module):
    """sin(U x + c), (points, inputs) -> (points, width)."""

    def __init__(self, inputs: int, width: int, scale: float) -> None:
        super().__init__()
        self.waves = Waves(inputs, width, scale)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.waves(x))


class GaborFilter(nn.Module):
    """sin(U x + c) exp(-γ/2 |x - μ|²), a wavelet around μ per channel, (points, inputs) -> (points, width).

    Initially γ is drawn from a gamma distribution and μ uniformly from [-1, 1], and frequencies are scaled by sqrt(γ)
    (Fathony and others 2021). If training makes γ negative, it counts as zero.
    """

    def __init__(self, inputs: int, width: int, scale: float) -> None:
        super().__init__()
        self.waves = Waves(inputs, width, scale)
        self.centres = nn.Parameter(torch.rand(width, inputs) * 2 - 1)
        self.sharpness = nn.Parameter(torch.empty(width, SHAPE).exponential_().sum(dim=1))
        with torch.no_grad():
            self.waves.map.weight.mul_(self.sharpness.sqrt().unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        # |x - μ|² is expanded, because a tensor of differences would have the shape (points, width, inputs)
        squares = x.square().sum(dim=1, keepdim=True) + self.centres.square().sum(dim=1) - 2 * x @ self.centres.T
        return torch.sin(self.waves(x)) * torch.exp(-0.5 * torch.relu(self.sharpness) * squares.clamp_min(0))


def make_filter(kind: FieldKind, inputs: int, width: int, scale: float) -> nn.Module:
    """Return a filter for a kind of field."""
    return GaborFilter(inputs, width, scale) if kind == "gabor" else FourierFilter(inputs, width, scale)


def coordinate_grid(*sizes: int) -> Tensor:
    """Return the centres of the cells of a grid on [-1, 1]^d, (product of sizes, d); the last coordinate varies fastest."""
    axes = [(2 * torch.arange(size) + 1) / size - 1 for size in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(sizes))
