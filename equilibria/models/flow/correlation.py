"""Correlations of all pairs of pixels, and windows of correlations around the end points of a flow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def correlation_pyramid(first: Tensor, second: Tensor, levels: int) -> tuple[Tensor, ...]:
    """Return the scalar products of all pixels of `first` and `second`, (batch, channels, h, w) each, over sqrt(channels).

    Level l has the shape (batch, h w, h / 2^l, w / 2^l). For every pixel of `first` it holds an image of the correlations
    with `second`, averaged over squares of 2^l x 2^l pixels.
    """
    size = first.shape[-2:]
    smallest = 2 ** (levels - 1)
    if min(size) < smallest:
        raise ValueError(
            f"A pyramid of {levels} levels needs features of at least {smallest}x{smallest} pixels, got "
            f"{size[0]}x{size[1]}. Use larger frames or fewer levels."
        )
    volume = first.flatten(2).mT @ second.flatten(2) / math.sqrt(first.shape[1])
    found = [volume.unflatten(2, size)]
    for _ in range(levels - 1):
        found.append(F.avg_pool2d(found[-1], 2))
    return tuple(found)


def look_up(pyramid: Sequence[Tensor], flow: Tensor, radius: int) -> Tensor:
    """Return the correlations in windows around the end points of the flow, (batch, levels (2 radius + 1)^2, h, w).

    The flow is (batch, 2, h, w). Correlations are interpolated linearly between pixels, and are 0 outside of the image, as
    with `grid_sample`. The interpolation is a product with matrices of hat functions, because `grid_sample` has neither
    second derivatives nor a forward-mode derivative.
    """
    size = flow.shape[-2:]
    x, y = (end.flatten(1) for end in _ends(flow))
    steps = torch.arange(-radius, radius + 1, dtype=flow.dtype, device=flow.device)
    found = []
    for level, images in enumerate(pyramid):
        # the centre of square i of 2^l pixels is at pixel 2^l i + (2^l - 1) / 2
        at_x, at_y = ((end + 0.5) / 2**level - 0.5 for end in (x, y))
        rows, columns = (_hats(at, steps, length) for at, length in ((at_y, images.shape[2]), (at_x, images.shape[3])))
        found.append((rows @ images @ columns.mT).flatten(2))
    return torch.cat(found, dim=2).mT.unflatten(2, size)


def _ends(flow: Tensor) -> tuple[Tensor, Tensor]:
    """Return column and row of the end point of every pixel's flow, (batch, h, w) each."""
    rows, columns = (torch.arange(length, dtype=flow.dtype, device=flow.device) for length in flow.shape[-2:])
    return flow[:, 0] + columns, flow[:, 1] + rows.unsqueeze(1)


def _hats(at: Tensor, steps: Tensor, length: int) -> Tensor:
    """Return the weights of `length` pixels in a linear interpolation at the points at + steps, (..., steps, length)."""
    pixels = torch.arange(length, dtype=at.dtype, device=at.device)
    return (1 - (at[..., None, None] + steps[:, None] - pixels).abs()).clamp_min(0)
