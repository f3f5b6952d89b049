"""Newton-Krylov steps inside a trust region, per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.newton import check_linear, inexact_step, next_forcing
from equilibria.solvers.rowwise import divide, dot

TRIALS = 12  # per linearisation; the radius falls at least by half from one to the next
ACCEPTED = 1e-4  # share of the predicted decrease that an accepted step achieves
POOR, GOOD = 0.25, 0.75  # shares below which the radius shrinks, above which it may grow
SHRINK, GROW = (0.02, 0.5), 2.0


@dataclass(frozen=True)
class TrustRegionState(Iterate):
    radius: Tensor  # (batch, 1), radius of the trust region; infinite until the first poor step
    forcing: Tensor  # (batch,), relative tolerance of the next linear system


@dataclass(frozen=True, kw_only=True)
class TrustRegion(Solver[TrustRegionState]):
    """Powell's dogleg (1970) on r(z) = f(z) - z: the step p that reduces the model |r - (I - J) p| with |p| <= radius.

    The path goes from z along the gradient of |r|² to the minimum of the model in that direction, and on to the
    Newton-Krylov step. A step is accepted if |r|² falls by 1e-4 of what the model predicts; else the radius shrinks and the
    next trial needs one evaluation. |r| never rises, so a sample ends at a root or where the gradient (I - J)' r is zero.
    Every sample has its own radius. One transposed product (reverse mode, one evaluation with a graph), one product for the
    gradient, one per inner step, and 1 to 12 evaluations a step. A sample whose trials all fail stays where it is and
    counts the step in `Stats.rejected`.

    linear        the solver of the linear systems
    linear_steps  its largest number of steps per step
    """

    differentiable: ClassVar[bool] = False
    linear: Solver[Any] = field(default_factory=GMRES)
    linear_steps: int = 100

    def __post_init__(self) -> None:
        check_linear("TrustRegion", self.linear, self.linear_steps)

    def init(self, f: Map, z0: Tensor) -> TrustRegionState:
        """Evaluate the start; the step is not limited yet."""
        batch = z0.shape[0]
        nobody = torch.zeros(batch, dtype=torch.bool, device=z0.device)
        radius, forcing = z0.new_full((batch, 1), torch.inf), z0.new_full((batch,), 0.1)
        return TrustRegionState(z0, f(z0), radius, forcing, rejected=nobody)

    def step(self, f: Map, state: TrustRegionState) -> TrustRegionState:
        """Take the step of the local model within the radius, accept it by the actual decrease, and adapt the radius."""
        model = self._model(f, state)
        before = state.length.unsqueeze(1)
        z, fz, radius, after = state.z, state.fz, state.radius, before
        searching = torch.isfinite(before) & (before > 0)
        searching = searching if state.active is None else searching & state.active.unsqueeze(1)
        for _ in range(TRIALS):
            if not f.any(searching):
                break
            p, predicted, slope = model.step(radius)
            trial = state.z + p
            value = f(trial)
            length = torch.linalg.vector_norm(value - trial, dim=1, keepdim=True)
            share = _share(before, length, predicted)
            good = searching & (share >= ACCEPTED)
            z, fz = torch.where(good, trial, z), torch.where(good, value, fz)
            after = torch.where(good, length, after)
            # shrink after a poor step to the minimum of an interpolating parabola; grow after a good step of full length
            ratio = divide(length, before)
            size = torch.linalg.vector_norm(p, dim=1, keepdim=True)
            vertex = -slope / (2 * (ratio.square() - 1 - slope))
            vertex = torch.where(torch.isfinite(vertex) & (vertex > 0), vertex, SHRINK[0]).clamp(*SHRINK)
            grown = torch.where(size > 0.99 * radius, GROW * radius, radius)
            next_radius = torch.where(share < POOR, size * vertex, torch.where(share > GOOD, grown, radius))
            radius = torch.where(searching, next_radius, radius)
            searching = searching & ~good
        forcing = next_forcing(state.forcing, state.length, after.squeeze(1))
        return TrustRegionState(z, fz, radius, forcing, active=state.active, rejected=searching.squeeze(1))

    def _model(self, f: Map, state: TrustRegionState) -> _Model:
        """Return the Newton direction and the direction of descent with their images, for the dogleg step."""
        residual, jacobian = state.residual, f.jacobian(state.z)
        newton, left = inexact_step(
            f, state, state.forcing, self.linear, self.linear_steps, start=torch.zeros_like(residual)
        )
        descent = residual - jacobian.transposed(residual)
        # scaled to length 1: the squares of a steep gradient overflow before the gradient does
        descent = divide(descent, torch.linalg.vector_norm(descent, dim=1, keepdim=True).expand_as(descent))
        image = descent - jacobian.product(descent)
        length = divide(dot(image, residual), dot(image, image))
        rest = residual - length * image
        worse = _squared(left) > _squared(rest)  # a linear solve that stagnated: less than the gradient achieves
        newton = torch.where(worse, length * descent, newton)
        return _Model(residual, descent, image, length, newton, torch.where(worse, rest, left))


@dataclass(frozen=True)
class _Model:
    """The model |residual - (I - J) p| along the dogleg."""

    residual: Tensor  # (batch, n), f(z) - z
    descent: Tensor  # (batch, n), direction of the gradient, of length 1
    image: Tensor  # (batch, n), (I - J) descent
    length: Tensor  # (batch, 1), of the Cauchy step
    newton: Tensor  # (batch, n)
    left: Tensor  # (batch, n), of the residual after the Newton step

    def step(self, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the point p on the path at `radius` or its end, the model's length and its slope towards p, (batch, 1)."""
        cauchy = self.length * self.descent
        beyond = self.newton - cauchy
        # the largest t in [0, 1] with |start + t direction| <= radius, (batch, 1), for |start| <= radius
        a, b, c = _squared(beyond), dot(cauchy, beyond), (radius.square() - _squared(cauchy)).clamp_min(0)
        root = (b.square() + a * c).sqrt()
        # the form of the solution without cancellation
        t = torch.where(b > 0, divide(c, b + root), divide(root - b, a))
        share = torch.where(torch.isfinite(t), t, 1.0).clamp(0, 1)
        inside = torch.linalg.vector_norm(self.newton, dim=1, keepdim=True) <= radius
        short = self.length >= radius
        clipped = torch.minimum(self.length, radius)
        p = torch.where(short, clipped * self.descent, cauchy + share * beyond)
        after = self.residual - clipped * self.image
        after = torch.where(short, after, torch.lerp(after, self.left, share))
        p, after = torch.where(inside, self.newton, p), torch.where(inside, self.left, after)
        slope = 2 * (divide(dot(self.residual, after), _squared(self.residual)) - 1)  # of |r|² / |r(z)|², at z
        return p, torch.linalg.vector_norm(after, dim=1, keepdim=True), slope


def _share(before: Tensor, after: Tensor, predicted: Tensor) -> Tensor:
    """Return the decrease of |r|² over the predicted one; below zero where it rose or is not finite."""
    share = divide((before - after) * (before + after), (before - predicted) * (before + predicted))
    return torch.where(torch.isfinite(after) & torch.isfinite(share) & (predicted < before), share, -1.0)


def _squared(x: Tensor) -> Tensor:
    """Return the squared length of each row, (batch, 1)."""
    return dot(x, x)
