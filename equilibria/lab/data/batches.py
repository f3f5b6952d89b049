"""Batches from memory, in an order that depends on seed and epoch alone, resumable at any batch."""

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
    """Batches that are handed out one by one.

        for epoch in range(batches.epoch, epochs):
            for batch in batches:
                ...  # batches.state() here: where to go on after this batch

    A loop that was left goes on where it was when the next one begins; `restart()` goes back to the beginning of the epoch.
    With several processes each gets its part of every batch: all together see the same batches for any number of them.
    """

    def __init__(self, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"Got batch_size={batch_size}, rank={rank}, world_size={world_size}: all count, ranks from 0.")
        if batch_size % world_size:
            raise ValueError(
                f"batch_size counts the samples of all processes: {batch_size} cannot be shared evenly by {world_size}."
            )
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.epoch = 0
        self.position = 0  # batches of this epoch handed out

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def batch(self, epoch: int, position: int) -> B:
        """This process' part of a batch."""

    @abstractmethod
    def identity(self) -> dict[str, int]:
        """Values that must match for a saved state to be valid."""

    def __iter__(self) -> Iterator[B]:
        while self.position < len(self):
            self.position += 1
            yield self.batch(self.epoch, self.position - 1)
        self.epoch, self.position = self.epoch + 1, 0

    def restart(self) -> None:
        self.position = 0

    def state(self) -> dict[str, int]:
        """The current position, as JSON numbers."""
        return {"epoch": self.epoch, "position": self.position, **self.identity()}

    def resume(self, state: Mapping[str, int]) -> None:
        """Continue where `state()` was taken, with any number of processes."""
        for key, value in self.identity().items():
            if state.get(key) != value:
                raise ValueError(
                    f"These batches have {key}={value}, those of the state had {state.get(key)}: it is another order."
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _share(self, whole: Tensor) -> Tensor:
        return whole.tensor_split(self.world_size)[self.rank]


class _Shuffled(Ordered[B]):
    """A permutation per epoch, cut into batches."""

    def __init__(
        self, samples: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool, rank: int, world_size: int
    ) -> None:
        super().__init__(batch_size, rank, world_size)
        self.samples, self.shuffle, self.seed, self.drop_last = samples, shuffle, seed, drop_last
        self._order: tuple[int, Tensor] | None = None
        if len(self) == 0:
            raise ValueError(f"{samples} samples make no batch of {batch_size}.")
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
        """The samples of a batch, those of all processes."""
        if self._order is None or self._order[0] != epoch:
            draws = generator(self.seed, epoch)
            order = torch.randperm(self.samples, generator=draws) if self.shuffle else torch.arange(self.samples)
            self._order = epoch, order
        return self._order[1][position * self.batch_size : (position + 1) * self.batch_size]


class Batches(_Shuffled[tuple[Tensor, Tensor]]):
    """(x, y) of a `Split`, where its tensors are.

        cifar = data.load("cifar10")
        train = data.Batches(cifar.train, 128, augment=[data.Crop(4), data.Flip()], transform=cifar.normalize)

    batch_size        samples of all processes together
    augment           applied to x as stored, one after the other; drawn anew for each batch from seed, epoch and place
    transform         applied to x last, such as `Dataset.normalize`
    drop_last         leave out the last batch of an epoch if it is smaller; it is also the one shared unevenly by processes
    rank, world_size  of this process and how many there are
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
            draws = augmentation.draw(len(index), generator(self.seed, epoch, position, k))
            x, y = augmentation(x, y, self._share(draws).to(x.device))
        return x if self.transform is None else self.transform(x), y


class GraphBatches(_Shuffled[Graph]):
    """Graphs joined to one, whose `batch` tells them apart; the arguments are those of `Batches`."""

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
    """Segments (x, y) of a text, (batch_size, length) each, y the token after each of x.

    The text is cut into batch_size rows of equal length, read side by side: row i of a segment goes on where row i of the
    one before ended, so that a model may carry over its memory. An epoch begins with none.

    drop_last  leave out the last segment of an epoch if it is shorter
    """

    def __init__(
        self, tokens: Tensor, batch_size: int, length: int, *, drop_last: bool = False, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(batch_size, rank, world_size)
        self.tokens, self.length, self.drop_last = tokens, length, drop_last
        columns = (len(tokens) - 1) // batch_size
        if length < 1 or columns < (length if drop_last else 1):
            raise ValueError(f"{len(tokens)} tokens make no segment of {length} in {batch_size} rows.")
        used = batch_size * columns
        self._x, self._y = (self._share(part[:used].view(batch_size, columns)) for part in (tokens, tokens[1:]))

    def __len__(self) -> int:
        columns = self._x.shape[1]
        return columns // self.length if self.drop_last else math.ceil(columns / self.length)

    def identity(self) -> dict[str, int]:
        return {"tokens": len(self.tokens), "batch_size": self.batch_size, "length": self.length}

    def batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        columns = slice(position * self.length, (position + 1) * self.length)
        return self._x[:, columns].long(), self._y[:, columns].long()
