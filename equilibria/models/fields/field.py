"""Fields: networks that map coordinates to the values of an image, a sound or a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.phantom import JFB
from equilibria.models.fields.cell import make_cell
from equilibria.models.fields.filters import FieldKind, make_filter
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.starts import Zeros
from equilibria.stop import Stop

OMEGA = 30.0  # frequency factor of the hidden layers of a SIREN, as published: weights are small and their gradients large


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """The architecture of a field.

    kind     "siren": sinusoids as activations; "fourier" and "gabor": multiplicative filter networks
    inputs   number of coordinates of a point, which lie in [-1, 1]
    outputs  number of values at a point
    scale    approximate largest frequency of a filter, in radians per unit of a coordinate. A signal with more detail needs
             a larger one; the published one is the number of pixels on a side
    bound    largest spectral norm of the state's weights. Below 1 the equilibrium is unique and plain iteration finds it.
             None: no bound, as published
    """

    kind: FieldKind = "siren"
    inputs: int = 2
    outputs: int = 1
    width: int = 256
    scale: float = 64.0
    bound: float | None = None

    def __post_init__(self) -> None:
        require(self.kind in get_args(FieldKind), f"kind must be one of {get_args(FieldKind)}, got {self.kind!r}.")
        for name in ("inputs", "outputs", "width"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        require(self.scale > 0, f"scale must be positive, got {self.scale}.")
        require(self.bound is None or self.bound > 0, f"bound must be positive or None, got {self.bound}.")


class EquilibriumField(nn.Module):
    """values = head(z*) with z* = f(z*, x) for every point x (Huang, Bai and Kolter 2021).

        field = eq.models.create("field-siren")
        values, state = field(x, with_state=True)
        values = field(x, state)  # after an optimiser step: the solve starts from the last equilibrium of each point

    The published training takes one step of the solver from the last equilibrium, with `JFB`. Derivatives of the values
    with respect to the coordinates are exact with `Implicit`.

    solver, stop, gradient, eval_stop  as for `DEQ`
    """

    def __init__(
        self,
        config: FieldConfig,
        *,
        solver: AnySolver = Anderson(),
        stop: Stop = Stop(max_steps=30, on_failure="ignore"),
        gradient: Gradient = JFB(),
        eval_stop: Stop | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        cell = make_cell(config.kind, config.inputs, config.width, config.scale, config.bound)
        self.layer = DEQ(cell, Zeros(config.width), solver, stop, gradient, eval_stop)
        self.head = nn.Linear(config.width, config.outputs)

    def forward(self, x: Tensor, state: Tensor | None = None, *, with_state: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the values (points, outputs) at coordinates (points, inputs); `with_state` returns (values, state).

        state  start of the solve, (points, width); None: zeros
        """
        check_points(x, self.config.inputs)
        z = self.layer(x, init=state)
        values: Tensor = self.head(z)
        return (values, z.detach()) if with_state else values


class ExplicitField(nn.Module):
    """A SIREN (Sitzmann and others 2020) or a multiplicative filter network (Fathony and others 2021), by `config.kind`.

    siren            h <- sin(30 (W_i h + b_i)), starting from sin(U x + c)
    fourier, gabor   h <- g_i(x) * (W_i h + b_i), starting from g_1(x)

    layers  number of hidden layers, including the first one; `config.bound` is not used
    """

    def __init__(self, config: FieldConfig, layers: int = 4) -> None:
        super().__init__()
        require(layers >= 1, f"layers must be at least 1, got {layers}.")
        self.config = config
        filters = layers if config.kind != "siren" else 1
        scale = config.scale / math.sqrt(filters)
        self.filters = nn.ModuleList(make_filter(config.kind, config.inputs, config.width, scale) for _ in range(filters))
        self.hidden = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(layers - 1))
        self.head = nn.Linear(config.width, config.outputs)
        self._initialize()

    def forward(self, x: Tensor) -> Tensor:
        check_points(x, self.config.inputs)
        h = self.filters[0](x)
        for i, layer in enumerate(self.hidden, start=1):
            h = torch.sin(OMEGA * layer(h)) if self.config.kind == "siren" else self.filters[i](x) * layer(h)
        values: Tensor = self.head(h)
        return values

    def _initialize(self) -> None:
        limit = math.sqrt(6 / self.config.width) / OMEGA if self.config.kind == "siren" else 1 / math.sqrt(self.config.width)
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            nn.init.uniform_(layer.weight, -limit, limit)


def check_points(x: Tensor, inputs: int) -> None:
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(
            f"Coordinates must have the shape (points, {inputs}), got {tuple(x.shape)}. Flatten a grid to one point per "
            "row, as coordinate_grid does."
        )
