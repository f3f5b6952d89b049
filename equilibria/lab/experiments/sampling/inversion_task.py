"""Model inversion as a task: find the noise whose sample is a given image, by gradients through the chain."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from equilibria.analysis.memory import peak_memory
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.lab.experiments.image_task import Batch, inside
from equilibria.lab.experiments.sampling.task import Denoising, SamplingSettings
from equilibria.lab.training.task import Outcome
from equilibria.models.diffusion.chain import ParallelSampler
from equilibria.models.diffusion.denoiser import Denoiser, diffusion_loss
from equilibria.solution import Solution, record
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

Way = Literal["sequential", "implicit", "jfb"]


@dataclass(frozen=True, kw_only=True)
class InversionSettings(SamplingSettings):
    """Settings of inversion.

    way         "sequential": back-propagation through the sequential chain; "implicit": implicit gradients of the parallel
                chain; "jfb": its one-step gradients
    iterations  number of iterations of Adam on the noise
    rtol        relative tolerance of the solves of the chain and of its adjoint
    """

    way: Way = "implicit"
    steps: int = 50
    samples: int = 8
    iterations: int = 60
    lr: float = 0.1
    rtol: float = 1e-3


class Inversion(Denoising):
    """Trains a denoiser, and measures the distance of reconstructions from test images and the cost of inversion."""

    settings: InversionSettings

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return errors and costs of inversion.

        `mse` is the error of the sequential chain from the last noise. `rounds` and `adjoint` are the numbers of sequential
        calls of the denoiser in an iteration, forward and backward.
        """
        net, images = inside(model, Denoiser), batch[0][: self.settings.samples]
        frozen = [p for p in net.parameters() if p.requires_grad]
        for p in frozen:
            p.requires_grad_(False)  # only the noise is trained; gradients of weights would add time and memory
        try:
            with torch.enable_grad():
                found = self._invert(net, images)
        finally:
            for p in frozen:
                p.requires_grad_(True)
        with torch.no_grad():
            return Outcome(diffusion_loss(net, batch[0]), found, len(batch[0]))

    def _invert(self, net: Denoiser, images: Tensor) -> dict[str, Tensor | float]:
        sampler = self._sampler(net)
        noise = torch.randn_like(images).requires_grad_()
        optimizer = torch.optim.Adam([noise], lr=self.settings.lr)
        first = _mse(sampler, noise, images)
        forward = backward = 0.0
        chain: Solution | None = None
        begin = time.thread_time()
        for _ in range(self.settings.iterations):
            chain, costs = self._step(sampler, noise, images, chain)
            forward, backward = forward + costs[0], backward + costs[1]
            optimizer.step()
        seconds = (time.thread_time() - begin) / self.settings.iterations
        # memory is measured in a separate iteration, because the profiler slows the timed ones down
        work: Callable[[], object] = partial(self._step, sampler, noise, images, chain)
        return {
            "mse_first": first,
            "mse": _mse(sampler, noise, images),
            "rounds": forward / self.settings.iterations,
            "adjoint": backward / self.settings.iterations,
            "bytes": float(peak_memory(work)),
            "seconds_iteration": seconds,
        }

    def _step(
        self, sampler: ParallelSampler, noise: Tensor, images: Tensor, chain: Solution | None
    ) -> tuple[Solution | None, tuple[int, int]]:
        """Compute the gradient of one iteration in `noise.grad`; returns the chain, and the rounds forward and backward."""
        noise.grad = None
        if self.settings.way == "sequential":
            torch.nn.functional.mse_loss(sampler.sequential(noise)[:, -1], images).backward()
            return None, (sampler.steps, sampler.steps)
        with record(sampler) as solutions:
            found = sampler.solve(noise, init=chain)  # a warm start: the noise changes little between iterations
            torch.nn.functional.mse_loss(torch.as_tensor(found.z)[:, -1], images).backward()
        adjoint = solutions[-1].adjoint
        return found, (1 + found.stats.evaluations, 1 + (1 if adjoint is None else adjoint.evaluations))

    def _sampler(self, net: Denoiser) -> ParallelSampler:
        s = self.settings
        stop = Stop(rtol=s.rtol, atol=0.0, max_steps=2 * s.steps, on_failure="ignore")
        gradient: Gradient = JFB() if s.way == "jfb" else Implicit(solver=Picard(), stop=stop)
        return ParallelSampler(net, s.steps, s.form, solver=Picard(), stop=stop, gradient=gradient)


@torch.no_grad()
def _mse(sampler: ParallelSampler, noise: Tensor, images: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(sampler.sequential(noise)[:, -1], images)
