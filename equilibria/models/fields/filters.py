"""Functions of the coordinates that fields are built from: sinusoids and Gabor wavelets."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["siren", "fourier", "gabor"]
SHAPE = 3  # of the gamma distribution that the inverse widths of Gabor envelopes are drawn from, split between two filters


class Waves(nn.Module):
    """U x + c, (points, inputs) -> (points, width), the phases of sinusoids.

    Frequencies are uniform in ±scale / sqrt(inputs), phases uniform in ±π.
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
    """sin(U x + c) exp(-γ/2 |x - μ|²): each channel is local, (points, inputs) -> (points, width).

    γ is drawn from a gamma distribution and μ uniformly in [-1, 1]; frequencies grow with sqrt(γ) (Fathony and others 2021).
    A γ that training makes negative counts as zero.
    """

    def __init__(self, inputs: int, width: int, scale: float) -> None:
        super().__init__()
        self.waves = Waves(inputs, width, scale)
        self.centres = nn.Parameter(torch.rand(width, inputs) * 2 - 1)
        self.sharpness = nn.Parameter(torch.empty(width, SHAPE).exponential_().sum(dim=1))
        with torch.no_grad():
            self.waves.map.weight.mul_(self.sharpness.sqrt().unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        # |x - μ|² expanded, because the differences themselves are (points, width, inputs)
        squares = x.square().sum(dim=1, keepdim=True) + self.centres.square().sum(dim=1) - 2 * x @ self.centres.T
        return torch.sin(self.waves(x)) * torch.exp(-0.5 * torch.relu(self.sharpness) * squares.clamp_min(0))


def make_filter(kind: Kind, inputs: int, width: int, scale: float) -> nn.Module:
    """The filter of a kind of field."""
    return GaborFilter(inputs, width, scale) if kind == "gabor" else FourierFilter(inputs, width, scale)


def coordinate_grid(*sizes: int) -> Tensor:
    """Centres of the cells of a grid on [-1, 1]^d, one per row, (product of sizes, d); the last dimension runs fastest."""
    axes = [(2 * torch.arange(size) + 1) / size - 1 for size in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(sizes))
