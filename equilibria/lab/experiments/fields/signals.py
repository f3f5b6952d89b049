"""The signals to which fields are fitted: a photograph, a sound and the signed distance of a shape."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from equilibria._core.files import optional
from equilibria.models.fields.filters import coordinate_grid

SIGNALS = ("image", "sound", "shape")  # names that `signal` takes


@lru_cache(maxsize=8)
def signal(name: str, size: int) -> tuple[Tensor, Tensor]:
    """Return coordinates (points, d) in [-1, 1] and values (points, 1) that lie about in [-1, 1].

    image  size x size pixels of scikit-learn's photograph of a flower, in grey
    sound  size² / 2 samples of a chirp and a decaying tone
    shape  signed distances on a grid of size / 2 x size / 2 points: negative inside of two discs
    """
    if name == "image":
        photograph = optional("sklearn.datasets", "train").load_sample_image("flower.jpg")
        grey = torch.from_numpy(photograph.copy()).float().mean(dim=-1)[60:400, 180:520] / 127.5 - 1
        flower = torch.nn.functional.interpolate(grey[None, None], size=(size, size), mode="area")[0, 0]
        return coordinate_grid(size, size), flower.reshape(-1, 1)
    if name == "sound":
        x = coordinate_grid(size * size // 2)
        return x, sound(x)
    x = coordinate_grid(size // 2, size // 2)
    return x, signed_distance(x)


def sound(x: Tensor) -> Tensor:
    """Return a tone whose frequency rises from 2 to 16 cycles per unit, plus a decaying tone of 10 cycles per unit."""
    chirp = torch.sin(2 * math.pi * (2 * (x + 1) + 3.5 * (x + 1).square()))
    return 0.6 * chirp + 0.4 * torch.exp(-2 * (x + 1)) * torch.sin(20 * math.pi * x)


def signed_distance(x: Tensor) -> Tensor:
    """Return the distance from the outline of the union of two discs, negative inside; it is exact outside of the discs."""
    centres, radii = x.new_tensor([[-0.25, -0.2], [0.3, 0.25]]), x.new_tensor([0.45, 0.35])
    return (torch.cdist(x, centres) - radii).amin(dim=1, keepdim=True)
