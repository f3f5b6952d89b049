"""Pictures of segmented images: labels as colours, and a bar per class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.analysis.plots import INK, finish, new_axes, png
from equilibria.lab.data.sets import IGNORE

VOID = (0, 0, 0)  # black, for pixels without a label
# the colours differ in lightness too, so that colour-blind readers can distinguish them
PALETTE = (
    (126, 190, 255),
    (150, 75, 45),
    (255, 214, 10),
    (110, 110, 128),
    (244, 143, 208),
    (34, 139, 60),
    (235, 60, 40),
    (178, 223, 138),
    (52, 70, 200),
    (255, 145, 30),
    (140, 40, 170),
    (0, 170, 170),
)
ROWS = ("image", "truth", "prediction")  # rows of panels, from top to bottom


def coloured(labels: Tensor) -> Tensor:
    """Return labels (height, width) as colours (height, width, 3); pixels without a label are black."""
    if int(labels.max()) >= len(PALETTE):
        raise ValueError(f"There are colours for labels below {len(PALETTE)}, got the label {int(labels.max())}.")
    return torch.tensor([*PALETTE, VOID])[labels.masked_fill(labels == IGNORE, len(PALETTE))]


def compared(images: Tensor, truth: Tensor, prediction: Tensor, names: Sequence[str]) -> bytes:
    """Return a PNG with a column per image: the image, its labels and the predicted labels; a legend is below.

    images             bytes (n, 3, height, width)
    truth, prediction  labels (n, height, width)
    """
    n, (height, width) = len(images), images.shape[-2:]
    across = 1.7  # inches
    figure: Any = new_axes(across * n + 0.3, 3 * across * height / width + 0.9).figure
    figure.clear()
    panels = figure.subplots(len(ROWS), n, squeeze=False)
    for i in range(n):
        for row, pixels in zip(panels, (images[i].movedim(0, -1), coloured(truth[i]), coloured(prediction[i])), strict=True):
            row[i].imshow(pixels.tolist(), interpolation="nearest")
            row[i].set(xticks=[], yticks=[])
            row[i].spines[:].set_visible(False)
    for row, name in zip(panels, ROWS, strict=True):
        row[0].set_ylabel(name, color=INK)
    _legend(figure, panels[0][0], names, with_void=bool((truth == IGNORE).any()))
    return png(panels[0][0])


def bars(values: Mapping[str, float]) -> bytes:
    """Return a PNG with a bar per class in its colour; values are shares of 1, and nan has no bar."""
    axes = new_axes(0.55 * len(values) + 1.2, 3.0)
    numbers = list(values.values())
    heights = [0.0 if math.isnan(value) else 100 * value for value in numbers]
    drawn = axes.bar(list(values), heights, color=[_share(colour) for colour in PALETTE[: len(values)]])
    axes.bar_label(drawn, ["–" if math.isnan(value) else f"{value:.0%}" for value in numbers], fontsize=8, color=INK)
    axes.tick_params(axis="x", rotation=45)
    return png(finish(axes, "", "%"))


def _legend(figure: Any, axes: Any, names: Sequence[str], *, with_void: bool) -> None:
    """Draw the legend of colours below the panels."""
    pairs = [*zip(names, PALETTE, strict=False), *([("no label", VOID)] if with_void else [])]
    handles = [axes.scatter([], [], marker="s", s=60, color=_share(colour), label=name) for name, colour in pairs]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(pairs)), frameon=False, fontsize=8)


def _share(colour: tuple[int, int, int]) -> tuple[float, ...]:
    """Return a colour of bytes as numbers in [0, 1], for matplotlib."""
    return tuple(part / 255 for part in colour)
