"""Warm starts keyed by sample: a solve starts from the last equilibrium of the same sample."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria._core.packing import Layout, State
from equilibria.solution import Solution

Keys = Sequence[Hashable] | Tensor


class Remember:
    """An `init` that starts every sample from its last equilibrium, at whatever position of a batch it appears.

        deq = eq.DEQ(cell, init=eq.Remember(capacity=50_000))
        for index, x in loader:  # shuffled or not
            with deq.init.keyed(index):
                z = deq(x)

    `eq.sample_keys(model, keys)` sets the keys of all layers of a model. Samples without a stored equilibrium, and solves
    without keys, start from `start`. Only converged equilibria are stored; a sample that fails is removed, so that a bad
    start is not used again. Stored equilibria are not part of a state_dict: after loading a checkpoint the memory is empty.

    start     the `init` of samples that are not stored
    capacity  largest number of samples per shape of state; the least recently used are removed first
    max_age   ignore equilibria stored more than `max_age` solves ago, as weights have changed since; None keeps all
    device    device of the stored equilibria, for example "cpu" to save GPU memory; None uses that of the state
    adjoint   store the solution of each sample's adjoint system too, from which the next backward pass of the sample
              starts; for gradients that solve this system exactly, such as `Implicit`. Takes twice the memory
    """

    def __init__(
        self,
        start: Any = None,
        capacity: int = 65_536,
        max_age: int | None = None,
        device: torch.device | str | None = None,
        adjoint: bool = False,
    ) -> None:
        require(capacity >= 1, f"Remember's capacity must be at least one sample, got {capacity}.")
        require(max_age is None or max_age >= 1, f"Remember's max_age must be at least one solve, got {max_age}.")
        self.start, self.capacity, self.max_age, self.device, self.adjoint = start, capacity, max_age, device, adjoint
        self.hits = 0  # number of samples that started from a stored equilibrium
        self.misses = 0  # number of samples with keys that had no stored equilibrium
        self._banks: dict[Hashable, _Bank] = {}
        self._adjoint_banks: dict[Hashable, _Bank] = {}
        self._keys: list[Hashable] | None = None
        self._solves = 0

    def __len__(self) -> int:
        return sum(len(bank.slots) for bank in self._banks.values())

    def __repr__(self) -> str:
        settings = {name: getattr(self, name) for name in ("start", "capacity", "max_age", "device", "adjoint")}
        return f"Remember({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    @contextmanager
    def keyed(self, keys: Keys) -> Iterator[None]:
        """Set the keys of the samples solved inside the block, one per row: integers, strings or a tensor of integers."""
        before, self._keys = self._keys, _as_list(keys)
        try:
            yield
        finally:
            self._keys = before

    def forget(self, keys: Keys | None = None) -> None:
        """Remove the samples with these keys, for example of videos that have ended.

        None removes every stored sample, for example after other weights were loaded.
        """
        if keys is None:
            self._banks.clear()
            self._adjoint_banks.clear()
            return
        for key in _as_list(keys):
            for bank in (*self._banks.values(), *self._adjoint_banks.values()):
                bank.drop(key)

    def recall(self, start: State, batched: bool) -> State:
        """Return `start` with the rows of stored samples replaced by their equilibria, without a graph."""
        if not self._visited(batched):
            return start
        layout = Layout.of(start, batched=True)
        keys = self._checked_keys(layout.batch)
        bank = self._banks.get(_signature(layout))
        oldest = 0 if self.max_age is None else self._solves - self.max_age
        packed, hits = (None, 0) if bank is None else bank.fill(layout.pack(start), keys, oldest)
        self.hits, self.misses = self.hits + hits, self.misses + len(keys) - hits
        return start if packed is None or not hits else layout.unpack(packed)

    def store(self, s: Solution) -> None:
        """Store the equilibria of the samples whose keys are set. The solution gets the keys for its backward pass."""
        if not self._visited(s.layout.batched):
            return
        self._solves += 1
        keys, signature = self._checked_keys(s.layout.batch), _signature(s.layout)
        z = s.layout.pack(s.z).detach()
        z = z if self.device is None else z.to(self.device)
        bank = self._banks.setdefault(signature, _Bank(self.capacity, z))
        bank.put(keys, s.stats.converged.tolist(), z, self._solves)
        if self.adjoint:
            s.result.adjoint_starts = AdjointStarts(self, keys, signature, self._solves)

    def _visited(self, batched: bool) -> bool:
        if self._keys is not None and not batched:
            raise ValueError(
                "Remember stores one equilibrium per sample, but a layer with batched=False solves one problem without "
                "samples. Use batched=True, or another init."
            )
        return self._keys is not None and not autodiff_modes.inside_transform()

    def _checked_keys(self, batch: int) -> list[Hashable]:
        assert self._keys is not None
        if len(self._keys) != batch:
            raise ValueError(
                f"Remember got {len(self._keys)} keys for a batch of {batch}: keyed(keys) takes one key per sample."
            )
        return self._keys


@dataclass(frozen=True)
class AdjointStarts:
    """The stored adjoint solutions of the samples of one solve, which its backward pass recalls and stores.

    solve  the number of the solve, by which the age of a solution is measured
    """

    memory: Remember
    keys: Sequence[Hashable]
    signature: Hashable
    solve: int

    def recall(self, like: Tensor) -> Tensor | None:
        """Return (batch, n), stored solutions, and zeros for samples without one; None if no sample has one."""
        bank, age = self.memory._adjoint_banks.get(self.signature), self.memory.max_age
        oldest = 0 if age is None else self.solve - 1 - age
        found, hits = (None, 0) if bank is None else bank.fill(torch.zeros_like(like), self.keys, oldest)
        return found if hits else None

    def store(self, u: Tensor, good: Tensor) -> None:
        """Store the solutions u, (batch, n), of the samples in `good`, (batch,)."""
        u = u.detach() if self.memory.device is None else u.detach().to(self.memory.device)
        bank = self.memory._adjoint_banks.setdefault(self.signature, _Bank(self.memory.capacity, u))
        bank.put(self.keys, good.tolist(), u, self.solve)


class _Bank:
    """Stored states of one shape, one row per key; the least recently used key is first in `slots`."""

    def __init__(self, capacity: int, like: Tensor) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):  # training could not write into an inference tensor
            self.values = like.new_empty(min(capacity, max(len(like), 1)), like.shape[1])
        self.slots: OrderedDict[Hashable, int] = OrderedDict()
        self.stored: dict[Hashable, int] = {}  # number of the solve that stored each key
        self.free: list[int] = list(range(len(self.values)))

    def fill(self, start: Tensor, keys: Sequence[Hashable], oldest: int) -> tuple[Tensor, int]:
        """Return `start`, (batch, n), with stored states in the rows of stored samples, and the number of these rows."""
        rows = [row for row, key in enumerate(keys) if key in self.slots and self.stored[key] >= oldest]
        if not rows:
            return start, 0
        for row in rows:
            self.slots.move_to_end(keys[row])
        found = self.values[[self.slots[keys[row]] for row in rows]].to(start.device, start.dtype)
        return start.index_copy(0, torch.tensor(rows, device=start.device), found), len(rows)

    def put(self, keys: Sequence[Hashable], good: Sequence[bool], z: Tensor, now: int) -> None:
        latest = {key: row for row, key in enumerate(keys)}  # the last row of a key that occurs twice
        for key in [key for key, row in latest.items() if not good[row]]:
            self.drop(key)
        rows = [row for row in latest.values() if good[row]][-self.capacity :]
        slots = [self._slot(keys[row], now) for row in rows]
        if rows:
            self.values[slots] = z[rows].to(self.values)

    def _slot(self, key: Hashable, now: int) -> int:
        if key not in self.slots:
            if not self.free and len(self.values) < self.capacity:
                size = len(self.values)
                more = min(size, self.capacity - size)
                with torch.inference_mode(False):
                    self.values = torch.cat([self.values, self.values.new_empty(more, self.values.shape[1])])
                self.free = list(range(size, size + more))
            if not self.free:
                self.drop(next(iter(self.slots)))
            self.slots[key] = self.free.pop()
        self.slots.move_to_end(key)
        self.stored[key] = now
        return self.slots[key]

    def drop(self, key: Hashable) -> None:
        """Remove a key if it is stored."""
        if key in self.slots:
            self.free.append(self.slots.pop(key))
            del self.stored[key]


def _signature(layout: Layout) -> Hashable:
    return str(layout.structure), tuple((leaf.shape, leaf.dtype) for leaf in layout.leaves)


def _as_list(keys: Keys) -> list[Hashable]:
    if not isinstance(keys, Tensor):
        return list(keys)
    if keys.dim() != 1 or keys.is_floating_point():
        raise ValueError(
            f"Keys in a tensor must be one integer per sample, got shape {tuple(keys.shape)} and {keys.dtype}. Pass the "
            "indices of the samples in their dataset."
        )
    return keys.tolist()
