"""Fitting fields to three signals at once as a task, with equilibria or explicit networks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.analysis.memory import peak_memory
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.lab.data.batches import Batches
from equilibria.lab.data.sets import Split
from equilibria.lab.experiments.fields.signals import SIGNALS, signal
from equilibria.lab.experiments.image_task import Batch, inside
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.fields.field import EquilibriumField, ExplicitField, FieldConfig
from equilibria.models.fields.filters import FieldKind
from equilibria.solution import record
from equilibria.solvers.krylov import GMRES
from equilibria.stop import Stop

Network = Literal["implicit", "jfb", "explicit"]
ADJOINT = Stop(rtol=1e-2, max_steps=15, on_failure="ignore")
EVALUATION = Stop(rtol=1e-4, max_steps=60, on_failure="ignore")
SCALES = {
    "image": 40.0,
    "sound": 100.0,
    "shape": 10.0,
}  # largest frequencies of the filters, radians per unit of a coordinate
PEAK = 2.0  # range of the values, which lie in [-1, 1], for the PSNR


@dataclass(frozen=True, kw_only=True)
class FieldSettings:
    """Settings of fitting fields.

    network  "implicit": an equilibrium with its implicit gradient; "jfb": with the gradient of one step; "explicit": layers
    steps    number of steps of the optimiser, each on all points of all signals
    solves   largest number of solver steps in a training step; a solve starts at the equilibrium of the last training step
    size     size of the signals, see `signal`
    """

    kind: FieldKind = "siren"
    network: Network = "implicit"
    width: int = 40
    layers: int = 2
    steps: int = 400
    solves: int = 8
    size: int = 48


class Fields(nn.ModuleDict):
    """One field per signal. The fields share no weights, so adding their losses trains each as if it were alone."""

    def forward(self, states: dict[str, Tensor], size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the values of every signal at its points, and the equilibria at which the next solves start."""
        values: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for name, field in self.items():
            x = signal(name, size)[0]
            if isinstance(field, EquilibriumField):
                values[name], after[name] = field(x, states.get(name), with_state=True)
            else:
                values[name] = field(x)
        return values, after


class Fitting(Task[Batch]):
    """Trains fields on the mean squared error of three signals, and measures the PSNR of solves that start at zeros."""

    def __init__(self, settings: FieldSettings) -> None:
        self.settings = settings
        self.states: dict[str, Tensor] = {}

    def model(self) -> nn.Module:
        return Fields({name: self._field(name) for name in SIGNALS})

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        """Return loaders whose batches are empty: a step uses all points of all signals."""
        steps = Split(torch.zeros(self.settings.steps, 1), torch.zeros(self.settings.steps))
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        test = Batches(Split(torch.zeros(1, 1), torch.zeros(1)), 1, shuffle=False, **place)
        return Loaders(Batches(steps, 1, seed=training.seed, **place), None, test)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        values, self.states = model(self.states, self.settings.size)
        # the sum of independent losses has the gradient of each alone
        return Outcome(sum(self._errors(values).values(), torch.zeros(())))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        fields = inside(model, Fields)
        with torch.no_grad(), record(fields) as solutions:
            errors = self._errors(fields({}, self.settings.size)[0])
        found: dict[str, Tensor | float] = {f"psnr_{name}": decibels(error) for name, error in errors.items()}
        # a mean of decibels, because a mean of errors would be dominated by the hardest signal
        found["psnr"] = sum(found.values(), torch.zeros(())) / len(errors)
        if solutions:
            found["failed"] = torch.cat([s.stats.failed.float() for s in solutions]).mean()
            found["nfe"] = sum(s.stats.sample_evaluations for s in solutions) / sum(len(s.stats.status) for s in solutions)
        found["bytes"] = float(peak_memory(partial(self._train, fields)))
        return Outcome(sum(errors.values(), torch.zeros(())), found)

    def state(self) -> Any:
        return self.states

    def resume(self, state: Any) -> None:
        self.states = state

    def _field(self, name: str) -> nn.Module:
        s = self.settings
        config = FieldConfig(kind=s.kind, inputs=1 if name == "sound" else 2, width=s.width, scale=SCALES[name])
        if s.network == "explicit":
            return ExplicitField(config, s.layers)
        gradient: Gradient = JFB() if s.network == "jfb" else Implicit(solver=GMRES(), stop=ADJOINT)
        stop = Stop(rtol=1e-3, max_steps=s.solves, on_failure="ignore")
        return EquilibriumField(config, stop=stop, gradient=gradient, eval_stop=EVALUATION)

    def _errors(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (value - signal(name, self.settings.size)[1]).square().mean() for name, value in values.items()}

    def _train(self, fields: Fields) -> None:
        """Compute the gradients of a training step on the image."""
        fields.train()
        image = fields["image"]
        x, y = signal("image", self.settings.size)
        with torch.enable_grad():
            if isinstance(image, EquilibriumField):
                values = torch.as_tensor(image(x, self.states.get("image")))
            else:
                values = image(x)
            torch.autograd.grad((values - y).square().mean(), list(image.parameters()))
        fields.eval()


def decibels(error: Tensor) -> Tensor:
    """Return the PSNR in dB of a mean squared error."""
    return 10 * torch.log10(PEAK**2 / error)
