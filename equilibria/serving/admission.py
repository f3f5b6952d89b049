"""When requests may enter: whenever a row is free, or in groups."""

from __future__ import annotations

from typing import Literal

Admission = Literal["auto", "continuous", "grouped"]

SETTLING = 2  # pools full of answers until a new mode shows what it costs: rows begin in step with each other
MEASURED = 4  # pools full of answers that are timed
CHOSEN = 100  # pools full of answers for which the quicker mode stays


class Admitting:
    """Chooses, under saturation, between two modes by the measured seconds per answer.

    continuous  requests enter whenever rows are free, beside rows that are further on
    grouped     requests enter when the pool is empty, and rows that are done are dropped: static batching. It wins where all
                requests take about as many steps, as then no row waits long for the others and histories stay short

    A pool that is not saturated is always continuous, for the sake of latency.
    """

    def __init__(self, mode: Admission, capacity: int) -> None:
        self.mode, self.capacity = mode, capacity
        self.grouped = mode == "grouped"
        self.seconds: dict[bool, float] = {}  # per answer, by `grouped`
        self._spent, self._answers, self._skip = 0.0, 0, SETTLING * capacity
        self._chosen = False

    def turned(self, seconds: float, answers: int, *, saturated: bool, empty: bool) -> None:
        """A turn of the pool took so long and finished so many rows."""
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
        self.seconds[self.grouped] = self._spent / self._answers
        other = not self.grouped
        if self._chosen or other not in self.seconds:
            self._restart(grouped=other, chosen=False)  # look at the other one, again
        else:
            self._restart(grouped=self.seconds[True] < self.seconds[False], chosen=True)

    def _restart(self, *, grouped: bool, chosen: bool) -> None:
        changed = grouped != self.grouped
        self.grouped, self._chosen = grouped, chosen
        self._spent, self._answers = 0.0, 0
        self._skip = SETTLING * self.capacity if changed and not grouped else self.capacity if changed else 0
