"""The solve of a pool in torch, for devices, dtypes and norms that the compiled kernels do not cover."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import LEAST, euclidean_norm
from equilibria.serving.records import Records
from equilibria.serving.row_solvers import row_solver
from equilibria.serving.rows import INF, Left, Row, RowResults, SolveRows
from equilibria.solution import Status
from equilibria.stop import Stop

STATUSES = {"stalled": Status.STALLED, "diverged": Status.DIVERGED, "steps": Status.MAX_STEPS, "late": Status.MAX_STEPS}


class TorchRows(SolveRows):
    """The tensors of a solve whose rows enter and leave.

    z, fz        (rows, n), the current iterates and the values of the cell at them
    best_z       (rows, n), the best iterates; the same object as `z` while every row improves
    residual     (rows, n), f(z) - z
    length       (rows,), Euclidean norms of the residuals
    improved     (rows,) bool, True for rows whose last iterate was their best; None means all rows
    tolerances   (2, room), rtol and atol
    room         rows for which memory is allocated
    """

    def __init__(
        self, like: Tensor, capacity: int, n: int, solver: Any, stop: Stop, floor: float, norm: Callable[[Tensor], Tensor]
    ) -> None:
        self.like, self.capacity, self.n, self.stop, self.norm = like, capacity, n, stop, norm
        self.solver = row_solver(solver, like, n)
        self.records = Records(floor, stop.patience)
        self.room = 0
        self.z = self.fz = self.best_z = like.new_zeros(0, n)
        self.residual, self.length = self.z, like
        self.improved: Tensor | None = None
        self.tolerances = like.new_zeros(2, 0)
        self.proposed = False  # True if the rows took a step, so that `record` has a pair to absorb
        self.entering: tuple[Tensor, Sequence[int] | None] | None = None

    def extend(self, count: int) -> None:
        have = len(self.z)
        if have + count > self.room:
            # allocate memory for `rows` rows
            rows = min(max(have + count, 2 * self.room), self.capacity)
            self.room = rows
            self.solver.reserve(rows)
            tolerances = self.like.new_ones(2, rows)
            tolerances[:, : self.tolerances.shape[1]] = self.tolerances
            self.tolerances = tolerances
        zeros = self.like.new_zeros(count, self.n)
        self.z, self.fz = torch.cat([self.z, zeros]), torch.cat([self.fz, zeros])
        self.best_z = torch.cat([self.best_z, zeros])
        self.length = torch.cat([self.length, zeros[:, 0]])
        self.residual = self.solver.residual(self.z, self.fz)
        if self.improved is not None:
            self.improved = torch.cat([self.improved, torch.ones(count, dtype=torch.bool, device=self.like.device)])
        self.records.extend(count)

    def cut(self, count: int) -> None:
        same = self.best_z is self.z
        self.z, self.fz, self.residual = self.z[:count], self.fz[:count], self.residual[:count]
        self.best_z = self.z if same else self.best_z[:count]
        self.length = self.length[:count]
        self.improved = None if self.improved is None else self.improved[:count]
        self.records.cut(count)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        here, there = (torch.tensor(places, device=self.like.device) for places in (source, target))
        self.solver.move(here, there)
        self.tolerances.index_copy_(1, there, self.tolerances.index_select(1, here))
        same = self.best_z is self.z
        self.z, self.fz, self.length = (_moved(t, here, there) for t in (self.z, self.fz, self.length))
        self.best_z = self.z if same else _moved(self.best_z, here, there)
        self.improved = None if self.improved is None else _moved(self.improved, here, there)
        self.residual = self.solver.residual(self.z, self.fz)
        self.records.move(source, target)

    def propose(self, depth: Callable[[], int] | None) -> Tensor:
        self.proposed = depth is not None
        if depth is None:
            return self.z
        return self.solver.propose(self.z, self.fz, self.residual, self.length, depth(), self.improved)

    def begin(self, z: Tensor, index: Tensor, rows: Sequence[Row], numbers: Sequence[int] | None, z0: Tensor) -> Tensor:
        info = torch.finfo(self.like.dtype)
        self.records.begin(index.tolist(), rows)
        rtols = [max(row.rtol, LEAST * info.eps) for row in rows]
        atols = [max(self.stop.atol * row.root, info.tiny**0.8) for row in rows]
        self.tolerances.index_copy_(1, index, self.like.new_tensor([rtols, atols]))
        self.entering = index, numbers
        return z.index_copy(0, index, z0)

    def record(self, z: Tensor, fz: Tensor, step: int, rows: Sequence[Row | None], new: Sequence[int]) -> dict[int, str]:
        if self.proposed:
            self.solver.absorb(z, fz)
        self.z, self.fz = z, fz
        self.residual = self.solver.residual(z, fz)
        self.length = torch.linalg.vector_norm(self.residual, dim=1)
        if self.entering is not None:
            index, numbers = self.entering
            self.solver.begin(index, self.length.index_select(0, index), numbers)
            self.entering = None
        length = self.length if self.norm is euclidean_norm else self.norm(self.residual)
        size, count = self.norm(fz), len(z)
        excess = length / torch.addcmul(self.tolerances[1, :count], size, self.tolerances[0, :count])
        excesses, lengths, sizes = torch.stack((excess, length, size)).tolist()  # the only read-back of a step
        stopped, worse = self.records.look(excesses, lengths, sizes, rows, new)
        self._keep_best(worse)
        return self.records.given_up(step, rows) | dict.fromkeys(stopped, "stopped")

    def _keep_best(self, worse: Sequence[int]) -> None:
        """Update the best iterates, except those of the rows in `worse`."""
        if not worse:
            self.improved, self.best_z = None, self.z
            return
        better = torch.ones(len(self.z), dtype=torch.bool)
        better[list(worse)] = False
        self.improved = better.to(self.like.device)
        self.best_z = torch.where(self.improved.unsqueeze(1), self.z, self.best_z)

    def suspects(self, new: Sequence[int], least: float, most: float) -> list[int]:
        lengths, sizes = self.records.first_length, self.records.first_size
        return [i for i in new if not (least <= sizes[i] <= most and lengths[i] < INF)]

    def leave(self, place: int, row: Row, step: int, reason: str) -> Left:
        r = self.records
        excess = r.excess[place]
        status = STATUSES.get(reason, Status.CONVERGED if excess <= 1 else Status.NONFINITE)
        length, size = (r.length[place], r.size[place]) if math.isfinite(excess) else (INF, 1.0)
        peak = max([r.peak[place], *(lengths[place] for lengths in r.trail if lengths[place] > r.peak[place])])
        numbers = (length, size, r.first_length[place], r.first_size[place], peak, r.last[place])
        return Left(row, place, reason, (self.best_z, int(status), step - row.born, numbers))

    def release(self, place: int) -> None:
        """Do nothing, because rows without a request are ignored."""

    def results(self, left: Sequence[Left]) -> RowResults:
        numbers = [list(column) for column in zip(*(each.kept[3] for each in left), strict=True)]
        return RowResults(_answers(left), [each.kept[1] for each in left], [each.kept[2] for each in left], numbers)

    def excess(self) -> list[float]:
        return self.records.excess


def _answers(left: Sequence[Left]) -> Tensor:
    """Return the iterates of rows that left at different steps, (rows, n)."""
    parts, begin = [], 0
    for end in range(1, len(left) + 1):
        if end == len(left) or left[end].kept[0] is not left[begin].kept[0]:
            index = torch.tensor([each.place for each in left[begin:end]], device=left[begin].kept[0].device)
            parts.append(left[begin].kept[0].index_select(0, index))
            begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _moved(tensor: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return tensor.index_copy(0, target, tensor.index_select(0, source))
