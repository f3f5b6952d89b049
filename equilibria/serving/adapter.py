"""Everything that serving uses of the private parts of the library, in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria._core.bookkeeping import (
    DIVERGENCE,
    DIVERGENCE_EVERY,
    FALL,
    FLOOR_PATIENCE,
    GROWN,
    LEAST,
    PROGRESS,
    SolveRecord,
)
from equilibria._core.maps import Counter
from equilibria._core.packing import Layout, State
from equilibria.deq import DEQ, constant
from equilibria.gradients.base import Gradient
from equilibria.gradients.phantom import JFB, UnrolledPhantom
from equilibria.gradients.reversible import Reversible
from equilibria.gradients.unrolled import Unrolled
from equilibria.gradients.warmup import Warmup
from equilibria.solution import Report, Solution, Stats
from equilibria.solvers.anderson import GROWTH, PATIENCE, Anderson
from equilibria.solvers.rowwise import history_size, products, solve_small, subtract_combination
from equilibria.starts import memory_of, prepared, start_of
from equilibria.stop import FLOOR, Stop, euclidean_norm, max_norm, rms_norm, usual_range

__all__ = [
    "DIVERGENCE",
    "DIVERGENCE_EVERY",
    "FALL",
    "FLOOR",
    "FLOOR_PATIENCE",
    "GROWN",
    "GROWTH",
    "LEAST",
    "PATIENCE",
    "PROGRESS",
    "Ended",
    "Layout",
    "State",
    "advance",
    "describe",
    "euclidean_norm",
    "history_limit",
    "judge",
    "max_norm",
    "memory_of",
    "prepared",
    "products",
    "rms_norm",
    "solution",
    "solve_small",
    "start",
    "subtract_combination",
    "usual_range",
]


def history_limit(solver: Any, n: int, like: Tensor) -> int:
    """Return how many pairs of vectors Anderson or Broyden keeps for a state of `n` numbers in the dtype of `like`."""
    row = like.new_empty(1, n)
    if isinstance(solver, Anderson):
        return history_size(solver.history, solver.budget, row, small=n, medium=4, large=3)
    return history_size(solver.history, solver.budget, row, small=2 * n, medium=20, large=20)


def start(deq: DEQ, inputs: Sequence[Any], given: Sequence[Any], init: Any) -> State:
    """Return the state from which a solve of these rows starts; `given` is the result of the cell's `prepare`."""
    cell = deq.cell
    chosen = deq.init if init is None else constant(init)
    return start_of(chosen, cell, lambda z: cell(z, *given), inputs, batched=True)


def advance(gradient: Gradient, solves: int) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None:
    """Return the steps that a gradient takes from the equilibrium in its forward pass; None if it takes none.

    Raises TypeError for a gradient whose forward pass does not run the solver.
    """
    if isinstance(gradient, Warmup):
        return advance(gradient.first if solves < gradient.until else gradient.then, solves)
    if isinstance(gradient, (Unrolled, Reversible)):
        raise TypeError(f"its gradient {gradient!r} runs its own steps instead of the solver")
    if isinstance(gradient, JFB):
        return lambda f, z: f(z)
    return gradient._advance if isinstance(gradient, UnrolledPhantom) else None


def solution(z: Tensor, layout: Layout, f: Callable[[State], State], z0: State, stats: Stats) -> Solution:
    """Return a Solution for the part of a model behind its equilibrium layer."""
    layout = dataclasses.replace(layout, batch=z.shape[0])
    return Solution(layout.unpack(layout.saturate(z)), z0, f, Report(stats=stats), layout, None)


def describe(status: Sequence[int], steps: Sequence[int], residual: Sequence[float], like: Tensor) -> Stats:
    """Return the Stats of rows that were solved in a pool."""
    whole = torch.tensor(steps, device=like.device)
    return Stats(
        status=torch.tensor(status, dtype=torch.int8, device=like.device),
        steps=whole,
        rejected=torch.zeros_like(whole),
        best=whole,
        residual=torch.tensor(residual, dtype=like.dtype, device=like.device),
        evaluations=0,
        sample_evaluations=0,
    )


@dataclasses.dataclass(slots=True)
class Ended:
    """The record of a stopped row that `judge` reads. Lengths are norms of residuals, sizes are norms of f(z)."""

    rtol: float
    excess: float  # residual over tolerance of the best iterate
    length: float
    size: float
    first_length: float
    first_size: float
    peak: float
    last: float
    steps: int
    open: bool  # the row was still running when its steps or its time ran out
    stalled: bool
    diverged: bool
    root: float


def judge(stop: Stop, precision: float, z0: Tensor, z: Tensor, row: Ended) -> tuple[Tensor, int, float]:
    """Return the answer, the status and the residual of a row that may have failed, by the rules of the library's own loop.

    z0, z  (1, n), its start and its best iterate
    """
    own = dataclasses.replace(stop, rtol=row.rtol, trace=False, keep_every=None)
    record = SolveRecord(own, z0, None, precision)
    record.natural = row.root
    numbers = {name: z.new_tensor([getattr(row, name)]) for name in ("excess", "length", "size", "last", "peak")}
    first = {name: z.new_tensor([getattr(row, name)]) for name in ("first_length", "first_size")}
    counts = {name: torch.tensor([getattr(row, name)], device=z.device) for name in ("steps", "open", "diverged")}
    record.watchful = record.watchful or row.stalled
    nothing = torch.zeros_like(counts["steps"])
    tensors: dict[str, Tensor] = {
        "z": z,
        "best": counts["steps"],
        "rejected": nothing,
        "worse": ~counts["open"],
        **numbers,
        **first,
        **counts,
    }
    tensors |= {"milestone": numbers["excess"], "waiting": nothing, "stalled": torch.tensor([row.stalled], device=z.device)}
    record.traced, record.diverged = True, counts["diverged"]
    record.load([tensors[name] for name in record._names()])
    answer, stats = record.close(Counter())
    answer, stats, _ = record.settle(answer, stats)
    return answer, int(stats.status), float(stats.residual)
