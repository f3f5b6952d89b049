"""When rows of a pool enter, are answered and are moved together, derived from the measured costs of doing so."""

from __future__ import annotations

import itertools
from collections import deque
from statistics import median
from typing import Literal

Admission = Literal["auto", "continuous", "grouped"]

KEPT = 15  # measurements; their median is robust against an occasional slow one
MEMORY = 1024  # rows over which steps are averaged
RENEW = 8  # measurements between two computations of a cost
SIZES = 4  # classes of batch sizes by which steps are measured


class Cost:
    """Measured seconds of an operation that handles several rows at once.

    fixed  seconds that do not depend on the number of rows: the intercept of a line through the measurements
    """

    def __init__(self) -> None:
        self.found: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._added = 0
        self.fixed = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Record a measurement."""
        self.found.append((rows, seconds))
        self._added += 1
        if self._added <= RENEW or self._added % RENEW == 0:
            self.fixed = self._intercept()

    def _intercept(self) -> float:
        found = list(self.found)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(found, 2) if a[0] != b[0]]
        slope = max(median(slopes), 0.0) if slopes else 0.0
        whole = median(seconds for _, seconds in found)
        return max(median(seconds - slope * rows for rows, seconds in found), 0.25 * whole)


class StepCost:
    """Measured seconds of a step, by the number of evaluated rows.

    whole    seconds of a step of the largest batches met
    per_row  seconds that one more row adds
    fixed    seconds that do not depend on the number of rows
    """

    def __init__(self, capacity: int) -> None:
        self._width = max(-(-capacity // SIZES), 1)
        self._found: list[deque[tuple[int, float]]] = [deque(maxlen=KEPT) for _ in range(SIZES)]
        self._added = 0
        self.whole = self.per_row = self.fixed = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Record a measurement."""
        self._found[(rows - 1) // self._width].append((rows, seconds))
        self._added += 1
        if self._added <= RENEW or self._added % RENEW == 0:
            self._renew()

    def _renew(self) -> None:
        classes = [(median(r for r, _ in each), median(s for _, s in each)) for each in self._found if each]
        (few, short), (many, self.whole) = classes[0], classes[-1]
        # rows are taken to cost the same each, until steps of different sizes have been measured
        self.per_row = max((self.whole - short) / (many - few), 0.0) if few != many else self.whole / many
        self.fixed = max(self.whole - self.per_row * many, 0.0)


class Variation:
    """The squared coefficient of variation of the steps that rows take, in a running average."""

    def __init__(self) -> None:
        self.count, self.mean, self.square = 0, 0.0, 0.0

    def add(self, steps: int) -> None:
        """Record the number of steps of a row that has left."""
        self.count += 1
        weight = 1.0 / min(self.count, MEMORY)
        self.mean += weight * (steps - self.mean)
        self.square += weight * (steps * steps - self.square)

    @property
    def squared(self) -> float:
        return max(self.square / self.mean**2 - 1.0, 0.0) if self.mean > 0 else 0.0


class Pacing:
    """Decides when rows are exchanged.

    To let rows enter, or to answer rows, costs time that does not depend on their number, and delays every other row by it.
    Not to do it delays the rows that wait by a step after every step. An exchange is due when the delay of the rows that
    waited for it has reached the delay that it causes. If rows come at a constant rate, this is the period with the smallest
    sum of both. An empty pool is filled at once.

    The part of a step that grows with the number of rows counts in that delay only as far as steps vary, up to a squared
    coefficient of variation of 1. If all requests take as many steps, a row that enters makes the steps of the others
    longer by as much as it gains itself. (In a single queue, sharing the processor has a smaller mean latency than first
    come, first served if the squared coefficient of variation is above 1.)

    - Where steps hardly vary and an exchange costs many steps, the rows of a batch leave together before it is due: the
      pool then works in groups, like static batching.
    - Where steps vary, or take long compared with an exchange, rows enter whenever some are free.
    - A queue longer than the pool is not served faster by early answers, so that answers become rare.

    Empty rows that no request waits for are dropped by the same rule: when evaluating them has cost as much as moving the
    others together.

    mode  "auto": as above; "continuous": rows enter as soon as they are free; "grouped": only into an empty pool
    """

    def __init__(self, capacity: int, mode: Admission = "auto") -> None:
        self.capacity, self.mode = capacity, mode
        self.enter, self.answer, self.compact = Cost(), Cost(), Cost()
        self.step, self.steps = StepCost(capacity), Variation()
        self.idle = self.unanswered = self.empty = 0  # rows that waited for an exchange, summed over the steps since then

    def stepped(self, rows: int, seconds: float, *, idle: int, unanswered: int, empty: int) -> None:
        """Record a step of `rows` rows.

        idle        empty rows for which a request waits
        unanswered  rows that have left and are not answered
        empty       other empty rows
        """
        self.step.add(rows, seconds)
        self.waited(idle, unanswered, empty)

    def waited(self, idle: int, unanswered: int, empty: int) -> None:
        """Count the rows that waited during a step."""
        self.idle += idle
        self.unanswered += unanswered
        self.empty += empty

    def may_enter(self, active: int, waiting: int) -> bool:
        """True if waiting requests are to enter beside `active` rows."""
        if active == 0 or self.mode == "continuous":
            return True
        if self.mode == "grouped":
            return False
        cost = self.enter.fixed
        if waiting < self.capacity:  # rows that enter apart from the others are answered apart
            cost += self.answer.fixed
        step = self.step.fixed + min(self.steps.squared, 1.0) * (self.step.whole - self.step.fixed)
        return self.idle * step >= cost * min(self.capacity, active + waiting)

    def may_answer(self, active: int, waiting: int, left: int) -> bool:
        """True if the rows that have left, `left` of them, are to be answered."""
        return left >= self.capacity or self.unanswered * self.step.whole >= self.answer.fixed * (active + waiting)

    def may_compact(self) -> bool:
        """True if rows are to be moved together."""
        return self.empty * self.step.per_row >= self.compact.fixed and self.empty > 0

    def entered(self, rows: int, seconds: float) -> None:
        """Record that `rows` rows entered in `seconds`, not counting the step itself."""
        self.enter.add(rows, seconds)
        self.idle = self.empty = 0

    def answered(self, rows: int, seconds: float) -> None:
        """Record that `rows` rows were answered in `seconds`."""
        self.answer.add(rows, seconds)
        self.unanswered = 0

    def compacted(self, rows: int, seconds: float) -> None:
        """Record that `rows` empty rows were dropped in `seconds`."""
        self.compact.add(rows, seconds)
        self.empty = 0
