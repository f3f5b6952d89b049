"""The memory of a native solve whose rows start at different steps and have their own tolerances and limits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor

from equilibria import native
from equilibria.native.context import NUMBERS
from equilibria.native.solve import DTYPES, KINDS, Workspace, kind_of, needs
from equilibria.solvers.broyden import Broyden
from equilibria.stop import FLOOR, Stop, euclidean_norm, rms_norm

OWN_COUNTERS = ("born", "end", "limit", "most", "trust", "watchful")  # one int64 per row, in the order of `struct Own`
OWN_NUMBERS = ("rtol", "atol", "natural")  # one number per row in the dtype of the state, in the order of `struct Own`
CTYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
    torch.int8: ctypes.c_int8,
}
NEVER = -1  # `born` of a place without a row


class Own(ctypes.Structure):
    """`struct Own` of context.h, field for field; the fields are documented there."""

    _fields_ = [(name, c_void_p) for name in (*OWN_COUNTERS, *OWN_NUMBERS, "stopped")]


def can_run(like: Tensor, solver: Any, stop: Stop) -> bool:
    """Return True if a pool whose states have the dtype and device of `like` may use native steps."""
    if not native.available() or type(solver) not in KINDS or (isinstance(solver, Broyden) and solver.line_search):
        return False
    return stop.norm in (rms_norm, euclidean_norm) and like.dtype in DTYPES and like.device.type == "cpu"


def _array(tensor: Tensor) -> Any:
    """Return the memory of a contiguous vector as an array of ctypes; it is valid as long as the tensor."""
    return (CTYPES[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())


class PoolWorkspace(Workspace):
    """A workspace of `capacity` places. A row is a row of the tensors of a call; `place` maps rows to places.

    counts   (6, capacity), the values of OWN_COUNTERS
    figures  (3, capacity), the values of OWN_NUMBERS

    Reading an entry of a tensor is slow. The ctypes arrays `place_of`, `stopped_rows`, `status_of`, `steps_of`, and those in
    `number_of` by name, therefore share the memory of tensors.
    """

    def __init__(self, like: Tensor, capacity: int, n: int, solver: Any, stop: Stop, precision: float, most: int) -> None:
        whole = like.new_empty(capacity, n)
        _, vectors, settings = needs(solver, whole.shape, whole.dtype)
        own = {"first_limit": most, "floor": FLOOR * precision, "patience": stop.patience or 0}
        super().__init__(whole, most, vectors, {**settings, **own})
        self.kind = kind_of(solver, n)
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
        self.place_of, self.stopped_rows = _array(self.place), _array(self.stopped)
        self.status_of, self.steps_of = _array(self.status), _array(self.counter("steps"))
        self.number_of = {name: _array(self.number(name)) for name in NUMBERS}

    def begin(self, rows: Tensor, settings: Sequence[Sequence[float]]) -> None:
        """Set the tolerances and limits of new rows, in the order of OWN_COUNTERS and OWN_NUMBERS.

        settings  one tuple per row, or a single tuple for all rows
        """
        place, split = self.place.index_select(0, rows), len(OWN_COUNTERS)
        counts = torch.tensor([each[:split] for each in settings], dtype=torch.int64).T
        figures = self.figures.new_tensor([each[split:] for each in settings]).T
        self.counts.index_copy_(1, place, counts.expand(-1, len(rows)))
        self.figures.index_copy_(1, place, figures.expand(-1, len(rows)))

    def record(self, z: Tensor, fz: Tensor, before: Tensor, out: Tensor, step: int) -> int:
        """Record all iterates and write the next points to evaluate into `out`; returns the number of running rows."""
        self.rows = self.context.rows = len(z)
        return self.advance(self.kind, z, fz, before, out, step)

    def release(self, row: int) -> None:
        """Stop a row; it no longer counts as running, and its place keeps its answer."""
        place = self.place_of[row]
        self.status_of[place] = 1
        self.counts[0, place] = NEVER

    def swap(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Exchange the places of the rows at `source` and `target`."""
        a, b = torch.tensor(source), torch.tensor(target)
        self.place[a], self.place[b] = self.place[b], self.place[a]
