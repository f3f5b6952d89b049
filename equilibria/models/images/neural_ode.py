"""Neural ordinary differential equations, plain and augmented, as baselines (Dupont, Doucet and Teh 2019).

The image is integrated along a vector field from t = 0 to 1, and a linear layer reads the result.

Integration uses the library's Runge-Kutta pairs for steady states, so the baseline needs no other package, and both kinds of
continuous model use the same coefficients. Gradients are those of the steps taken: exact for the computation, with the
memory of all its stages. The published models solve an adjoint equation backwards in time instead, which saves that memory
and has an error of its own; for ten to twenty steps on small images the memory does not matter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.solvers.tableaus import TABLEAUS, Method, Tableau, weighted_sum
from equilibria.stop import rms_norm

Field = Callable[[float, Tensor], Tensor]  # (t, h) -> dh/dt

# the controller aims at a step SAFETY times as long as the error allows, and changes it by factors from SHRINK to GROW
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0
SHORTEST = 1e-6  # shortest allowed step of the interval [0, 1]


def _check_method(method: str) -> None:
    """Raise ValueError for an unknown Runge-Kutta method."""
    choices = get_args(Method)
    require(method in choices, f"method must be one of {', '.join(choices)}, got {method!r}.")


@dataclass(frozen=True)
class Flow:
    """The state h at t = 1, and the cost of the integration."""

    h: Tensor
    steps: int  # accepted steps
    rejected: int  # rejected steps
    evaluations: int  # of the field, counted


class Integrator(ABC):
    """A method that integrates dh/dt = field(t, h) from t = 0 to 1."""

    @abstractmethod
    def integrate(self, field: Field, h: Tensor) -> Flow:
        """Return the Flow from h; differentiable in h and in everything the field depends on."""


@dataclass(frozen=True, kw_only=True)
class FixedSteps(Integrator):
    """Equal steps.

    method  "dopri5", "tsit5" (order 5, six evaluations per step), "bs3" (3, three) or "heun" (2, two)
    steps   number of steps; the error decreases as steps^-order
    """

    method: Method = "dopri5"
    steps: int = 10

    def __post_init__(self) -> None:
        _check_method(self.method)
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}.")

    def integrate(self, field: Field, h: Tensor) -> Flow:
        counted, tableau, dt = _Counted(field), TABLEAUS[self.method], 1 / self.steps
        for step in range(self.steps):
            t = step * dt
            h, _ = _advance(tableau, counted, t, h, counted(t, h), dt)
        return Flow(h, self.steps, 0, counted.calls)


@dataclass(frozen=True, kw_only=True)
class AdaptiveSteps(Integrator):
    """Steps chosen so that the estimated error e satisfies rms(e / (atol + rtol max(|h|, |h_new|))) <= 1 in every sample.

    The batch shares its steps. Step lengths are constants for the gradient.

    method      as in FixedSteps
    rtol, atol  tolerances of a step
    first_step  length of the first trial step
    max_steps   accepted and rejected steps; beyond it RuntimeError is raised
    """

    method: Method = "dopri5"
    rtol: float = 1e-3
    atol: float = 1e-3
    first_step: float = 0.1
    max_steps: int = 1000

    def __post_init__(self) -> None:
        _check_method(self.method)
        require(self.rtol >= 0, f"rtol must not be negative, got {self.rtol}.")
        require(self.atol > 0, f"atol must be positive, got {self.atol}: it is the only scale for entries at zero.")
        require(0 < self.first_step <= 1, f"first_step must lie in (0, 1], got {self.first_step}.")

    def integrate(self, field: Field, h: Tensor) -> Flow:
        """Integrate with adaptive steps; raises RuntimeError if `max_steps` are used up or the step becomes too short."""
        counted, tableau = _Counted(field), TABLEAUS[self.method]
        t, dt, taken = 0.0, self.first_step, 0
        slope = counted(t, h)
        for tried in range(1, self.max_steps + 1):
            dt = 1 - t if 1 - t < dt + SHORTEST else dt  # this step ends at 1 if otherwise a tiny one would be left
            point, slopes = _advance(tableau, counted, t, h, slope, dt)
            slopes.append(counted(t + dt, point))  # for the error, and the first slope of the next step if this is accepted
            error = self._error(dt * weighted_sum(tableau.error, slopes), h, point)
            if error <= 1:
                t, h, slope, taken = t + dt, point, slopes[-1], taken + 1
            if t >= 1:
                return Flow(h, taken, tried - taken, counted.calls)
            dt *= _change(error, tableau.order)  # a rejected step is tried again with a shorter one
            if dt < SHORTEST:
                break
        raise RuntimeError(
            f"Integration stopped at t = {t:.4g} of 1 after {taken} steps and {tried - taken} rejected ones; the next step "
            f"would have length {dt:.2g}. The equation is stiff or the weights are too large. Lower the learning rate, "
            "decay the weights, or integrate with FixedSteps."
        )

    @torch.no_grad()
    def _error(self, error: Tensor, h: Tensor, point: Tensor) -> float:
        """Return the error of the worst sample in units of the tolerance; infinite if it is not finite."""
        scale = self.atol + self.rtol * torch.maximum(h.abs(), point.abs())
        worst = float(rms_norm((error / scale).flatten(1)).max())  # the only device sync of a step
        return worst if math.isfinite(worst) else math.inf


class ConvField(nn.Module):
    """dh/dt = conv1x1 -> relu -> conv3x3 -> relu -> conv1x1, with the time as an additional input channel of every layer."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels + 1, filters, 1)
        self.conv2 = nn.Conv2d(filters + 1, filters, 3, padding=1)
        self.conv3 = nn.Conv2d(filters + 1, channels, 1)

    def forward(self, t: float, h: Tensor) -> Tensor:
        h = torch.relu(self.conv1(_with_time(t, h)))
        h = torch.relu(self.conv2(_with_time(t, h)))
        return self.conv3(_with_time(t, h))


