"""Image classification as a task: data, loss and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.lab.data.augment import Augmentation, Crop, Erase, Flip
from equilibria.lab.data.batches import Batches
from equilibria.lab.data.catalogue import load
from equilibria.lab.data.sets import Dataset, Split, generator
from equilibria.lab.training.processes import step_clock
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.solution import Solution, record

Batch = tuple[Tensor, Tensor]  # inputs and targets
M = TypeVar("M", bound=nn.Module)
ImageSet = Literal["digits", "mnist", "fashion-mnist", "cifar10", "svhn"]

SHAPES: dict[ImageSet, tuple[int, int]] = {  # channels, side
    "digits": (1, 8),
    "mnist": (1, 28),
    "fashion-mnist": (1, 28),
    "cifar10": (3, 32),
    "svhn": (3, 32),
}


GUESS: dict[ImageSet, float] = {  # share of the largest class in the test set, %: what a constant answer scores
    "digits": 10.3,
    "mnist": 11.35,
    "fashion-mnist": 10.0,
    "cifar10": 10.0,
    "svhn": 19.6,
}


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Settings that choose images and their preprocessing; channels are always normalised to mean 0 and deviation 1.

    train, test  number of images, drawn at random under `seed`; None: all
    size         side to which images are scaled: down by means over squares, up by interpolation; None: unchanged
    crop         pixels by which training images are padded before a random cut
    flip         mirror half of the training images
    erase        share of the training images in which a rectangle of 10 to 25 % is made black
    """

    name: ImageSet = "mnist"
    train: int | None = None
    test: int | None = None
    size: int | None = None
    crop: int = 0
    flip: bool = False
    erase: float = 0.0
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image, (channels, height, width)."""
        channels, side = SHAPES[self.name]
        side = self.size or side
        return channels, side, side

    def load(self, root: Path | None) -> Dataset[Split]:
        """Load the dataset, draw the requested number of images and scale them."""
        whole: Dataset[Split] = load(self.name, root)
        train, test = self._cut(whole.train, self.train, "train"), self._cut(whole.test, self.test, "test")
        return dataclasses.replace(whole, train=self._scaled(train), test=self._scaled(test))

    def augmentations(self) -> list[Augmentation]:
        """Return the augmentations of the training images, in the order of application."""
        found: list[Augmentation] = []
        found += [Crop(self.crop)] if self.crop else []
        found += [Flip()] if self.flip else []
        found += [Erase(self.erase, 0.1, 0.25)] if self.erase else []
        return found

    def _cut(self, split: Split, count: int | None, name: str) -> Split:
        """Return `count` images of a split, drawn under `seed`; None: all."""
        if count is None:
            return split
        if not 0 < count <= len(split):
            raise ValueError(f"data.{name} must lie between 1 and the {len(split)} images of {self.name}, got {count}.")
        return split[torch.randperm(len(split), generator=generator(self.seed, name))[:count]]

    def _scaled(self, split: Split) -> Split:
        """Scale the images to `size`, as floats from 0 to 1; done once, not per batch."""
        if self.size is None or self.size == split.x.shape[-1]:
            return split
        x = split.x.float().div_(255) if split.x.dtype == torch.uint8 else split.x
        if self.size < x.shape[-1]:
            return Split(F.adaptive_avg_pool2d(x, self.size), split.y)  # interpolation would skip pixels
        return Split(F.interpolate(x, size=(self.size, self.size), mode="bilinear"), split.y)


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings that all tasks on images share."""

    data: ImageData = field(default_factory=ImageData)


class ImageTask(Task[Batch]):
    """Cross entropy and accuracy; a subclass makes the model, and may add penalties."""

    better = ("accuracy", "max")

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        found = self.data.load(root)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": found.normalize}
        augment = self.data.augmentations()
        train = Batches(found.train, training.batch_size, seed=training.seed, augment=augment, drop_last=True, **place)
        return Loaders(train, None, Batches(found.test, training.eval_batch_size, shuffle=False, **place))

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        x, y = batch
        scores, solutions = self.run(model, x)
        loss, metrics = judged(scores, y)
        for name, (weight, penalty) in self.penalties(solutions, step).items():
            metrics[name] = penalty.detach()
            loss = loss + weight * penalty
        return Outcome(loss, metrics, len(y))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        x, y = batch
        with torch.no_grad():
            before = now(x)  # the forward pass alone is timed, without loss and metrics
            scores = model(x)
            seconds = now(x) - before
            loss, metrics = judged(scores, y)
        return Outcome(loss, metrics | {"predict_seconds": seconds} | self.seen(model, batch), len(y))

    def run(self, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Solution]]:
        """Return the scores and the solutions of the equilibrium layers."""
        with record(model) as solutions:
            scores = model(x)
        return scores, solutions

    def penalties(self, solutions: Sequence[Solution], step: int) -> dict[str, tuple[float, Tensor]]:
        """Return the penalties of a training step as (weight, value) by name."""
        return {}

    def seen(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        """Return additional metrics on a batch of the test set."""
        return {}


def judged(scores: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Return the cross entropy, accuracy and error of scores, (batch, classes), with labels y, (batch,)."""
    right = (scores.detach().argmax(dim=1) == y).float().mean()
    return F.cross_entropy(scores, y), {"accuracy": right, "error": 1 - right}


def inside(model: nn.Module, kind: type[M]) -> M:
    """Return the module of type `kind` inside the wrapper of distributed training."""
    return next(module for module in model.modules() if isinstance(module, kind))


def now(x: Tensor) -> float:
    """Return seconds by the clock of training steps, after all work on the device of x is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return step_clock(x.device)()
