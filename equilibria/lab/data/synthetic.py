"""Tasks that need no files: polynomial regression, chains, copy memory, and shapes to segment."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from equilibria.lab.data.graphs import Graph
from equilibria.lab.data.sets import Dataset, Split, generator

SHAPES = ("background", "circle", "square", "triangle")  # the classes of pixels
SYMBOLS = tuple("0123456789")
COPIED = 10  # symbols to remember


def polynomial(*, train: int = 512, test: int = 128, noise: float = 0.005, seed: int = 0) -> Dataset[Split]:
    """Generate points of h(x) = 3/2 x^3 + x^2 - 5x + 2 sin x - 3, x uniform in (-1, 1) (Pal, Edelman and Rackauckas 2022).

    The paper prints - x^2; its code adds x^2, as does the paper on Jacobian regularization with the same function.

    noise  standard deviation of the noise on the training targets; test targets are exact
    """
    draws = generator(seed, "polynomial")
    x = torch.rand(train + test, 1, generator=draws) * 2 - 1
    y = 1.5 * x**3 + x**2 - 5 * x + 2 * x.sin() - 3
    noisy = y[:train] + noise * torch.randn(train, 1, generator=draws)
    return Dataset("polynomial", Split(x[:train], noisy), Split(x[train:], y[train:]))


def chains(
    *,
    length: int = 10,
    chains: int = 20,
    classes: int = 2,
    features: int = 100,
    train: int = 20,
    valid: int = 100,
    test: int = 200,
    seed: int = 42,
) -> Dataset[tuple[Graph, ...]]:
    """Generate chains whose nodes are to be classified; only the first node shows the class, one-hot (Gu and others 2020).

    One graph holds classes * chains directed paths whose edges lead away from the first node. The nodes of the splits are
    drawn at random and given by `mask`.

    chains  number of chains per class
    """
    nodes = classes * chains * length
    if length < 1 or train + valid + test > nodes or classes > features:
        raise ValueError(
            f"{classes} x {chains} chains of {length} make {nodes} nodes with {features} features: "
            f"too few for {classes} classes and splits of {train} + {valid} + {test} nodes."
        )
    place, y = torch.arange(nodes) % length, torch.arange(nodes) // (chains * length)
    x = torch.zeros(nodes, features)
    x[place == 0, y[place == 0]] = 1
    start = torch.arange(nodes)[place < length - 1]
    whole = Graph(x, torch.stack([start, start + 1]), y)
    order = torch.randperm(nodes, generator=generator(seed, "chains"))
    parts = order[: train + valid + test].split([train, valid, test])
    masks = [torch.zeros(nodes, dtype=torch.bool).index_fill_(0, part, True) for part in parts]
    first, second, third = ((dataclasses.replace(whole, mask=mask),) for mask in masks)
    return Dataset("chains", first, third, second, classes=tuple(f"class {i}" for i in range(classes)))


def copy_memory(*, delay: int = 400, train: int = 20_000, test: int = 2_000, seed: int = 0) -> Dataset[Split]:
    """Generate the copy memory task: ten symbols of 1 to 8 must be repeated after a delay (Bai, Kolter and Koltun 2019).

    Sequences of delay + 20 numbers: x = (s_1 .. s_10, 0 .., 9 at place delay + 10, 0 ..), y = (0 .., s_1 .. s_10).
    """
    if delay < 1:
        raise ValueError(f"copy-memory needs a delay of at least 1, got {delay}.")
    symbols = torch.randint(1, 9, (train + test, COPIED), generator=generator(seed, "copy memory"))
    x = symbols.new_zeros(train + test, delay + 2 * COPIED)
    y = x.clone()
    x[:, :COPIED] = symbols
    x[:, delay + COPIED - 1] = 9
    y[:, -COPIED:] = symbols
    return Dataset("copy-memory", Split(x[:train], y[:train]), Split(x[train:], y[train:]), classes=SYMBOLS)


def shapes(
    *,
    size: int = 32,
    train: int = 2_000,
    valid: int = 200,
    test: int = 400,
    most: int = 3,
    noise: float = 0.1,
    seed: int = 0,
) -> Dataset[Split]:
    """Generate images of circles, squares and triangles in any colour on a noisy background, with a label per pixel.

    Images are uint8 (n, 3, size, size), labels (n, size, size). Later shapes cover earlier ones. The class depends on the
    outline, not on the colour.

    most   largest number of shapes in an image; there is at least one
    noise  standard deviation of the pixels, on a scale of 0 to 1
    """
    if size < 8 or most < 1:
        raise ValueError(f"shapes need at least 8x8 pixels and one shape, got size={size} and most={most}.")
    draws = generator(seed, "shapes")
    n = train + valid + test
    image = torch.rand(n, 3, 1, 1, generator=draws).expand(n, 3, size, size)
    labels = torch.zeros(n, size, size, dtype=torch.int64)
    for k in range(most):
        kind, inside = _outline(n, size, draws)
        inside = inside & ((k == 0) | (torch.rand(n, 1, 1, generator=draws) < 0.5))
        image = torch.where(inside.unsqueeze(1), torch.rand(n, 3, 1, 1, generator=draws), image)
        labels = torch.where(inside, kind, labels)
    image = image + noise * torch.randn(image.shape, generator=draws)
    whole = Split(image.clamp(0, 1).mul(255).round().to(torch.uint8), labels)
    first, second, third = whole[:train], whole[train : train + valid], whole[train + valid :]
    return Dataset("shapes", first, third, second, classes=SHAPES, mean=(0.5,) * 3, std=(0.3,) * 3)


def _outline(n: int, size: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one shape per image; returns its kind, (n, 1, 1), and a mask of its pixels, (n, size, size)."""
    kind = torch.randint(1, len(SHAPES), (n, 1, 1), generator=draws)
    radius = size * (0.12 + 0.13 * torch.rand(n, 1, 1, generator=draws))
    # the whole shape lies inside the image
    centre = radius.unsqueeze(0) + (size - 1 - 2 * radius) * torch.rand(2, n, 1, 1, generator=draws)
    grid = torch.arange(size, dtype=torch.float32)
    down, right = grid.view(1, -1, 1) - centre[0], grid.view(1, 1, -1) - centre[1]
    circle = down**2 + right**2 <= radius**2
    square = (down.abs() <= 0.8 * radius) & (right.abs() <= 0.8 * radius)
    triangle = (down.abs() <= radius) & (2 * right.abs() <= down + radius)
    return kind, torch.where(kind == 1, circle, torch.where(kind == 2, square, triangle))
