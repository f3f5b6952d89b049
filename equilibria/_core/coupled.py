"""Batches whose samples depend on each other (batch statistics): one problem, not many.

Per sample, a Krylov space or a set of mixing weights describes nothing here, and a sample that was frozen does not
stay converged while its neighbours move.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from equilibria._core.loop import Flat, Stop, solve
from equilibria._core.maps import Affine, FlatMap
from equilibria.solution import Stats
from equilibria.solvers.fallback import AnySolver


def solve_whole(
    f: FlatMap, z0: Tensor, solver: AnySolver, stop: Stop, *, right: Tensor | None, precision: float, known: Tensor | None
) -> Flat:
    """As `solve`, on the batch as one vector; every sample gets the statistics of the whole."""
    batch, n = z0.shape

    def join(x: Tensor) -> Tensor:
        return x.reshape(1, batch * n)

    def joined(g: FlatMap) -> FlatMap:
        return lambda x: join(g(x.reshape(batch, n)))

    whole = Affine(joined(f.product), joined(f.transposed), join(f.offset)) if isinstance(f, Affine) else joined(f)
    scale = None if right is None else stop.norm(join(right))
    flat = solve(
        whole, join(z0), solver, stop, scale=scale, precision=precision, known=None if known is None else join(known)
    )
    return dataclasses.replace(flat, z=flat.z.reshape(batch, n), stats=_spread(flat.stats, batch))


def _spread(stats: Stats, batch: int) -> Stats:
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
