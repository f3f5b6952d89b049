"""equilibria: deep equilibrium models in PyTorch. What is not named here is not API."""

from equilibria.deq import DEQ, fixed_point
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.norms import euclidean_norm, max_norm, rms_norm
from equilibria.recording import record
from equilibria.solution import ConvergenceError, ConvergenceWarning, Handover, Solution, Stats, Status
from equilibria.solve import Stop
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import Fallback
from equilibria.solvers.krylov import GMRES, BiCGSTAB, NormalCG
from equilibria.solvers.newton import Newton
from equilibria.solvers.picard import Picard
from equilibria.solvers.restart import Restart
from equilibria.starts import FirstStep, Zeros

__version__ = "0.1.0"

__all__ = [
    "DEQ",
    "GMRES",
    "Anderson",
    "BiCGSTAB",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "Fallback",
    "FirstStep",
    "Gradient",
    "Handover",
    "Implicit",
    "Iterate",
    "Newton",
    "NormalCG",
    "Picard",
    "Restart",
    "Solution",
    "Solver",
    "Stats",
    "Status",
    "Stop",
    "Zeros",
    "euclidean_norm",
    "fixed_point",
    "max_norm",
    "record",
    "rms_norm",
]
