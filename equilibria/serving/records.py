"""The history of every row's residuals, and the decision which rows are done.

The numbers of a step arrive in one read-back, as lists of floats. In most steps every row improves and none is done. Such a
step only compares two numbers per row.
"""

from __future__ import annotations

from collections.abc import Sequence

from equilibria.serving.adapter import DIVERGENCE, DIVERGENCE_EVERY, FLOOR_PATIENCE, PROGRESS
from equilibria.serving.rows import INF, Row

FOLD = 64  # steps whose norms are kept before they are reduced to their maximum


class Records:
    """Lists with one entry per evaluated row. Lengths are norms of residuals, sizes are norms of f(z)."""

    NAMES = ("excess", "length", "size", "first_length", "first_size", "peak", "last")

    def __init__(self, floor: float, patience: int | None) -> None:
        self.floor, self.patience = floor, patience  # relative residuals below the floor are rounding errors
        self.excess: list[float] = []  # residual over tolerance of the best iterate
        self.length: list[float] = []  # norm of the residual of the best iterate; `size` belongs to the same iterate
        self.size: list[float] = []
        self.first_length: list[float] = []
        self.first_size: list[float] = []
        self.peak: list[float] = []  # largest length, not counting those in the trail
        self.last: list[float] = []  # length of the last iterate
        self.trail: list[list[float]] = []  # lengths of the last steps, not yet in `peak`
        self.next_end = 0  # no row runs out of steps before this step of the pool
        self.watching = False  # some row may have its progress checked

    def extend(self, rows: int) -> None:
        self.fold()
        for name in self.NAMES:
            getattr(self, name).extend([INF if name == "excess" else 0.0] * rows)

    def cut(self, rows: int) -> None:
        for name in self.NAMES:
            setattr(self, name, getattr(self, name)[:rows])
        self.trail = [lengths[:rows] for lengths in self.trail]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the records of rows at `source` to the places `target`."""
        self.fold()
        for name in self.NAMES:
            values = getattr(self, name) if name != "last" else self.last
            setattr(self, name, values := list(values))
            for a, b in zip(source, target, strict=True):
                values[b] = values[a]

    def fold(self) -> None:
        """Reduce the lengths of the last steps to their maximum."""
        for lengths in self.trail:
            # the comparison is false for nan, which is then ignored
            self.peak = [new if new > old else old for old, new in zip(self.peak, lengths, strict=True)]
        self.trail = []

    def begin(self, places: Sequence[int], rows: Sequence[Row]) -> None:
        """Reset the records of rows that are at their start."""
        self.fold()
        self.excess, self.peak = list(self.excess), list(self.peak)
        for place in places:
            self.excess[place], self.peak[place] = INF, 0.0
        self.next_end = min([self.next_end, *(row.end for row in rows)])
        self.watching = self.watching or any(row.watched for row in rows)

    def look(
        self, excess: list[float], length: list[float], size: list[float], rows: Sequence[Row | None], new: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Record an iterate; return the rows that converged or are not finite, and those whose best iterate is older."""
        if new:
            self.first_length, self.first_size = list(self.first_length), list(self.first_size)
            for i in new:
                self.first_length[i], self.first_size[i] = length[i], size[i]
        stopped, worse = [], []
        for i in [i for i, (e, b) in enumerate(zip(excess, self.excess, strict=True)) if not 1.0 < e < b]:
            if rows[i] is None:
                continue
            if not excess[i] < self.excess[i]:
                worse.append(i)
            if not 1.0 < excess[i] < INF:
                stopped.append(i)
        self._keep(excess, length, size, worse)
        return stopped, worse

    def _keep(self, excess: list[float], length: list[float], size: list[float], worse: list[int]) -> None:
        """Store the new numbers; rows in `worse` keep those of their best iterate."""
        self.last = length
        self.trail.append(length)
        if len(self.trail) >= FOLD:
            self.fold()
        if worse:
            excess, length, size = list(excess), list(length), list(size)
            for i in worse:
                excess[i], length[i], size[i] = self.excess[i], self.length[i], self.size[i]
        self.excess, self.length, self.size = excess, length, size

    def given_up(self, step: int, rows: Sequence[Row | None]) -> dict[int, str]:
        """Return the rows that diverge, stall or run out of steps, with the reason."""
        found: dict[int, str] = {}
        if any(length > DIVERGENCE for length in self.last):
            found = {i: "diverged" for i, row in enumerate(rows) if row is not None and self._diverged(i, row, step)}
        if self.watching:
            found |= {
                i: "stalled" for i, row in enumerate(rows) if row is not None and row.watched and self._stalled(i, row)
            }
        if step >= self.next_end:
            found |= {i: "steps" for i, row in enumerate(rows) if row is not None and step >= row.end and i not in found}
            self.next_end = min((row.end for row in rows if row is not None and row.end > step), default=step + FOLD)
        return found

    def _diverged(self, i: int, row: Row, step: int) -> bool:
        taken = step - row.born
        far = DIVERGENCE * max(self.first_length[i], self.first_size[i], row.root)
        return taken > 0 and taken % DIVERGENCE_EVERY == 0 and self.last[i] > far

    def _stalled(self, i: int, row: Row) -> bool:
        """Return True if the row is out of patience, or if its residual is at the level of rounding errors."""
        if self.excess[i] < PROGRESS * row.milestone:
            row.milestone, row.waiting = self.excess[i], 0
        else:
            row.waiting += 1
        at_floor = self.length[i] < self.floor * self.size[i] and row.waiting >= FLOOR_PATIENCE
        return at_floor or (self.patience is not None and row.waiting >= self.patience)
