"""Peak memory of a training step in states, for every solver here and for TorchDEQ's Anderson.

    python benchmarks/step_memory.py            # writes benchmarks/results/step_memory.json

A state is batch x n numbers. Counted is what the allocator of torch hands out during a step, above what was there before:
cell, solver, adjoint and gradients together. A tolerance ten times tighter takes more
steps, which cost no memory.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria.analysis.memory import peak_memory
from equilibria.lab.bench.cases import Case, make
from equilibria.lab.bench.driver import setting
from equilibria.lab.bench.methods import Method, Ours, TorchDEQ

SOLVERS: dict[str, tuple[Any, Any]] = {
    "Picard, GMRES adjoint": (eq.Picard(), None),
    "default (Anderson, GMRES adjoint)": (None, None),
    "Anderson(history=2), GMRES(restart=2)": (eq.Anderson(history=2), eq.GMRES(restart=2)),
    "Anderson, BiCGSTAB adjoint": (eq.Anderson(), eq.BiCGSTAB()),
    "Broyden, GMRES adjoint": (eq.Broyden(), None),
}


def peak_states(case: Case, method: Method) -> float:
    """Of a training step, in states."""
    method.step(case, case.rtol)
    peak = peak_memory(lambda: method.step(case, case.rtol))
    state = sum(part.numel() * part.element_size() for part in pytree.tree_leaves(case.start))
    return peak / state


def measure(name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for factor in (1.0, 0.1):
        case = make(name)
        case = replace(case, rtol=factor * case.rtol)
        methods: dict[str, Method] = {
            label: Ours(solver=solver, adjoint=adjoint) for label, (solver, adjoint) in SOLVERS.items()
        }
        methods["TorchDEQ Anderson"] = TorchDEQ("TorchDEQ Anderson", "anderson")
        methods["TorchDEQ Picard"] = TorchDEQ("TorchDEQ Picard", "fixed_point_iter")
        for label, method in methods.items():
            found.setdefault(label, []).append(round(peak_states(case, method), 1))
            print(f"{name:10s} {case.rtol:.0e}  {label:40s} {found[label][-1]:6.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a training step in states.")
    parser.add_argument("--cases", nargs="+", default=["mlp-b512", "conv"])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/step_memory.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "setting": setting(),
        "peak states at the tolerance and at a tenth of it": {name: measure(name) for name in options.cases},
    }
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
