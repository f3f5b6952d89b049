"""Correlations of all pairs of pixels, and windows of them around where a flow leads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def correlation_pyramid(first: Tensor, second: Tensor, levels: int) -> tuple[Tensor, ...]:
    """Scalar products of all pixels of `first` with all of `second`, (batch, channels, h, w) each, over sqrt(channels).

    Level l is (batch, h w, h / 2^l, w / 2^l): for every pixel of `first` an image of its correlations, of which means over
    squares of 2^l pixels are taken.
    """
    size = first.shape[-2:]
    smallest = 2 ** (levels - 1)
    if min(size) < smallest:
        raise ValueError(
            f"{levels} levels of correlations need features of at least {smallest}x{smallest} pixels, "
            f"got {size[0]}x{size[1]}: use larger frames or fewer levels."
        )
    volume = first.flatten(2).mT @ second.flatten(2) / math.sqrt(first.shape[1])
    found = [volume.unflatten(2, size)]
    for _ in range(levels - 1):
        found.append(F.avg_pool2d(found[-1], 2))
    return tuple(found)


def look_up(pyramid: Sequence[Tensor], flow: Tensor, radius: int) -> Tensor:
    """(batch, levels (2 radius + 1)^2, h, w): correlations at the end of the flow, (batch, 2, h, w), and around it.

    Between pixels the correlations are interpolated, outside they are 0, as `grid_sample` has it. The interpolation is
    written as products with matrices of hat functions: derivatives of any order and of any mode exist, which `grid_sample`
    lacks.
    """
    size = flow.shape[-2:]
    x, y = (end.flatten(1) for end in _ends(flow))
    steps = torch.arange(-radius, radius + 1, dtype=flow.dtype, device=flow.device)
    found = []
    for level, images in enumerate(pyramid):
        # the middle of a square of 2^l pixels is at its index times 2^l, plus (2^l - 1) / 2
        at_x, at_y = ((end + 0.5) / 2**level - 0.5 for end in (x, y))
        rows, columns = (_hats(at, steps, length) for at, length in ((at_y, images.shape[2]), (at_x, images.shape[3])))
        found.append((rows @ images @ columns.mT).flatten(2))
    return torch.cat(found, dim=2).mT.unflatten(2, size)


def _ends(flow: Tensor) -> tuple[Tensor, Tensor]:
    """Column and row, (batch, h, w) each, where the flow of every pixel leads."""
    rows, columns = (torch.arange(length, dtype=flow.dtype, device=flow.device) for length in flow.shape[-2:])
    return flow[:, 0] + columns, flow[:, 1] + rows.unsqueeze(1)


def _hats(at: Tensor, steps: Tensor, length: int) -> Tensor:
    """(..., steps, length), linear weights of `length` pixels for the points at + steps."""
    pixels = torch.arange(length, dtype=at.dtype, device=at.device)
    return (1 - (at[..., None, None] + steps[:, None] - pixels).abs()).clamp_min(0)
