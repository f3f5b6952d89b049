"""DF-SANE: spectral steps along the residual with a nonmonotone line search, per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.rowwise import divide, dot

SPECTRAL = (1e-10, 1e10)  # bounds of the absolute value of the spectral step
SUFFICIENT = 1e-4  # a step of length t must decrease |r|² by this times t² |r|²
CUT = (0.1, 0.5)  # bounds of the factor by which a step shrinks in one trial
TURNED = 0.5  # squared cosine between steps and changes of the residual below which the short spectral step is taken
TRIALS = 20  # per direction and step


@dataclass(frozen=True)
class SpectralState(Iterate):
    spectral: Tensor  # (batch, 1), the next step is spectral * residual, or its opposite
    recent: Tensor  # (batch, memory), squared residuals of the last iterates, relative to the first
    first: Tensor  # (batch, 1), length of the first residual
    count: Tensor  # (batch, 1), steps of this sample


@dataclass(frozen=True, kw_only=True)
class DFSane(Solver[SpectralState]):
    """z <- z ± t s r with r = f(z) - z and the spectral step s of the last step (La Cruz, Martínez and Raydan 2006).

        s = |dz|² / (dz' dr),     |r_new|² <= max of the last |r|² + |r_0|² / (1 + k)² - 1e-4 t² |r|²

    It needs no derivatives and constant memory: 8 states, and `memory` numbers per sample. The line search tries both
    directions with the same length, then shorter ones, with 1 to 40 evaluations per step.

    memory  number of last iterates over which the maximum of |r|² is taken
    """

    differentiable: ClassVar[bool] = False
    memory: int = 10

    def __post_init__(self) -> None:
        require(self.memory >= 1, f"DFSane's memory must be at least 1, got {self.memory}.")

    def init(self, f: Map, z0: Tensor) -> SpectralState:
        """Evaluate the start; the step length is one."""
        start = Iterate(z0, f(z0))
        one = z0.new_ones(z0.shape[0], 1)
        recent = torch.cat((one, one.expand(-1, self.memory - 1) * 0), dim=1)
        return SpectralState(z0, start.fz, one, recent, start.length.unsqueeze(1), torch.zeros_like(one))

    def step(self, f: Map, state: SpectralState) -> SpectralState:
        """Try the residual as a direction, forward and backward, and shorten it until the merit falls enough."""
        residual, before = state.residual, divide(state.length.unsqueeze(1), state.first).square()
        direction = state.spectral * residual
        bound = state.recent.amax(dim=1, keepdim=True) + (1 + state.count).square().reciprocal()
        z, fz, merit = state.z, state.fz, torch.full_like(before, torch.inf)
        searching = torch.isfinite(before) & (before > 0)
        searching = searching if state.active is None else searching & state.active.unsqueeze(1)
        lengths = {1: torch.ones_like(before), -1: torch.ones_like(before)}
        for _ in range(TRIALS):
            for sign, t in lengths.items():
                trial = state.z + sign * t * direction
                value = f(trial)
                after = divide(torch.linalg.vector_norm(value - trial, dim=1, keepdim=True), state.first).square()
                good = searching & (after <= bound - SUFFICIENT * t.square() * before)
                # if no trial is good enough, the best one is taken
                better = searching & (good | (after < merit))
                z, fz, merit = (
                    torch.where(better, trial, z),
                    torch.where(better, value, fz),
                    torch.where(better, after, merit),
                )
                searching = searching & ~good
                if not f.any(searching):
                    return self._next(state, z, fz, merit)
                # the minimum of a parabola through the merit at 0 and t, kept within a tenth and a half of t
                vertex = t.square() * before / (after + (2 * t - 1) * before)
                lengths[sign] = torch.where(torch.isfinite(vertex), vertex, 0.0).clamp(min=CUT[0] * t, max=CUT[1] * t)
        return self._next(state, z, fz, merit)

    def _next(self, state: SpectralState, z: Tensor, fz: Tensor, merit: Tensor) -> SpectralState:
        """Return the state at the accepted trial, with a new spectral step length."""
        step, change = z - state.z, (fz - z) - state.residual
        # r = -F of the paper: the curvature dz' dF is -dz' dr
        along, steepness = -dot(step, change), dot(change, change)
        # the long step of the paper diverges on rotations, where dz and dr are nearly orthogonal; the short one does not
        turned = along.square() < TURNED * dot(step, step) * steepness
        spectral = torch.where(turned, divide(along, steepness), divide(dot(step, step), along))
        size = spectral.abs()
        usable = torch.isfinite(spectral) & (size >= SPECTRAL[0]) & (size <= SPECTRAL[1])
        length = torch.linalg.vector_norm(fz - z, dim=1, keepdim=True)
        fallback = divide(torch.ones_like(length), length).clamp(1.0, 1e5)
        place = torch.arange(self.memory, device=z.device) == (state.count + 1).remainder(self.memory)
        recent = torch.where(place, merit, state.recent)
        spectral = torch.where(usable, spectral, fallback)
        return SpectralState(z, fz, spectral, recent, state.first, state.count + 1, active=state.active)
