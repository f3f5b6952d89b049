"""How often rows are exchanged: by the measured cost of an exchange and of a step."""

from __future__ import annotations

import math

FORGET = 0.9  # share of the earlier measurements that counts when a new one comes
FIRST = 4  # steps between two exchanges while nothing is measured


class Pacing:
    """Measured costs of a pool, and the number of steps between two exchanges of rows that they suggest.

    An exchange (the model's parts before and after the layer, and the bookkeeping) costs a + b per row. With a period of T
    steps it costs a / T a step, while the rows that finished in between stand idle, T / 2 steps each on average. A pool
    whose rows take m steps loses T / 2m of every step to that. The sum is least at T = sqrt(2 a m / step).
    """

    def __init__(self) -> None:
        self.step = 0.0  # seconds of a step
        self.steps = 0.0  # of a row until it is done
        self._weight = self._count = self._seconds = self._squares = self._products = 0.0

    def stepped(self, seconds: float) -> None:
        self.step = seconds if self.step == 0 else FORGET * self.step + (1 - FORGET) * seconds

    def finished(self, steps: int) -> None:
        self.steps = steps if self.steps == 0 else FORGET * self.steps + (1 - FORGET) * steps

    def exchanged(self, rows: int, seconds: float) -> None:
        """An exchange of so many rows took so long."""
        sums = self._weight, self._count, self._seconds, self._squares, self._products
        new = 1.0, float(rows), seconds, float(rows * rows), rows * seconds
        decayed = (FORGET * old + now for old, now in zip(sums, new, strict=True))
        self._weight, self._count, self._seconds, self._squares, self._products = decayed

    @property
    def fixed(self) -> float:
        """Seconds of an exchange that do not depend on its rows: the intercept of a line through the measurements."""
        if self._weight == 0:
            return 0.0
        mean, seconds = self._count / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        slope = (self._products / self._weight - mean * seconds) / variance if variance > 0.25 else 0.0
        return min(max(seconds - slope * mean, 0.1 * seconds), seconds)

    @property
    def period(self) -> int:
        """Steps between two exchanges."""
        if self.step == 0 or self._weight == 0 or self.steps == 0:
            return FIRST
        best = math.sqrt(2 * self.fixed * max(self.steps, 1.0) / self.step)
        return max(1, min(round(best), math.ceil(self.steps / 2)))
