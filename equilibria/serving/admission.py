"""The choice when requests enter a saturated pool: whenever rows are free, or in groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

from equilibria.serving.pacing import Pacing

Admission = Literal["auto", "continuous", "grouped"]

BLOCKS = 9  # pools whose largest numbers of steps are kept
CLEARLY = 1.25


class Admitting:
    """Chooses between two modes of a saturated pool by measured costs.

    continuous  requests enter whenever rows are free, beside rows that are further advanced
    grouped     requests enter when the pool is empty, and finished rows are dropped: static batching

    A group takes as many steps as its slowest row, the last ones with few rows. In return its rows enter and are answered
    once, where the continuous mode does so every few steps (see `Pacing`). The mode whose extra cost is smaller is used; the
    continuous one only if it is clearly smaller, because costs are measured on a machine that does other things too. A pool
    that is not saturated is always continuous, which keeps latency low.
    """

    def __init__(self, mode: Admission, capacity: int, *, full: bool = False) -> None:
        self.mode, self.capacity, self.full = mode, capacity, full
        self.grouped = mode != "continuous"  # the first group measures the costs of steps of few and of many rows
        self._longest: deque[int] = deque(maxlen=BLOCKS)
        self._most, self._rows = 0, 0  # of the rows that finished since

    def finished(self, steps: Sequence[int], pacing: Pacing) -> None:
        """Record the numbers of steps of rows that finished; chooses the mode after every pool of them."""
        self._most, self._rows = max([self._most, *steps]), self._rows + len(steps)
        if self._rows >= self.capacity:
            self._longest.append(self._most)
            self._most = self._rows = 0
            if self.mode == "auto":
                extra = pacing.extra_of_groups(median(self._longest), full=self.full)
                self.grouped = extra < CLEARLY * pacing.extra_of_continuous()
