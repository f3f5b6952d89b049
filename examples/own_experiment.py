"""Define an experiment for the command line.

equilibria train examples/own_experiment.py:experiment --set width=16
equilibria sweep examples/own_experiment.py:experiment --grid width=8,32 --grid training.optimizer.lr=1e-3,1e-2
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.lab import data, training
from equilibria.lab.experiments import Experiment


@dataclass(frozen=True)
class Settings:
    """Settings that `--set width=64` changes by name. Those of training have a prefix: `--set training.epochs=5`."""

    width: int = 32
    rtol: float = 1e-3


class Cell(nn.Linear):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(z) + x)


class Digits(training.Task[Any]):
    """Classify 8x8 digits with an equilibrium layer."""

    better = ("accuracy", "max")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        width = self.settings.width
        layer = eq.DEQ(Cell(width, width), stop=eq.Stop(rtol=self.settings.rtol))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), layer, nn.Linear(width, 10))

    def batches(self, root: Path | None, settings: training.Training, rank: int, world_size: int) -> training.Loaders[Any]:
        sets = data.load("digits", root)
        share: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": sets.normalize}
        train = data.Batches(sets.train, settings.batch_size, seed=settings.seed, **share)
        return training.Loaders(train, test=data.Batches(sets.test, settings.eval_batch_size, shuffle=False, **share))

    def loss(self, model: nn.Module, batch: Any, step: int) -> training.Outcome:
        x, y = batch
        guess = model(x)
        accuracy = (guess.argmax(1) == y).float().mean()
        return training.Outcome(F.cross_entropy(guess, y), {"accuracy": accuracy}, size=len(y))


experiment = Experiment(
    name="my-digits",
    summary="8x8 digits with an equilibrium layer",
    settings=Settings(),
    training=training.Training(epochs=3, batch_size=128, optimizer=training.Optimizer(lr=3e-3)),
    make=Digits,
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        summary = training.Trainer(experiment.task(), experiment.training, Path(folder) / "run").fit()
        print(f"test accuracy {summary.final['split']['test']['accuracy']:.1%}")
