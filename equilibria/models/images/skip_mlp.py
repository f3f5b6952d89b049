"""Skip DEQs of dense layers: the MNIST classifier and the polynomial regressor of Pal, Edelman and Rackauckas (2022)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.models.solve_options import SolveOptions, relative_stop
from equilibria.solution import Stats
from equilibria.solvers.base import Solver
from equilibria.starts import FirstStep

Variant = Literal["vanilla", "skip", "v2"]
SkipMethod = Literal["broyden", "tsit5", "bs3"]


@dataclass(frozen=True, kw_only=True)
class SkipSolver:
    """Settings of the equilibria and their gradients.

    method              "broyden" (discrete), "tsit5" or "bs3" (continuous)
    tolerance           relative tolerance of the equilibrium
    history             pairs of updates that Broyden keeps
    first_step          first step of the continuous methods; None: by Hairer's rule, as in the paper's code
    together            True: the batch is one system with one norm, as in the paper's code; False: one per sample
    adjoint_tolerance   tolerance of GMRES, relative to the incoming gradient
    """

    method: SkipMethod = "broyden"
    tolerance: float = 5e-3
    max_steps: int = 50
    history: int = 27
    first_step: float | None = None
    together: bool = False
    adjoint_tolerance: float = 5e-3
    adjoint_steps: int = 15

    def __post_init__(self) -> None:
        methods = get_args(SkipMethod)
        require(self.method in methods, f"method must be one of {', '.join(methods)}, got {self.method!r}.")
        require(self.tolerance > 0, f"tolerance must be positive, got {self.tolerance}.")

    def layer(self, cell: nn.Module, init: Any) -> DEQ:
        """Return a DEQ of `cell` that starts at `init`."""
        return DEQ(cell, init, **self._options().parts(), batched=not self.together)

    def solver(self) -> Solver[Any]:
        return self._options().make_solver()

    def _options(self) -> SolveOptions:
        """Return the settings as SolveOptions."""
        return SolveOptions(
            stop=relative_stop(self.tolerance, self.max_steps),
            adjoint_stop=relative_stop(self.adjoint_tolerance, self.adjoint_steps),
            solver=self.method,
            history=self.history,
            first_step=self.first_step,
            directions=self.adjoint_steps,  # GMRES keeps all of them, and never restarts
        )

    def published_count(self, stats: Stats, variant: Variant) -> int:
        """Return the evaluations of one solve as the paper counts them.

        It adds to the solver's own evaluations one for the residual after it and one for f of its answer. Its continuous
        methods evaluate the start once more, and once for the length of the first step. The step from zero to the start of
        V2 does not count.
        """
        after = 2 if self.method == "broyden" else 3 if self.first_step is None else 4
        return stats.evaluations + after - int(variant == "v2")


DISCRETE = SkipSolver()
CONTINUOUS = SkipSolver(method="bs3", tolerance=1e-3, adjoint_tolerance=1e-3, adjoint_steps=50)


class SumCell(nn.Module):
    """f(z, x) = relu(W_z z) + relu(W_x x): two branches, each with its own activation, without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)
        self.input = nn.Linear(width, width, bias=False)

    def prepare(self, x: Tensor) -> Tensor:
        return torch.relu(self.input(x))

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.relu(self.state(z)) + injected


class HiddenCell(nn.Module):
    """f(z, x) = W3 relu(W1 z + b1 + W2 x + b2) + b3 with a hidden layer twice as wide as the state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, 2 * width)
        self.input = nn.Linear(width, 2 * width)
        self.output = nn.Linear(2 * width, width)

    def prepare(self, x: Tensor) -> Tensor:
        return self.input(x)

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return self.output(torch.relu(self.state(z) + injected))


class SkipNet(nn.Module):
    """encoder -> equilibrium of `cell` -> head; the output of the layer is f of the solver's answer.

    variant    start of the solver: "vanilla" at zero, "skip" at predictor(x), "v2" at f(0, x)
    predictor  builds the predictor of "skip"; the other variants have none
    solver     settings of the solve
    depth      build the explicit twin instead: the cell applied that many times, with the same names in the state dict
    """

    def __init__(
        self,
        encoder: nn.Module,
        cell: nn.Module,
        head: nn.Module,
        predictor: Callable[[], nn.Module],
        *,
        variant: Variant = "vanilla",
        solver: SkipSolver = DISCRETE,
        depth: int | None = None,
    ) -> None:
        super().__init__()
        variants = get_args(Variant)
        require(variant in variants, f"variant must be one of {', '.join(variants)}, got {variant!r}.")
        self.encoder = encoder
        init = predictor() if variant == "skip" else FirstStep() if variant == "v2" else None
        self.layer = solver.layer(cell, init) if depth is None else WeightTied(cell, depth, init)
        self.head = head

    def forward(self, x: Tensor, *, with_state: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the prediction; `with_state` returns (prediction, state), where the state is f of the solver's answer."""
        features = self.encoder(x)
        if isinstance(self.layer, WeightTied):
            z = self.layer(features)
        else:
            s = self.layer.solve(features)
            z = s.f(s.z)  # as in the paper's code; in training the gradient reaches the cell through this step too
        prediction = self.head(z)
        return (prediction, z) if with_state else prediction


class SkipMLP(SkipNet):
    """The MNIST classifier: 134,538 parameters, 151,050 for "skip"; Glorot-uniform weights, zero biases."""

    def __init__(
        self,
        inputs: int = 784,
        classes: int = 10,
        width: int = 128,
        *,
        variant: Variant = "vanilla",
        solver: SkipSolver = DISCRETE,
        depth: int | None = None,
    ) -> None:
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU())
        head = nn.Linear(width, classes)
        super().__init__(
            encoder,
            SumCell(width),
            head,
            lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU()),
            variant=variant,
            solver=solver,
            depth=depth,
        )
        _initialize(self, nn.init.xavier_uniform_)


class SkipPolynomial(SkipNet):
    """The regressor of one number: 60,801 parameters, 101,101 for "skip"; zero biases.

    The weights start as N(0, 0.01), those of the head by Glorot's rule, as in the released script. With 0.01 in the head
    too, the spectral radius exceeds 1 within twenty steps of Adam, and training diverges.
    """

    def __init__(
        self,
        width: int = 100,
        *,
        variant: Variant = "vanilla",
        solver: SkipSolver = CONTINUOUS,
        depth: int | None = None,
    ) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(1, width), nn.ReLU()),
            HiddenCell(width),
            nn.Linear(width, 1),
            lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)),
            variant=variant,
            solver=solver,
            depth=depth,
        )
        _initialize(self, lambda weight: nn.init.normal_(weight, std=0.01))
        _initialize(self.head, nn.init.xavier_uniform_)


def _initialize(model: nn.Module, weight: Callable[[Tensor], Any]) -> None:
    """Apply `weight` to the weights of all linear layers, and set their biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
