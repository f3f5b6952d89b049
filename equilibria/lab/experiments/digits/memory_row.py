"""Measure one row of the demo's memory table: python -m ...memory_row equilibrium|explicit DEPTH

Prints the peak bytes of a training step. Each row has its own process, so that it is free of caches of other rows.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F

from equilibria.analysis.memory import peak_memory
from equilibria.deq import DEQ
from equilibria.gradients.implicit import Implicit
from equilibria.models.images.skip_mlp import SkipMLP
from equilibria.solvers.anderson import Anderson
from equilibria.stop import Stop

INPUTS, WIDTH, BATCH = 64, 64, 512
GAIN = 0.5  # factor on the state's weight, so that no solve diverges with any number of steps
HISTORY = 5  # pairs that Anderson stores; they count as memory


def classifier(kind: str, depth: int) -> SkipMLP:
    """Return the demo's classifier with `depth` layers, or an equilibrium whose solver takes exactly `depth` steps."""
    torch.manual_seed(0)
    model = SkipMLP(INPUTS, width=WIDTH, depth=depth if kind == "explicit" else None)
    cell: Any = model.layer.cell
    with torch.no_grad():
        cell.state.weight.mul_(GAIN)
    if kind == "equilibrium":
        # never converged and never stalled: the solve takes all steps, with all rows
        steps = Stop(rtol=0.0, atol=0.0, max_steps=depth, patience=10**6, compact=False, on_failure="ignore")
        adjoint = Stop(rtol=1e-3, max_steps=30, on_failure="ignore")
        model.layer = DEQ(cell, solver=Anderson(history=HISTORY), stop=steps, gradient=Implicit(stop=adjoint))
    return model


def peak_bytes(kind: str, depth: int) -> int:
    """Return the peak memory of a training step in bytes."""
    model = classifier(kind, depth)
    x, y = torch.randn(BATCH, INPUTS), torch.randint(10, (BATCH,))

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    step()  # gradients are allocated once
    return peak_memory(step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(peak_bytes(sys.argv[1], int(sys.argv[2])))
