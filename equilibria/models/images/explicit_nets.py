"""Explicit networks for comparison with equilibria.

weight_tied  replaces every equilibrium layer by a fixed number of plain steps with the same weights
untied       replaces every equilibrium layer by one copy of its cell per step, each with its own weights
ResNet       the residual network of He, Zhang, Ren and Sun (2016) for small images
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.starts import Init, check_cell, check_init, prepared, start_of


class UntiedStack(nn.Module):
    """z_{i+1} = cell_i(z_i, *inputs): one layer per step, each with its own weights.

    cells    in the order of application; every cell prepares the inputs by its own `prepare(*inputs)`, if it has one
    init     as for a DEQ; an init that runs the cell, such as FirstStep, runs the first one
    batched  False: the state is one problem without a batch dimension
    """

    def __init__(self, cells: Sequence[nn.Module], init: Init = None, *, batched: bool = True) -> None:
        super().__init__()
        require(len(cells) > 0, "UntiedStack needs at least one cell, got none.")
        for cell in cells:
            check_cell(cell)
        check_init(init)
        self.cells = nn.ModuleList(cells)
        self.init = init
        self.batched = batched

    @property
    def cell(self) -> nn.Module:
        """The first cell, whose attributes all cells share."""
        return self.cells[0]

    def forward(self, *inputs: Any, init: State | None = None) -> State:
        """Return the state after the last cell. `init` replaces the start; gradients reach it."""
        z = self._start(inputs) if init is None else init
        for cell in self.cells:
            z = cell(z, *prepared(cell, inputs))
        return z

    def _start(self, inputs: Sequence[Any]) -> State:
        """Return the state before the first cell."""
        given = prepared(self.cell, inputs)
        return start_of(self.init, self.cell, lambda z: self.cell(z, *given), inputs, batched=self.batched)


def weight_tied(model: nn.Module, depth: int) -> nn.Module:
    """Return a copy of the model in which every DEQ is a `WeightTied` of `depth` steps; state dicts are interchangeable."""
    return _replaced(model, lambda layer: WeightTied(layer.cell, depth, layer.init, batched=layer.batched))


def untied(model: nn.Module, depth: int) -> nn.Module:
    """Return a copy of the model in which every DEQ is `depth` copies of its cell in series.

    The copies start with the weights of that cell, so before training the result equals `weight_tied(model, depth)`.
    """
    require(depth >= 1, f"depth, the number of copies of a cell, must be at least 1, got {depth}.")

    def stack(layer: DEQ) -> nn.Module:
        if not isinstance(layer.cell, nn.Module):
            raise TypeError(f"Only a cell that is an nn.Module can be untied, got {layer.cell!r}. Use weight_tied.")
        cells = [copy.deepcopy(layer.cell) for _ in range(depth)]
        return UntiedStack(cells, layer.init, batched=layer.batched)

    return _replaced(model, stack)


def matched_width(build: Callable[[int], nn.Module], count: int, largest: int = 4096) -> int:
    """Return the width, at most `largest`, whose build(width) has a number of parameters closest to `count`.

        width = matched_width(lambda width: untied(MyModel(width), depth=5), count=parameters(model))

    Of two equally close widths the smaller is returned. The number of parameters must grow with the width. Models are built
    on the meta device, so nothing is allocated.
    """
    require(largest >= 1, f"largest must be at least 1, got {largest}.")
    low, high = 1, largest
    while low < high:  # bisect for the first width with at least `count`
        middle = (low + high) // 2
        low, high = (low, middle) if _count(build, middle) >= count else (middle + 1, high)
    below = max(low - 1, 1)
    return below if count - _count(build, below) <= _count(build, low) - count else low


class BasicBlock(nn.Module):
    """act(conv-norm-act-conv-norm(x) + shortcut(x)) with 3x3 kernels and no biases.

    The shortcut has no parameters: it takes every stride-th pixel and pads channels with zeros on both sides (option A).

    slope    slope of the activation for negative inputs; 0: relu
    dropout  share of channels dropped after the first activation and before the sum
    """

    def __init__(self, inputs: int, channels: int, stride: int = 1, *, slope: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        missing = channels - inputs
        require(
            missing >= 0 and missing % 2 == 0,
            f"The shortcut pads channels equally on both sides, which is impossible from {inputs} to {channels}. "
            "Make the difference even and not negative.",
        )
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout2d(dropout)
        self.slope, self.stride, self.added = slope, stride, missing // 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.leaky_relu(self.norm1(self.conv1(x)), self.slope))
        h = self.dropout(self.norm2(self.conv2(h)))
        shortcut = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        return F.leaky_relu(h + shortcut, self.slope)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Three stages of (depth - 2) / 6 basic blocks, each with half the height and width of the one before.

    depth        layers with weights: 20, 32, 44, 56 and 110 in the paper
    channels     channels of the stages
    in_channels  channels of the images
    """

    depth: int = 56
    channels: tuple[int, int, int] = (16, 32, 64)
    in_channels: int = 3
    classes: int = 10

    def __post_init__(self) -> None:
        require(
            self.depth >= 8 and (self.depth - 2) % 6 == 0,
            f"depth must be 6 n + 2 with n at least 1, such as 20 or 56, got {self.depth}.",
        )

    @property
    def blocks(self) -> int:
        """The number of blocks in each stage."""
        return (self.depth - 2) // 6


RESNET_56 = ResNetConfig()


class ResNet(nn.Module):
    """A convolution, three stages of basic blocks, a mean over the pixels and a linear layer.

    It has 853,018 parameters at depth 56.
    """

    def __init__(self, config: ResNetConfig = RESNET_56) -> None:
        super().__init__()
        self.config = config
        width = config.channels[0]
        self.stem = nn.Sequential(
            nn.Conv2d(config.in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        # the first block of every stage but the first has stride 2, as in the paper
        blocks, before = [], config.channels[0]
        for stage, channels in enumerate(config.channels):
            for block in range(config.blocks):
                blocks.append(BasicBlock(before, channels, 2 if stage and not block else 1))
                before = channels
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(config.channels[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


def _replaced(model: nn.Module, build: Callable[[DEQ], nn.Module]) -> nn.Module:
    """Return a copy of the model with its DEQs replaced by build(deq)."""
    model = copy.deepcopy(model)
    vars(model).pop("_origin", None)  # it is no longer the model that `create` made
    if isinstance(model, DEQ):
        return build(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DEQ)}
    require(bool(layers), f"This {type(model).__name__} contains no eq.DEQ whose cell could be applied explicitly.")
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, build(layer))
    return model


def _count(build: Callable[[int], nn.Module], width: int) -> int:
    """Return the number of trained parameters of build(width)."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(width).parameters() if p.requires_grad)
