"""Memory and time of training a multiscale DEQ over the number of solver steps: claims C10 and C11."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.analysis.memory import peak_memory
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import UnrolledPhantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.lab.experiments.claims import Claim, at_least, at_most, column_at_least, column_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.image_task import Batch, ImageData, ImageSettings, ImageTask, judged, now
from equilibria.lab.experiments.mdeq.task import MDEQOptions
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome
from equilibria.models.images.mdeq import MDEQ
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS
from equilibria.models.images.revnet import RevNet
from equilibria.models.solve_options import relative_stop
from equilibria.solvers.krylov import GMRES

MEMORY = "mdeq-memory"
DEPTHS = (5, 10, 20, 40, 80)  # number of steps of the unrolled networks
LEAST, MOST = DEPTHS[0], DEPTHS[-1]
NEVER = 1e-30  # a tolerance that no solve reaches, so that it takes all its steps
DIRECTIONS = 4  # directions that GMRES keeps in the row with a fixed number
MemoryKind = Literal["implicit", "implicit-default", "upg", "bptt", "checkpointed", "revnet"]
_TITLES: dict[MemoryKind, str] = {
    "implicit": f"DEQ, implicit, GMRES of {DIRECTIONS} directions",
    "implicit-default": "DEQ, implicit, GMRES of 4 to 20, the default",
    "upg": "DEQ, UPG of 5 steps",
    "bptt": "unrolled",
    "checkpointed": "unrolled, checkpointed",
    "revnet": "RevNet, as many reversible blocks",
}


@dataclass(frozen=True, kw_only=True)
class MemorySettings(ImageSettings):
    """Settings: a model whose solver takes exactly d steps is measured for every d in `depths`."""

    model: MDEQOptions = field(default_factory=MDEQOptions)
    kind: MemoryKind = "implicit"
    depths: tuple[int, ...] = DEPTHS


class MemoryTask(ImageTask):
    """Measures training steps of models of several depths; only the shallowest one is trained."""

    def __init__(self, settings: MemorySettings) -> None:
        super().__init__(settings.data)
        self.settings = settings

    def model(self) -> nn.Module:
        return self._model(self.settings.depths[0])

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        return replace(super().batches(root, training, rank, world_size), test=None)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        outcome = super().loss(model, batch, step)
        found: dict[str, Tensor | float] = {}
        for depth in self.settings.depths:
            twin = self._twin(depth).to(batch[0].device)
            _train(twin, batch)  # warm-up: caches are allocated before time and memory are measured
            before = now(batch[0])
            _train(twin, batch)
            found[f"seconds_{depth}"] = now(batch[0]) - before
            found[f"bytes_{depth}"] = float(peak_memory(partial(_train, twin, batch), batch[0].device))
        return replace(outcome, metrics={**outcome.metrics, **found})

    def _twin(self, depth: int) -> nn.Module:
        """Return the network to measure; RevNet has tied blocks of the width of MDEQ's finest state."""
        if self.settings.kind != "revnet":
            return self._model(depth)
        width = 2 * MDEQ_CONFIGS[self.settings.model.size].channels[0]
        return RevNet(self.data.shape[0], width=width, depth=depth, tied=True)

    def _model(self, depth: int) -> MDEQ:
        """Return a model whose solver never reaches its tolerance and takes `depth` steps forward and backward."""
        s = self.settings
        options = replace(s.model, solver="picard", forward_steps=depth, tolerance=NEVER)
        model = options.model(self.data.shape[0])
        model.layer.gradient = self._gradient(depth)
        return model

    def _gradient(self, depth: int) -> Gradient:
        """Return the gradient of this row for `depth` steps."""
        match self.settings.kind:
            case "implicit" | "implicit-default" as kind:
                stop = relative_stop(NEVER, depth)
                return Implicit(solver=GMRES(restart=DIRECTIONS if kind == "implicit" else None), stop=stop)
            case "upg":
                return UnrolledPhantom(steps=5, damping=0.5)
            case "bptt":
                return Unrolled(depth=depth)
            case "checkpointed":
                return Unrolled(depth=depth, checkpoint="sqrt")
            case "revnet":  # for the MDEQ that is trained; only RevNets are measured
                return UnrolledPhantom(steps=1, damping=1.0)


