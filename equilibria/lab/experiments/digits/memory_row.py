"""One row of the demo's table of memory, in a process of its own: python -m ...memory_row equilibrium|explicit DEPTH

Prints the peak bytes of a training step. A process of its own has no caches or peaks of other rows.
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
GAIN = 0.5  # of the state's weight, so that no solve diverges, whatever its steps
HISTORY = 5  # pairs that Anderson stores, which count as memory


def classifier(kind: str, depth: int) -> SkipMLP:
    """The demo's classifier: `depth` layers, or an equilibrium whose solver takes exactly `depth` steps."""
    torch.manual_seed(0)
    model = SkipMLP(INPUTS, width=WIDTH, depth=depth if kind == "explicit" else None)
    cell: Any = model.layer.cell
    with torch.no_grad():
        cell.state.weight.mul_(GAIN)
    if kind == "equilibrium":
        steps = Stop(rtol=0.0, atol=0.0, max_steps=depth, patience=10**6, compact=False, on_failure="ignore")
        adjoint = Stop(rtol=1e-3, max_steps=30, on_failure="ignore")
        model.layer = DEQ(cell, solver=Anderson(history=HISTORY), stop=steps, gradient=Implicit(stop=adjoint))
    return model


def peak_bytes(kind: str, depth: int) -> int:
    model = classifier(kind, depth)
    x, y = torch.randn(BATCH, INPUTS), torch.randint(10, (BATCH,))

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    step()  # gradients are allocated once
    return peak_memory(step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(peak_bytes(sys.argv[1], int(sys.argv[2])))
