"""Where the time of a training step goes: the cell, its products, what every step of a solver adds, what every solve adds.

    python benchmarks/breakdown.py --json benchmarks/results/breakdown.json

Each part is measured on its own (processor time, one thread, median): a bare call of the cell and a bare product, times
their number; a step that stops at once, which leaves all that is paid once per solve; and what remains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from equilibria.lab.bench.cases import CASES, Case, make
from equilibria.lab.bench.driver import setting
from equilibria.lab.bench.methods import Ours
from equilibria.lab.bench.rules import count


def seconds(run: Callable[[], object], least: float = 0.3) -> float:
    run()
    found: list[float] = []
    while sum(found) < least or len(found) < 5:
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return statistics.median(found)


def parts(case: Case) -> dict[str, int]:
    """Microseconds."""
    method = Ours()
    work = count(case, method, case.rtol)
    with torch.no_grad():
        evaluation = seconds(lambda: case.cell(case.start, *case.inputs))
    start = pytree.tree_map(lambda part: part.detach().requires_grad_(), case.start)
    out = case.cell(start, *case.inputs)
    leaves, weights = pytree.tree_leaves(start), [torch.randn_like(part) for part in pytree.tree_leaves(out)]
    product = seconds(lambda: torch.autograd.grad(pytree.tree_leaves(out), leaves, weights, retain_graph=True))
    step, once = seconds(lambda: method.step(case, case.rtol)), seconds(lambda: Ours().step(case, 1e9))
    calls = work.evaluations + work.graph_evaluations
    found = {"step": step, "cell": calls * evaluation, "products": work.products * product, "once": once}
    found["solver"] = step - found["cell"] - found["products"] - once
    return {name: round(1e6 * value) for name, value in found.items()} | {
        "evaluations": calls,
        "counted products": work.products,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a training step goes.")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print("| case | step, us | evaluations | products | cell | products | once per solve | solver and check |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.cases:
        found = results[name] = parts(make(name))
        shares = (f"{100 * found[part] / found['step']:.0f} %" for part in ("cell", "products", "once", "solver"))
        columns = (name, found["step"], found["evaluations"], found["counted products"], *shares)
        print(f"| {' | '.join(map(str, columns))} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"setting": setting(), "microseconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
