"""A chain of different solvers, for problems on which single solvers fail."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import Fallback
from equilibria.solvers.newton import Newton
from equilibria.solvers.pseudo_transient import PseudoTransient
from equilibria.solvers.trust_region import TrustRegion


@dataclass(frozen=True, init=False, repr=False)
class Robust(Fallback):
    """A `Fallback` in this order: Anderson, Newton, TrustRegion, Newton with full steps, PseudoTransient.

    A sample that Anderson solves costs what Anderson costs. The other solvers fail for different reasons and complement
    each other: Newton with its line search and the trust region never increase the residual and may end in a local minimum
    of it; full Newton steps and the differential equation of PseudoTransient leave such minima.

    patience  steps without progress after which a sample is handed to the next solver
    """

    def __init__(self, *, patience: int = 10) -> None:
        links = Anderson(), Newton(), TrustRegion(), Newton(line_search=False), PseudoTransient()
        super().__init__(*links, patience=patience)

    def __repr__(self) -> str:
        return f"Robust(patience={self.patience})"
