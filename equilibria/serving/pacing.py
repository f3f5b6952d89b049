"""Decide from measured costs when rows of a pool enter, when they are answered, and when empty rows are dropped."""

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

    fixed  seconds that do not depend on the number of rows: the intercept of a line fitted to the measurements
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

    whole    seconds of a step of the largest batches seen
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
        # until steps of different sizes have been measured, all rows are assumed to take the same time
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
    """Decide when rows are exchanged.

    An exchange lets rows enter, or answers rows that have left. It takes a time that does not depend on the number of these
    rows, and it delays every other row by this time. Without an exchange, every step delays the waiting rows by the time of
    a step. An exchange is due when the delay of the rows that wait for it has reached the delay that it causes. If rows
    arrive at a constant rate, this period minimizes the sum of both delays. An empty pool is filled at once.

    The time of a step has a part that grows with the number of rows. In the delay of rows that wait to enter, this part is
    multiplied by the squared coefficient of variation of the numbers of steps, or by 1 if that is larger than 1. The reason
    is that a row that enters lengthens the steps of the others: if all requests take the same number of steps, the others
    lose as much time as this row gains. (In a single queue, processor sharing has a smaller mean latency than first come,
    first served if the squared coefficient of variation is above 1.)

    - If the numbers of steps hardly vary and an exchange takes as long as many steps, all rows of a batch leave before an
      exchange is due. The pool then works in groups, like static batching.
    - If the numbers of steps vary, or if a step takes long compared with an exchange, rows enter whenever some are free.
    - If more requests wait than the pool has rows, early answers do not shorten the queue, and rows are answered rarely.

    The same rule decides when empty rows for which no request waits are dropped: when evaluating them has taken as much
    time as moving the other rows together.

    mode  "auto": as above; "continuous": rows enter as soon as they are free; "grouped": only into an empty pool
    """

    def __init__(self, capacity: int, mode: Admission = "auto") -> None:
        self.capacity, self.mode = capacity, mode
        self.enter, self.answer, self.compact = Cost(), Cost(), Cost()
        self.step, self.steps = StepCost(capacity), Variation()
        self.idle = self.unanswered = self.empty = 0  # rows that waited, summed over the steps since the last exchange

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
        """Return True if waiting requests should enter beside `active` rows."""
        if active == 0 or self.mode == "continuous":
            return True
        if self.mode == "grouped":
            return False
        cost = self.enter.fixed
        if waiting < self.capacity:  # rows that enter separately are also answered separately
            cost += self.answer.fixed
        step = self.step.fixed + min(self.steps.squared, 1.0) * (self.step.whole - self.step.fixed)
        return self.idle * step >= cost * min(self.capacity, active + waiting)

    def may_answer(self, active: int, waiting: int, left: int) -> bool:
        """Return True if the `left` rows that have left the solve should be answered."""
        return left >= self.capacity or self.unanswered * self.step.whole >= self.answer.fixed * (active + waiting)

    def may_compact(self) -> bool:
        """Return True if rows should be moved together, so that empty ones can be dropped."""
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
