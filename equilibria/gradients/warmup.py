"""A gradient that switches to another one after a number of training solves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.problem import Problem
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.unrolled import Unrolled


@dataclass(frozen=True, kw_only=True)
class Warmup(Gradient):
    """Use `first` for the first `until` training solves of a DEQ, and `then` afterwards.

    DEQ training recipes pre-train a short unrolled network before they solve for an equilibrium:

        Warmup(first=Unrolled(depth=10), then=Implicit(), until=3000)

    The DEQ counts its solves in training mode with gradients in a buffer, so that a resumed run continues the count. In
    eval mode and without gradients it uses the gradient that the next training solve would use.
    """

    first: Gradient = field(default_factory=lambda: Unrolled(depth=10))
    then: Gradient = field(default_factory=Implicit)
    until: int = 1000
    follows_start: ClassVar[bool] = True  # __call__ detaches the start for the one that does not follow it

    def __post_init__(self) -> None:
        for name, part in (("first", self.first), ("then", self.then)):
            if not isinstance(part, Gradient):
                raise TypeError(f"Warmup's {name} must be a gradient such as eq.Implicit(), got {part!r}.")
        require(self.until >= 0, f"Warmup's until must not be negative, got {self.until}.")

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve by `first` in the first `until` training solves of the layer, and by `then` afterwards."""
        gradient = self.first if problem.solves < self.until else self.then
        return gradient(problem, z0 if gradient.follows_start else z0.detach(), args)
