"""A load generator, which sends requests with Poisson arrivals to a server, limited in number and time."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from equilibria.serving.monitor import percentile


@dataclass(frozen=True)
class Reply:
    """The outcome of one request."""

    due: float  # time at which the request was due, in seconds from the start of the load
    seconds: float  # from that time to the answer
    code: int  # HTTP code; 0 means no answer
    body: bytes = b""


@dataclass
class LoadReport:
    """The result of a load test.

    Latencies count from the time a request was due, so they include the time it waited in the client.
    """

    outcomes: list[Reply] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def codes(self) -> dict[int, int]:
        return dict(sorted(Counter(outcome.code for outcome in self.outcomes).items()))

    @property
    def throughput(self) -> float:
        """Number of answers with code 200 per second."""
        return self.codes.get(200, 0) / self.seconds if self.seconds else 0.0

    def latency(self, share: float) -> float | None:
        """Return a percentile of the latencies of answers with code 200, in seconds; None if there are no such answers."""
        return percentile(sorted(outcome.seconds for outcome in self.outcomes if outcome.code == 200), share)

    def summary(self) -> dict[str, Any]:
        """Return counts by code, duration and throughput, and the latency percentiles in seconds, as a dict for JSON."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {
            "requests": len(self.outcomes),
            "codes": {str(code): count for code, count in self.codes.items()},
            "seconds": self.seconds,
            "throughput": self.throughput,
            **{name: self.latency(share) for name, share in shares.items()},
        }


def poisson(rate: float, count: int, seconds: float, seed: int = 0) -> list[float]:
    """Return the arrival times of a Poisson process in seconds: at most `count`, none after `seconds`."""
    if rate <= 0 or count < 1 or seconds <= 0:
        raise ValueError(f"rate, count and seconds must be positive, got {rate}, {count} and {seconds}.")
    chance, now = random.Random(seed), 0.0
    found: list[float] = []
    while len(found) < count:
        now += chance.expovariate(rate)
        if now > seconds:
            break
        found.append(now)
    return found


def run_load(
    url: str,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    *,
    clients: int = 32,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
    on_outcome: Callable[[int, Reply], None] | None = None,
) -> LoadReport:
    """Send requests over `clients` connections and return the report.

    Request i has the body bodies[i % len(bodies)] and is due arrivals[i] seconds after the start.
    """
    address = urlsplit(url)
    if address.scheme != "http" or not address.hostname:
        raise ValueError(f"Expected an address such as http://127.0.0.1:8000, got {url!r}.")
    report, lock, position = LoadReport(), threading.Lock(), iter(range(len(arrivals)))
    begin = time.monotonic()

    def client() -> None:
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=timeout)
        while True:
            with lock:
                i = next(position, None)
            if i is None:
                connection.close()
                return
            time.sleep(max(begin + arrivals[i] - time.monotonic(), 0.0))
            outcome = _send(connection, bodies[i % len(bodies)], arrivals[i], begin, headers or {})
            with lock:
                report.outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(i, outcome)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(min(clients, max(len(arrivals), 1)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.seconds = time.monotonic() - begin
    return report


def _send(connection: http.client.HTTPConnection, body: bytes, due: float, begin: float, headers: dict[str, str]) -> Reply:
    """Send one request and return its outcome; a failed connection gives code 0."""
    try:
        connection.request("POST", "/predict", body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text, code = response.read(), response.status
    except (OSError, http.client.HTTPException):
        connection.close()  # the next request opens it again
        text, code = b"", 0
    return Reply(due, time.monotonic() - begin - due, code, text)
