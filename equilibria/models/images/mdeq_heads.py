"""The explicit parts of a multiscale DEQ: the stem before the equilibrium, a classifier or segmentation head after it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from equilibria.models.images.mdeq_cell import States
from equilibria.models.images.mdeq_configs import Conventions, MDEQConfig
from equilibria.models.images.mdeq_layers import activation, conv


def stem(config: MDEQConfig) -> nn.Sequential:
    """Return the map from image to injection: two 3x3 convolutions, the first `downsampling` of them of stride 2.

    A 1x1 convolution follows if the image is halved or there are more than two resolutions.
    """
    width, times, rules = config.channels[0], config.downsampling, config.conventions
    first = conv(config.inputs, width, 3, stride=2 if times >= 1 else 1, bias=rules.stem_bias)
    second = conv(width, width, 3, stride=2 if times >= 2 else 1, bias=rules.stem_bias)
    layers = nn.Sequential(*_activated(first, rules), *_activated(second, rules))
    if times > 0 or len(config.channels) > 2:
        layers.extend(_activated(conv(width, width, 1), rules))
    return layers


class Bottleneck(nn.Module):
    """act(body(x) + shortcut(x)), where the body is 1x1, 3x3 and 1x1 convolutions to 4 * width channels.

    The shortcut is the identity, or a 1x1 convolution where the channels change.
    """

    def __init__(self, inputs: int, width: int, rules: Conventions) -> None:
        super().__init__()
        outputs, affine = 4 * width, rules.wide_bottleneck
        middle = outputs if rules.wide_bottleneck else width
        self.body = nn.Sequential(
            *_activated(conv(inputs, width, 1), rules, affine=affine),
            *_activated(conv(width, middle, 3), rules, affine=affine),
            conv(middle, outputs, 1),
            nn.BatchNorm2d(outputs, affine=affine),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1), nn.BatchNorm2d(outputs))
        self.activation = activation(rules.activation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return out


class ClassificationHead(nn.Module):
    """States -> (batch, classes).

    One bottleneck runs per resolution; then each resolution is downsampled and added to the next lower one.
    """

    def __init__(self, config: MDEQConfig, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        rules, outputs = config.conventions, [4 * width for width in widths]
        pairs = zip(config.channels, widths, strict=True)
        self.bottlenecks = nn.ModuleList(Bottleneck(c, width, rules) for c, width in pairs)
        self.downs = nn.ModuleList(
            nn.Sequential(*_activated(conv(a, b, 3, stride=2, bias=True), rules)) for a, b in pairwise(outputs)
        )
        self.final = nn.Sequential(*_activated(conv(outputs[-1], config.features, 1, bias=True), rules))
        self.classifier = nn.Linear(config.features, classes)

    def forward(self, z: States) -> Tensor:
        first, *others = (bottleneck(part) for bottleneck, part in zip(self.bottlenecks, z, strict=True))
        for down, other in zip(self.downs, others, strict=True):
            first = other + down(first)
        scores: Tensor = self.classifier(self.final(first).mean(dim=(2, 3)))
        return scores


class SegmentationHead(nn.Module):
    """States -> (batch, classes, height, width) at the highest resolution of the state, 1 / 2^downsampling of the image."""

    def __init__(self, config: MDEQConfig, classes: int) -> None:
        super().__init__()
        total = sum(config.channels)
        self.layers = nn.Sequential(
            conv(total, total, 1, bias=True),
            nn.BatchNorm2d(total, momentum=0.01),
            activation(config.conventions.activation),
            conv(total, classes, 1, bias=True),
        )

    def forward(self, z: States) -> Tensor:
        size = z[0].shape[-2:]
        lower = [nn.functional.interpolate(part, size=size, mode="bilinear", align_corners=True) for part in z[1:]]
        scores: Tensor = self.layers(torch.cat([z[0], *lower], dim=1))
        return scores


def _activated(layer: nn.Conv2d, rules: Conventions, *, affine: bool = True) -> list[nn.Module]:
    """Return the convolution followed by a batch norm and the activation."""
    return [layer, nn.BatchNorm2d(layer.out_channels, affine=affine), activation(rules.activation)]
