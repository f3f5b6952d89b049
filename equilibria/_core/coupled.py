"""Solving a batch whose samples depend on each other, as with batch statistics, as one problem.

Krylov spaces and mixing weights per sample are not valid here, because J is not block diagonal. A sample that is frozen
when it converges does not stay converged while the other samples change.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from equilibria._core.loop import VERIFICATIONS, SolveResult, measure, solve
from equilibria._core.maps import FlatMap, LinearMap
from equilibria.solution import Stats
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

TIGHTER = 2.0  # factor by which the tolerance is tightened beyond what the worst row needs


def solve_coupled(
    f: FlatMap, z0: Tensor, solver: AnySolver, stop: Stop, *, right: Tensor | None, precision: float, known: Tensor | None
) -> SolveResult:
    """As `loop.solve`, with the batch as one row of batch * n numbers; every sample gets the statistics of that row.

    right  (batch, n), the right-hand side of a linear equation, to which the tolerance is relative
    known  (batch, n), f(z0) if it has been evaluated
    """
    batch, n = z0.shape

    def join(x: Tensor) -> Tensor:
        return x.reshape(1, batch * n)

    def joined(g: FlatMap) -> FlatMap:
        return lambda x: join(g(x.reshape(batch, n)))

    whole = joined(f)
    if isinstance(f, LinearMap):
        whole = LinearMap(joined(f.product), joined(f.transposed), join(f.rhs))
    scale = None if right is None else stop.norm(join(right))
    result = solve(
        whole, join(z0), solver, stop, scale=scale, precision=precision, known=None if known is None else join(known)
    )
    return dataclasses.replace(result, z=result.z.reshape(batch, n), stats=_spread(result.stats, batch))


def solve_rows_as_one(f: FlatMap, z0: Tensor, solver: AnySolver, stop: Stop, *, precision: float) -> SolveResult:
    """As `solve_coupled`, repeated with tighter tolerances until every row meets its own; status is per row."""
    result = solve_coupled(f, z0, solver, stop, right=None, precision=precision, known=None)
    factor = 1.0
    for _ in range(VERIFICATIONS):
        claimed, left = result.stats.converged, stop.max_steps - result.taken
        result = measure(result, f, stop, precision)
        short = claimed & result.stats.failed
        if left <= 0 or not bool(short.any()):
            return result
        # the batch as one vector meets the tolerance, but some row does not
        factor *= TIGHTER * max(float(result.stats.residual[short].max()) / max(stop.rtol, precision), 1.0)
        tighter = dataclasses.replace(stop, rtol=stop.rtol / factor, atol=stop.atol / factor, max_steps=left)
        result = go_on(result, solve_coupled(f, result.z, solver, tighter, right=None, precision=precision, known=None))
    return measure(result, f, stop, precision)


def go_on(first: SolveResult, then: SolveResult) -> SolveResult:
    """Join two successive solves: the result and status of the second one, the steps and evaluations of both."""
    a, b = first.stats, then.stats
    trace = None
    if a.trace is not None and b.trace is not None:
        trace = tuple(torch.cat([x, y[1:]]) for x, y in zip(a.trace, b.trace, strict=True))
    stats = dataclasses.replace(
        b,
        steps=a.steps + b.steps,
        rejected=a.rejected + b.rejected,
        best=a.steps + b.best,
        evaluations=a.evaluations + b.evaluations,
        sample_evaluations=a.sample_evaluations + b.sample_evaluations,
        products=a.products + b.products,
        trace=trace,
        iterates=a.iterates + b.iterates,
        handovers=a.handovers + b.handovers,
    )
    return dataclasses.replace(then, stats=stats, taken=first.taken + then.taken, coupled=True)


def _spread(stats: Stats, batch: int) -> Stats:
    """The statistics of one row, repeated for every sample of the batch."""
    return dataclasses.replace(
        stats,
        status=stats.status.repeat(batch),
        steps=stats.steps.repeat(batch),
        rejected=stats.rejected.repeat(batch),
        best=stats.best.repeat(batch),
        residual=stats.residual.repeat(batch),
        sample_evaluations=stats.sample_evaluations * batch,
        trace=None if stats.trace is None else stats.trace * batch,
        iterates=tuple(z.reshape(batch, -1) for z in stats.iterates),
    )
