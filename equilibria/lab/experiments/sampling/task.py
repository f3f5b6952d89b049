"""A small diffusion model of digits as a task, and its sampling chain, solved in parallel and computed sequentially."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.lab.data.batches import Batches
from equilibria.lab.data.catalogue import load
from equilibria.lab.data.sets import Split
from equilibria.lab.experiments.image_task import Batch, inside
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.diffusion.chain import Form, ParallelSampler
from equilibria.models.diffusion.denoiser import DIGITS, Denoiser, DenoiserConfig, diffusion_loss
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

Rule = Literal["picard", "anderson"]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of sampling.

    steps      number of steps of the chain
    form       form of its fixed point, see `ChainCell`
    solver     solver of the chain
    exponents  numbers e: the chain is solved to relative residuals of 10^-e
    samples    number of samples that are drawn in evaluation
    repeats    number of passes through the training images in an epoch
    """

    config: DenoiserConfig = DIGITS
    steps: int = 100
    form: Form = "velocity"
    solver: Rule = "picard"
    exponents: tuple[int, ...] = (2, 3, 4)
    samples: int = 64
    repeats: int = 100


class Denoising(Task[Batch]):
    """Trains a denoiser of digits on velocities at random angles."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        return Denoiser(self.settings.config)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        digits = load("digits")
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": symmetric}
        times = self.settings.repeats
        images = Split(digits.train.x.repeat(times, 1, 1, 1), digits.train.y.repeat(times))
        train = Batches(images, training.batch_size, seed=training.seed, drop_last=True, **place)
        return Loaders(train, None, Batches(digits.test, training.eval_batch_size, shuffle=False, **place))

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        return Outcome(diffusion_loss(model, batch[0]), size=len(batch[0]))


class Sampling(Denoising):
    """Trains a denoiser, and compares samples of the parallel chain with those of the sequential chain."""

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return `rounds_e`, `error_e` and `calls_e` of chains that are solved to a residual of 10^-e.

        The error is the largest over the samples. `calls_e` counts evaluations of the denoiser per sample, where every
        state counts, divided by those of the sequential chain.
        """
        images, net = batch[0], inside(model, Denoiser)
        noise = torch.randn_like(images[: self.settings.samples])
        found: dict[str, Tensor | float] = {}
        for exponent in self.settings.exponents:
            sampler = self.sampler(net, 10.0**-exponent)
            solution, chain = sampler.solve(noise), sampler.sequential(noise)
            # one more call than the solver's evaluations: the velocity of the noise is computed before the solve
            found[f"rounds_{exponent}"] = 1.0 + solution.stats.evaluations
            found[f"calls_{exponent}"] = 1 / sampler.steps + solution.stats.sample_evaluations / len(noise)
            found[f"error_{exponent}"] = relative_error(torch.as_tensor(solution.z)[:, -1], chain[:, -1]).max()
            found[f"failed_{exponent}"] = solution.stats.failed.float().mean()
        return Outcome(diffusion_loss(net, images), {**found, "steps": float(self.settings.steps)}, len(images))

    def sampler(self, net: Denoiser, rtol: float) -> ParallelSampler:
        s = self.settings
        solver = Picard() if s.solver == "picard" else Anderson()
        stop = Stop(rtol=rtol, atol=0.0, max_steps=2 * s.steps, on_failure="ignore")
        return ParallelSampler(net, s.steps, s.form, solver=solver, stop=stop)


def symmetric(images: Tensor) -> Tensor:
    """Map images from [0, 1] to [-1, 1]."""
    return 2 * images - 1


def relative_error(found: Tensor, truth: Tensor) -> Tensor:
    """Return |found - truth| / |truth| of every sample, (batch,)."""
    return (found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
