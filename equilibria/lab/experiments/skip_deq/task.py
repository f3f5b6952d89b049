"""The tasks of the Skip DEQ experiments: classification of small images, and regression of one number."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.lab.data.batches import Batches
from equilibria.lab.data.catalogue import load
from equilibria.lab.experiments.image_task import Batch, judged, now
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.images.skip_mlp import CONTINUOUS, DISCRETE, SkipMLP, SkipPolynomial, SkipSolver, Variant
from equilibria.penalties import jacobian_penalty, skip_penalty
from equilibria.solution import Solution, record

PIXELS = {"mnist": 784, "fashion-mnist": 784, "digits": 64}


@dataclass(frozen=True, kw_only=True)
class SkipSettings:
    """Settings that both tasks share.

    depth            None: train the equilibrium; a number: train the explicit twin with that many layers
    skip_weight      weight of the mean |f(z) - start|, for variants whose start is trained
    jacobian_weight  weight of the Jacobian penalty, with one probe at every step; 0: no penalty
    """

    variant: Variant = "vanilla"
    depth: int | None = None
    skip_weight: float = 0.01
    jacobian_weight: float = 0.0
    solver: SkipSolver = field(default_factory=lambda: dataclasses.replace(DISCRETE, together=True))


@dataclass(frozen=True, kw_only=True)
class MLPSettings(SkipSettings):
    """Settings of the classifier; the released script has skip_weight 5, the paper prints 0.01."""

    data: Literal["mnist", "fashion-mnist", "digits"] = "mnist"
    width: int = 128
    skip_weight: float = 5.0


@dataclass(frozen=True, kw_only=True)
class PolynomialSettings(SkipSettings):
    """Settings of the regressor; the data are the same for every seed of a run."""

    width: int = 100
    data_seed: int = 0
    solver: SkipSolver = field(default_factory=lambda: dataclasses.replace(CONTINUOUS, together=True))


class _SkipTask(Task[Batch]):
    """Loss, penalties and counts; a subclass defines the model, its loss and its metrics."""

    def __init__(self, settings: SkipSettings) -> None:
        self.settings = settings

    @abstractmethod
    def judge(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Return the loss and the metrics of a prediction."""

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        x, y = batch
        prediction, s = self._run(model, x)
        loss, metrics = self.judge(prediction, y)
        found = []  # (name, weight, value) of the penalties
        if s is not None and self.settings.variant != "vanilla" and self.settings.skip_weight:
            found.append(("skip", self.settings.skip_weight, skip_penalty(s)))
        if s is not None and self.settings.jacobian_weight:
            found.append(("jacobian", self.settings.jacobian_weight, jacobian_penalty(s)))
        for name, weight, penalty in found:
            metrics[name] = penalty.detach()
            loss = loss + weight * penalty
        return Outcome(loss, metrics | self._counts(s), len(y))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return the loss without penalties, the metrics of the start of the solver alone, and the time of a prediction."""
        x, y = batch
        with torch.no_grad():
            before = now(x)
            prediction, s = self._run(model, x)
            seconds = now(x) - before
            loss, metrics = self.judge(prediction, y)
            metrics["predict_seconds"] = seconds
            if s is not None:
                explicit, judged = self.judge(_part(model, "head")(s.z0), y)  # the network without its solver
                metrics |= {f"explicit_{name}": value for name, value in ({"loss": explicit} | judged).items()}
        return Outcome(loss, metrics | self._counts(s), len(y))

    def _run(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Solution | None]:
        """Return the prediction and its solution, with z replaced by the state from which the head predicted."""
        with record(model) as solutions:
            prediction, z = model(x, with_state=True)
        return prediction, dataclasses.replace(solutions[0], z=z) if solutions else None

    def _counts(self, s: Solution | None) -> dict[str, Tensor | float]:
        """Return the number of evaluations as the paper counts them; of an explicit twin its layers."""
        if s is None:
            assert self.settings.depth is not None
            return {"nfe": float(self.settings.depth)}
        return {"nfe": float(self.settings.solver.published_count(s.stats, self.settings.variant))}


class Classify(_SkipTask):
    """Trains a `SkipMLP` to classify images with pixels in [0, 1]."""

    better = ("accuracy", "max")

    def __init__(self, settings: MLPSettings) -> None:
        super().__init__(settings)
        self.own = settings

    def model(self) -> nn.Module:
        s = self.own
        return SkipMLP(PIXELS[s.data], width=s.width, variant=s.variant, solver=s.solver, depth=s.depth)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        found = load(self.own.data, root)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": _unit}
        train = Batches(found.train, training.batch_size, seed=training.seed, **place)
        test = Batches(found.test, training.eval_batch_size, shuffle=False, **place)
        return Loaders(train, None, test)

    def judge(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        return judged(prediction, y)


class Fit(_SkipTask):
    """Trains a `SkipPolynomial` on the polynomial; every epoch has the same batches."""

    better = ("loss", "min")

    def __init__(self, settings: PolynomialSettings) -> None:
        super().__init__(settings)
        self.own = settings

    def model(self) -> nn.Module:
        s = self.own
        return SkipPolynomial(s.width, variant=s.variant, solver=s.solver, depth=s.depth)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        found = load("polynomial", root, seed=self.own.data_seed)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "shuffle": False}
        train = Batches(found.train, training.batch_size, **place)
        return Loaders(train, None, Batches(found.test, training.eval_batch_size, **place))

    def judge(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
        return F.mse_loss(prediction, y), {}


def _unit(x: Tensor) -> Tensor:
    """Return pixels in [0, 1] as floats."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x


def _part(model: nn.Module, name: str) -> Any:
    return getattr(model, name)
