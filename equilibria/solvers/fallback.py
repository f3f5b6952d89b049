"""A chain of solvers, in which each one gets the samples that those before it did not solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equilibria._core.checks import require
from equilibria.solvers.base import Solver


@dataclass(frozen=True, init=False)
class Fallback:
    """Each solver gets the samples on which those before it failed or stalled, from the best iterate found so far.

    A sample whose best iterate has a larger residual than the start, for example after a solver diverged, is handed over
    from the start instead.

        Fallback(Picard(), Anderson(), Newton())

    Every solver may take `Stop.max_steps` steps; all but the last give up a sample after `patience` steps without
    progress. Samples that the last solver does not solve are solved again from the start, with all steps, by every solver
    that started elsewhere or was stopped early, the last one first. A chain therefore solves every sample that one of its
    solvers solves alone, and a sample that none of them solves costs up to twice their steps. `stats.handovers` records
    which samples were handed over, and why.
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


def check_solver(solver: Any) -> None:
    """Raise TypeError unless `solver` is a solver or a chain of solvers."""
    if isinstance(solver, type) or not isinstance(solver, (Solver, Fallback)):
        raise TypeError(f"A solver is an object such as Anderson() or Fallback(Picard(), Newton()), got {solver!r}.")