def _train(model: nn.Module, batch: Batch) -> None:
    """Compute the gradients of a training step and discard them."""
    x, y = batch
    scores = model(x)
    assert isinstance(scores, Tensor)
    torch.autograd.grad(judged(scores, y)[0], list(model.parameters()), allow_unused=True)


def experiment(kind: MemoryKind, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a row: one gradient method at every depth."""
    digits = ImageData(name="digits", train=32, test=32)
    images = {"debug": digits, "reduced": ImageData(name="cifar10", train=32, test=32, size=16)}
    size = "cifar-tiny-2021" if scale == "full" else "nano"
    return Experiment(
        name=f"{MEMORY}-{kind}",
        summary=f"memory of a training step of MDEQ, {_TITLES[kind]}",
        settings=MemorySettings(
            data=images.get(scale, ImageData(name="cifar10", train=32, test=32)),
            model=MDEQOptions(size=size, dropout=0.0),
            kind=kind,
            depths=DEPTHS[:2] if scale == "debug" else DEPTHS,
        ),
        training=Training(epochs=1, batch_size=32, eval_batch_size=32),
        make=MemoryTask,
        scale=scale,
    )


def _claims() -> tuple[Claim, ...]:
    return (
        column_at_most(
            f"bytes_{MOST}",
            f"bytes_{LEAST}",
            "implicit",
            1.05,
            f"implicit training takes no more memory with {MOST} steps than with {LEAST}, to 5 %",
            id="C10",
        ),
        column_at_most(
            f"bytes_{MOST}",
            f"bytes_{LEAST}",
            "implicit-default",
            2.0,
            "with the default, which keeps more directions where a step gains little, it is at most twice as much",
            id="C10",
        ),
        column_at_least(
            f"bytes_{MOST}",
            f"bytes_{LEAST}",
            "bptt",
            MOST / LEAST / 2,
            f"the unrolled network takes at least {MOST // LEAST // 2} times the memory with {MOST} steps",
            id="C10",
        ),
        column_at_most(
            "bytes_80",
            "bytes_20",
            "checkpointed",
            2.5,
            "checkpointing grows with the root of the steps: from 20 to 80 to less than 2.5 times",
            id="C10",
        ),
        column_at_most(
            f"bytes_{MOST}",
            f"bytes_{LEAST}",
            "revnet",
            1.05,
            f"reversible blocks take no more memory with {MOST} of them than with {LEAST}, to 5 %",
            id="C10",
        ),
        at_most(
            "bytes_80",
            "implicit",
            "bptt",
            0.1,
            "with 80 steps, implicit training takes less than a tenth of the unrolled network's memory",
            id="C10",
        ),
        at_least(
            "seconds_20",
            "implicit",
            "bptt",
            1.0,
            "at equal steps, implicit training takes longer than the unrolled network (published: 2 to 3 times)",
            id="C11",
        ),
    )


def tables() -> tuple[Table, ...]:
    peaks = tuple(Column(f"bytes_{d}", f"peak of {d} steps, MB", f"train.bytes_{d}", digits=1, factor=1e-6) for d in DEPTHS)
    times = tuple(Column(f"seconds_{d}", f"time of {d} steps, s", f"train.seconds_{d}", digits=3) for d in DEPTHS)
    notes = (
        "What torch's allocator hands out during a training step of 32 images, above weights and data; plain iteration, "
        "which takes exactly the steps that are asked for, forward and, by GMRES, backward.",
    )
    return (
        Table(
            name=MEMORY,
            title="Memory of a training step of MDEQ over the steps of its solver",
            source="Bai, Kolter and Koltun 2019, Deep Equilibrium Models: constant memory is claimed, no figure shown",
            rows=tuple(TableRow(kind, title, partial(experiment, kind)) for kind, title in _TITLES.items()),
            columns=(*peaks, *times),
            claims=_claims(),
            profiles=(
                Profile(
                    name="memory-steps",
                    title="Peak memory of a training step",
                    x_label="steps of the solver",
                    y_label="MB",
                    points=tuple((d, f"bytes_{d}") for d in DEPTHS),
                    log=True,
                ),
            ),
            protocol={
                "debug": ("Debug scale: nano MDEQ on digits, 5 and 10 steps.", *notes),
                "reduced": ("Nano MDEQ, images averaged to 16x16 pixels.", *notes),
                "full": ("MDEQ-TINY, 32x32 pixels.", *notes),
            },
        ),
    )
