"""The equilibrium as the steady state of an ordinary differential equation, integrated per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.tableaus import TABLEAUS, Method, Tableau, weighted_sum
from equilibria.stop import rms_norm

SAFETY = 0.9  # steps are this share of what the error allows, because a rejected step costs more
SHRINK, GROW = 0.2, 10.0  # bounds of the ratio of successive time steps
NOTCHES = 16  # grid points of dt per doubling
SMALLEST_ERROR = 1e-4  # smallest error that the controller uses
ROUNDING = 4  # smallest tolerance of a step, in roundings of the state


@dataclass(frozen=True)
class Integration(Iterate):
    dt: Tensor  # (batch, 1), the step to try next
    longest: Tensor  # (batch, 1), upper bound of dt; infinite until it is known
    error: Tensor  # (batch, 1), error of the last accepted step in units of the tolerance


@dataclass(frozen=True, kw_only=True)
class SteadyState(Solver[Integration]):
    """Integrate dz/dt = f(z) - z to its steady state: the continuous DEQ (Pal, Edelman and Rackauckas 2022).

    It uses explicit Runge-Kutta pairs with an individual step size for every sample. A step with the estimated error e is
    accepted if

        rms(e / (atol + rtol max(|z|, |z_new|))) <= 1   and   |e| <= edge dt |f(z) - z|,

    otherwise it is repeated with a smaller dt. The first condition bounds the error of the trajectory. Near the steady
    state it alone would let dt grow beyond the limit of stability, and the residual would remain of the order of rtol. The
    second condition, with the `edge` of the pair at that limit, lets the residual fall to any tolerance. The solver finds
    equilibria at which the eigenvalues of the Jacobian have real parts below 1, also where plain iteration diverges. Six
    evaluations per step ("bs3" three, "heun" two), accepted or not; `Stats.depth` counts the accepted ones. Memory of 14
    states ("bs3" 11, "heun" 10).

    method      "tsit5", "dopri5" (order 5), "bs3" (3) or "heun" (2)
    rtol, atol  tolerances of the trajectory; those of the equilibrium are in `Stop`. If only the equilibrium matters,
                rtol=0.1 saves up to 40 % of the evaluations, with "bs3" 60 %, with "heun" 80 %. rtol counts as at least
                four machine epsilons of the cell's dtype, 0.03 in bfloat16
    first_step  the first dt; None uses Hairer's rule, which costs an evaluation and, from zero, many short steps
    """

    method: Method = "tsit5"
    rtol: float = 1e-3
    atol: float = 1e-6
    first_step: float | None = 0.5

    def __post_init__(self) -> None:
        choices = get_args(Method)
        require(self.method in choices, f"SteadyState's method must be one of {choices}, got {self.method!r}.")
        require(self.rtol >= 0, f"SteadyState's rtol must not be negative, got {self.rtol}.")
        require(
            self.atol > 0,
            f"SteadyState's atol must be positive, got {self.atol}: entries at zero have no other scale. Take a small one.",
        )
        require(
            self.first_step is None or 0 < self.first_step < math.inf,
            f"SteadyState's first_step must be positive and finite, got {self.first_step}; None chooses one.",
        )

    def init(self, f: Map, z0: Tensor) -> Integration:
        """Evaluate the start, and choose the first step size."""
        fz, rows = f(z0), (z0.shape[0], 1)
        dt = self._first_step(f, z0, fz - z0) if self.first_step is None else z0.new_full(rows, self.first_step)
        nobody = torch.zeros(z0.shape[0], dtype=torch.bool, device=z0.device)
        error, longest = z0.new_full(rows, SMALLEST_ERROR), z0.new_full(rows, torch.inf)
        return Integration(z0, fz, dt, longest, error, rejected=nobody)

    def step(self, f: Map, state: Integration) -> Integration:
        """Take a Runge-Kutta step, accept it by its error, and choose the next step size."""
        tableau = TABLEAUS[self.method]
        z, fz, slopes = trial(tableau, f, state.z, state.fz, state.dt)
        with torch.no_grad():  # dt moves on a grid: its derivative is zero
            # an estimate from slopes in half precision is rounding noise, which would make dt tiny if rtol were below it
            error = self._measure(tableau, state, z, fz, slopes, max(self.rtol, ROUNDING * f.precision))
            longest = torch.where(torch.isinf(state.longest), _longest(tableau, state.dt, slopes), state.longest)
            # past the shortest step there is nothing to try: a finite trial is taken, any other ends the sample
            taken = (error <= 1) | (state.dt <= _shortest(state.dt))
            dt = state.dt * _change(tableau.order, error, state.error, taken)
            dt = torch.minimum(dt, longest).clamp(min=_shortest(dt), max=torch.finfo(dt.dtype).max)
            remembered = torch.where(taken, error.clamp_min(SMALLEST_ERROR), state.error)
        z, fz = torch.where(taken, z, state.z), torch.where(taken, fz, state.fz)
        return Integration(z, fz, dt, longest, remembered, active=state.active, rejected=~taken.squeeze(1))

    def _measure(
        self, tableau: Tableau, state: Integration, z: Tensor, fz: Tensor, slopes: list[Tensor], rtol: float
    ) -> Tensor:
        """Return the error relative to the tolerance, (batch, 1); infinite where the trial is not finite."""
        error = state.dt * weighted_sum(tableau.error, slopes)
        scale = self.atol + rtol * torch.maximum(state.z.abs(), z.abs())
        before, after = _rms(state.fz - state.z), _rms(fz - z)
        measured = torch.maximum(_rms(error / scale), _rms(error) / (tableau.edge * state.dt * before))
        measured = torch.where(before == 0, 1.0, measured)  # a sample at rest gives no information about longer steps
        return torch.where(torch.isfinite(measured) & torch.isfinite(after), measured, torch.inf)

    def _first_step(self, f: Map, z: Tensor, slope: Tensor) -> Tensor:
        """Return (batch, 1), the first dt by one Euler step (Hairer, Nørsett and Wanner 1993, II.4)."""
        scale = self.atol + self.rtol * z.abs()
        size, speed = _rms(z / scale), _rms(slope / scale)
        probe = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed)
        point = z + probe * slope
        change = _rms((f(point) - point - slope) / scale) / probe
        largest = torch.maximum(speed, change)
        dt = (0.01 / largest).pow(1 / TABLEAUS[self.method].order)
        dt = torch.where(largest <= 1e-15, (1e-3 * probe).clamp_min(1e-6), dt)
        dt = torch.minimum(100 * probe, dt)
        return torch.where(torch.isfinite(dt), dt, probe).detach()


def trial(tableau: Tableau, f: Map, z: Tensor, fz: Tensor, dt: Tensor | float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Try one step; returns the new point, f there, and the slopes of all stages."""
    slopes, point, value = [fz - z], z, fz
    for row in tableau.rows:
        point = z + dt * weighted_sum(row, slopes)
        value = f(point)
        slopes.append(value - point)
    return point, value, slopes


