"""Metrics of a running server, for Prometheus and for the status page."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from typing import Any

from equilibria.serving.engine import Engine
from equilibria.serving.tickets import Answer

RECENT = 60.0  # seconds over which throughput and percentiles are computed
KEPT = 4096  # largest number of answers used for percentiles
# upper bounds of the buckets of latencies
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # upper bounds of the buckets of solver steps


class Histogram:
    """Counts in cumulative buckets, in the form Prometheus expects."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        found, total = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class ServerMonitor:
    """Counts answers and responses; thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.begin = engine, time.monotonic()
        self.responses: Counter[int] = Counter()
        self.statuses: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()
        self.late = self.cancelled = 0
        self.latency, self.solver_steps = Histogram(SECONDS), Histogram(STEPS)
        self.recent: deque[tuple[float, float]] = deque(maxlen=KEPT)  # time of the answer, and its latency in seconds
        self._lock = threading.Lock()

    def answered(self, answer: Answer) -> None:
        """Record an answer: its status, steps and latency."""
        with self._lock:
            self.statuses[answer.status.name] += 1
            self.steps[answer.steps] += 1
            self.late += answer.late
            self.latency.add(answer.seconds)
            self.solver_steps.add(answer.steps)
            self.recent.append((time.monotonic(), answer.seconds))

    def responded(self, code: int) -> None:
        with self._lock:
            self.responses[code] += 1

    def gave_up(self) -> None:
        with self._lock:
            self.cancelled += 1

    def status(self) -> dict[str, Any]:
        """Return the numbers of the status page as a dict for JSON."""
        now = time.monotonic()
        with self._lock:
            recent = [(when, seconds) for when, seconds in self.recent if now - when <= RECENT]
            steps, statuses = dict(sorted(self.steps.items())), dict(self.statuses)
            codes = {str(code): count for code, count in sorted(self.responses.items())}
        took = sorted(seconds for _, seconds in recent)
        span = max(min(RECENT, now - self.begin, now - recent[0][0] if recent else RECENT), 1e-9)
        return {
            "uptime": now - self.begin,
            "rows": self.engine.rows,
            "active": [[row, taken, excess] for row, taken, excess in self.engine.residuals() if excess < float("inf")],
            "queue": self.engine.queued,
            "queue_limit": self.engine.queue,
            "throughput": len(recent) / span if len(recent) > 1 else 0.0,
            "p50": percentile(took, 0.5),
            "p99": percentile(took, 0.99),
            "steps": [[taken, count] for taken, count in steps.items()],
            "statuses": statuses,
            "responses": codes,
        }

    def prometheus(self) -> str:
        """Return the metrics in the text format of Prometheus, version 0.0.4."""
        counts = self.engine.counts()
        with self._lock:
            lines = [
                *_metric("responses_total", "counter", "HTTP responses by code."),
                *(f'equilibria_responses_total{{code="{code}"}} {n}' for code, n in sorted(self.responses.items())),
                *_metric("answers_total", "counter", "Answers by the status of their solve."),
                *(f'equilibria_answers_total{{status="{status}"}} {n}' for status, n in sorted(self.statuses.items())),
                *_metric("latency_seconds", "histogram", "Seconds from the arrival of a request to its answer."),
                *self.latency.lines("equilibria_latency_seconds"),
                *_metric("solver_steps", "histogram", "Solver steps of answered requests."),
                *self.solver_steps.lines("equilibria_solver_steps"),
                *_single("late_total", "counter", "Answers whose deadline passed before convergence.", self.late),
                *_single("cancelled_total", "counter", "Requests whose client disconnected.", self.cancelled),
            ]
        lines += _single("queue_length", "gauge", "Requests that wait for a row.", self.engine.queued)
        lines += _single("active_rows", "gauge", "Rows in use.", self.engine.active)
        lines += _single("pool_steps_total", "counter", "Solver steps of all pools.", counts.steps)
        lines += _single(
            "evaluated_rows_total", "counter", "Rows on which the cell was run, summed over the steps.", counts.evaluated
        )
        lines += _single("used_rows_total", "counter", "Rows in use, summed over the steps.", counts.row_steps)
        return "\n".join(lines) + "\n"


def percentile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _metric(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP equilibria_{name} {text}", f"# TYPE equilibria_{name} {kind}"]


def _single(name: str, kind: str, text: str, value: float) -> list[str]:
    return [*_metric(name, kind, text), f"equilibria_{name} {value}"]
