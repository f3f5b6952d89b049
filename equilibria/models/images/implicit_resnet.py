"""Implicit residual networks of JFB (Fung, Heaton, Li, McKenzie, Osher and Yin 2022), for MNIST, SVHN and CIFAR-10.

    u = R(u, Q(images)),   classes = S(u)

Q maps images to the latent space, R is a residual network on it, S classifies the equilibrium. Four ways to train:

    ImplicitResNet(MNISTResNet())                                             Jacobian-free, as proposed
    ImplicitResNet(MNISTResNet(latent_norm=False), gradient=JACOBIAN)         exact, by conjugate gradients, as compared with
    ImplicitResNet(MNISTResNet(latent_norm=False), gradient=EXACT)            exact, by GMRES, in a third of the time
    ImplicitResNet(MNISTResNet(), depth=1)                                    the explicit twin S(R(0, Q(images)))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.constraints import contract_
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.models.images.explicit_nets import BasicBlock
from equilibria.solution import Solution
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.krylov import NormalCG
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

SLOPE = 0.1  # slope of the activation for negative inputs
GREY = 0.449  # the CIFAR-10 encoder pads its images with this value

PICARD, ANDERSON = Picard(), Anderson()
JACOBIAN_FREE = JFB()
JACOBIAN = Implicit(solver=NormalCG(), stop=Stop(rtol=1e-3, atol=0.0, max_steps=50, on_failure="ignore"))
EXACT = Implicit(stop=JACOBIAN.stop)


@dataclass(frozen=True)
class ChannelNorm:
    """The largest Euclidean norm of a pixel's channel vector, in which the published tolerances are given.

    A row may hold one image (channels, pixels) or a batch of them.
    """

    channels: int
    pixels: int

    def __call__(self, x: Tensor) -> Tensor:
        images = x.view(len(x), -1, self.channels, self.pixels)
        return torch.linalg.vector_norm(images, dim=2).flatten(1).amax(dim=1)


class LatentCell(nn.Module, ABC):
    """R(u, v): residual layers of two 3x3 convolutions each, with batch norms without parameters between them.

    channels  channels of u and v
    layers    number of layers
    gamma     factor that makes R contract
    norm      False: no batch norms, so that every sample has its own equation
    """

    def __init__(self, channels: int, layers: int, gamma: float, norm: bool) -> None:
        super().__init__()
        self.gamma = gamma
        self.first = nn.ModuleList(_conv(channels, channels) for _ in range(layers))
        self.second = nn.ModuleList(_conv(channels, channels) for _ in range(layers))
        self.norms = nn.ModuleList(_bare_norm(channels) if norm else nn.Identity() for _ in range(layers))

    @abstractmethod
    def forward(self, u: Tensor, v: Tensor) -> Tensor: ...

    def convolutions(self) -> list[nn.Module]:
        """Return all convolutions; contraction control scales them."""
        return [*self.first, *self.second]


class OutputScaledCell(LatentCell):
    """R(u, v) = gamma w; w starts as u + v, and each layer maps it to norm(w + act(act(conv(act(conv(w))))))."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        w = u + v
        for first, second, norm in zip(self.first, self.second, self.norms, strict=True):
            w = norm(w + _act(_act(second(_act(first(w))))))
        return self.gamma * w


