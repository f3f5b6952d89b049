"""Optical flow on generated scenes as a task: training on pairs of frames, evaluation along videos."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, UnrolledPhantom
from equilibria.lab.data.batches import Batches
from equilibria.lab.data.catalogue import load
from equilibria.lab.data.sets import Dataset, Split
from equilibria.lab.experiments.image_task import Batch, inside
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.flow.configs import FLOW_CONFIGS, FlowConfig
from equilibria.models.flow.deq_flow import DEQFlow
from equilibria.penalties import ExponentialWeights, correction_penalty
from equilibria.solution import record
from equilibria.solvers.krylov import GMRES
from equilibria.stop import Stop

FlowKind = Literal["jfb", "upg", "implicit", "unrolled"]
ADJOINT = Stop(rtol=0.1, atol=0.0, max_steps=12, on_failure="ignore")


@dataclass(frozen=True, kw_only=True)
class SceneData:
    """Settings of the scenes, see `moving_layers`; `frames` is the length of the videos to validate and test on."""

    height: int = 48
    width: int = 64
    train: int = 1_000
    valid: int = 16
    test: int = 32
    frames: int = 8
    motion: float = 6.0
    seed: int = 0

    def load(self) -> Dataset[Split]:
        options: dict[str, Any] = {"train": self.train, "valid": self.valid, "test": self.test, "frames": self.frames}
        return load("moving-layers", size=(self.height, self.width), motion=self.motion, seed=self.seed, **options)


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """Settings of optical flow.

    kind         "jfb", "upg" (`phantom_steps` steps) or "implicit": gradient of the equilibrium; "unrolled": the update
                 applied `depth` times
    corrections  number of intermediate iterates that are supervised too, with phantom gradients of `correction_steps` steps
    rtol         relative tolerance of solves, in training and in evaluation
    depths       numbers of updates after which unrolled networks are evaluated
    """

    data: SceneData = field(default_factory=SceneData)
    config: FlowConfig = FLOW_CONFIGS["nano"]
    kind: FlowKind = "jfb"
    depth: int = 12
    corrections: int = 2
    correction_steps: int = 1
    keep_every: int = 3
    phantom_steps: int = 3
    rtol: float = 1e-2
    max_steps: int = 24
    eval_steps: int = 40
    depths: tuple[int, ...] = (6, 12, 24, 48)


class OpticalFlow(Task[Batch]):
    """Trains on the mean absolute error of flows, of intermediate iterates too; measures end-point errors along videos."""

    better = ("epe", "min")

    def __init__(self, settings: FlowSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        return make_model(self.settings)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        found = self.settings.data.load()
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": found.normalize}
        train = Batches(found.train, training.batch_size, seed=training.seed, drop_last=True, **place)
        valid, test = (
            None if part is None else Batches(part, training.eval_batch_size, shuffle=False, **place)
            for part in (found.valid, found.test)
        )
        return Loaders(train, valid, test)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        frames, y = batch
        target = y[:, 0, :2]
        flows = model(frames, on_the_way=True)
        loss = correction_penalty(flows, lambda flow: (flow - target).abs().mean(), ExponentialWeights(0.8))
        return Outcome(loss, {"epe": end_point_error(flows[-1].detach(), target)}, len(y))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return errors and costs: `epe` with all solves started from zeros, `epe_warm` with warm starts along the video."""
        frames, y = batch
        net, truth = inside(model, DEQFlow), y[:, :, :2]
        with record(net) as solutions:
            flows = torch.stack([net(frames[:, i : i + 2]) for i in range(truth.shape[1])], dim=1)
        metrics: dict[str, Tensor | float] = {"epe": end_point_error(flows, truth)}
        mask = y[:, :, 2] > 0
        metrics["epe_visible"] = torch.where(mask, _distances(flows, truth), 0).sum() / mask.sum().clamp_min(1)
        metrics["epe_zero"] = end_point_error(torch.zeros_like(truth), truth)  # the error of a model that predicts no motion
        if solutions:
            metrics |= _costs("cold", solutions, len(y))
            with record(net) as solutions:
                warm = net.video(frames)
            metrics |= {"epe_warm": end_point_error(warm, truth)} | _costs("warm", solutions, len(y))
        else:
            # an unrolled network is also evaluated with other numbers of updates than in training, on the first pair only
            found: dict[str, Tensor | float] = {}
            states = net.layer.trajectory(*net.inputs(frames[:, :2]), depth=max(self.settings.depths)).states  # type: ignore[operator]
            for depth in self.settings.depths:
                found[f"epe_{depth}"] = end_point_error(net.upsample(states[depth]), truth[:, 0])
            metrics |= found
        return Outcome((flows - truth).abs().mean(), metrics, len(y))


def make_model(s: FlowSettings) -> DEQFlow:
    """Return the network of these settings."""
    if s.kind == "unrolled":
        return DEQFlow(s.config, depth=s.depth)
    gradients: dict[str, Gradient] = {
        "jfb": JFB(),
        "upg": UnrolledPhantom(steps=s.phantom_steps, damping=1.0),
        "implicit": Implicit(solver=GMRES(), stop=ADJOINT),
    }
    stop = Stop(rtol=s.rtol, max_steps=s.max_steps, keep_every=s.keep_every, on_failure="ignore")
    eval_stop = Stop(rtol=s.rtol, max_steps=s.eval_steps, on_failure="ignore")
    return DEQFlow(
        s.config,
        stop=stop,
        gradient=gradients[s.kind],
        eval_stop=eval_stop,
        corrections=s.corrections,
        correction_steps=s.correction_steps,
    )


def end_point_error(flow: Tensor, truth: Tensor) -> Tensor:
    """Return the mean distance of two flows, (..., 2, height, width) each."""
    return _distances(flow, truth).mean()


def _distances(flow: Tensor, truth: Tensor) -> Tensor:
    return (flow - truth).norm(dim=-3)


def _costs(name: str, solutions: list[Any], rows: int) -> dict[str, Tensor | float]:
    """Return the evaluations of each pair of frames, their mean over all but the first, and the failed solves."""
    counts = [s.stats.sample_evaluations / rows for s in solutions]
    found: dict[str, Tensor | float] = {f"nfe_{name}_{i + 1}": count for i, count in enumerate(counts)}
    # the first pair has no warm start, and is left out of both means so that they compare the same pairs
    found[f"nfe_{name}"] = sum(counts[1:]) / max(len(counts) - 1, 1)
    found[f"failed_{name}"] = torch.stack([s.stats.failed.float().mean() for s in solutions]).mean()
    return found
