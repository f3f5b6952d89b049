"""Run methods on cases by the rules of `rules`; `BenchResults` holds the results and converts them to and from JSON."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from equilibria.lab.bench.cases import Case
from equilibria.lab.bench.methods import COMPILED, DEFAULT, OURS, PLAIN, Method
from equilibria.lab.bench.rules import Judge, Work, count, race, tighten


@dataclass(frozen=True)
class MethodResult:
    """The result of one method on one case.

    failure   the reason why the method was not timed; None if it was
    tol       the tolerance of the method, tightened until the residual was small enough
    residual  residual of the worst sample, in float64; None if it is not finite
    work      counted calls and products of a training step; None if they cannot be counted
    cosine    cosine of the angle between the gradient and the reference; `error` is the relative distance from it
    times     for every round, the time of a training step divided by that of a bare call of the cell just before it
    forward   the same for a solve without gradients; empty if it was not measured
    """

    method: str
    library: str
    failure: str | None = None
    tol: float | None = None
    residual: float | None = None
    work: Work | None = None
    cosine: float | None = None
    error: float | None = None
    times: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()

    @property
    def forward_time(self) -> float | None:
        """Median time of a solve without gradients, in units of a bare call of the cell."""
        return statistics.median(self.forward) if self.forward else None

    @property
    def time(self) -> float | None:
        """Median time of a training step, in units of a bare call of the cell."""
        return statistics.median(self.times) if self.times else None

    @property
    def spread(self) -> float | None:
        """Slowest divided by fastest round; differences below this are noise of the machine."""
        return max(self.times) / min(self.times) if self.times else None

    @property
    def overhead(self) -> float | None:
        """Step time divided by the time of its evaluations and products, each counted as one bare call."""
        return self.time / self.work.calls if self.time is not None and self.work is not None else None


@dataclass(frozen=True)
class CaseResults:
    """The results of all methods on one case; `unit` is the median time of a bare call of the cell in seconds."""

    case: str
    note: str
    batch: int
    rtol: float
    outcomes: tuple[MethodResult, ...]
    unit: float | None = None

    def named(self, method: str) -> MethodResult | None:
        return next((outcome for outcome in self.outcomes if outcome.method == method), None)

    def fastest(self, library: str, *, forward: bool = False) -> MethodResult | None:
        """Return the fastest training step of a library, or its fastest `forward` solve; None if none was timed."""
        own = [(i, outcome) for i, outcome in enumerate(self.outcomes) if outcome.library == library]
        timed = [(outcome.forward_time if forward else outcome.time, i) for i, outcome in own]
        found = min(((time, i) for time, i in timed if time is not None), default=None)
        return None if found is None else self.outcomes[found[1]]


@dataclass(frozen=True)
class BenchResults:
    """The results of a benchmark run, with versions and the kind of machine."""

    setting: Mapping[str, Any]
    cases: tuple[CaseResults, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> BenchResults:
        read = json.loads(text)
        return BenchResults(read["setting"], tuple(map(_case_results, read["cases"])))


def run(cases: Iterable[Case], methods: Sequence[Method], *, rounds: int = 7, budget: float = 40.0) -> BenchResults:
    """Run every method on every case.

    A method that fails, or does not reach the accuracy of the case, is recorded with the reason.

    rounds  number of timed rounds per case
    budget  seconds per case after which no further round begins; at least three rounds are run
    """
    return BenchResults(setting(), tuple(_run_case(case, methods, rounds, budget) for case in cases))


def setting() -> dict[str, Any]:
    """Return the versions and the hardware on which the numbers depend, without names or paths of the machine."""
    found = {name: _version(name) for name in ("equilibria", "torch", "torchdeq", "jax", "jaxopt", "optimistix")}
    return {name: version for name, version in found.items() if version} | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _run_case(case: Case, methods: Sequence[Method], rounds: int, budget: float) -> CaseResults:
    begin, judge = time.perf_counter(), Judge(case)
    outcomes = [_examined(case, method, judge) for method in methods]
    ready = [(method, outcome) for method, outcome in zip(methods, outcomes, strict=True) if outcome.failure is None]
    _say(f"{case.name}: {len(ready)} of {len(methods)} methods reach the residual, {time.perf_counter() - begin:.0f} s")
    runs = {(outcome.method, "times"): _step(case, method, outcome) for method, outcome in ready}
    runs |= {
        (outcome.method, "forward"): _solve(case, method, outcome) for method, outcome in ready if is_timed_forward(method)
    }
    samples = race(case, runs, rounds, budget)
    units = [sample.unit for some in samples.values() for sample in some]
    _say(f"{case.name}: {max(map(len, samples.values()), default=0)} rounds, {time.perf_counter() - begin:.0f} s in all")
    ratios = {key: tuple(float(f"{sample.ratio:.5g}") for sample in some) for key, some in samples.items()}
    timed = tuple(
        replace(o, times=ratios.get((o.method, "times"), ()), forward=ratios.get((o.method, "forward"), ()))
        for o in outcomes
    )
    unit = statistics.median(units) if units else None
    return CaseResults(case.name, case.note, case.batch, case.rtol, timed, unit)


def _examined(case: Case, method: Method, judge: Judge) -> MethodResult:
    """Measure accuracy and work of a method, without timing it."""
    outcome = MethodResult(method.name, method.library)
    try:
        found = tighten(case, method, judge)
        outcome = replace(outcome, tol=found.tol, residual=_finite(found.residual))
        if not found.reached:
            return replace(outcome, failure=f"not reached: residual {found.residual:.1e}, required {case.rtol:.0e}")
        agreement = judge.gradient(method.step(case, found.tol)[1])
        work = count(case, method, found.tol)
        outcome = replace(outcome, work=work if work.calls else None)  # hooks cannot count the calls of another framework
        outcome = replace(outcome, cosine=agreement.cosine, error=_finite(agreement.error))
        return outcome if outcome.error is not None else replace(outcome, failure="its gradient is not finite")
    except Exception as error:  # of any type, because the failure of one method must not end the run of the others
        _say(f"{case.name}: {method.name} failed: {error!r}")
        message = re.sub(r"(/[\w.-]+){2,}", "...", str(error))  # paths are removed, because results are published
        return replace(outcome, failure=f"{type(error).__name__}: {message[:200]}")


def _step(case: Case, method: Method, outcome: MethodResult) -> Any:
    tol = outcome.tol
    assert tol is not None
    return lambda: method.step(case, tol)


def _solve(case: Case, method: Method, outcome: MethodResult) -> Any:
    tol = outcome.tol
    assert tol is not None
    return lambda: method.solve(case, tol)


def is_timed_forward(method: Method) -> bool:
    """Return True if a solve without gradients is timed too: for all forms of our default, and for other libraries."""
    return method.library != OURS or method.name in (DEFAULT, PLAIN, COMPILED)


def _case_results(read: dict[str, Any]) -> CaseResults:
    return CaseResults(**read | {"outcomes": tuple(map(_outcome, read["outcomes"]))})


def _outcome(read: dict[str, Any]) -> MethodResult:
    work = None if read["work"] is None else Work(**read["work"])
    forward = tuple(read.get("forward", ()))  # missing in results of older versions
    return MethodResult(**read | {"work": work, "times": tuple(read["times"]), "forward": forward})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
