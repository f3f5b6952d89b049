"""A chain of solvers: each gets the samples that those before it did not solve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equilibria._core.results import LoopRun, merge
from equilibria.solution import Handover, SolveResult, Status
from equilibria.solvers.base import Solver
from equilibria.solvers.fallback import Fallback

Solve = Callable[[LoopRun, Tensor, Solver[Any]], SolveResult]  # by one solver


def solve_chain(run: LoopRun, z0: Tensor, chain: Fallback, solve: Solve) -> SolveResult:
    """Run each solver of a Fallback in turn on the samples that are not solved yet; `solve` runs one of them.

    A solver may fail from the best iterate of another one and succeed from the start. Samples that all solvers leave are
    therefore solved again from the start, by the last solver first: the chain solves every sample that one of them solves.
    """
    *first, last = chain.solvers
    impatient = run.with_stop(patience=run.stop.patience or chain.patience)
    result = solve(impatient, z0, first[0])
    untried = [_gave_up(run, result)]  # per solver the samples for which its own run from the start is still to be seen
    for before, solver in zip(chain.solvers, (*first[1:], last), strict=False):
        ended = bool(result.coupled) or result.faint is not None
        if run.f.anywhere(ended) or not run.f.any(result.stats.failed):
            # the caller solves rows that depend on each other as one run, with the whole chain; answers that are too
            # small for the numbers they were found with are followed first
            return result
        start = (
            result.z
            if result.sound is None
            else torch.where((result.sound | result.stats.converged).unsqueeze(1), result.z, z0)
        )
        if run.f.any_rank is not None:  # a value known to one rank must not spare it an evaluation that the others wait for
            start = start.clone()
        result, more = _hand_over(run if solver is last else impatient, solve, result, before, solver, start)
        moved = (start != z0).any(dim=1)
        untried.append(moved | _gave_up(run, more))
    before = last
    if result.coupled:
        return result
    for solver, rows in zip(reversed(chain.solvers), reversed(untried), strict=True):
        again = rows & result.stats.failed & torch.isfinite(result.stats.residual)
        if run.f.any(again):
            result, _ = _hand_over(run, solve, result, before, solver, torch.where(again.unsqueeze(1), z0, result.z), again)
            before = solver
    return result


def _gave_up(run: LoopRun, result: SolveResult) -> Tensor:
    """Return (batch,), True for samples that stalled by the patience of the chain, not by that of the caller."""
    stalled = result.stats.status == Status.STALLED
    return stalled if run.stop.patience is None else torch.zeros_like(stalled)


def _hand_over(
    run: LoopRun,
    solve: Solve,
    result: SolveResult,
    before: Solver[Any],
    solver: Solver[Any],
    start: Tensor,
    rows: Tensor | None = None,
) -> tuple[SolveResult, SolveResult]:
    """Run `solver` from `start` on the samples that failed, or on `rows`; returns the joined result and the new one."""
    index = (result.stats.failed if rows is None else rows).nonzero().squeeze(1)
    handover = Handover(repr(before), repr(solver), index, result.stats.status[index], result.stats.residual[index])
    more = solve(run, start, solver)
    merged = merge(result, more, rows)
    stats = dataclasses.replace(merged.stats, handovers=(*result.stats.handovers, handover))
    return dataclasses.replace(merged, stats=stats), more
