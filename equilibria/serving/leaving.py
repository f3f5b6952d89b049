"""Rows that have left the solve and are not yet answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.serving.adapter import FALL, GROWN, Ended, judge
from equilibria.serving.records import INF, Records, Row
from equilibria.solution import Status
from equilibria.stop import Stop


@dataclass(eq=False, slots=True)
class Left:
    """A row that has left the solve. Its place keeps the tensors it carried until rows are exchanged."""

    row: Row
    place: int
    z: Tensor  # (rows, n), the best iterates when it left; later steps do not overwrite them
    length: float  # norm of the residual of its best iterate
    size: float
    steps: int
    reason: str
    ended: Ended | None  # None: it converged without doubt

    @staticmethod
    def of(row: Row, place: int, z: Tensor, r: Records, step: int, reason: str, precision: float) -> Left:
        """Return the record of a row that leaves at pool step `step` for `reason`; it has converged if its best residual is
        below tolerance.
        """
        excess, length, size, steps = r.excess[place], r.length[place], r.size[place], step - row.born
        # a state may have grown so much that any residual is small relative to it
        grown = size > GROWN * r.first_size[place] and size * max(row.rtol, precision) > FALL * r.first_length[place]
        ended = None if excess <= 1 and not grown else _ended(row, place, r, steps, reason)
        return Left(row, place, z, length, size, steps, reason, ended)


def _ended(row: Row, place: int, r: Records, steps: int, reason: str) -> Ended:
    """Collect what `judge` needs to decide how the row ended."""
    excess = r.excess[place]
    finite = math.isfinite(excess)
    return Ended(
        rtol=row.rtol,
        excess=excess,
        length=r.length[place] if finite else INF,
        size=r.size[place] if finite else 1.0,
        first_length=r.first_length[place],
        first_size=r.first_size[place],
        peak=max([r.peak[place], *(lengths[place] for lengths in r.trail if lengths[place] > r.peak[place])]),
        last=r.last[place],
        steps=steps,
        open=reason in ("steps", "late"),
        stalled=reason == "stalled",
        diverged=reason == "diverged",
        root=row.root,
    )


@dataclass
class Done:
    """Rows that wait for the part of the model behind the layer."""

    rows: list[Row]
    z: Tensor  # (rows, n)
    carried: list[Tensor]
    status: list[int]
    steps: list[int]
    residual: list[float]
    late: list[bool]

    @staticmethod
    def of(left: Sequence[Left], carried: Sequence[Tensor]) -> Done:
        """Gather rows that left at different steps; `carried` are the tensors that all rows of the pool carry."""
        place = torch.tensor([each.place for each in left], device=left[0].z.device)
        tiny = torch.finfo(left[0].z.dtype).tiny
        return Done(
            rows=[each.row for each in left],
            z=_answers(left),
            carried=[buffer.index_select(0, place) for buffer in carried],
            status=[int(Status.CONVERGED)] * len(left),
            steps=[each.steps for each in left],
            residual=[each.length / max(each.size, tiny) for each in left],
            late=[each.reason == "late" for each in left],
        )

    def judge(self, j: int, left: Left, stop: Stop, precision: float, least: float) -> bool:
        """Set status and residual of a row; False if its numbers are so small that their squares underflow."""
        if left.ended is not None:
            start = left.row.start.unsqueeze(0)
            answer, self.status[j], self.residual[j] = judge(stop, precision, start, self.z[j : j + 1], left.ended)
            self.z[j] = answer[0]
        arrived = self.status[j] in (Status.CONVERGED, Status.STALLED)
        return not (arrived and 0 < left.size < least and left.steps > 0)

    @staticmethod
    def join(parts: Sequence[Done]) -> Done:
        """Concatenate several groups of rows into one."""
        if len(parts) == 1:
            return parts[0]
        names = ("rows", "status", "steps", "residual", "late")
        rows, status, steps, residual, late = ([v for part in parts for v in getattr(part, name)] for name in names)
        carried = [torch.cat(columns) for columns in zip(*(part.carried for part in parts), strict=True)]
        return Done(rows, torch.cat([part.z for part in parts]), carried, status, steps, residual, late)

    def select(self, rows: Sequence[int]) -> Done:
        """Return the rows at these positions."""
        if len(rows) == len(self.rows):
            return self
        index = torch.tensor(rows, device=self.z.device)
        picked = [[getattr(self, name)[j] for j in rows] for name in ("rows", "status", "steps", "residual", "late")]
        own, status, steps, residual, late = picked
        z, *carried = (tensor.index_select(0, index) for tensor in (self.z, *self.carried))
        return Done(own, z, carried, status, steps, residual, late)


def _answers(left: Sequence[Left]) -> Tensor:
    """Return the iterates of rows that left at different steps, (rows, n)."""
    parts, begin = [], 0
    for end in range(1, len(left) + 1):
        if end == len(left) or left[end].z is not left[begin].z:
            index = torch.tensor([each.place for each in left[begin:end]], device=left[begin].z.device)
            parts.append(left[begin].z.index_select(0, index))
            begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)
