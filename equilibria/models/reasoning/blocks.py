"""The block of a reasoner: layers that mix positions, then channels, each followed by an RMS norm."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Mixer = Literal["mlp", "attention", "line", "square"]
EPS = 1e-5  # added to the mean square in RMS norms
ROTARY_BASE = 10_000.0  # base of the wavelengths of rotary positions, the usual value


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) over the last dimension, without biases.

    The hidden width is 2/3 of expansion * width, rounded up to a multiple of `multiple`. The three matrices then have about
    as many weights as the two matrices of an MLP with that expansion.
    """

    def __init__(self, width: int, expansion: float, multiple: int) -> None:
        super().__init__()
        hidden = math.ceil(round(expansion * width * 2 / 3) / multiple) * multiple
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class PositionMLP(nn.Module):
    """A SwiGLU over the positions of (batch, positions, width), equal for all channels; the number of positions is fixed."""

    def __init__(self, positions: int, expansion: float, multiple: int) -> None:
        super().__init__()
        self.mlp = SwiGLU(positions, expansion, multiple)

    def forward(self, h: Tensor) -> Tensor:
        return self.mlp(h.transpose(1, 2)).transpose(1, 2)


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions: queries and keys are rotated by angles that grow with the position.

    causal  True: a position attends to itself and earlier positions; False: to all positions
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(
                f"Rotary attention needs an even width per head, got width={width} and heads={heads}. Use a width that is a "
                f"multiple of {2 * heads}."
            )
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (batch, heads, positions, d)
        cos, sin = rotary_angles(h.shape[1], q.shape[-1], h)
        # Plain operations, because torch's fused attention has neither second derivatives, which penalties on the Jacobian
        # need, nor a forward-mode derivative, which Newton's method needs.
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class NeighbourConvolution(nn.Module):
    """A convolution of (batch, positions, width) over each position and its nearest neighbours, with zero padding.

    dimensions  1: positions form a line, kernel 3. 2: positions form a square board, row by row, kernel 3x3
    """

    def __init__(self, width: int, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions
        make = nn.Conv1d if dimensions == 1 else nn.Conv2d
        self.convolution: nn.Conv1d | nn.Conv2d = make(width, width, 3, padding=1, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        channels = h.transpose(1, 2)
        if self.dimensions == 2:
            channels = channels.unflatten(2, (side := board_side(h.shape[1]), side))
        return self.convolution(channels).flatten(2).transpose(1, 2)


def board_side(positions: int) -> int:
    """Return the side of a square board with this number of positions."""
    side = math.isqrt(positions)
    if side * side != positions:
        raise ValueError(
            f"mixer='square' needs a square number of positions, got {positions}. Use mixer='line' for a sequence."
        )
    return side


def rotary_angles(positions: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles position * base^(-2 i / size), (positions, size / 2) each."""
    frequency = ROTARY_BASE ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float64) / size)
    angle = torch.arange(positions, device=like.device, dtype=torch.float64).unsqueeze(1) * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + d/2}) of the last dimension by their angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class ReasonerLayer(nn.Module):
    """h <- norm(h + mix(h)), then h <- norm(h + mlp(h)); the norm is the RMS over channels, without weights."""

    def __init__(self, mixer: nn.Module, width: int, expansion: float, multiple: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.mlp = SwiGLU(width, expansion, multiple)

    def forward(self, h: Tensor) -> Tensor:
        h = rms_norm(h + self.mixer(h))
        return rms_norm(h + self.mlp(h))


def rms_norm(h: Tensor) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], eps=EPS)


def initialize(module: nn.Module) -> None:
    """Draw weights from a normal distribution of deviation 1 / sqrt(inputs), truncated at two deviations."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            std = part.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
