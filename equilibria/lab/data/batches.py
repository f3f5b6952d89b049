"""Batches of data in memory. Their order depends only on seed and epoch, and can be resumed at any batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from equilibria.lab.data.augment import Augmentation
from equilibria.lab.data.graphs import Graph, join
from equilibria.lab.data.sets import Split, generator

B = TypeVar("B")


class Ordered(ABC, Generic[B]):
    """Batches in a resumable order.

        for epoch in range(batches.epoch, epochs):
            for batch in batches:
                ...  # batches.state() here: where to continue after this batch

    A loop that was left early continues with the next batch when a new loop begins; `restart()` returns to the beginning
    of the epoch. Each of several processes gets its part of every batch, so that the batches do not depend on their number.
    """

    def __init__(self, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size must be at least 1 and rank at least 0 and below world_size, got batch_size={batch_size}, "
                f"rank={rank}, world_size={world_size}."
            )
        if batch_size % world_size:
            raise ValueError(
                f"batch_size counts the samples of all processes and must be divisible by their number {world_size}, got "
                f"{batch_size}."
            )
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.epoch = 0
        self.position = 0  # batches of this epoch handed out

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abstractmethod
    def batch(self, epoch: int, position: int) -> B:
        """Return the part of a batch that belongs to this process."""

    @abstractmethod
    def identity(self) -> dict[str, int]:
        """Return values that must match for a saved state to be valid."""

    def __iter__(self) -> Iterator[B]:
        while self.position < len(self):
            self.position += 1  # before the yield: `state()` inside the loop then points behind this batch
            yield self.batch(self.epoch, self.position - 1)
        self.epoch, self.position = self.epoch + 1, 0

    def restart(self) -> None:
        """Return to the beginning of the epoch."""
        self.position = 0

    def state(self) -> dict[str, int]:
        """Return the current position as numbers for JSON."""
        return {"epoch": self.epoch, "position": self.position, **self.identity()}

    def resume(self, state: Mapping[str, int]) -> None:
        """Continue where `state()` was taken, with any number of processes."""
        for key, value in self.identity().items():
            if state.get(key) != value:
                raise ValueError(
                    f"The state belongs to batches with {key}={state.get(key)}, but these have {key}={value}, and another "
                    "order. Resume with the same data and settings."
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _share(self, whole: Tensor) -> Tensor:
        """Return the rows of a batch that belong to this process."""
        return whole.tensor_split(self.world_size)[self.rank]


class _Shuffled(Ordered[B]):
    """Batches cut from one permutation per epoch."""

    def __init__(
        self, samples: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool, rank: int, world_size: int
    ) -> None:
        super().__init__(batch_size, rank, world_size)
        self.samples, self.shuffle, self.seed, self.drop_last = samples, shuffle, seed, drop_last
        self._order: tuple[int, Tensor] | None = None
        if len(self) == 0:
            raise ValueError(f"{samples} samples are too few for a batch of {batch_size}: use a smaller batch_size.")
        if not drop_last and 0 < samples % batch_size < world_size:
            raise ValueError(
                f"The last batch, of {samples % batch_size} samples, leaves some of {world_size} processes without any: "
                "use drop_last=True or another batch_size."
            )

    def __len__(self) -> int:
        return self.samples // self.batch_size if self.drop_last else math.ceil(self.samples / self.batch_size)

    def identity(self) -> dict[str, int]:
        return {"samples": self.samples, "batch_size": self.batch_size, "seed": self.seed, "shuffle": int(self.shuffle)}

    def index(self, epoch: int, position: int) -> Tensor:
        """Return the indices of the samples of a batch, for all processes together."""
        if self._order is None or self._order[0] != epoch:
            draws = generator(self.seed, epoch)
            order = torch.randperm(self.samples, generator=draws) if self.shuffle else torch.arange(self.samples)
            self._order = epoch, order
        return self._order[1][position * self.batch_size : (position + 1) * self.batch_size]


class Batches(_Shuffled[tuple[Tensor, Tensor]]):
    """Batches (x, y) of a `Split`, on the device of its tensors.

        cifar = data.load("cifar10")
        train = data.Batches(cifar.train, 128, augment=[data.Crop(4), data.Flip()], transform=cifar.normalize)

    batch_size        number of samples of all processes together
    augment           augmentations applied in this order to x as stored; draws depend on seed, epoch and position
    transform         function applied to x last, such as `Dataset.normalize`
    drop_last         leave out the last batch of an epoch if it is smaller; processes would share it unevenly
    rank, world_size  rank of this process and number of processes
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        augment: Sequence[Augmentation] = (),
        transform: Callable[[Tensor], Tensor] | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(len(split), batch_size, shuffle, seed, drop_last, rank, world_size)
        self.split, self.augment, self.transform = split, tuple(augment), transform

    def batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        index = self.index(epoch, position)
        rows = self._share(index).to(self.split.x.device)
        x, y = self.split.x.index_select(0, rows), self.split.y.index_select(0, rows)
        for k, augmentation in enumerate(self.augment):
            # drawn for the whole batch, then shared, so that samples do not depend on the number of processes
            draws = augmentation.draw(len(index), generator(self.seed, epoch, position, k))
            x, y = augmentation(x, y, self._share(draws).to(x.device))
        return x if self.transform is None else self.transform(x), y


class GraphBatches(_Shuffled[Graph]):
    """Batches of graphs, each joined to one graph with the numbers in `batch`; the arguments are those of `Batches`."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(len(graphs), batch_size, shuffle, seed, drop_last, rank, world_size)
        self.graphs = graphs

    def batch(self, epoch: int, position: int) -> Graph:
        return join([self.graphs[i] for i in self._share(self.index(epoch, position)).tolist()])


class TextBatches(Ordered[tuple[Tensor, Tensor]]):
    """Segments (x, y) of a text, (batch_size, length) each; y holds the token after each token of x.

    The text is cut into batch_size rows of equal length. Row i of a segment continues row i of the segment before, so that a
    model can carry its memory from segment to segment within an epoch.

    drop_last  leave out the last segment of an epoch if it is shorter
    """

    def __init__(
        self, tokens: Tensor, batch_size: int, length: int, *, drop_last: bool = False, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(batch_size, rank, world_size)
        self.tokens, self.length, self.drop_last = tokens, length, drop_last
        columns = (len(tokens) - 1) // batch_size
        if length < 1 or columns < (length if drop_last else 1):
            raise ValueError(
                f"{len(tokens)} tokens are too few for a segment of {length} in {batch_size} rows: use fewer rows or "
                "shorter segments."
            )
        used = batch_size * columns
        self._x, self._y = (self._share(part[:used].view(batch_size, columns)) for part in (tokens, tokens[1:]))

    def __len__(self) -> int:
        columns = self._x.shape[1]
        return columns // self.length if self.drop_last else math.ceil(columns / self.length)

    def identity(self) -> dict[str, int]:
        return {"tokens": len(self.tokens), "batch_size": self.batch_size, "length": self.length}

    def batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        columns = slice(position * self.length, (position + 1) * self.length)
        return self._x[:, columns].long(), self._y[:, columns].long()  # corpora are stored as int32
