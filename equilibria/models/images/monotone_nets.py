"""Monotone operator networks: classifiers around a monotone cell (Winston and Kolter 2020).

    MonotoneNet(MonotoneMLPConfig())                                        one dense layer
    MonotoneNet(MonotoneConvConfig(image=(3, 32, 32), channels=81))         one convolution
    MonotoneNet(MonotoneTiersConfig())                                      a pyramid of convolutions

Their equilibria exist and are unique for all weights. `SplittingConfig` selects the splitting that finds them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.cells.monotone import Certificate, MonotoneCell, MonotoneLinear
from equilibria.cells.monotone_conv import MonotoneConv2d, MonotoneTiers2d
from equilibria.cells.splitting import ForwardBackward, PeacemanRachford, Readout, Splitting, tune_alpha
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

SplittingMethod = Literal["peaceman-rachford", "forward-backward"]

PICARD = Picard()
PUBLISHED_STOP = Stop(rtol=1e-2, atol=0.0, max_steps=300)


@dataclass(frozen=True, kw_only=True)
class SplittingConfig:
    """The operator splitting.

    method  "peaceman-rachford": converges for every alpha, inverts the linear part once per solve.
            "forward-backward": needs no inverse, converges below the alpha of the certificate, which changes with the
            weights; see `MonotoneNet.make_safe_`
    alpha   the step
    """

    method: SplittingMethod = "peaceman-rachford"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        methods = get_args(SplittingMethod)
        require(self.method in methods, f"method must be one of {', '.join(methods)}, got {self.method!r}.")

    def of(self, cell: MonotoneCell) -> Splitting:
        """Return the splitting of a cell."""
        return (PeacemanRachford if self.method == "peaceman-rachford" else ForwardBackward)(cell, self.alpha)


PUBLISHED_SPLITTING = SplittingConfig()


@dataclass(frozen=True, kw_only=True)
class MonotoneConfig(ABC):
    """Settings of a monotone cell and of the head on top of it.

    image    (channels, height, width)
    m        monotonicity: I - W >= m I
    """

    image: tuple[int, int, int] = (1, 28, 28)
    classes: int = 10
    m: float = 1.0

    @abstractmethod
    def cell(self) -> MonotoneCell: ...

    @abstractmethod
    def head(self) -> nn.Module: ...

    def prepared(self, images: Tensor) -> Tensor:
        """Return the images in the shape that the cell takes."""
        return images


@dataclass(frozen=True, kw_only=True)
class MonotoneMLPConfig(MonotoneConfig):
    """z = relu(W z + U x + b) on the flattened image: 84,313 parameters."""

    width: int = 87

    def cell(self) -> MonotoneCell:
        return MonotoneLinear(math.prod(self.image), self.width, self.m)

    def head(self) -> nn.Module:
        return nn.Linear(self.width, self.classes)

    def prepared(self, images: Tensor) -> Tensor:
        return images.flatten(1)


@dataclass(frozen=True, kw_only=True)
class MonotoneConvConfig(MonotoneConfig):
    """3x3 convolutions on the image, then a mean over squares of `pool` pixels.

    MNIST, 54 channels: 79,500 parameters; SVHN and CIFAR-10, 81 channels: 172,218; CIFAR-10 augmented, 200 channels:
    853,612. The squares include the frame of the state; incomplete squares are left out.
    """

    channels: int = 54
    pool: int = 4

    def cell(self) -> MonotoneCell:
        return MonotoneConv2d(self.image[0], self.channels, 3, self.image[1:], self.m)

    def head(self) -> nn.Module:
        height, width = ((side + 2) // self.pool for side in self.image[1:])  # + 2 for the frame of the state
        last = nn.Linear(self.channels * height * width, self.classes)
        return nn.Sequential(nn.AvgPool2d(self.pool), nn.Flatten(), last)


@dataclass(frozen=True, kw_only=True)
class MonotoneTiersConfig(MonotoneConfig):
    """A pyramid of images; the head reads the smallest.

    MNIST, (16, 32, 32) channels: 81,394 parameters; SVHN and CIFAR-10, (16, 32, 60): 170,194; CIFAR-10 augmented,
    (64, 128, 128): 1,014,546.
    """

    channels: tuple[int, ...] = (16, 32, 32)

    def cell(self) -> MonotoneCell:
        return MonotoneTiers2d(self.image[0], self.channels, 3, self.image[1:], self.m)

    def head(self) -> nn.Module:
        # every tier halves the image; + 2 for the frame of the state
        height, width = (side // 2 ** (len(self.channels) - 1) + 2 for side in self.image[1:])
        return nn.Sequential(_Last(), nn.Flatten(), nn.Linear(self.channels[-1] * height * width, self.classes))


class MonotoneNet(nn.Module):
    """A linear layer on the equilibrium of a monotone cell.

    config     MonotoneMLPConfig(), MonotoneConvConfig() or MonotoneTiersConfig()
    splitting  the operator splitting
    solver     solver for the splitting; plain iteration always converges
    stop       stop for the splitting
    gradient   None: implicit with the same solver and tolerance, on the transposed splitting
    """

    def __init__(
        self,
        config: MonotoneConfig,
        *,
        splitting: SplittingConfig = PUBLISHED_SPLITTING,
        solver: AnySolver = PICARD,
        stop: Stop = PUBLISHED_STOP,
        gradient: Gradient | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        gradient = gradient or Implicit(solver=solver, stop=stop)
        self.layer = Readout(DEQ(splitting.of(config.cell()), None, solver, stop, gradient))
        self.head = config.head()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(self.config.prepared(images)))

    @property
    def splitting(self) -> Splitting:
        """The map that is iterated. Its step alpha is a setting and not part of the state dict."""
        splitting: Any = self.layer.deq.cell
        return splitting

    def certificate(self) -> Certificate:
        """Return the monotonicity and the norm of the operator for the current weights."""
        return self.splitting.cell.certificate()

    def make_safe_(self, share: float = 0.5) -> float:
        """Set alpha to `share` of the largest value at which forward-backward splitting converges, and return it.

        The bound changes with the weights: call this from time to time during training with forward-backward splitting.
        """
        require(0 < share < 1, f"share must lie in (0, 1), got {share}: convergence is not guaranteed at the bound itself.")
        self.splitting.alpha = share * self.certificate().alpha
        return self.splitting.alpha

    @torch.no_grad()
    def tune_alpha_(self, images: Tensor, largest: float = 1.0) -> float:
        """Set alpha to the value among `largest`, `largest` / 2, ... that needs the fewest steps for these images.

        The published training does the same. Returns the value.
        """
        x = self.config.prepared(images)
        deq: Any = self.layer.deq
        start = self.splitting.start(x)  # the same start for every alpha, so that the numbers of steps compare
        return tune_alpha(self.splitting, lambda: deq.solve(x, init=start).stats.steps.max(), largest)


class _Last(nn.Module):
    """Selects the last tier of a pyramid."""

    def forward(self, tiers: tuple[Tensor, ...]) -> Tensor:
        return tiers[-1]
