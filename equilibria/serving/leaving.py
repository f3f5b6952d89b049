"""Rows that have left the solve and are not yet answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.serving.adapter import FALL, GROWN, settle
from equilibria.serving.rows import Left, Row, RowResults
from equilibria.solution import Status


@dataclass
class Done:
    """Rows that have left and wait for the part of the model behind the layer."""

    rows: list[Row]
    z: Tensor  # (rows, n)
    carried: list[Tensor]
    status: list[int]
    steps: list[int]
    residual: list[float]
    late: list[bool]

    @staticmethod
    def of(
        left: Sequence[Left], results: RowResults, carried: Sequence[Tensor], precision: float, least: float
    ) -> tuple[Done, list[int]]:
        """Return the rows that left, and the positions of rows whose numbers are so small that their squares underflow.

        carried  the tensors that all rows of the pool carry
        least    smallest norm whose square the dtype can represent
        """
        place = torch.tensor([each.place for each in left], device=results.z.device)
        rows, status, steps, numbers = [each.row for each in left], results.status, results.steps, results.numbers
        lengths, sizes = numbers[0], numbers[1]
        tiny = torch.finfo(results.z.dtype).tiny
        residual = [length / max(size, tiny) for length, size in zip(lengths, sizes, strict=True)]
        carried = [buffer.index_select(0, place) for buffer in carried]
        late = [each.reason == "late" for each in left]
        done = Done(rows, results.z, carried, status, steps, residual, late)
        doubtful = _doubtful(rows, status, numbers, precision)
        if doubtful:
            done._settle(numbers, doubtful, precision)
        if min(sizes) >= least:
            return done, []
        sound = (Status.CONVERGED, Status.STALLED)
        faint = [j for j, size in enumerate(sizes) if 0 < size < least and steps[j] > 0 and status[j] in sound]
        return done, faint

    def _settle(self, numbers: Sequence[Sequence[float]], doubtful: Sequence[int], precision: float) -> None:
        """Set answers, statuses and residuals of rows that may have failed, for all rows of one tolerance at once."""
        groups: dict[float, list[int]] = {}
        for j in doubtful:
            groups.setdefault(self.rows[j].rtol, []).append(j)
        for rtol, group in groups.items():
            index = torch.tensor(group, device=self.z.device)
            rows = [self.rows[j] for j in group]
            z, status, residual = settle(
                precision,
                rtol,
                self.z.new_tensor([row.root for row in rows]),
                torch.stack([row.starts[row.at] for row in rows]),
                self.z.index_select(0, index),
                torch.tensor([self.status[j] for j in group], device=self.z.device),
                torch.tensor([self.steps[j] for j in group], device=self.z.device),
                self.z.new_tensor([[column[j] for j in group] for column in numbers]),
            )
            self.z.index_copy_(0, index, z)
            for j, own_status, own_residual in zip(group, status, residual, strict=True):
                self.status[j], self.residual[j] = own_status, own_residual

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


def _doubtful(rows: Sequence[Row], status: Sequence[int], numbers: Sequence[Sequence[float]], precision: float) -> list[int]:
    """Return the positions of rows that may have failed.

    These are rows with another status than CONVERGED, and rows whose state has grown so much that any residual is small
    relative to it.
    """
    _, sizes, first_lengths, first_sizes, *_ = numbers
    return [
        j
        for j, (ended, size, first) in enumerate(zip(status, sizes, first_sizes, strict=True))
        if ended or (size > GROWN * first and size * max(rows[j].rtol, precision) > FALL * first_lengths[j])
    ]
