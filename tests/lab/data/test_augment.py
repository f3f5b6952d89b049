"""Augmentation: changes of images and labels, and their frequency."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equilibria.lab import data


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, size: int = 8) -> Tensor:
    """Return images without black pixels, in which all pixels of an image differ."""
    return (torch.arange(size * size) + 1).view(1, 1, size, size).repeat(n, 3, 1, 1).to(torch.uint8)


def test_crops_are_windows_of_the_padded_image_at_every_offset() -> None:
    x, y = images(500), torch.arange(500)
    crop = data.Crop(2)
    draws = crop.draw(500, generator())
    found, same = crop(x, y, draws)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for image, whole, (top, left) in zip(found, padded, draws.tolist(), strict=True):
        assert torch.equal(image, whole[:, top : top + 8, left : left + 8])
    assert {tuple(draw) for draw in draws.tolist()} == {(a, b) for a in range(5) for b in range(5)}
    assert same is y and found.dtype == torch.uint8


def test_half_of_the_images_are_mirrored_as_a_whole() -> None:
    x, y = images(1000), torch.arange(1000)
    flip = data.Flip()
    draws = flip.draw(1000, generator())
    found, _ = flip(x, y, draws)
    assert torch.equal(found[draws], x[draws].flip(-1)) and torch.equal(found[~draws], x[~draws])
    assert int(draws.sum()) == pytest.approx(500, abs=48)  # three sigma
    assert not data.Flip(0).draw(9, generator()).any() and data.Flip(1).draw(9, generator()).all()


def test_labels_of_pixels_move_with_the_image() -> None:
    x = images(40)
    y = x[:, 0].long()
    for augmentation in (data.Crop(3), data.Flip()):
        x, y = augmentation(x, y, augmentation.draw(40, generator()))
    padding = x[:, 0] == 0
    assert torch.equal(y[~padding], x[:, 0][~padding].long())
    assert padding.any() and bool((y[padding] == data.IGNORE).all())


def test_erased_rectangles_have_the_share_asked_for() -> None:
    x, y = images(400, size=15), torch.arange(400)
    erase = data.Erase(probability=0.75, low=0.1, high=0.25)
    found, _ = erase(x, y, erase.draw(400, generator()))
    black = found[:, 0] == 0
    erased = black.flatten(1).any(dim=1)
    assert float(erased.float().mean()) == pytest.approx(0.75, abs=0.065)  # three sigma
    rounding = 0.5 * (15 + 15) / 15**2  # half a pixel on each side
    for mask in black[erased]:
        rows, columns = mask.any(dim=1), mask.any(dim=0)
        assert torch.equal(mask, rows[:, None] & columns)
        assert 0.1 - rounding < float(mask.float().mean()) < 0.25 + rounding
    assert torch.equal(found[:, 0][~black], x[:, 0][~black])
