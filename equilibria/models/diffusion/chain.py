"""The deterministic sampling chain of a diffusion model as one fixed point (Pokle, Geng and Kolter 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.models.diffusion.denoiser import LARGEST_ANGLE, Denoiser
from equilibria.solution import Solution
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

Form = Literal["velocity", "noise", "step"]


class ChainCell(nn.Module):
    """One round on all states (x_1, ..., x_S) of a DDIM chain that starts at the noise x_0; it calls the denoiser once.

    A step of DDIM from angle φ_k to φ_{k+1} = φ_k - δ is x_{k+1} = cos δ x_k - sin δ v(x_k, φ_k). The three forms have the
    same fixed point, which is the chain. They differ in how a state depends on the states of the round before:

    step      x_{k+1} <- cos δ x_k - sin δ v_k: a state depends on its predecessor only, and state k is exact after k rounds
    velocity  x_{k+1} <- cos(δ)^{k+1} x_0 - sin δ sum_{j <= k} cos(δ)^{k-j} v_j, all earlier steps inserted: a state depends
              on all its predecessors
    noise     the same with the predicted noise ε_j = sin φ_j x_j + cos φ_j v_j, as published: x_{k+1} <-
              cos φ_{k+1} (x_0 / cos φ_0 + sum_{j <= k} (tan φ_{j+1} - tan φ_j) ε_j)

    The Jacobian is strictly triangular and hence nilpotent: plain iteration is exact after at most S rounds.
    """

    def __init__(self, denoiser: Denoiser, steps: int, form: Form = "velocity") -> None:
        super().__init__()
        require(steps >= 1, f"steps must be at least 1, got {steps}.")
        require(form in get_args(Form), f"form must be one of {get_args(Form)}, got {form!r}.")
        self.denoiser, self.steps, self.form = denoiser, steps, form
        self.delta = LARGEST_ANGLE / steps

    def prepare(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise and its velocity, which is equal in all rounds."""
        return noise, self.denoiser(noise, self.angles(noise)[:1].expand(len(noise)))

    def forward(self, z: Tensor, noise: Tensor, velocity: Tensor) -> Tensor:
        """Return the states after one round, (batch, S, *image) -> (batch, S, *image)."""
        angles, later = self.angles(z), z[:, :-1]
        rest = self.denoiser(later.flatten(0, 1), angles[1:].repeat(len(z))).view_as(later)
        x, v = torch.cat([noise.unsqueeze(1), later], dim=1), torch.cat([velocity.unsqueeze(1), rest], dim=1)
        match self.form:
            case "step":
                return self.step(x, v)
            case "velocity":
                place = torch.arange(self.steps, dtype=v.dtype, device=v.device)
                gaps = place.unsqueeze(1) - place
                weights = torch.where(gaps >= 0, -math.sin(self.delta) * math.cos(self.delta) ** gaps.clamp_min(0), 0.0)
                share = _aligned(math.cos(self.delta) ** (place + 1), v)
                return share * noise.unsqueeze(1) + torch.einsum("kj,bj...->bk...", weights, v)
            case _:
                wide = _aligned(angles, x)
                predicted = wide.sin() * x + wide.cos() * v
                after = wide - self.delta
                moved = ((after.tan() - wide.tan()) * predicted).cumsum(dim=1)
                return after.cos() * (noise.unsqueeze(1) / math.cos(LARGEST_ANGLE) + moved)

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """Return the state after one step of DDIM."""
        return math.cos(self.delta) * x - math.sin(self.delta) * velocity

    def angles(self, like: Tensor) -> Tensor:
        """Return the falling angles of x_0 ... x_{S-1}, (S,), on the device and in the dtype of `like`."""
        # not a buffer: `double()` would convert angles that were rounded to single precision
        return LARGEST_ANGLE - self.delta * torch.arange(self.steps, dtype=like.dtype, device=like.device)


def _aligned(values: Tensor, like: Tensor) -> Tensor:
    """Return values (S,) in the shape (1, S, 1, ...), which broadcasts with tensors (batch, S, *image)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


@dataclass(frozen=True)
class NoiseEverywhere:
    """An `init` that sets all `steps` states of a chain to the noise."""

    steps: int

    def __call__(self, noise: Tensor) -> Tensor:
        return noise.unsqueeze(1).expand(-1, self.steps, *noise.shape[1:])


class ParallelSampler(nn.Module):
    """Draws samples of a diffusion model by DDIM, with all states of the chain as one equilibrium.

        sampler = eq.models.ParallelSampler(denoiser, steps=50)
        images = sampler(torch.randn(16, 1, 8, 8))  # differentiable in the noise and the weights
        s = sampler.solve(noise)  # s.z is (batch, steps, *image); its last state is the sample
        rounds = 1 + s.stats.evaluations  # sequential calls of the denoiser; the plain chain takes `steps`

    A row of the solve is the whole chain of one sample, and stops by its own residual. All states start at the noise.

    steps     number of steps of the chain
    form      form of the fixed point, see `ChainCell`
    solver, stop, gradient  as for `DEQ`
    """

    def __init__(
        self,
        denoiser: Denoiser,
        steps: int = 50,
        form: Form = "velocity",
        *,
        solver: AnySolver = Picard(),
        stop: Stop = Stop(rtol=1e-4),
        gradient: Gradient = Implicit(),
    ) -> None:
        super().__init__()
        self.steps = steps
        self.layer = DEQ(ChainCell(denoiser, steps, form), NoiseEverywhere(steps), solver, stop, gradient)

    def forward(self, noise: Tensor) -> Tensor:
        """Return samples (batch, *image) from noise of the same shape."""
        return torch.as_tensor(self.solve(noise).z)[:, -1]

    def solve(self, noise: Tensor, *, init: Solution | Tensor | None = None) -> Solution:
        """Return the Solution, whose z is the whole chain; `init` is a chain to start from, such as that of nearby noise."""
        return self.layer.solve(noise, init=init)

    def sequential(self, noise: Tensor) -> Tensor:
        """Return the chain (batch, steps, *image) computed step by step, with `steps` calls of the denoiser."""
        cell = self.layer.cell
        assert isinstance(cell, ChainCell)
        x, states = noise, []
        for angle in cell.angles(noise):
            x = cell.step(x, cell.denoiser(x, angle.expand(len(x))))
            states.append(x)
        return torch.stack(states, dim=1)
