"""The memory of one native solve: a struct for the kernels, the tensors behind its pointers, and the calls."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equilibria._core.closed_record import ClosedRecord

if TYPE_CHECKING:
    from equilibria._core.results import Run

NUMBERS = (
    "excess",
    "length",
    "size",
    "first_length",
    "first_size",
    "peak",
    "last",
    "milestone",
    "shortest",
)  # one number per row, in the dtype of the state
COUNTERS = ("steps", "best_step", "waiting", "waited", "limit", "count")  # one int64 per row


class Context(ctypes.Structure):
    """`struct Context` of context.h, field for field; the fields are documented there."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "n",
                "rows",
                "batch",
                "first_limit",
                "most",
                "slots",
                "wanted",
                "core_size",
                "patience",
                "watchful",
                "threads",
                "patience_of_trust",
            )
        ],
        *[
            (name, c_double)
            for name in (
                "rtol",
                "atol",
                "floor",
                "natural",
                "damping",
                "threshold",
                "slow",
                "lowest",
                "highest",
                "longest",
            )
        ],
        *[
            (name, c_void_p)
            for name in (
                "place",
                "status",
                *COUNTERS,
                "order",
                "current",
                *NUMBERS[:3],
                "scale",
                *NUMBERS[3:8],
                "answer",
                "residual",
                "value",
                "shortest",
                "iterate",
                "other",
                "core",
                "first",
                "second",
                "own",
            )
        ],
    ]


CONTEXT_SIZE = ctypes.sizeof(Context)
PICARD, ANDERSON, BROYDEN, GMRES_BEGIN, GMRES = range(5)  # `enum Method` of kernels.cpp
FIRST_CORE = 8


class Workspace:
    """Record and history of every row, stored at the row's position in the original batch; stopped rows stay in place.

    numbers, counters, status, excess  the record, with one column or entry per row
    answer                     (batch, n), best iterates; complete when no row runs, or after a call without `out`
    rows, place                number of the rows carried, and (rows,) their places in the batch; None for all
    """

    def __init__(self, kernels: Any, z0: Tensor, most: int, vectors: tuple[str, ...], settings: dict[str, Any]) -> None:
        batch, n = z0.shape
        self.advance_rows, self.wide = kernels.advance, int(z0.dtype == torch.float64)
        self.numbers = z0.new_empty(len(NUMBERS), batch)
        self.counters = torch.empty(len(COUNTERS), batch, dtype=torch.int64)
        self.flags = torch.empty(2, batch, dtype=torch.int8)
        self.status, self.rows, self.excess = self.flags[0], batch, self.numbers[0]
        self.order = torch.empty(batch, most, dtype=torch.int32)
        self.answer = torch.empty_like(z0)
        self.vectors = [torch.empty_like(z0) for _ in vectors]
        self.slots: list[Tensor] = []
        self.first, self.second = (c_void_p * most)(), (c_void_p * most)()
        self.core: Tensor | None = None
        self.place: Tensor | None = None
        self.scale: Tensor | None = settings.pop("scale", None)
        self.context = Context(n=n, rows=batch, batch=batch, most=most, threads=torch.get_num_threads(), **settings)
        tensors = dict(zip(vectors, self.vectors, strict=True))
        tensors |= dict(zip(NUMBERS, self.numbers.unbind(), strict=True))
        tensors |= dict(zip(COUNTERS, self.counters.unbind(), strict=True))
        tensors |= {"status": self.status, "current": self.flags[1], "order": self.order, "answer": self.answer}
        if self.scale is not None:
            tensors["scale"] = self.scale
        for name, tensor in tensors.items():
            setattr(self.context, name, tensor.data_ptr())
        self.context.first, self.context.second = ctypes.addressof(self.first), ctypes.addressof(self.second)
        self.address = ctypes.addressof(self.context)

    def number(self, name: str) -> Tensor:
        return self.numbers[NUMBERS.index(name)]

    def counter(self, name: str) -> Tensor:
        return self.counters[COUNTERS.index(name)]

    def vector(self, at: int) -> Tensor:
        """Return one of the `vectors` for the rows still carried, (rows, n)."""
        return self.vectors[at] if self.place is None else self.vectors[at].index_select(0, self.place)

    def advance(self, method: int, a: Tensor, b: Tensor, before: Tensor, out: Tensor | None, step: int) -> int:
        """Record a step and write the next point to evaluate into `out`; returns the number of running rows."""
        where = 0 if out is None else out.data_ptr()
        running: int = self.advance_rows(
            self.address, method, self.wide, a.data_ptr(), b.data_ptr(), before.data_ptr(), where, step
        )
        if self.context.wanted > len(self.slots):
            self._make_room(self.context.wanted)
        if method == BROYDEN and self.context.wanted > self.context.core_size:
            self._make_room_in_core(self.context.wanted)
        return running

    def _make_room(self, wanted: int) -> None:
        """Allocate the slots that the next call fills."""
        while len(self.slots) < wanted:
            slot = self.answer.new_empty(2, *self.answer.shape)
            at = len(self.slots)
            self.first[at] = slot.data_ptr()
            self.second[at] = slot.data_ptr() + slot.stride(0) * slot.element_size()
            self.slots.append(slot)
        self.context.slots = len(self.slots)

    def _make_room_in_core(self, wanted: int) -> None:
        """Allocate the products between slots; the capacity doubles when it is used up."""
        size = self.context.core_size
        larger = min(max(2 * size, FIRST_CORE, wanted), self.context.most)
        core = self.answer.new_empty(len(self.answer), larger, larger)
        if self.core is not None:
            core[:, :size, :size] = self.core
        self.core, self.context.core, self.context.core_size = core, core.data_ptr(), larger

    def running_rows(self) -> Tensor:
        """Return the indices of the carried rows that still run."""
        status = self.status if self.place is None else self.status.index_select(0, self.place)
        return (status < 0).nonzero().squeeze(1)

    def close(self, run: Run, z0: Tensor) -> ClosedRecord:
        """Return the record of the whole batch, at the end of the solve."""
        numbers = dict(zip(NUMBERS, self.numbers.unbind(), strict=True))
        counters = dict(zip(COUNTERS, self.counters.unbind(), strict=True))
        return ClosedRecord(
            self.answer,
            self.status,
            numbers["length"],
            numbers["size"] if self.scale is None else self.scale,
            counters["steps"],
            counters["best_step"],
            torch.zeros_like(counters["steps"]),
            start=z0,
            first_length=numbers["first_length"],
            first_size=numbers["first_size"],
            extremes=lambda: (numbers["last"], numbers["peak"]),
            rtol=run.stop.rtol,
            precision=run.precision,
            natural=self.context.natural,
            linear=self.scale is not None,
        )

    def keep_running(self, z: Tensor) -> None:
        """Store the iterates of running rows where they are the best so far, when the solve ends before they converge."""
        place = torch.arange(len(self.status)) if self.place is None else self.place
        best = (self.flags[1].index_select(0, place) != 0).nonzero().squeeze(1)
        self.answer.index_copy_(0, place.index_select(0, best), z.index_select(0, best))

    def drop(self, index: Tensor) -> None:
        """Continue with the rows at `index` only. History does not move: rows are addressed by their position."""
        self.place = index if self.place is None else self.place.index_select(0, index)
        self.rows = len(index)
        self.context.place, self.context.rows = self.place.data_ptr(), self.rows
