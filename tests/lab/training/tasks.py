"""Small tasks for tests of training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.lab import data
from equilibria.lab.training import Loaders, Outcome, Run, Silent, Task, Training
from tests.problems import TanhCell

WIDTH, CLASSES = 6, 3
STOP = eq.Stop(rtol=1e-4, max_steps=60, on_failure="ignore")

Pair = tuple[Tensor, Tensor]


def points(count: int, dtype: torch.dtype = torch.float32) -> data.Split:
    """Return points around one centre per class."""
    draws = torch.Generator().manual_seed(count)
    y = torch.randint(CLASSES, (count,), generator=draws)
    centres = 2 * torch.eye(CLASSES, WIDTH, dtype=torch.float64)
    x = centres[y] + 0.7 * torch.randn(count, WIDTH, dtype=torch.float64, generator=draws)
    return data.Split(x.to(dtype), y)


class Classifying(Task[Pair]):
    """A task that classifies three classes of points by a small DEQ after dropout."""

    better: tuple[str, Literal["max", "min"]] = ("accuracy", "max")

    def __init__(
        self, stop: eq.Stop = STOP, dtype: torch.dtype = torch.float32, dropout: float = 0.1, train: int = 40
    ) -> None:
        self.stop, self.dtype, self.dropout, self.samples = stop, dtype, dropout, train

    def model(self) -> nn.Module:
        cell = TanhCell(WIDTH, norm=0.9).to(self.dtype)
        parts = (nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), eq.DEQ(cell, stop=self.stop, gradient=self.gradient()))
        return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES)).to(self.dtype)

    def gradient(self) -> eq.Gradient:
        return eq.Warmup(first=eq.JFB(), then=eq.Implicit(), until=4)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Pair]:
        shared: dict[str, Any] = {"rank": rank, "world_size": world_size}
        train = data.Batches(points(40, self.dtype), training.batch_size, seed=training.seed, **shared)
        valid = data.Batches(points(24, self.dtype), training.eval_batch_size, shuffle=False, **shared)
        return Loaders(train, valid, None)

    def loss(self, model: nn.Module, batch: Pair, step: int) -> Outcome:
        x, y = batch
        out = model(x)
        accuracy = (out.argmax(1) == y).double().mean()
        return Outcome(F.cross_entropy(out, y), {"accuracy": accuracy}, len(y))


class Noted(Silent):
    """A listener that records all events and raises at a given step to interrupt the run."""

    def __init__(self, stop_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.stop_at, self.error = stop_at, error
        self.messages: list[str] = []
        self.losses: list[float] = []
        self.epochs: list[Mapping[str, Any]] = []

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        self.losses.append(loss)
        if step == self.stop_at:
            raise self.error("cut off")

    def epoch_done(self, record: Mapping[str, Any]) -> None:
        self.epochs.append(record)

    def message(self, text: str) -> None:
        self.messages.append(text)


def weights(folder: Path, task: Task[Any]) -> dict[str, Tensor]:
    return Run.open(folder).model(task, "raw").state_dict()


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without times and memory, which may differ between equal runs."""
    free = ("seconds_train", "seconds_step", "seconds_backward", "peak_bytes")
    return [{key: value for key, value in line.items() if key not in free} for line in Run.open(folder).metrics]
