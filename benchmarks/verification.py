"""What it costs a training step to verify that its rows do not depend on each other: on over off, interleaved.

    python benchmarks/verification.py --json benchmarks/results/verification.json

"Off" leaves out the two rows run without the others and the measurement of the answer in backward. Processor time of the
thread, the median over rounds of the ratio of two neighbouring measurements; the first of a pair alternates. The dispatched
operations and read-backs of a step do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from equilibria._core import loop
from equilibria._core.compaction import TRUSTED
from equilibria._core.problem import Problem
from equilibria.lab.bench.cases import CASES, Case, make
from equilibria.lab.bench.counts import Lists, Operations
from equilibria.lab.bench.driver import setting
from equilibria.lab.bench.methods import Ours

LEAST = 0.02  # seconds of one measurement


@contextlib.contextmanager
def unverified() -> Iterator[None]:
    """Training steps without the verification."""

    def believe(problem: Problem, *measured: Any, **options: Any) -> None:
        problem.result.unmeasured = False

    with (
        patch.object(loop, "compare_rows", lambda *given, **options: TRUSTED),
        patch.object(loop, "compare_answer", lambda *given: TRUSTED),
        patch.object(Problem, "measure", believe),
    ):
        yield


def seconds(case: Case, method: Ours, steps: int) -> float:
    begin = time.thread_time()
    for _ in range(steps):
        method.step(case, case.rtol)
    return (time.thread_time() - begin) / steps


def operations(case: Case, method: Ours) -> tuple[int, int]:
    """Dispatched operations and read-backs of one training step."""
    with Operations() as seen, Lists() as lists:
        method.step(case, case.rtol)
    return seen.operations, seen.read_backs + lists.read_backs


def compare(case: Case, rounds: int) -> dict[str, float]:
    method = Ours()
    steps = max(1, round(LEAST / min(seconds(case, method, 2) for _ in range(3))))
    ratios, times = [], []
    for turn in range(rounds):
        pair = {}
        for on in (True, False) if turn % 2 else (False, True):
            with contextlib.nullcontext() if on else unverified():
                pair[on] = seconds(case, method, steps)
        ratios.append(pair[True] / pair[False])
        times.append(pair[False])
    with_check = operations(case, method)
    with unverified():
        without = operations(case, method)
    return {
        "on_over_off": round(statistics.median(ratios), 4),
        "microseconds_off": round(1e6 * statistics.median(times)),
        "operations_on": with_check[0],
        "operations_off": without[0],
        "read_backs_on": with_check[1],
        "read_backs_off": without[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=101, help="measurements; a third of them for steps beyond 50 ms")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print("| case | on / off | step off, us | operations on, off | read-backs on, off |")
    print("|---|---:|---:|---:|---:|")
    for name in options.cases:
        case = make(name)
        slow = seconds(case, Ours(), 1) > 0.05
        found = results[name] = compare(case, max(options.rounds // 3, 5) if slow else options.rounds)
        counts = f"{found['operations_on']}, {found['operations_off']} | {found['read_backs_on']}, {found['read_backs_off']}"
        print(f"| {name} | {found['on_over_off']:.3f} | {found['microseconds_off']} | {counts} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"setting": setting(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
