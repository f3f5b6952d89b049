"""The memory of a native solve whose rows start at different steps, with tolerances and limits of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor

from equilibria import native
from equilibria.native.solve import DTYPES, KINDS, Workspace, needs
from equilibria.solvers.broyden import Broyden
from equilibria.stop import FLOOR, Stop, euclidean_norm, rms_norm

OWN_COUNTERS = ("born", "end", "limit", "trust", "watchful")  # one int64 per row, in the order of `struct Own`
OWN_NUMBERS = ("rtol", "atol", "natural")  # one number per row in the dtype of the state, in the order of `struct Own`
NEVER = -1  # `born` of a place without a row


class Own(ctypes.Structure):
    """`struct Own` of context.h, field for field; the fields are documented there."""

    _fields_ = [(name, c_void_p) for name in (*OWN_COUNTERS, *OWN_NUMBERS, "stopped")]


def can_run(like: Tensor, solver: Any, stop: Stop) -> bool:
    """Return True if a pool whose states have the dtype and device of `like` may use native steps."""
    if not native.available() or type(solver) not in KINDS or (isinstance(solver, Broyden) and solver.line_search):
        return False
    return stop.norm in (rms_norm, euclidean_norm) and like.dtype in DTYPES and like.device.type == "cpu"


class PoolWorkspace(Workspace):
    """A workspace of `capacity` places. Rows are the rows of the tensors of a call; `place` maps them to places.

    counts   (5, capacity), OWN_COUNTERS
    figures  (3, capacity), OWN_NUMBERS
    """

    def __init__(self, like: Tensor, capacity: int, n: int, solver: Any, stop: Stop, precision: float, most: int) -> None:
        whole = like.new_empty(capacity, n)
        _, vectors, settings = needs(solver, whole.shape, whole.dtype)
        own = {"first_limit": most, "floor": FLOOR * precision, "patience": stop.patience or 0}
        super().__init__(whole, most, vectors, {**settings, **own})
        self.kind = KINDS[type(solver)]
        self.answer.zero_()  # places without a row are evaluated at their answer
        self.status.fill_(1)
        self.counts = torch.full((len(OWN_COUNTERS), capacity), NEVER, dtype=torch.int64)
        self.figures = whole.new_ones(len(OWN_NUMBERS), capacity)
        self.stopped = torch.zeros(capacity, dtype=torch.int64)
        self.place: Tensor = torch.arange(capacity)
        tensors = dict(zip(OWN_COUNTERS, self.counts.unbind(), strict=True))
        tensors |= dict(zip(OWN_NUMBERS, self.figures.unbind(), strict=True))
        self.own = Own(stopped=self.stopped.data_ptr(), **{name: tensor.data_ptr() for name, tensor in tensors.items()})
        self.context.own, self.context.place = ctypes.addressof(self.own), self.place.data_ptr()
        self.counters.zero_()

    def begin(self, rows: Tensor, counts: Sequence[Sequence[int]], figures: Sequence[Sequence[float]]) -> None:
        """Set what new rows have of their own, in the order of OWN_COUNTERS and OWN_NUMBERS."""
        place = self.place.index_select(0, rows)
        self.counts.index_copy_(1, place, torch.tensor(counts))
        self.figures.index_copy_(1, place, self.figures.new_tensor(figures))

    def record(self, z: Tensor, fz: Tensor, before: Tensor, out: Tensor, step: int) -> int:
        """Record the iterates of all rows and write the next points to evaluate into `out`; returns the running rows."""
        self.rows = self.context.rows = len(z)
        return self.advance(self.kind, z, fz, before, out, step)

    def release(self, row: int) -> None:
        """Stop a row; it no longer counts as running, and its place keeps its answer."""
        place = self.place[row]
        self.status[place] = 1
        self.counts[0, place] = NEVER

    def swap(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Exchange the places of the rows at `source` and `target`."""
        a, b = torch.tensor(source), torch.tensor(target)
        self.place[a], self.place[b] = self.place[b], self.place[a]
