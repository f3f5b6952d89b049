"""The choice when requests enter a saturated pool: whenever rows are free, or in groups."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

from equilibria.serving.pacing import Pacing

Admission = Literal["auto", "continuous", "grouped"]

BLOCKS = 9  # pools whose largest numbers of steps are kept


class Admitting:
    """Chooses between two modes of a saturated pool by measured costs.

    continuous  requests enter whenever rows are free, beside rows that are further advanced
    grouped     requests enter when the pool is empty, and finished rows are dropped: static batching

    A step of r rows costs c(r) = c + b r. A group takes as many steps as its slowest row, so that it pays c for `longest`
    steps, where a pool whose rows are always in use pays it for `mean` steps. In return the continuous mode has rows enter
    and leave every T steps at a cost a, and leaves rows idle in between, which costs sqrt(2 a mean c(rows)) per pool at the
    best T (see `Pacing`), where a group pays a once. A pool that is not saturated is always continuous, which keeps latency
    low.
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
                self.grouped = self._is_grouped_faster(pacing)

    def _is_grouped_faster(self, pacing: Pacing) -> bool:
        """Compare the costs of both modes for one pool of requests."""
        enter = pacing.exchange
        whole = pacing.step_of(self.capacity)
        fixed = whole if self.full else pacing.step_of(0)
        saved = fixed * (median(self._longest) - pacing.steps) + enter
        return saved < math.sqrt(2 * enter * max(pacing.steps, 1.0) * whole)
