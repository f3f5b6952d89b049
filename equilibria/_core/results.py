"""The arguments of a run of the loop, and the join of the results of two runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria._core.compaction import RowCheck, warn_once
from equilibria._core.maps import Map
from equilibria.solution import SolveResult, Status
from equilibria.stop import Stop

VERIFICATIONS = 3  # how often a result found by recurrence may miss the tolerance and be improved


@dataclass(eq=False)
class LoopRun:
    """One run of the loop: the map, the tolerances, and what is known about both.

    scale           (batch,), the quantity that rtol is relative to; None uses |f(z)|
    precision       machine epsilon of the numbers `f` computes with
    keep_state      return the state of the solver
    verify          evaluate `f` once more if the solver updates f(z) by a recurrence
    measured_later  True if the caller evaluates `f` at the result
    rows            what is known about the rows before the first step; None if they are to be compared
    ordinary        True if no transform, forward mode or trace is active
    origin          (batch, n), the start, if its magnitude is checked
    unit            (batch,), by which f and z are divided; None for no division
    """

    f: Map
    stop: Stop
    scale: Tensor | None
    precision: float
    keep_state: bool = False
    verify: bool = True
    measured_later: bool = False
    rows: RowCheck | None = None
    ordinary: bool = False
    origin: Tensor | None = None
    unit: Tensor | None = None

    def warn_of_coupling(self) -> None:
        """Warn once per cell that its rows cannot be dropped, unless compaction is not wanted."""
        if self.f.equation is not None and self.stop.compact:
            warn_once(self.f.equation.identity)

    def with_stop(self, **changes: Any) -> LoopRun:
        """Return the same run with some settings of its stop changed."""
        return dataclasses.replace(self, stop=dataclasses.replace(self.stop, **changes))


def merge(first: SolveResult, then: SolveResult, rows: Tensor | None = None) -> SolveResult:
    """Join two successive solves: per sample the later result if it is better, with the steps of both.

    rows  (batch,), the samples that the second solve is for; None: all. Its results for the others are not used, because
          it started from their results: relative to a state that has grown, any residual is small.
    """
    a, b = first.stats, then.stats
    sound = torch.ones_like(b.converged) if then.sound is None else then.sound
    better = b.converged | (a.failed & sound & (b.residual < a.residual))
    # a state that has run away is no answer if there is another one
    better = better | ((a.status == Status.DIVERGED) & (b.status != Status.DIVERGED) & torch.isfinite(b.residual))
    if first.faint is not None:  # what is known about those is not worth anything
        better = better | first.faint
    better = better if rows is None else better & rows
    if then.coupled and rows is None:  # the second solve measured all rows together, and others have moved since the first
        a, better = dataclasses.replace(a, status=b.status), torch.ones_like(better)
    kept = a.converged | ((a.status == Status.DIVERGED) & ~better)
    kept = kept if rows is None else kept | ~rows
    trace = None
    if a.trace is not None and b.trace is not None:  # the second solve begins with the last iterate of the first
        trace = tuple(torch.cat([x, y[1:]]) for x, y in zip(a.trace, b.trace, strict=True))
    stats = dataclasses.replace(
        b,
        # a sample that stays failed keeps the later reason: it is what the caller can still act on
        status=torch.where(kept, a.status, b.status),
        steps=a.steps + b.steps,
        rejected=a.rejected + b.rejected,
        best=torch.where(better, a.steps + b.best, a.best),
        residual=torch.where(better, b.residual, a.residual),
        trace=trace,
        iterates=a.iterates + b.iterates,
    )
    z = torch.where(better.unsqueeze(1), then.z, first.z)
    sound = sound if first.sound is None else torch.where(better, sound, first.sound)
    coupled = then.coupled if first.coupled is None else first.coupled or then.coupled
    unmeasured = first.unmeasured or then.unmeasured
    return SolveResult(
        z, stats, first.taken + then.taken, coupled=coupled, unmeasured=unmeasured, sound=sound, faint=then.faint
    )


def within_dtype(result: SolveResult, z0: Tensor) -> SolveResult:
    """Return the result with samples that overflow the dtype set to NONFINITE and to their start."""
    lost = ~torch.isfinite(result.z).all(dim=1)
    if not bool(lost.any()):
        return result
    start = torch.where(torch.isfinite(z0), z0, torch.zeros_like(z0))
    stats = result.stats
    status, residual = stats.status.masked_fill(lost, Status.NONFINITE), stats.residual.masked_fill(lost, float("inf"))
    stats = dataclasses.replace(stats, status=status, residual=residual, best=stats.best.masked_fill(lost, 0))
    return dataclasses.replace(result, z=torch.where(lost.unsqueeze(1), start, result.z), stats=stats, failed=True)
