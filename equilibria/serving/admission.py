"""The choice when waiting requests enter a pool: whenever rows are free, or in groups."""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import Literal

from equilibria.serving.pacing import Pacing

Admission = Literal["auto", "continuous", "grouped"]

COHORTS = 9  # whose steps are kept
CLEARLY = 1.25  # groups are used unless they cost clearly more, so that the mode does not flip


class Admitting:
    """Chooses between two modes of admission by measured costs.

    continuous  requests enter whenever rows are free, beside rows that are further advanced
    grouped     requests enter when the pool is empty, and finished rows are dropped: static batching

    A group takes as many steps as its slowest row, the last ones with few rows. In return its rows enter and are answered
    once, where the continuous mode does so every few steps (see `Pacing`). The mode whose extra cost is smaller is used; the
    continuous one only if it is clearly smaller, because costs are measured on a machine that does other things too. Where
    few requests wait, the pool is always continuous, which keeps latency low.

    Steps are recorded by cohort: as many requests as the pool has rows, in the order in which they entered. In the order in
    which they leave, the first ones after a change of mode would all be easy, and a mixed load would look uniform.
    """

    def __init__(self, mode: Admission, capacity: int, *, full: bool = False) -> None:
        self.mode, self.capacity, self.full = mode, capacity, full
        self.grouped = mode != "continuous"  # the first group measures the costs of steps of few and of many rows
        self._entered = 0
        self._open: dict[int, list[int]] = {}  # steps of the rows that have left, by cohort
        self._longest: deque[int] = deque(maxlen=COHORTS)
        self._mean: deque[float] = deque(maxlen=COHORTS)

    def enter(self) -> int:
        """Count a request that enters, and return the number of its cohort."""
        self._entered += 1
        return (self._entered - 1) // self.capacity

    def leave(self, cohort: int, steps: int, pacing: Pacing) -> None:
        """Record that a row has left after so many steps; chooses the mode after every whole cohort."""
        left = self._open.setdefault(cohort, [])
        left.append(steps)
        if len(left) == self.capacity:
            del self._open[cohort]
            self._longest.append(max(left))
            self._mean.append(fmean(left))
            if self.mode == "auto":
                extra = pacing.extra_of_groups(self.longest - fmean(self._mean), full=self.full)
                self.grouped = extra < CLEARLY * pacing.extra_of_continuous()

    @property
    def longest(self) -> float:
        """Mean over cohorts of the largest number of steps of a row; 0 before the first whole cohort."""
        return fmean(self._longest) if self._longest else 0.0
