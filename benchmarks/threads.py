"""Training steps with one thread and with several, in turns: time and whether the bits are equal.

    python benchmarks/threads.py --cases mlp-b512 conv --threads 2

Needs as many idle cores as threads. Time is that of the clock on the wall: the fastest of the rounds, and their median. Bits
are compared for z and for all gradients; kernels of torch that split a sum over threads may round differently.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.lab.bench.cases import CASES, make
from equilibria.lab.bench.driver import setting
from equilibria.lab.bench.methods import Ours

LEAST = 0.2  # seconds of a round, at least


def measured(name: str, threads: int, rounds: int, batch: int | None = None) -> dict[str, Any]:
    """Milliseconds of a step with one thread and with `threads`, and whether z and the gradients are equal bit by bit."""
    case, method = make(name, batch), Ours()
    results: dict[int, list[Tensor]] = {}
    times: dict[int, list[float]] = {1: [], threads: []}
    repeats = 1
    try:
        for done in range(rounds + 1):
            for count in times:
                torch.set_num_threads(count)
                begin = time.perf_counter()
                for _ in range(repeats):
                    z, gradients = method.step(case, case.rtol)
                times[count].append((time.perf_counter() - begin) / repeats)
                results[count] = [*pytree.tree_leaves(z), *gradients]
            if not done:  # the first round warms up
                repeats = max(1, round(LEAST / times[1].pop()))
                times[threads].clear()
    finally:
        torch.set_num_threads(1)
    pairs = zip(results[1], results[threads], strict=True)
    found: dict[str, Any] = {"case": name, "equal": all(torch.equal(a, b) for a, b in pairs)}
    for count, some in times.items():
        found |= {f"fastest, {count}": 1e3 * min(some), f"median, {count}": 1e3 * statistics.median(some)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps with one thread and with several.")
    parser.add_argument("--cases", nargs="+", default=["mlp-b512", "conv"], choices=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads < 2:
        parser.error(f"--threads must be at least 2, got {options.threads}.")
    results = [measured(name, options.threads, options.rounds) for name in options.cases]
    print(f"| case | ms, 1 thread | ms, {options.threads} threads | fastest : fastest | bits |")
    print("|---|---:|---:|---:|---|")
    for each in results:
        one, several = each["median, 1"], each[f"median, {options.threads}"]
        ratio = each[f"fastest, {options.threads}"] / each["fastest, 1"]
        bits = "equal" if each["equal"] else "differ"
        print(f"| {each['case']} | {one:.1f} | {several:.1f} | {ratio:.2f} | {bits} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"setting": setting(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
