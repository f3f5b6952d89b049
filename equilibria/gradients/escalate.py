"""A cheap gradient where it is good enough, an exact one where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from equilibria._core.attach import attach
from equilibria._core.primitive import differentiable_fixed_point
from equilibria.gradients.approximations import Approximation, Neumann
from equilibria.gradients.base import Gradient, Problem
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom
from equilibria.solvers.base import require


@dataclass(frozen=True, kw_only=True)
class Escalate(Gradient):
    """Per sample the cotangent of `cheap` if its relative residual |J'u + v - u| / |v| is at most `when`, else exact.

    The residual costs one product; a sample that is sent on starts from its cheap cotangent. Derivatives that are to be
    differentiated again are exact for every sample.

    cheap  JFB() or NeumannPhantom(...)
    exact  Implicit(...)
    when   the largest residual that will do
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
        task = dataclasses.replace(self.exact.task(problem), approximation=self._approximation(), when=self.when)
        return attach(task, z0, args) if problem.opaque else differentiable_fixed_point(task, z0, *args)[0]

    def _approximation(self) -> Approximation:
        if isinstance(self.cheap, JFB):
            return Neumann(1, 1.0)
        if isinstance(self.cheap, NeumannPhantom):
            return Neumann(self.cheap.steps, self.cheap.damping)
        raise TypeError(
            f"Escalate's cheap must be eq.JFB() or eq.NeumannPhantom(...), got {self.cheap!r}: only a cotangent at the "
            "equilibrium has an adjoint residual to be judged by."
        )
