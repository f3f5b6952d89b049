"""The solve of a pool by the compiled kernels: one call per step, and no work per row in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import LEAST, PATIENCE, Anderson, PoolWorkspace, history_limit
from equilibria.serving.rows import Left, Row, RowResults, SolveRows
from equilibria.solution import Status
from equilibria.stop import Stop

REASONS = {int(Status.STALLED): "stalled", int(Status.DIVERGED): "diverged", int(Status.MAX_STEPS): "steps"}


class NativeRows(SolveRows):
    """`PoolWorkspace` with the interface of a pool.

    z    (rows, n), the iterates recorded last
    out  (rows, n), the points to evaluate next
    """

    def __init__(self, like: Tensor, capacity: int, n: int, solver: Any, stop: Stop, precision: float, most: int) -> None:
        self.rule, self.like, self.n, self.stop = solver, like, n, stop
        self.work = PoolWorkspace(like, capacity, n, solver, stop, precision, most)
        self.z = self.out = like.new_zeros(0, n)
        info = torch.finfo(like.dtype)
        self.least_rtol, self.least_atol = LEAST * info.eps, info.tiny**0.8
        self.running = 0
        self.usual = self._limits(n)

    def _limits(self, n: int) -> tuple[int, int]:
        """Return the slots of the history of a row of `n` numbers, and its patience."""
        limit = history_limit(self.rule, n, self.like)
        return limit, PATIENCE + (0 if limit < n else limit) if isinstance(self.rule, Anderson) else 0

    def extend(self, count: int) -> None:
        self.out = torch.cat((self.out, self.out.new_zeros(count, self.n)))

    def cut(self, count: int) -> None:
        self.z, self.out = self.z[:count], self.out[:count]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        here, there = torch.tensor(source), torch.tensor(target)
        self.z, self.out = (each.index_copy(0, there, each.index_select(0, here)) for each in (self.z, self.out))
        self.work.swap(source, target)

    def propose(self, depth: int) -> Tensor:
        return self.out

    def begin(self, z: Tensor, index: Tensor, rows: Sequence[Row], numbers: Sequence[int] | None, z0: Tensor) -> Tensor:
        limits = [self.usual] * len(rows) if numbers is None else [self._limits(n) for n in numbers]
        born, end = [row.born for row in rows], [row.end for row in rows]
        watched, roots = [int(row.watched) for row in rows], [row.root for row in rows]
        rtols = [max(row.rtol, self.least_rtol) for row in rows]
        atols = [max(self.stop.atol * root, self.least_atol) for root in roots]
        counts = [born, end, [limit for limit, _ in limits], [patience for _, patience in limits], watched]
        self.work.begin(index, counts, [rtols, atols, roots])
        self.running += len(rows)
        self.out = z = z.index_copy_(0, index, z0)
        return z

    def record(self, z: Tensor, fz: Tensor, step: int, rows: Sequence[Row | None], new: Sequence[int]) -> dict[int, str]:
        before, self.z, self.out = self.z, z, torch.empty_like(z)
        running = self.work.record(z, fz.contiguous(), before, self.out, step)
        stopped, self.running = self.running - running, running
        if not stopped:
            return {}
        found = self.work.stopped[:stopped]
        status = self.work.status.index_select(0, self.work.place.index_select(0, found))
        return {i: REASONS.get(s, "stopped") for i, s in zip(found.tolist(), status.tolist(), strict=True)}

    def starts(self, new: Sequence[int]) -> tuple[list[float], list[float]]:
        place = self.work.place.index_select(0, torch.tensor(new))
        lengths, sizes = self.work.numbers[3:5].index_select(1, place).tolist()
        return lengths, sizes

    def leave(self, place: int, row: Row, step: int, reason: str) -> Left:
        at = int(self.work.place[place]) if reason in ("late", "unusual") else -1
        if at >= 0 and self.work.status[at] < 0:
            if self.work.flags[1, at]:  # its last iterate is its best
                self.work.answer[at] = self.z[place]
            self.release(place)
        return Left(row, place, reason)

    def release(self, place: int) -> None:
        self.running -= 1
        self.work.release(place)

    def results(self, left: Sequence[Left]) -> RowResults:
        place = self.work.place.index_select(0, torch.tensor([each.place for each in left]))
        return RowResults(
            z=self.work.answer.index_select(0, place),
            status=self.work.status.index_select(0, place).tolist(),
            steps=self.work.counter("steps").index_select(0, place).tolist(),
            numbers=self.work.numbers[1:7].index_select(1, place),
        )

    def excess(self) -> list[float]:
        found: list[float] = self.work.number("excess").index_select(0, self.work.place[: len(self.z)]).tolist()
        return found
