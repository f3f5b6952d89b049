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

BatchT = TypeVar("BatchT")
Batch_co = TypeVar("Batch_co", covariant=True)


class Loader(Protocol[Batch_co]):
    """Batches in a resumable order, such as `data.Batches`.

    An iteration that was left early continues with the next batch; after a complete one the next epoch begins. `state()` has
    at least the keys "epoch" and "position".
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch_co]: ...

    def state(self) -> dict[str, int]: ...

    def resume(self, state: Mapping[str, int]) -> None: ...


@dataclass(frozen=True)
class Loaders(Generic[BatchT]):
    """The splits of a task. `valid` and `test` are evaluated after every epoch."""

    train: Loader[BatchT]
    valid: Loader[BatchT] | None = None
    test: Loader[BatchT] | None = None


@dataclass(frozen=True)
class Outcome:
    """Loss and metrics of a batch.

    loss     mean over the samples, a scalar
    metrics  means over the samples by name
    size     number of samples, the weight in means over batches
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    size: int = 1


class Task(ABC, Generic[BatchT]):
    """A model, its data and its loss.

    better  metric that selects the best epoch, and "max" or "min"; it is taken on the validation split, without one on the
            test split, or else on the training split

    State that is neither in the model's `state_dict` nor a function of the step, such as the memory that a sequence model
    carries from batch to batch, must be returned by `state`. Starts that `eq.Remember` has stored are not in checkpoints: a
    resumed run that uses it agrees to the tolerance of its solves, not bit by bit.
    """

    better: tuple[str, Literal["max", "min"]] = ("loss", "min")

    def prepare(self, root: Path | None, training: Training) -> None:
        """Do work that new weights need and loaded ones do not, such as pre-training a part.

        The trainer calls this before `model` when a run is started or resumed. Without it, `model` must still return a model
        of the same shapes.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model; called under the run's seed."""

    @abstractmethod
    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[BatchT]:
        """Return the data from the folder `root`, or the default one; each batch is the part of this process."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: BatchT, step: int) -> Outcome:
        """Return the loss to minimise, including penalties; `step` is the number of batches before this one.

        Call `model` itself, not a part of it or another method: DDP and FSDP attach to its forward.
        """

    def evaluate(self, model: nn.Module, batch: BatchT) -> Outcome:
        """Return loss and metrics without gradients, on a model in eval mode; by default those of `loss`."""
        with torch.no_grad():
            return self.loss(model, batch, 0)

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """Return the figures of a split from the means of its metrics over all batches.

        A task overrides this for figures that are not means, such as a ratio of two means.
        """
        return means

    def conclude(self, splits: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """Return the figures of the validation and test splits from the results of `summarise` for each.

        A task overrides this for figures on the test split that depend on a choice made on the validation split.
        """
        return splits

    def improve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimiser's step; a task that projects, rescales or prunes weights does it here."""
        optimizer.step()

    def pretrain(self, model: nn.Module, on: bool) -> None:
        """Switch the model to unrolled pre-training, or back; needed for `Training.pretrain_steps`."""
        raise NotImplementedError(
            f"pretrain_steps needs {type(self).__name__}.pretrain(model, on), which makes the model unrolled and back. "
            "Implement it, or set pretrain_steps=0."
        )

    def gallery(self, model: nn.Module, root: Path | None, training: Training) -> dict[str, tuple[str, bytes]]:
        """Return pictures of a trained model for its report, as (title, PNG) by name."""
        return {}

    def state(self) -> Any:
        """Return further state for a checkpoint: tensors, numbers, strings and None in dicts, lists and tuples."""
        return None

    def resume(self, state: Any) -> None:
        """Restore what `state` returned."""
