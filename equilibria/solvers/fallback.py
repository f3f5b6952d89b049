"""A chain of solvers: what one cannot solve, the next one gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equilibria.solvers.base import Solver, require


@dataclass(frozen=True, init=False)
class Fallback:
    """Each solver gets the samples on which those before it failed or stalled, from the best iterate found so far.

    A sample whose best iterate has a larger residual than the start, as of a solver that ran away, is handed over from the
    start instead.

        Fallback(Picard(), Anderson(), Newton())

    Every solver may take `Stop.max_steps` steps; all but the last give a sample up after `patience` steps without
    progress. Samples that the last solver leaves unsolved are tried again from the start, with all steps, by every solver
    that began elsewhere or was cut short, the last one first. So a chain solves whatever one of its solvers solves alone,
    and a sample that none of them solves costs up to twice their steps. `stats.handovers` records which samples went on,
    and why.
    """

    solvers: tuple[Solver[Any], ...]
    patience: int

    def __init__(self, *solvers: Solver[Any], patience: int = 10) -> None:
        require(len(solvers) >= 2, f"Fallback needs at least two solvers, got {len(solvers)}.")
        for solver in solvers:
            if not isinstance(solver, Solver):
                raise TypeError(f"Fallback is made of solvers such as Anderson(), got {solver!r}.")
        require(patience >= 1, f"Fallback's patience must be at least 1, got {patience}.")
        object.__setattr__(self, "solvers", solvers)
        object.__setattr__(self, "patience", patience)

    def __repr__(self) -> str:
        return f"Fallback({', '.join(map(repr, self.solvers))}, patience={self.patience})"


AnySolver = Solver[Any] | Fallback
