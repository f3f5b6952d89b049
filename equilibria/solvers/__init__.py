"""Solvers: rules for the next iterate, one file per method."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equilibria.solvers.anderson import Anderson
    from equilibria.solvers.base import Iterate, Solver
    from equilibria.solvers.broyden import Broyden
    from equilibria.solvers.df_sane import DFSane
    from equilibria.solvers.fallback import Fallback
    from equilibria.solvers.krylov import GMRES, BiCGSTAB, NormalCG
    from equilibria.solvers.newton import Newton
    from equilibria.solvers.picard import Picard
    from equilibria.solvers.pseudo_transient import PseudoTransient
    from equilibria.solvers.restart import Restart
    from equilibria.solvers.robust import Robust
    from equilibria.solvers.steady_state import SteadyState
    from equilibria.solvers.trust_region import TrustRegion

__all__ = [
    "GMRES",
    "Anderson",
    "BiCGSTAB",
    "Broyden",
    "DFSane",
    "Fallback",
    "Iterate",
    "Newton",
    "NormalCG",
    "Picard",
    "PseudoTransient",
    "Restart",
    "Robust",
    "Solver",
    "SteadyState",
    "TrustRegion",
]

FILES = {
    "GMRES": "krylov",
    "BiCGSTAB": "krylov",
    "NormalCG": "krylov",
    "DFSane": "df_sane",
    "Iterate": "base",
    "Solver": "base",
    "PseudoTransient": "pseudo_transient",
    "SteadyState": "steady_state",
    "TrustRegion": "trust_region",
}  # of names that are not those of their file


def __getattr__(name: str) -> Any:
    # on first use: the machinery that solvers are written with imports this package
    if name in __all__:
        return getattr(importlib.import_module(f"equilibria.solvers.{FILES.get(name, name.lower())}"), name)
    raise AttributeError(f"module 'equilibria.solvers' has no attribute {name!r}")
