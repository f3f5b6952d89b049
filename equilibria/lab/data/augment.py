"""Augmentation of batches. Drawing random numbers is separate from applying them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from equilibria.lab.data.sets import IGNORE


class Augmentation(Protocol):
    """An augmentation of images and targets.

    Draws are made on the CPU for the whole batch, so that they depend neither on the device nor on the number of processes.
    """

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return the random draws for `count` samples, (count, ...)."""

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Augment images (n, channels, height, width) and targets; of targets only labels of pixels change."""


@dataclass(frozen=True)
class Crop:
    """Pads images with black on all sides and cuts out the original size at random. Labels of padding are `IGNORE`."""

    padding: int = 4

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2 * self.padding + 1, (count, 2), generator=generator)

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        top, left = draws.unbind(1)
        x = self._cut(x, top, left, 0)
        return x, self._cut(y.unsqueeze(1), top, left, IGNORE).squeeze(1) if _per_pixel(x, y) else y

    def _cut(self, x: Tensor, top: Tensor, left: Tensor, fill: int) -> Tensor:
        """Return the windows of padded images, (n, channels, height, width), that begin at top and left, (n,)."""
        # a view of all windows, (n, channels, offsets, offsets, height, width); indexing copies only the chosen ones
        windows = pad(x, (self.padding,) * 4, value=fill).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
        return windows[torch.arange(len(x), device=x.device), :, top, left]


@dataclass(frozen=True)
class Flip:
    """Mirrors images horizontally with this probability."""

    probability: float = 0.5

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(count, generator=generator) < self.probability

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.where(draws.view(-1, 1, 1, 1), x.flip(-1), x)
        return x, torch.where(draws.view(-1, 1, 1), y.flip(-1), y) if _per_pixel(x, y) else y


@dataclass(frozen=True)
class Erase:
    """Makes a random rectangle black, with this probability; targets do not change.

    low, high  range of the rectangle's share of the image; the ratio of its sides is at most 3.3
    """

    probability: float = 0.5
    low: float = 0.02
    high: float = 0.33

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(count, 5, generator=generator)

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        erased, share, shape, top, left = draws.view(-1, 5, 1, 1).unbind(1)
        side = (self.low + (self.high - self.low) * share).sqrt()
        stretch = 3.3 ** (shape - 0.5)  # its square is the ratio of the sides
        inside = _within(x.shape[2], side * stretch, top, x.device).unsqueeze(2)
        inside = inside & _within(x.shape[3], side / stretch, left, x.device).unsqueeze(1)
        return x.masked_fill((inside & (erased < self.probability)).unsqueeze(1), 0), y


def _within(length: int, share: Tensor, place: Tensor, device: torch.device) -> Tensor:
    """Return a mask (n, length) of the pixels in an interval of this share of the length."""
    extent = (share.clamp_max(1) * length).round().view(-1, 1)
    start = (place.view(-1, 1) * (length - extent + 1)).floor()
    pixels = torch.arange(length, device=device)
    return (pixels >= start) & (pixels < start + extent)


def _per_pixel(x: Tensor, y: Tensor) -> bool:
    """Return True if the targets are labels of the pixels of x."""
    return y.dim() == 3 and y.shape[1:] == x.shape[2:]
