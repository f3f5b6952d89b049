"""The intervals at which rows enter and are answered, derived from the measured costs of doing so and of a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

KEPT = 15  # measurements; their median is robust against an occasional slow one
FIRST = 3  # steps between two exchanges before anything is measured
FORGET = 0.99  # weight of earlier rows in the running mean of steps per row
NARROW = 4  # steps of less than 1 / NARROW of all rows are kept apart
RENEW = 8  # measurements between two computations of a period


class Cost:
    """Measured seconds of an operation that handles several rows at once."""

    def __init__(self) -> None:
        self.found: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._added = 0

    def add(self, rows: int, seconds: float) -> bool:
        """Record a measurement; True where what follows from the measurements is to be computed anew."""
        self.found.append((rows, seconds))
        self._added += 1
        return self._added <= RENEW or self._added % RENEW == 0

    @property
    def fixed(self) -> float:
        """Seconds that do not depend on the number of rows: the intercept of a line through the measurements."""
        found = list(self.found)
        if not found:
            return 0.0
        half = len(found) // 2
        pairs = zip(found[:half], found[-half:], strict=True) if half else ()
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if a[0] != b[0]]
        slope = max(median(slopes), 0.0) if slopes else 0.0
        whole = median(seconds for _, seconds in found)
        return max(median(seconds - slope * rows for rows, seconds in found), 0.25 * whole)

    def middle(self) -> float:
        """Return the median of the seconds."""
        return median(seconds for _, seconds in self.found)


class Pacing:
    """Measured costs of a pool, and the number of steps between two admissions or two answers.

    Admitting r rows costs a + b r. With a period of T steps the fixed part costs a / T per step, while rows that finished in
    between stay idle for T / 2 steps on average: a pool whose rows take m steps loses T / 2m of every step to that. The sum
    is smallest at T = sqrt(2 a m / step). The same T minimises the latency of a request, whose m steps take a / T longer
    each and which waits for T / 2 steps. Answers use the same formula with the cost of the model's last part.
    """

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self.steps = 0.0  # mean number of steps of a row
        self.enter_period = self.answer_period = FIRST
        self._enter, self._answer = Cost(), Cost()
        self._narrow, self._wide = Cost(), Cost()

    @property
    def step(self) -> float:
        """Seconds of a step, with as many rows as lately."""
        last = self._wide if self._wide.found else self._narrow
        return last.middle() if last.found else 0.0

    @property
    def narrow_step(self) -> float:
        """Seconds of a step of few rows."""
        return self._narrow.middle() if self._narrow.found else self.step

    def extra_of_groups(self, steps: float, *, full: bool) -> float:
        """Return the seconds that a pool of requests takes beyond those of its rows' steps if it enters as a group.

        steps  those of the slowest row beyond the mean
        full   steps of few rows cost as much as those of many
        """
        step = self.step if full else self.narrow_step
        return self._enter.fixed + self._answer.fixed + step * steps

    def extra_of_continuous(self) -> float:
        """Return the same if rows enter and leave at any time: sqrt(2 a m step) for entering, at the best period."""
        steps = max(self.steps, 1.0)
        return math.sqrt(2 * self._enter.fixed * steps * self.step) + self._answer.fixed * steps / self.answer_period

    def stepped(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` rows."""
        (self._narrow if rows * NARROW < self.capacity else self._wide).add(rows, seconds)

    def finished(self, steps: Sequence[int]) -> None:
        """Record the numbers of steps of rows that finished."""
        if steps:
            mean, kept = sum(steps) / len(steps), FORGET ** len(steps)
            self.steps = mean if self.steps == 0 else kept * self.steps + (1 - kept) * mean

    def entered(self, rows: int, seconds: float) -> None:
        """Record that `rows` rows entered in `seconds`, not counting the step itself."""
        if self._enter.add(rows, seconds):
            self.enter_period = self._period(self._enter)

    def answered(self, rows: int, seconds: float) -> None:
        """Record that `rows` rows were answered in `seconds`."""
        if self._answer.add(rows, seconds):
            self.answer_period = self._period(self._answer)

    def _period(self, cost: Cost) -> int:
        """Return the period in steps that minimises the cost per step; FIRST before anything is measured."""
        if self.step == 0 or self.steps == 0:
            return FIRST
        best = math.sqrt(2 * cost.fixed * max(self.steps, 1.0) / self.step)
        return max(1, min(round(best), math.ceil(self.steps / 2)))