def _longest(tableau: Tableau, dt: Tensor, slopes: list[Tensor]) -> Tensor:
    """Return (batch, 1), the largest dt stable for twice the observed rate |(I - J) k| / |k|, or for rate 2 if smaller.

    2 is the fastest rate of a contraction. A mode that has decayed to rounding errors is not observed. Longer steps would
    amplify it again, and the result would then depend on the batch size through rounding.
    """
    rate = _rms(slopes[1] - slopes[0]) / (tableau.rows[0][0] * dt * _rms(slopes[0]))
    longest = _on_grid(tableau.stable / (2 * rate).clamp(max=2.0))
    return torch.where(torch.isfinite(longest), longest, torch.inf)


def _change(order: int, error: Tensor, before: Tensor, taken: Tensor) -> Tensor:
    """Return (batch, 1), the next dt over this one: a PI controller, proportional only after a rejection."""
    proportional = SAFETY * error.pow(-7 / (10 * order))
    change = torch.where(taken, proportional * before.pow(2 / (5 * order)), proportional).clamp(SHRINK, GROW)
    return _on_grid(change)


def _on_grid(x: Tensor) -> Tensor:
    """Round dt to a grid, so that rounding errors in z, which depend on the batch size, do not change it."""
    return torch.exp2(torch.round(x.log2() * NOTCHES) / NOTCHES)


def _shortest(dt: Tensor) -> float:
    """Return the smallest dt: the time scale of dz/dt = f(z) - z is 1, and steps below its rounding error have no effect."""
    return torch.finfo(dt.dtype).eps


def _rms(x: Tensor) -> Tensor:
    """Return the root mean square of each row, (batch, 1)."""
    return rms_norm(x).unsqueeze(1)
