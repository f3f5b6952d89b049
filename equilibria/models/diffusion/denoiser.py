"""A small diffusion model of images: a dense denoiser, and its loss on images with noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria._core.checks import require

LARGEST_ANGLE = 0.98 * math.pi / 2  # angle of the noisiest images; at π/2 the form "noise" of the chain would divide by zero


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig:
    """The architecture of a denoiser.

    image       (channels, height, width)
    blocks      number of residual blocks, each of two dense layers
    embedding   width of the sinusoidal embedding of the noise angle, an even number
    """

    image: tuple[int, int, int] = (1, 8, 8)
    width: int = 192
    blocks: int = 3
    embedding: int = 32

    def __post_init__(self) -> None:
        for name in ("width", "blocks", "embedding"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        require(self.embedding % 2 == 0, f"embedding must be even, got {self.embedding}.")


DIGITS = DenoiserConfig()


class Block(nn.Module):
    """h + W2 silu(W1 norm(h) + e), where e is the embedding of the noise angle."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.angle = nn.Linear(embedding, width, bias=False)
        self.second = nn.Linear(width, width)

    def forward(self, h: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = h + self.second(nn.functional.silu(self.first(self.norm(h)) + self.angle(embedded)))
        return out


class Denoiser(nn.Module):
    """Predicts the velocity v = cos φ ε - sin φ x of a noisy image x_φ = cos φ x + sin φ ε (Salimans and Ho 2022).

    The noise is then ε = sin φ x_φ + cos φ v, and the image is x = cos φ x_φ - sin φ v. φ lies between 0 and 0.98 π/2.
    """

    frequencies: Tensor

    def __init__(self, config: DenoiserConfig = DIGITS) -> None:
        super().__init__()
        self.config = config
        pixels = math.prod(config.image)
        self.register_buffer("frequencies", torch.logspace(0, 1.3, config.embedding // 2), persistent=False)
        self.input = nn.Linear(pixels, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.embedding) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, pixels)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        """Return the velocity of noisy images (batch, *image) at angles (batch,), in the shape of x."""
        phases = angle.unsqueeze(1) * self.frequencies
        embedded = torch.cat([phases.sin(), phases.cos()], dim=1)
        h = self.input(x.flatten(1))
        for block in self.blocks:
            h = block(h, embedded)
        return torch.as_tensor(self.output(self.norm(h)).view_as(x))


def diffusion_loss(denoiser: nn.Module, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return the mean squared error of the velocity at uniformly drawn angles, for images (batch, *image) in [-1, 1]."""
    draws = {"generator": generator, "device": images.device, "dtype": images.dtype}
    angle = LARGEST_ANGLE * torch.rand(len(images), **draws)  # type: ignore[arg-type]
    noise = torch.randn(images.shape, **draws)  # type: ignore[arg-type]
    wide = angle.view(-1, *[1] * (images.dim() - 1))
    predicted = denoiser(wide.cos() * images + wide.sin() * noise, angle)
    return nn.functional.mse_loss(predicted, wide.cos() * noise - wide.sin() * images)
