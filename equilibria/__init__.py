"""equilibria: deep equilibrium models in PyTorch. docs/api.md lists the public names.

`__all__` has the names most people use. The others are in named modules of the package: `eq.solvers`,
`eq.looped`, `eq.penalties`, `eq.stop`, `eq.native`, and those that load on first use (`ROOMS`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibria import looped as looped
from equilibria import native as native
from equilibria import nn
from equilibria import penalties as penalties
from equilibria import solvers as solvers
from equilibria import stop as stop
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
from equilibria.monitoring import monitor
from equilibria.nn import freeze_dropout
from equilibria.penalties import correction_penalty, jacobian_penalty, random_max_steps, skip_penalty
from equilibria.remember import Remember
from equilibria.solution import ConvergenceError, ConvergenceWarning, Solution, Stats, Status, record
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import Fallback
from equilibria.solvers.krylov import GMRES, BiCGSTAB, NormalCG
from equilibria.solvers.newton import Newton
from equilibria.solvers.picard import Picard
from equilibria.solvers.restart import Restart
from equilibria.solvers.robust import Robust
from equilibria.solvers.steady_state import SteadyState
from equilibria.starts import FirstStep, Zeros
from equilibria.stop import Stop

if TYPE_CHECKING:
    from equilibria import analysis as analysis
    from equilibria import cells as cells
    from equilibria import integrations as integrations
    from equilibria import lab as lab
    from equilibria import models as models
    from equilibria import serving as serving
    from equilibria.analysis import diagnose, gradient_agreement, spectral_radius, tune

__version__ = "0.2.0"

__all__ = [
    "DEQ",
    "GMRES",
    "JFB",
    "Anderson",
    "BiCGSTAB",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "Escalate",
    "Fallback",
    "FirstStep",
    "Gradient",
    "Implicit",
    "Iterate",
    "NeumannPhantom",
    "Newton",
    "NormalCG",
    "Picard",
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
    "Unrolled",
    "UnrolledPhantom",
    "Warmup",
    "WeightTied",
    "Zeros",
    "correction_penalty",
    "diagnose",
    "export",
    "fixed_point",
    "freeze_dropout",
    "gradient_agreement",
    "jacobian_penalty",
    "monitor",
    "nn",
    "random_max_steps",
    "record",
    "root",
    "sample_keys",
    "skip_penalty",
    "spectral_radius",
    "to_onnx",
    "tune",
]

ROOMS = ("analysis", "cells", "constraints", "integrations", "lab", "models", "serving")  # loaded on first use
FROM_ANALYSIS = ("diagnose", "gradient_agreement", "spectral_radius", "tune")  # names that load `analysis`


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"equilibria.{name}")
    if name in FROM_ANALYSIS:
        return getattr(importlib.import_module("equilibria.analysis"), name)
    raise AttributeError(f"module 'equilibria' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *ROOMS, *FROM_ANALYSIS})
