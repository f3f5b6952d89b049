"""Solver, stop and gradient of an equilibrium layer, chosen by names: for settings files and command lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom, UnrolledPhantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.picard import Picard
from equilibria.solvers.steady_state import SteadyState
from equilibria.stop import Stop

SolverName = Literal["anderson", "broyden", "picard", "tsit5", "bs3"]
GradientName = Literal["implicit", "upg", "npg", "jfb", "bptt"]
AdjointName = Literal["gmres", "broyden", "solver"]


def relative_stop(tolerance: float, max_steps: int) -> Stop:
    """Return a Stop with a relative tolerance and a step limit that does not warn; the caller counts failed samples."""
    return Stop(rtol=tolerance, atol=0.0, max_steps=max_steps, on_failure="ignore")


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """Settings by which a layer is solved and differentiated.

    stop           stop of the forward solve
    adjoint_stop   stop of the adjoint solve; its max_steps is also the history of Broyden's method there
    solver         forward solver; "tsit5" and "bs3" integrate the continuous system
    gradient       "upg" and "npg" are phantom gradients of `phantom_steps` steps with `damping`; "bptt" unrolls
                   stop.max_steps steps
    adjoint        solver of the adjoint equation of "implicit"; "solver" is the forward solver
    history        pairs that Broyden's method keeps in the forward solve; None: its default
    relaxation     damping of Picard's method
    first_step     first step of the continuous system; None: by Hairer's rule
    directions     directions that GMRES keeps before it restarts; None: its default
    """

    stop: Stop
    adjoint_stop: Stop
    solver: SolverName = "anderson"
    gradient: GradientName = "implicit"
    adjoint: AdjointName = "gmres"
    history: int | None = None
    relaxation: float = 1.0
    first_step: float | None = 0.5
    directions: int | None = None
    phantom_steps: int = 5
    damping: float = 0.5

    def parts(self) -> dict[str, Any]:
        """Return the keyword arguments `solver`, `stop` and `gradient` of a model."""
        return {"solver": self.make_solver(), "stop": self.stop, "gradient": self.make_gradient()}

    def make_solver(self) -> Solver[Any]:
        """Return the forward solver by its name."""
        match self.solver:
            case "anderson":
                return Anderson()
            case "broyden":
                return Broyden() if self.history is None else Broyden(history=self.history)
            case "picard":
                return Picard(damping=self.relaxation)
            case _:
                return SteadyState(method=self.solver, first_step=self.first_step)

    def make_gradient(self) -> Gradient:
        """Return the gradient by its name."""
        match self.gradient:
            case "upg":
                return UnrolledPhantom(steps=self.phantom_steps, damping=self.damping)
            case "npg":
                return NeumannPhantom(steps=self.phantom_steps, damping=self.damping)
            case "jfb":
                return JFB()
            case "bptt":
                return Unrolled(depth=self.stop.max_steps)  # always this depth, whatever the tolerance
            case _:
                return Implicit(solver=self._adjoint_solver(), stop=self.adjoint_stop)

    def _adjoint_solver(self) -> Solver[Any]:
        """Return the solver of the adjoint equation by its name."""
        match self.adjoint:
            case "gmres":
                return GMRES(restart=self.directions)
            case "broyden":
                return Broyden(history=max(self.adjoint_stop.max_steps, 1))  # keeps the pairs of all steps
            case _:
                return self.make_solver()
