"""The private parts of the library that serving uses, gathered in one module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria._core.bookkeeping import DIVERGENCE_EVERY, FLOOR_PATIENCE, LEAST, PROGRESS
from equilibria._core.closed_record import DIVERGENCE, FALL, GROWN, ClosedRecord
from equilibria._core.loop import finished
from equilibria._core.maps import Counter
from equilibria._core.packing import Layout, State
from equilibria.deq import DEQ, constant
from equilibria.gradients.base import Gradient
from equilibria.gradients.phantom import JFB, UnrolledPhantom
from equilibria.gradients.reversible import Reversible
from equilibria.gradients.unrolled import Unrolled
from equilibria.gradients.warmup import Warmup
from equilibria.native.pool import PoolWorkspace
from equilibria.native.pool import can_run as can_run_native
from equilibria.solution import Solution, SolveResult, Stats
from equilibria.solvers.anderson import GROWTH, PATIENCE, SLOW, Anderson, least_squares
from equilibria.solvers.picard import Picard
from equilibria.solvers.rowwise import MEDIUM_STATE, history_size, products, solve_small, subtract_combination
from equilibria.starts import memory_of, prepared, start_of
from equilibria.stop import FLOOR, euclidean_norm, max_norm, rms_norm, usual_range

__all__ = [
    "DIVERGENCE",
    "DIVERGENCE_EVERY",
    "FALL",
    "FLOOR",
    "FLOOR_PATIENCE",
    "GROWN",
    "GROWTH",
    "LEAST",
    "MEDIUM_STATE",
    "PATIENCE",
    "PROGRESS",
    "SLOW",
    "Anderson",
    "Layout",
    "PoolWorkspace",
    "State",
    "advance",
    "can_run_native",
    "describe",
    "euclidean_norm",
    "history_limit",
    "history_range",
    "least_squares",
    "max_norm",
    "memory_of",
    "prepared",
    "products",
    "rms_norm",
    "settle",
    "solution",
    "solve_small",
    "start",
    "subtract_combination",
    "usual_range",
]


def history_range(solver: Any, n: int, like: Tensor) -> tuple[int, int]:
    """Return how many pairs a solver keeps for a state of `n` numbers in the dtype of `like`, at first and at most."""
    row = like.new_empty(1, n)
    if isinstance(solver, Anderson):
        return solver.history_range(row)
    most = 0 if isinstance(solver, Picard) else history_limit(solver, n, like)
    return most, most


def history_limit(solver: Any, n: int, like: Tensor) -> int:
    """Return how many pairs of vectors a solver keeps at most for a state of `n` numbers in the dtype of `like`."""
    if isinstance(solver, Picard):
        return 0
    row = like.new_empty(1, n)
    if isinstance(solver, Anderson):
        return solver.history_range(row)[1]
    return history_size(solver.history, solver.budget, row, small=2 * n, medium=20, large=20)


def start(deq: DEQ, inputs: Sequence[Any], given: Sequence[Any], init: Any) -> State:
    """Return the state from which a solve of these rows starts; `given` is the result of the cell's `prepare`."""
    cell = deq.cell
    chosen = deq.init if init is None else constant(init)
    return start_of(chosen, cell, lambda z: cell(z, *given), inputs, batched=True)


def advance(gradient: Gradient, solves: int) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None:
    """Return the function that takes the steps of a gradient from the equilibrium in its forward pass; None without steps.

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
    """Return the Solution that the part of a model behind its equilibrium layer receives."""
    layout = dataclasses.replace(layout, batch=z.shape[0])
    return Solution(layout.unpack(layout.saturate(z)), z0, f, SolveResult(z, stats), layout, None)


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


def settle(
    precision: float,
    rtol: float,
    roots: Tensor,
    z0: Tensor,
    z: Tensor,
    status: Tensor,
    steps: Tensor,
    numbers: Tensor,
) -> tuple[Tensor, list[int], list[float]]:
    """Return answers, statuses and residuals of rows that may have failed, by the rules of the library's own loop.

    z0, z    (rows, n), starts and best iterates
    roots    (rows,), norms of states of ones
    numbers  (6, rows), as in `RowResults`
    """
    length, size, first_length, first_size, peak, last = numbers
    nothing, extremes = torch.zeros_like(steps), lambda: (last, peak)
    first = (z0, first_length, first_size)
    record = ClosedRecord(z, status, length, size, steps, steps, nothing, *first, extremes, rtol, precision, roots)
    answer, stats, _ = record.settle(finished(record, Counter(), settle=False).stats)
    return answer, stats.status.tolist(), stats.residual.tolist()
