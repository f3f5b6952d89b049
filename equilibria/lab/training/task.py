"""`Task`: the model, data and loss that the trainer needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from equilibria.lab.training.settings import Training

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)


class Loader(Protocol[Batch_co]):
    """Batches in a resumable order, such as `data.Batches`.

    An iteration that was left goes on where it was; one that ended begins the next epoch. `state()` has at least the keys
    "epoch" and "position".
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch_co]: ...

    def state(self) -> dict[str, int]: ...

    def resume(self, state: Mapping[str, int]) -> None: ...


@dataclass(frozen=True)
class Loaders(Generic[Batch]):
    """The splits of a task. `valid` and `test` are evaluated after every epoch."""

    train: Loader[Batch]
    valid: Loader[Batch] | None = None
    test: Loader[Batch] | None = None


@dataclass(frozen=True)
class Outcome:
    """Loss and metrics of a batch.

    loss     a scalar, the mean over the samples
    metrics  means over the samples too, by name
    size     how many these are: the weight in means over batches
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    size: int = 1


class Task(ABC, Generic[Batch]):
    """A model, its data and its loss.

    better  the metric that tells the best epoch, and which way: on the validation split, or where there is none on the
            test split, or else on the training split

    State that is neither in the model's `state_dict` nor a function of the step, such as a memory that a sequence model
    carries from batch to batch, goes through `state` and `resume`. What an `eq.Remember` has stored is not in checkpoints:
    a run that uses it is resumed from fresh starts, to the tolerance of its solves and not to the bit.
    """

    better: tuple[str, Literal["max", "min"]] = ("loss", "min")

    def prepare(self, root: Path | None, training: Training) -> None:
        """Called by the trainer before `model`, whenever a run is started or resumed: the place for work that new weights
        need and loaded ones do not, such as pre-training a part. Without it `model` must still give the same shapes."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; called under the run's seed."""

    @abstractmethod
    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        """The data, from the folder `root` or the default one; of each batch the part of this process."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        """The loss to minimise, penalties included; `step` counts all batches before this one. Call `model` itself, not a
        part of it or another method: that is where gradients are shared between processes."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """The same without gradients, on a model in eval mode."""
        with torch.no_grad():
            return self.loss(model, batch, 0)

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """The figures to report of a split, from the means of its metrics over all batches; for figures that are no means
        themselves, such as a ratio of two."""
        return means

    def conclude(self, splits: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """The figures to report of validation and test together, from what `summarise` gave for each; for figures on the
        test split of a choice that is made on the validation split."""
        return splits

    def improve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimiser's step; a task that projects, rescales or prunes weights does it here."""
        optimizer.step()

    def pretrain(self, model: nn.Module, on: bool) -> None:
        """Switch the model to unrolled pre-training, or back; needed for `Training.pretrain_steps`."""
        raise NotImplementedError(
            f"pretrain_steps needs {type(self).__name__}.pretrain(model, on), which makes the model unrolled, and back."
        )

    def gallery(self, model: nn.Module, root: Path | None, training: Training) -> dict[str, tuple[str, bytes]]:
        """Pictures of what a trained model does, for its report: (title, PNG) by name."""
        return {}

    def state(self) -> Any:
        """The further content of a checkpoint: tensors, numbers, strings, None, in dicts, lists and tuples."""
        return None

    def resume(self, state: Any) -> None:
        """Restore what `state` returned."""
