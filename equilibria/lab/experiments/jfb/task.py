"""Implicit ResNets, neural ODEs and explicit ResNets as tasks on images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.lab.experiments.image_task import Batch, ImageSettings, ImageTask, inside
from equilibria.lab.training.task import Outcome
from equilibria.models.images.explicit_nets import ResNet, ResNetConfig
from equilibria.models.images.implicit_resnet import (
    PICARD,
    CIFARResNet,
    ImplicitResNet,
    ImplicitResNetConfig,
    MNISTResNet,
    SVHNResNet,
)
from equilibria.models.images.neural_ode import AdaptiveSteps, FixedSteps, Integrator, NeuralODE, NeuralODEConfig
from equilibria.models.solve_options import relative_stop
from equilibria.solution import Solution, record
from equilibria.solvers.krylov import NormalCG
from equilibria.solvers.tableaus import Method as RungeKutta


@dataclass(frozen=True, kw_only=True)
class ImplicitResNetSettings(ImageSettings):
    """Settings of an implicit ResNet.

    kind       dataset whose published network is used
    by         "jfb": with batch norms in the cell; "jacobian": without them, and with exact gradients by conjugate gradients
               on the normal equations; "explicit": the cell applied once
    blocks     number of encoder blocks of the CIFAR-10 network
    tolerance  tolerance of the solve; None: the published one
    max_steps  step limit of the solve and of the conjugate gradients; None: the published one
    contract   scale the cell's weights after a step if the cell does not contract
    """

    kind: Literal["mnist", "svhn", "cifar10"] = "mnist"
    by: Literal["jfb", "jacobian", "explicit"] = "jfb"
    blocks: int = 32
    tolerance: float | None = None
    max_steps: int | None = None
    contract: bool = True


class ImplicitResNetTask(ImageTask):
    """Trains an implicit ResNet and keeps its cell a contraction."""

    def __init__(self, settings: ImplicitResNetSettings) -> None:
        super().__init__(settings.data)
        self.settings = settings
        self._last: Solution | None = None  # solution of the current step, from `loss` to `improve`

    def model(self) -> nn.Module:
        s, config = self.settings, self._config()
        depth = 1 if s.by == "explicit" else None
        return ImplicitResNet(config, solver=PICARD, gradient=self._gradient(config), depth=depth)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        with record(model) as solutions:
            outcome = super().loss(model, batch, step)
        # the explicit twin has no solution, and nothing to contract
        self._last = solutions[0] if solutions and self.settings.contract else None
        return outcome

    def improve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().improve(model, optimizer)
        if self._last is not None:
            inside(model, ImplicitResNet).contract_(self._last)
            self._last = None  # a solution keeps its graph and inputs alive

    def _config(self) -> ImplicitResNetConfig:
        """Return the configuration of the network."""
        s = self.settings
        options: dict[str, Any] = {"image": s.data.shape, "latent_norm": s.by != "jacobian"}
        options |= {name: value for name in ("tolerance", "max_steps") if (value := getattr(s, name)) is not None}
        match s.kind:
            case "mnist":
                return MNISTResNet(**options)
            case "svhn":
                return SVHNResNet(**options)
            case _:
                return CIFARResNet(blocks=s.blocks, **options)

    def _gradient(self, config: ImplicitResNetConfig) -> Gradient:
        """Return the gradient of the equilibrium."""
        if self.settings.by != "jacobian":
            return JFB()
        stop = relative_stop(1e-3, config.max_steps)
        return Implicit(solver=NormalCG(), stop=stop)


@dataclass(frozen=True, kw_only=True)
class NeuralODESettings(ImageSettings):
    """Settings of a neural ODE.

    augment  number of channels of zeros that are added to the image
    steps    number of equal steps; None: adaptive steps with relative and absolute tolerances of 1e-3
    """

    filters: int = 92
    augment: int = 0
    method: RungeKutta = "dopri5"
    steps: int | None = None


class Flowing(ImageTask):
    """Trains a neural ODE."""

    def __init__(self, settings: NeuralODESettings) -> None:
        super().__init__(settings.data)
        self.settings = settings

    def model(self) -> nn.Module:
        s = self.settings
        integrator: Integrator = AdaptiveSteps(method=s.method)
        if s.steps is not None:
            integrator = FixedSteps(method=s.method, steps=s.steps)
        config = NeuralODEConfig(image=s.data.shape, filters=s.filters, augment=s.augment)
        return NeuralODE(config, integrator=integrator)

    def seen(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        with torch.no_grad():
            return {"evaluations": float(inside(model, NeuralODE).flow(batch[0][:1]).evaluations)}


@dataclass(frozen=True, kw_only=True)
class PlainSettings(ImageSettings):
    """Settings of an explicit ResNet."""

    depth: int = 56
    channels: tuple[int, int, int] = (16, 32, 64)


class Plain(ImageTask):
    """Trains an explicit ResNet."""

    def __init__(self, settings: PlainSettings) -> None:
        super().__init__(settings.data)
        self.settings = settings

    def model(self) -> nn.Module:
        s = self.settings
        return ResNet(ResNetConfig(depth=s.depth, channels=s.channels, in_channels=s.data.shape[0]))
