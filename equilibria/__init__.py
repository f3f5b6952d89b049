"""equilibria: deep equilibrium models in PyTorch. docs/api.md lists the public names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibria import native, nn
from equilibria.deq import DEQ, fixed_point, root, sample_keys
from equilibria.explicit import WeightTied
from equilibria.export import export, to_onnx
from equilibria.gradients.base import Gradient
from equilibria.gradients.escalate import Escalate
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom, UnrolledPhantom
from equilibria.gradients.reversible import Reversible
from equilibria.gradients.shine import Shine
from equilibria.gradients.unrolled import Unrolled
from equilibria.gradients.warmup import Warmup
from equilibria.looped import Carry, Halting, RandomStart, breadth
from equilibria.monitoring import monitor
from equilibria.nn import freeze_dropout
from equilibria.penalties import correction_penalty, correction_states, jacobian_penalty, random_max_steps, skip_penalty
from equilibria.remember import Remember
from equilibria.solution import ConvergenceError, ConvergenceWarning, Solution, Stats, Status, record
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
from equilibria.starts import FirstStep, Zeros
from equilibria.stop import Stop, euclidean_norm, max_norm, rms_norm

if TYPE_CHECKING:
    from equilibria import analysis, cells, integrations, lab, models, serving
    from equilibria.analysis import diagnose, gradient_agreement, spectral_radius, tune

__version__ = "0.1.0"

__all__ = [
    "DEQ",
    "GMRES",
    "JFB",
    "Anderson",
    "BiCGSTAB",
    "Broyden",
    "Carry",
    "ConvergenceError",
    "ConvergenceWarning",
    "DFSane",
    "Escalate",
    "Fallback",
    "FirstStep",
    "Gradient",
    "Halting",
    "Implicit",
    "Iterate",
    "NeumannPhantom",
    "Newton",
    "NormalCG",
    "Picard",
    "PseudoTransient",
    "RandomStart",
    "Remember",
    "Restart",
    "Reversible",
    "Robust",
    "Shine",
    "Solution",
    "Solver",
    "Stats",
    "Status",
    "SteadyState",
    "Stop",
    "TrustRegion",
    "Unrolled",
    "UnrolledPhantom",
    "Warmup",
    "WeightTied",
    "Zeros",
    "analysis",
    "breadth",
    "cells",
    "correction_penalty",
    "correction_states",
    "diagnose",
    "euclidean_norm",
    "export",
    "fixed_point",
    "freeze_dropout",
    "gradient_agreement",
    "integrations",
    "jacobian_penalty",
    "lab",
    "max_norm",
    "models",
    "monitor",
    "native",
    "nn",
    "random_max_steps",
    "record",
    "rms_norm",
    "root",
    "sample_keys",
    "serving",
    "skip_penalty",
    "spectral_radius",
    "to_onnx",
    "tune",
]

ROOMS = ("analysis", "cells", "constraints", "integrations", "lab", "models", "serving")  # loaded on first use
FROM_ANALYSIS = ("diagnose", "gradient_agreement", "spectral_radius", "tune")  # names that load the room behind them


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"equilibria.{name}")
    if name in FROM_ANALYSIS:
        return getattr(importlib.import_module("equilibria.analysis"), name)
    raise AttributeError(f"module 'equilibria' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *ROOMS, *FROM_ANALYSIS})
