"""A gradient that is approximate for samples where that is accurate enough, and exact for the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from equilibria._core.attach import attach
from equilibria._core.checks import require
from equilibria._core.primitive import differentiable_fixed_point
from equilibria._core.problem import Problem
from equilibria.gradients.approximations import Approximation, Neumann
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom


@dataclass(frozen=True, kw_only=True)
class Escalate(Gradient):
    """Use the cotangent of `cheap` for samples whose relative residual |J'u + v - u| / |v| is at most `when`, else `exact`.

    The residual costs one product. The exact solve of the other samples starts from their cheap cotangents. Derivatives
    that are differentiated again are exact for every sample.

    cheap  JFB() or NeumannPhantom(...)
    exact  Implicit(...)
    when   the largest residual at which the cheap cotangent is accepted
    """

    cheap: Gradient = field(default_factory=NeumannPhantom)
    exact: Implicit = field(default_factory=Implicit)
    when: float = 0.1

    def __post_init__(self) -> None:
        require(self.when >= 0, f"Escalate's when must not be negative, got {self.when}.")
        if not isinstance(self.exact, Implicit):
            raise TypeError(f"Escalate's exact must be an eq.Implicit(...), got {self.exact!r}.")
        self._approximation()

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve; backward uses the formula of `cheap` where it is accurate enough."""
        linear = dataclasses.replace(self.exact.linear(problem), approximation=self._approximation(), when=self.when)
        problem = problem.changed(linear=linear)
        return attach(problem, z0, args) if problem.opaque else differentiable_fixed_point(problem, z0, *args)[0]

    def _approximation(self) -> Approximation:
        """Return the formula of `cheap`; TypeError if it has none."""
        if isinstance(self.cheap, JFB):
            return Neumann(1, 1.0)
        if isinstance(self.cheap, NeumannPhantom):
            return Neumann(self.cheap.steps, self.cheap.damping)
        raise TypeError(
            f"Escalate's cheap must be eq.JFB() or eq.NeumannPhantom(...), got {self.cheap!r}: the adjoint residual is "
            "defined only for a cotangent at the equilibrium."
        )
