"""The solve of a pool by the compiled kernels: one call per step, without work in Python for rows that continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import LEAST, PATIENCE, Anderson, PoolWorkspace, history_range
from equilibria.serving.rows import INF, Left, Row, RowResults, SolveRows
from equilibria.solution import Status
from equilibria.stop import Stop

REASONS = {int(Status.STALLED): "stalled", int(Status.DIVERGED): "diverged", int(Status.MAX_STEPS): "steps"}


class NativeRows(SolveRows):
    """The interface of `SolveRows` on top of `PoolWorkspace`.

    Three buffers exchange their roles after every step: the iterates recorded last, the iterates before them, and the points
    to evaluate next. Records of single rows are read through ctypes, because an operation of torch takes microseconds.
    """

    def __init__(self, like: Tensor, capacity: int, n: int, solver: Any, stop: Stop, precision: float, most: int) -> None:
        self.rule, self.like, self.n, self.stop = solver, like, n, stop
        self.work = PoolWorkspace(like, capacity, n, solver, stop, precision, most)
        self.buffers = [like.new_zeros(capacity, n) for _ in range(3)]
        self.before, self.z, self.out = (buffer[:0] for buffer in self.buffers)  # (rows, n), the first rows of the buffers
        info = torch.finfo(like.dtype)
        self.least_rtol, self.least_atol = LEAST * info.eps, info.tiny**0.8
        self.running = 0
        self.usual = self._limits(n)

    def _limits(self, n: int) -> tuple[int, int, int]:
        """Return the slots of the history of a row of `n` numbers, at first and at most, and its patience."""
        first, most = history_range(self.rule, n, self.like)
        return first, most, PATIENCE + (0 if most < n else most) if isinstance(self.rule, Anderson) else 0

    def extend(self, count: int) -> None:
        have = len(self.out)
        self._resize(have + count)
        self.out[have:] = 0.0

    def cut(self, count: int) -> None:
        self._resize(count)

    def _resize(self, rows: int) -> None:
        self.before, self.z, self.out = (buffer[:rows] for buffer in self.buffers)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        here, there = torch.tensor(source), torch.tensor(target)
        for points in (self.z, self.out):
            points.index_copy_(0, there, points.index_select(0, here))
        self.work.swap(source, target)

    def propose(self, depth: Callable[[], int] | None) -> Tensor:
        return self.out

    def begin(self, z: Tensor, index: Tensor, rows: Sequence[Row], numbers: Sequence[int] | None, z0: Tensor) -> Tensor:
        first = rows[0]
        if numbers is None and all(row.rtol == first.rtol and row.end == first.end for row in rows):
            settings = [self._settings(first, *self.usual)]
        else:
            limits = [self.usual] * len(rows) if numbers is None else [self._limits(n) for n in numbers]
            settings = [self._settings(row, *limit) for row, limit in zip(rows, limits, strict=True)]
        self.work.begin(index, settings)
        self.running += len(rows)
        return z.index_copy_(0, index, z0)

    def _settings(self, row: Row, limit: int, most: int, patience: int) -> tuple[float, ...]:
        """Return the settings of one row, in the order that `PoolWorkspace.begin` expects."""
        counts = (row.born, row.end, limit, most, patience, int(row.watched))
        return *counts, max(row.rtol, self.least_rtol), max(self.stop.atol * row.root, self.least_atol), row.root

    def record(self, z: Tensor, fz: Tensor, step: int, rows: Sequence[Row | None], new: Sequence[int]) -> dict[int, str]:
        # the next points are written into the buffer of the oldest iterates, which are not needed any more
        before, last, points = self.buffers
        self.buffers = [last, points, before]
        self.before, self.z, self.out = self.z, z, self.before
        running = self.work.record(z, fz.contiguous(), self.before, self.out, step)
        stopped, self.running = self.running - running, running
        if not stopped:
            return {}
        status, place = self.work.status_of, self.work.place_of
        return {i: REASONS.get(status[place[i]], "stopped") for i in self.work.stopped_rows[:stopped]}

    def suspects(self, new: Sequence[int], least: float, most: float) -> list[int]:
        place, lengths, sizes = self.work.place_of, self.work.number_of["first_length"], self.work.number_of["first_size"]
        return [i for i in new if not (least <= sizes[place[i]] <= most and lengths[place[i]] < INF)]

    def leave(self, place: int, row: Row, step: int, reason: str) -> Left:
        if reason in ("late", "unusual"):
            at = self.work.place_of[place]
            if self.work.status_of[at] < 0:
                if self.work.flags[1, at]:  # its last iterate is its best
                    self.work.answer[at] = self.z[place]
                self.release(place)
        return Left(row, place, reason)

    def release(self, place: int) -> None:
        self.running -= 1
        self.work.release(place)

    def results(self, left: Sequence[Left]) -> RowResults:
        work = self.work
        place = [work.place_of[each.place] for each in left]
        index = torch.tensor(place)
        return RowResults(
            z=work.answer.index_select(0, index),
            status=[work.status_of[at] for at in place],
            steps=[work.steps_of[at] for at in place],
            numbers=work.numbers[1:7].index_select(1, index).tolist(),
        )

    def excess(self) -> list[float]:
        excess, place = self.work.number_of["excess"], self.work.place_of
        return [excess[place[i]] for i in range(len(self.z))]
