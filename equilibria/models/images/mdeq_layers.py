"""Layers of multiscale DEQs: convolutions, norms, residual blocks, and paths between resolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from equilibria.models.images.mdeq_configs import Activation, MDEQConfig
from equilibria.nn import VariationalDropout

SPREAD = 0.01  # standard deviation of initial weights and biases of convolutions


def activation(kind: Activation) -> nn.Module:
    return nn.ReLU() if kind == "relu" else nn.GELU()


def conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """Return a convolution that keeps the size, or halves it with stride=2; initialised with N(0, 0.01)."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=SPREAD)
    return layer


def normalized(layer: nn.Conv2d) -> nn.Conv2d:
    """Add weight norm with one scale per output channel; a solve computes the weight once."""
    weight_norm(layer, dim=0)
    return layer


def latent_norm(config: MDEQConfig, channels: int, groups: int, *, affine: bool = True) -> nn.Module:
    """Return the norm of the configuration: batch norm, or group norm with `groups`."""
    if config.norm == "batch":
        return nn.BatchNorm2d(channels, affine=affine)
    return nn.GroupNorm(groups, channels, affine=affine)


class ResidualBlock(nn.Module):
    """norm(act(norm(W2 act(norm(W1 z)) + x) + z)) with 3x3 convolutions W1, W2 under weight norm.

    The injection x is added before the second norm, dropout follows W2. An eager block also has an activation after the
    second norm.
    """

    def __init__(self, config: MDEQConfig, channels: int, dropout: float) -> None:
        super().__init__()
        wide, groups = config.expansion * channels, config.block_groups or config.groups
        self.conv1 = normalized(conv(channels, wide, 3))
        self.conv2 = normalized(conv(wide, channels, 3))
        self.norm1 = latent_norm(config, wide, groups)
        self.norm2 = latent_norm(config, channels, groups)
        self.norm3 = latent_norm(config, channels, groups)
        self.dropout = VariationalDropout(dropout, shared=(2, 3))  # drops whole channels
        self.activation = activation(config.conventions.activation)
        self.eager = config.conventions.eager

    def forward(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        y = self.dropout(self.conv2(self.activation(self.norm1(self.conv1(z)))))
        y = self.norm2(y if x is None else y + x)
        y = self.activation(y) if self.eager else y
        out: Tensor = self.norm3(self.activation(y + z))
        return out


def down_path(config: MDEQConfig, source: int, target: int) -> nn.Sequential:
    """Return a path to a lower resolution: 3x3 convolutions of stride 2, the last of which changes the channels."""
    channels, layers = config.channels, nn.Sequential()
    for step in range(source + 1, target + 1):
        last = step == target
        outputs = channels[target] if last else channels[source]
        layers.append(conv(channels[source], outputs, 3, stride=2))
        layers.append(latent_norm(config, outputs, config.groups))
        if not last or config.conventions.eager:
            layers.append(activation(config.conventions.activation))
    return layers


def up_path(config: MDEQConfig, source: int, target: int) -> nn.Sequential:
    """Return a path to a higher resolution: a 1x1 convolution that changes the channels; `resized` then changes the size."""
    outputs = config.channels[target]
    layers = nn.Sequential(conv(config.channels[source], outputs, 1), latent_norm(config, outputs, config.groups))
    if config.conventions.eager:
        layers.append(activation(config.conventions.activation))
    return layers


def resized(y: Tensor, size: torch.Size) -> Tensor:
    """Resize to another height and width by nearest neighbours; unchanged if they match."""
    return y if y.shape[-2:] == size else nn.functional.interpolate(y, size=size, mode="nearest")
