"""The cell of a multiscale DEQ, and the starts of its solves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from equilibria.models.images.mdeq_configs import MDEQConfig, halved
from equilibria.models.images.mdeq_layers import (
    ResidualBlock,
    activation,
    conv,
    down_path,
    latent_norm,
    normalized,
    resized,
    up_path,
)

States = tuple[Tensor, ...]  # one (batch, channels, height, width) per resolution, the highest first


class MDEQCell(nn.Module):
    """f(z, x) of Bai, Koltun and Kolter (2020) on a tuple of resolutions; x enters only the highest one.

    A residual block runs per resolution. Then y_i = sum_j T_ji(out_j), with strided convolutions down, 1x1 convolutions and
    nearest-neighbour upsampling up, and the identity on the diagonal. norm(W act(y_i)) follows if the configuration has it.
    """

    def __init__(self, config: MDEQConfig) -> None:
        super().__init__()
        scales = range(len(config.channels))
        self.blocks = nn.ModuleList(ResidualBlock(config, c, config.dropout) for c in config.channels)
        self.paths = nn.ModuleList(nn.ModuleList(_path(config, j, i) for j in scales) for i in scales)
        self.posts = nn.ModuleList(_post(config, c) for c in config.channels)

    def forward(self, z: States, x: Tensor) -> States:
        out = tuple(block(part, x if i == 0 else None) for i, (block, part) in enumerate(zip(self.blocks, z, strict=True)))
        return tuple(post(self._fused(out, i)) for i, post in enumerate(self.posts))

    def _fused(self, out: States, target: int) -> Tensor:
        """Return the sum of all resolutions at the resolution `target`."""
        total = out[target]
        paths: Any = self.paths[target]
        for source, path in enumerate(paths):
            if source != target:
                total = total + resized(path(out[source]), out[target].shape[-2:])
        return total


def _path(config: MDEQConfig, source: int, target: int) -> nn.Module:
    """Return the layers that bring the resolution `source` to the resolution `target`."""
    if source == target:
        return nn.Identity()
    return down_path(config, source, target) if source < target else up_path(config, source, target)


def _post(config: MDEQConfig, channels: int) -> nn.Module:
    """Return the layer after the fusion: activation, 1x1 convolution and norm; the identity if there is none."""
    if config.post is None:
        return nn.Identity()
    layer = conv(channels, channels, 1)
    if config.conventions.post_weight_norm:
        layer = normalized(layer)
    # half as many groups as in the fusion, see `MDEQConfig.groups`
    norm = latent_norm(config, channels, max(config.groups // 2, 1), affine=config.post == "affine")
    return nn.Sequential(activation(config.conventions.activation), layer, norm)


class Predictor(nn.Module):
    """The start of a Skip DEQ, computed from the injection by a residual block and a path to every lower resolution."""

    def __init__(self, config: MDEQConfig) -> None:
        super().__init__()
        self.block = ResidualBlock(config, config.channels[0], dropout=0.0)
        self.paths = nn.ModuleList(down_path(config, 0, i) for i in range(1, len(config.channels)))

    def forward(self, x: Tensor) -> States:
        return (self.block(x), *(path(x) for path in self.paths))


@dataclass(frozen=True)
class ZeroStates:
    """Zeros for every resolution, with sizes from the injection."""

    channels: tuple[int, ...]

    def __call__(self, x: Tensor) -> States:
        size = (x.shape[-2], x.shape[-1])
        return tuple(x.new_zeros(x.shape[0], c, *halved(size, i)) for i, c in enumerate(self.channels))