class InputScaledCell(LatentCell):
    """R(u, v) = w; w starts as v + gamma u, and each layer maps it to norm(act(w + conv(act(conv(w)))))."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        w = v + self.gamma * u
        for first, second, norm in zip(self.first, self.second, self.norms, strict=True):
            w = norm(_act(w + second(_act(first(w)))))
        return w


@dataclass(frozen=True, kw_only=True)
class ImplicitResNetConfig(ABC):
    """Q, R and S, and the tolerance of the equilibrium.

    image        (channels, height, width)
    channels     channels of the latent space
    layers       layers of R
    gamma        contraction factor of R
    latent_norm  batch norms in R; in training the batch is then one equation. Meant for Jacobian-free gradients
    tolerance    largest change of a pixel in the last step, in the norm of its channels
    """

    image: tuple[int, int, int]
    channels: int
    layers: int
    gamma: float
    tolerance: float
    max_steps: int
    latent_norm: bool = True
    classes: int = 10

    def __post_init__(self) -> None:
        require(0 < self.gamma < 1, f"gamma must lie in (0, 1) for R to contract, got {self.gamma}.")
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}.")
        require(
            min(self.latent_size) >= 3, f"Images of {self.image[1:]} leave {self.latent_size} pixels for R. Use larger ones."
        )

    @property
    @abstractmethod
    def latent_size(self) -> tuple[int, int]:
        """Height and width in the latent space."""

    @abstractmethod
    def encoder(self) -> nn.Module:
        """Return Q."""

    @abstractmethod
    def cell(self) -> LatentCell:
        """Return R."""

    @abstractmethod
    def head(self) -> nn.Module:
        """Return S."""

    def stop(self) -> Stop:
        """Return the published stop; where samples are independent it applies per sample, not to the worst of the batch."""
        norm = ChannelNorm(self.channels, math.prod(self.latent_size))
        return Stop(rtol=0.0, atol=self.tolerance, max_steps=self.max_steps, norm=norm, on_failure="ignore")


@dataclass(frozen=True, kw_only=True)
class MNISTResNet(ImplicitResNetConfig):
    """Settings for MNIST, 54,352 parameters: two convolutions with a pooling by 3, two latent layers of 32 channels."""

    image: tuple[int, int, int] = (1, 28, 28)
    channels: int = 32
    layers: int = 2
    gamma: float = 0.5
    tolerance: float = 0.1
    max_steps: int = 50

    @property
    def latent_size(self) -> tuple[int, int]:
        return self.image[1] // 3, self.image[2] // 3  # after the pooling by 3

    def encoder(self) -> nn.Module:
        half = self.channels // 2
        return nn.Sequential(
            _conv(self.image[0], half),
            nn.BatchNorm2d(half),
            nn.LeakyReLU(SLOPE),
            nn.MaxPool2d(3),
            _conv(half, self.channels),
            nn.BatchNorm2d(self.channels),
            nn.LeakyReLU(SLOPE),
        )

    def cell(self) -> LatentCell:
        return OutputScaledCell(self.channels, self.layers, self.gamma, self.latent_norm)

    def head(self) -> nn.Module:
        return _unpadded_head(self, dropout=0.2)


@dataclass(frozen=True, kw_only=True)
class SVHNResNet(ImplicitResNetConfig):
    """Settings for SVHN, 163,488 parameters: three residual blocks, one latent layer of 64 channels.

    The released model counts 163,744, including two batch norms of 128 parameters each that it never uses. Without
    latent_norm a gamma of 0.9 hardly contracts, and plain iteration runs out of steps. Lower it, or use a stronger solver.
    """

    image: tuple[int, int, int] = (3, 32, 32)
    channels: int = 64
    layers: int = 1
    gamma: float = 0.9
    tolerance: float = 1e-4
    max_steps: int = 200

    @property
    def latent_size(self) -> tuple[int, int]:
        return math.ceil(self.image[1] / 4), math.ceil(self.image[2] / 4)  # after two blocks of stride 2

    def encoder(self) -> nn.Module:
        width = self.channels // 4
        return nn.Sequential(
            nn.Conv2d(self.image[0], width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(SLOPE),
            BasicBlock(width, width, slope=SLOPE, dropout=0.1),
            BasicBlock(width, 2 * width, 2, slope=SLOPE, dropout=0.1),
            BasicBlock(2 * width, 4 * width, 2, slope=SLOPE, dropout=0.1),
        )

    def cell(self) -> LatentCell:
        return OutputScaledCell(self.channels, self.layers, self.gamma, self.latent_norm)

    def head(self) -> nn.Module:
        return _unpadded_head(self, dropout=0.2)


@dataclass(frozen=True, kw_only=True)
class CIFARResNet(ImplicitResNetConfig):
    """Settings for CIFAR-10, 843,430 parameters: an encoder of 32 residual blocks, five latent layers of 35 channels.

    blocks  number of encoder blocks; the image is halved after half of them and after all
    """

    image: tuple[int, int, int] = (3, 32, 32)
    channels: int = 35
    layers: int = 5
    gamma: float = 0.5
    tolerance: float = 0.1
    max_steps: int = 50
    blocks: int = 32

    @property
    def latent_size(self) -> tuple[int, int]:
        return (self.image[1] + 8) // 4, (self.image[2] + 8) // 4  # padded by 4 on each side, then pooled twice

    def encoder(self) -> nn.Module:
        half = [PlainBlock(self.channels) for _ in range(self.blocks // 2)]
        rest = [PlainBlock(self.channels) for _ in range(self.blocks - self.blocks // 2)]
        return nn.Sequential(
            nn.ConstantPad2d(4, GREY),
            nn.Conv2d(self.image[0], self.channels, 7, padding=3, padding_mode="replicate"),
            nn.LeakyReLU(SLOPE),
            *half,
            nn.AvgPool2d(2),
            *rest,
            nn.AvgPool2d(2),
        )

    def cell(self) -> LatentCell:
        return InputScaledCell(self.channels, self.layers, self.gamma, self.latent_norm)

    def head(self) -> nn.Module:
        conv = nn.Conv2d(self.channels, self.channels, 3, 2, padding=1)
        height, width = (math.ceil(side / 2) for side in self.latent_size)
        return _head(conv, self.channels * height * width, self.classes, dropout=0.1)


class PlainBlock(nn.Module):
    """norm(act(x + conv(drop(act(conv(x)))))), the norm without parameters."""

    def __init__(self, channels: int, dropout: float = 0.15) -> None:
        super().__init__()
        self.first = _conv(channels, channels)
        self.dropout = nn.Dropout2d(dropout)
        self.second = _conv(channels, channels)
        self.norm = _bare_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(_act(x + self.second(self.dropout(_act(self.first(x))))))


class ImplicitResNet(nn.Module):
    """S(u) at the equilibrium u = R(u, Q(images)), started from u = 0.

    config    the three networks: MNISTResNet(), SVHNResNet() or CIFARResNet()
    solver    of the equilibrium; the paper takes `PICARD`, which needs more evaluations
    stop      None: the published one, config.stop()
    gradient  JFB(), or EXACT or JACOBIAN with config.latent_norm=False
    depth     build the explicit twin instead: R applied that many times, 1 in the paper; the state dict has the same names

    To keep R contracting, scale it after the optimizer's step:

        with eq.record(model) as solutions:
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        model.contract_(solutions[0])
    """

    def __init__(
        self,
        config: ImplicitResNetConfig,
        *,
        solver: AnySolver = ANDERSON,
        stop: Stop | None = None,
        gradient: Gradient = JACOBIAN_FREE,
        depth: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = config.encoder()
        cell = config.cell()
        self.layer: DEQ | WeightTied = (
            DEQ(cell, None, solver, stop or config.stop(), gradient) if depth is None else WeightTied(cell, depth)
        )
        self.head = config.head()
        self.train(self.training)  # sets `layer.batched` for the initial mode

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(self.encoder(images)))

    def train(self, mode: bool = True) -> ImplicitResNet:
        super().train(mode)
        # with batch statistics the batch is one equation; in eval mode they are fixed, and samples are independent
        self.layer.batched = not (mode and self.config.latent_norm)
        return self

    def contract_(self, s: Solution, bound: float | None = None, generator: torch.Generator | None = None) -> float:
        """Scale the convolutions of R if it maps a random step at u to more than `bound` times its norm.

        This calls `equilibria.contract_` and returns the ratio before scaling; `bound` defaults to gamma. Without batch
        norms the shortcuts of R alone have the ratio gamma, so scaling approaches gamma over many calls and never passes
        below it. The paper scales layers of two convolutions, this function single convolutions: two calls correspond to
        one of the paper's.
        """
        cell: Any = self.layer.cell
        return contract_(cell.convolutions(), s, self.config.gamma if bound is None else bound, generator=generator)


def _unpadded_head(config: ImplicitResNetConfig, dropout: float) -> nn.Module:
    """Return a classifier that begins with a convolution without padding, which loses one pixel at every edge."""
    height, width = config.latent_size
    conv = nn.Conv2d(config.channels, 16, 3)
    return _head(conv, 16 * (height - 2) * (width - 2), config.classes, dropout)


def _head(conv: nn.Module, features: int, classes: int, dropout: float) -> nn.Module:
    """Return `conv`, activation, dropout and a linear layer from `features` numbers to logits."""
    last = nn.Linear(features, classes, bias=False)
    return nn.Sequential(conv, nn.LeakyReLU(SLOPE), nn.Dropout2d(dropout), nn.Flatten(), last)


def _conv(inputs: int, channels: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, channels, 3, padding=1)


def _bare_norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm without weight and bias."""
    return nn.BatchNorm2d(channels, affine=False)


def _act(x: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE)
