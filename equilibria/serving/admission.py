"""The choice when requests enter a pool: whenever a row is free, or in groups."""

from __future__ import annotations

from typing import Literal

Admission = Literal["auto", "continuous", "grouped"]

SETTLING = 2  # answers, in pools, before a new mode is timed: at first all rows start together, which is not typical
MEASURED = 4  # answers, in pools, that are timed
CHOSEN = 100  # answers, in pools, for which the faster mode is kept before both are timed again


class Admitting:
    """Chooses between two modes of a saturated pool by the measured seconds per answer.

    continuous  requests enter whenever rows are free, beside rows that are further advanced
    grouped     requests enter when the pool is empty, and finished rows are dropped: static batching. It is faster where
                all requests take about the same number of steps, because no row waits long and histories stay short

    A pool that is not saturated is always continuous, which keeps latency low.
    """

    def __init__(self, mode: Admission, capacity: int) -> None:
        self.mode, self.capacity = mode, capacity
        self.grouped = mode == "grouped"
        self.seconds: dict[bool, float] = {}  # per answer, by `grouped`
        self._spent, self._answers, self._skip = 0.0, 0, SETTLING * capacity
        self._chosen = False

    def turned(self, seconds: float, answers: int, *, saturated: bool, empty: bool) -> None:
        """Record one turn of the pool: the seconds it took and the number of rows it finished. May switch the mode."""
        if self.mode != "auto":
            return
        if not saturated:
            self._restart(grouped=False, chosen=False)
            return
        if self._skip > 0:
            self._skip -= answers
            return
        self._spent += seconds
        self._answers += answers
        long = (CHOSEN if self._chosen else MEASURED) * self.capacity
        if self._answers >= long and (empty or not self.grouped):
            self._decide()

    def _decide(self) -> None:
        """Store the seconds per answer of the current mode, then time the other mode or switch to the faster one."""
        self.seconds[self.grouped] = self._spent / self._answers
        other = not self.grouped
        if self._chosen or other not in self.seconds:
            self._restart(grouped=other, chosen=False)  # time the other mode, again after CHOSEN pools
        else:
            self._restart(grouped=self.seconds[True] < self.seconds[False], chosen=True)

    def _restart(self, *, grouped: bool, chosen: bool) -> None:
        changed = grouped != self.grouped
        self.grouped, self._chosen = grouped, chosen
        self._spent, self._answers = 0.0, 0
        self._skip = SETTLING * self.capacity if changed and not grouped else self.capacity if changed else 0
