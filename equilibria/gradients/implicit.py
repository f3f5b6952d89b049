"""Exact gradients by the implicit function theorem."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from equilibria._core.attach import attach
from equilibria._core.primitive import differentiable_fixed_point
from equilibria._core.problem import AdjointFailure, LinearSolve, Problem
from equilibria.gradients.base import Gradient
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.krylov import GMRES
from equilibria.stop import DefaultTolerance, Stop


@dataclass(frozen=True, kw_only=True)
class Implicit(Gradient):
    """dz = (I - J)^{-1} dF: the backward pass solves g = J'g + v and stores no forward steps.

    Gradients are exact up to the tolerances, in reverse and forward mode and to any order; forward mode does not nest.

    solver      solver of the linear systems; None uses GMRES
    stop        tolerances of the linear systems, relative to their right-hand sides, so that gradients do not depend on
                the scale of the loss; None uses those of the forward solve
    on_failure  for samples whose system was not solved: "ignore", "warn", "raise", or "fall_back" to the
                Jacobian-free gradient g = v with a warning; None uses `stop.on_failure`
    """

    solver: AnySolver | None = None
    stop: Stop | None = None
    on_failure: AdjointFailure | None = None

    def __post_init__(self) -> None:
        choices = ("ignore", "warn", "raise", "fall_back", None)
        if self.on_failure not in choices:
            raise ValueError(f"Implicit's on_failure must be one of {choices}, got {self.on_failure!r}.")

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve; backward solves the adjoint system."""
        problem = problem.changed(linear=self.linear(problem))
        return attach(problem, z0, args) if problem.opaque else differentiable_fixed_point(problem, z0, *args)[0]

    def linear(self, problem: Problem) -> LinearSolve:
        """Return the settings of the linear systems of the problem."""
        default = isinstance((self.stop or problem.stop).rtol, DefaultTolerance)
        stop = _linear_stop(self.stop, problem.stop, problem.equation.precision if default else 0.0)
        return LinearSolve(self.solver or _GMRES, stop, self.on_failure)


_GMRES = GMRES()


@functools.lru_cache(maxsize=256)
def _linear_stop(own: Stop | None, forward: Stop, least: float) -> Stop:
    """Return the stop of the linear systems: `own`, or that of the forward solve with an rtol of at least `least`.

    Cached, because building a Stop checks all its settings. `least` is 0 for an rtol that was given, which is not changed.
    """
    # tolerances are relative to the right-hand side, so an absolute part would depend on the scale of the loss
    stop = own or dataclasses.replace(forward, atol=0.0, trace=False, keep_every=None)
    if stop.rtol < least:
        stop = dataclasses.replace(stop, rtol=DefaultTolerance(least))
    if stop.process_group is None:  # ranks that take the same number of steps forward must do so backward
        stop = dataclasses.replace(stop, process_group=forward.process_group)
    return stop
