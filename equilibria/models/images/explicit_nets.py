"""Explicit networks to compare equilibria with.

weight_tied  any model with its equilibrium layers cut off after a number of plain steps: the same weights
untied       the same with a copy of the cell for every step: that many times the weights of the cell
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

from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.solvers.base import require
from equilibria.starts import Init, check_cell, check_init, prepared, start_of


class UntiedStack(nn.Module):
    """z_{i+1} = cell_i(z_i, *inputs): a layer for every step, each with weights of its own.

    cells    in the order in which they are applied; one that has `prepare(*inputs)` prepares the inputs for itself
    init     as of a DEQ; where it runs the cell, that is the first one
    batched  False: the state is one whole problem without a batch dimension
    """

    def __init__(self, cells: Sequence[nn.Module], init: Init = None, *, batched: bool = True) -> None:
        super().__init__()
        require(len(cells) > 0, "A stack has at least one cell, got none.")
        for cell in cells:
            check_cell(cell)
        check_init(init)
        self.cells = nn.ModuleList(cells)
        self.init = init
        self.batched = batched

    @property
    def cell(self) -> nn.Module:
        """The first cell, which has the attributes that all cells share."""
        return self.cells[0]

    def forward(self, *inputs: Any, init: State | None = None) -> State:
        """The state after the last cell. `init` is a state to start from instead; gradients reach it."""
        z = self._start(inputs) if init is None else init
        for cell in self.cells:
            z = cell(z, *prepared(cell, inputs))
        return z

    def _start(self, inputs: Sequence[Any]) -> State:
        given = prepared(self.cell, inputs)
        return start_of(self.init, self.cell, lambda z: self.cell(z, *given), inputs, batched=self.batched)


def weight_tied(model: nn.Module, depth: int) -> nn.Module:
    """A copy of the model in which every DEQ is a `WeightTied` of `depth` steps; its state dict fits both ways."""
    return _replaced(model, lambda layer: WeightTied(layer.cell, depth, layer.init, batched=layer.batched))


def untied(model: nn.Module, depth: int) -> nn.Module:
    """A copy of the model in which every DEQ is `depth` copies of its cell in a row.

    They begin with the weights of that cell, so that before training this is `weight_tied(model, depth)`.
    """
    require(depth >= 1, f"depth is how many copies of a cell there are, at least 1, got {depth}.")

    def stack(layer: DEQ) -> nn.Module:
        if not isinstance(layer.cell, nn.Module):
            raise TypeError(f"Only a cell that is an nn.Module has weights to untie, got {layer.cell!r}. Use weight_tied.")
        cells = [copy.deepcopy(layer.cell) for _ in range(depth)]
        return UntiedStack(cells, layer.init, batched=layer.batched)

    return _replaced(model, stack)


def matched_width(build: Callable[[int], nn.Module], count: int, largest: int = 4096) -> int:
    """The width up to `largest` at which build(width) comes closest to `count` parameters; of two, the smaller model.

        width = matched_width(lambda width: untied(MyModel(width), depth=5), count=parameters(model))

    The count must grow with the width. Nothing is allocated: the models are built without data.
    """
    require(largest >= 1, f"largest is a width, at least 1, got {largest}.")
    low, high = 1, largest
    while low < high:  # the first width that has at least `count`
        middle = (low + high) // 2
        low, high = (low, middle) if _count(build, middle) >= count else (middle + 1, high)
    below = max(low - 1, 1)
    return below if count - _count(build, below) <= _count(build, low) - count else low


class BasicBlock(nn.Module):
    """act(conv-norm-act-conv-norm(x) + shortcut(x)), 3x3 kernels without biases.

    The shortcut has no parameters: every stride-th pixel, and channels of zeros on both sides (option A).

    slope    of the activation where it is negative; 0: relu
    dropout  share of the channels that is dropped after the first activation and before the sum
    """

    def __init__(self, inputs: int, channels: int, stride: int = 1, *, slope: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        missing = channels - inputs
        require(
            missing >= 0 and missing % 2 == 0,
            f"The shortcut adds as many channels on either side: from {inputs} to {channels} it cannot. "
            "Take an even number more.",
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
        return F.leaky_relu(h + self._shortcut(x), self.slope)

    def _shortcut(self, x: Tensor) -> Tensor:
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Three stages of (depth - 2) / 6 basic blocks, each with half the height and width of the one before.

    depth        layers with weights: 20, 32, 44, 56 and 110 in the paper
    channels     of the stages
    in_channels  of the images
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
    """Convolution, three stages of basic blocks, mean over the pixels, linear: 853,018 parameters at depth 56."""

    def __init__(self, config: ResNetConfig = RESNET_56) -> None:
        super().__init__()
        self.config = config
        width = config.channels[0]
        self.stem = nn.Sequential(
            nn.Conv2d(config.in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(*_stages(config))
        self.head = nn.Linear(config.channels[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


def _stages(config: ResNetConfig) -> list[BasicBlock]:
    blocks, before = [], config.channels[0]
    for stage, channels in enumerate(config.channels):
        for block in range(config.blocks):
            blocks.append(BasicBlock(before, channels, 2 if stage and not block else 1))
            before = channels
    return blocks


def _replaced(model: nn.Module, build: Callable[[DEQ], nn.Module]) -> nn.Module:
    """A copy of the model with other modules in the places of its DEQs."""
    model = copy.deepcopy(model)
    vars(model).pop("_origin", None)  # it is no longer what `create` made
    if isinstance(model, DEQ):
        return build(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DEQ)}
    require(bool(layers), f"There is no eq.DEQ in this {type(model).__name__} whose cell could be applied explicitly.")
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, build(layer))
    return model


def _count(build: Callable[[int], nn.Module], width: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(width).parameters() if p.requires_grad)
