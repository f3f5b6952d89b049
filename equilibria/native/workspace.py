"""The tensors of one native solve and the calls into the kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor

from equilibria.native.context import COUNTERS, NUMBERS, Context

PICARD, ANDERSON, BROYDEN, GMRES_BEGIN, GMRES = range(5)  # `enum Method` of kernels.cpp
FIRST_CORE = 8


class Workspace:
    """Record and history of every row of a batch, in the place the row had at the start; rows that stop stay where they are.

    numbers, counters, status  the record, with one column or entry per row
    answer                     (batch, n), best iterates; complete when no row runs, or after a call without `out`
    """

    def __init__(self, kernels: Any, z0: Tensor, most: int, vectors: tuple[str, ...], settings: dict[str, Any]) -> None:
        batch, n = z0.shape
        self.advance_rows, self.wide = kernels.advance, int(z0.dtype == torch.float64)
        self.numbers = z0.new_empty(len(NUMBERS), batch)
        self.counters = torch.empty(len(COUNTERS), batch, dtype=torch.int64)
        self.flags = torch.empty(2, batch, dtype=torch.int8)
        self.order = torch.empty(batch, most, dtype=torch.int32)
        self.answer = torch.empty_like(z0)
        self.vectors = [torch.empty_like(z0) for _ in vectors]
        self.slots: list[Tensor] = []
        self.first, self.second = (c_void_p * most)(), (c_void_p * most)()
        self.core: Tensor | None = None
        self.place: Tensor | None = None  # (rows,) of the rows carried; None: all
        self.scale: Tensor | None = settings.pop("scale", None)
        self.context = Context(n=n, rows=batch, batch=batch, most=most, threads=torch.get_num_threads(), **settings)
        self._point(vectors)
        self.address = ctypes.addressof(self.context)

    @property
    def status(self) -> Tensor:
        return self.flags[0]

    @property
    def rows(self) -> int:
        return self.context.rows

    def number(self, name: str) -> Tensor:
        return self.numbers[NUMBERS.index(name)]

    def counter(self, name: str) -> Tensor:
        return self.counters[COUNTERS.index(name)]

    def vector(self, at: int) -> Tensor:
        """(rows, n), the rows carried of one of the `vectors`."""
        return self.vectors[at] if self.place is None else self.vectors[at].index_select(0, self.place)

    def advance(self, method: int, a: Tensor, b: Tensor, before: Tensor, out: Tensor | None, step: int) -> int:
        """Record a step and write where to evaluate next into `out`; returns how many rows are still running."""
        where = 0 if out is None else out.data_ptr()
        running: int = self.advance_rows(
            self.address, method, self.wide, a.data_ptr(), b.data_ptr(), before.data_ptr(), where, step
        )
        return running

    def make_room(self) -> None:
        """Give memory to the slots that the next call fills."""
        wanted = self.context.wanted
        while len(self.slots) < wanted:
            slot = self.answer.new_empty(2, *self.answer.shape)
            at = len(self.slots)
            self.first[at] = slot.data_ptr()
            self.second[at] = slot.data_ptr() + slot.stride(0) * slot.element_size()
            self.slots.append(slot)
        self.context.slots = len(self.slots)

    def make_room_in_core(self) -> None:
        """Give memory to the products between the slots, doubled when full."""
        size, wanted = self.context.core_size, self.context.wanted
        if wanted <= size:
            return
        larger = min(max(2 * size, FIRST_CORE, wanted), self.context.most)
        core = self.answer.new_empty(len(self.answer), larger, larger)
        if self.core is not None:
            core[:, :size, :size] = self.core
        self.core, self.context.core, self.context.core_size = core, core.data_ptr(), larger

    def running_rows(self) -> Tensor:
        """Indices of the rows carried that still run."""
        status = self.status if self.place is None else self.status.index_select(0, self.place)
        return (status < 0).nonzero().squeeze(1)

    def keep_running(self, z: Tensor) -> None:
        """Store the iterates of rows that still run, where they are their best: the solve ends here for other reasons."""
        place = torch.arange(len(self.status)) if self.place is None else self.place
        best = (self.flags[1].index_select(0, place) != 0).nonzero().squeeze(1)
        self.answer.index_copy_(0, place.index_select(0, best), z.index_select(0, best))

    def drop(self, index: Tensor) -> None:
        """Carry on with the rows at `index` alone. No history moves: rows are found by their place."""
        self.place = index if self.place is None else self.place.index_select(0, index)
        self.context.place, self.context.rows = self.place.data_ptr(), len(index)

    def _point(self, vectors: tuple[str, ...]) -> None:
        tensors = dict(zip(vectors, self.vectors, strict=True))
        tensors |= dict(zip(NUMBERS, self.numbers.unbind(), strict=True))
        tensors |= dict(zip(COUNTERS, self.counters.unbind(), strict=True))
        tensors |= {"status": self.flags[0], "current": self.flags[1], "order": self.order, "answer": self.answer}
        if self.scale is not None:
            tensors["scale"] = self.scale
        for name, tensor in tensors.items():
            setattr(self.context, name, tensor.data_ptr())
        self.context.first, self.context.second = ctypes.addressof(self.first), ctypes.addressof(self.second)