@dataclass(frozen=True, kw_only=True)
class NeuralODEConfig:
    """Sizes of a neural ODE.

    image    (channels, height, width)
    filters  channels of the field
    augment  channels of zeros added to the image, so that trajectories can cross; 0: the plain Neural ODE
    """

    image: tuple[int, int, int] = (1, 28, 28)
    filters: int = 92
    augment: int = 0
    classes: int = 10

    def __post_init__(self) -> None:
        require(self.filters >= 1, f"filters must be at least 1, got {self.filters}.")
        require(self.augment >= 0, f"augment must not be negative, got {self.augment}.")

    @property
    def channels(self) -> int:
        """Channels of the state."""
        return self.image[0] + self.augment


NODE_MNIST = NeuralODEConfig()
ANODE_MNIST = NeuralODEConfig(filters=64, augment=5)
NODE_CIFAR10 = NeuralODEConfig(image=(3, 32, 32), filters=124)
ANODE_CIFAR10 = NeuralODEConfig(image=(3, 32, 32), filters=64, augment=10)
TEN_STEPS = FixedSteps()


class NeuralODE(nn.Module):
    """A classifier: the image, with channels of zeros, is integrated from t = 0 to 1; a linear layer reads the result.

    MNIST: 85,316 parameters plain and 85,462 augmented; CIFAR-10: 171,352 (125 filters: 173,611) and 172,452.
    """

    def __init__(self, config: NeuralODEConfig = NODE_MNIST, *, integrator: Integrator = TEN_STEPS) -> None:
        super().__init__()
        self.config, self.integrator = config, integrator
        _, height, width = config.image
        self.field = ConvField(config.channels, config.filters)
        self.head = nn.Linear(config.channels * height * width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.flow(images).h.flatten(1))

    def flow(self, images: Tensor) -> Flow:
        """Return the state at t = 1 and the number of evaluations."""
        if tuple(images.shape[1:]) != self.config.image:
            raise ValueError(
                f"This model takes images of shape (batch, {', '.join(map(str, self.config.image))}), got "
                f"{tuple(images.shape)}. Resize them, or make the model with another `image`."
            )
        h = F.pad(images, (0, 0, 0, 0, 0, self.config.augment))
        return self.integrator.integrate(self.field, h)


class _Counted:
    """A field that counts its evaluations."""

    def __init__(self, field: Field) -> None:
        self.field, self.calls = field, 0

    def __call__(self, t: float, h: Tensor) -> Tensor:
        self.calls += 1
        return self.field(t, h)


def _advance(tableau: Tableau, field: Field, t: float, h: Tensor, slope: Tensor, dt: float) -> tuple[Tensor, list[Tensor]]:
    """Return the point one step ahead, and the slopes of all stages but the last, which is the slope at that point.

    The tableaus are for autonomous equations; the time of a stage is the sum of its row, as for dt/dt = 1.
    """
    slopes = [slope]
    for row in tableau.rows[:-1]:
        slopes.append(field(t + dt * sum(row), h + dt * weighted_sum(row, slopes)))
    return h + dt * weighted_sum(tableau.rows[-1], slopes), slopes


def _change(error: float, order: int) -> float:
    """Return the ratio of the next step length to this one."""
    if error == 0:
        return GROW
    return min(max(SAFETY * error ** (-1 / order), SHRINK), GROW)


def _with_time(t: float, h: Tensor) -> Tensor:
    """Put a channel with the constant t before the channels of h."""
    return torch.cat([torch.full_like(h[:, :1], t), h], dim=1)
