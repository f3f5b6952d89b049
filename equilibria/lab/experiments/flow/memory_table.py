"""The table on the memory of a training step of optical flow over the steps of the solver."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.analysis.memory import peak_memory
from equilibria.lab.experiments.claims import at_most, column_at_least, column_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.flow.task import FlowSettings, OpticalFlow, SceneData, make_model
from equilibria.lab.experiments.image_task import Batch
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome

MEMORY = "flow-memory"
DEPTHS = (6, 12, 24, 48)  # number of updates of the unrolled networks
PHANTOM: dict[str, Any] = {"phantom_steps": 4, "correction_steps": 3}  # of this row in both tables
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "deq": ("equilibrium, one-step gradient, two corrections", {"kind": "jfb"}),
    "deq-upg": ("equilibrium, phantom gradient of 4 steps, corrections of 3", {"kind": "upg", **PHANTOM}),
    "deq-exact": ("equilibrium, implicit gradient, two corrections", {"kind": "implicit"}),
    "unrolled": ("as many updates, back-propagated through", {"kind": "unrolled"}),
}
EQUILIBRIA = {"deq": "one-step gradient", "deq-upg": "phantom gradient", "deq-exact": "implicit gradient"}


@dataclass(frozen=True, kw_only=True)
class FlowMemorySettings(FlowSettings):
    """Settings of the measurement: for every d in `depths` a model is measured that takes exactly d steps."""

    depths: tuple[int, ...] = DEPTHS


class FlowMemory(OpticalFlow):
    """Measures training steps of models of several depths; only the shallowest one is trained."""

    better = ("loss", "min")

    def model(self) -> nn.Module:
        return self._model(self.settings.depths[0])

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        return dataclasses.replace(super().batches(root, training, rank, world_size), test=None)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        outcome = super().loss(model, batch, step)
        found: dict[str, Tensor | float] = {}
        for depth in self.settings.depths:
            work = partial(self._train, self._model(depth).to(batch[0].device), batch)
            work()
            found[f"bytes_{depth}"] = float(peak_memory(work, batch[0].device))
        return dataclasses.replace(outcome, metrics={**outcome.metrics, **found})

    def _model(self, depth: int) -> nn.Module:
        """Return a model whose solver takes exactly `depth` steps, since its tolerance is 0, and keeps three iterates."""
        s = self.settings
        return make_model(dataclasses.replace(s, depth=depth, max_steps=depth, rtol=0.0, keep_every=max(depth // 3, 1)))

    def _train(self, model: nn.Module, batch: Batch) -> None:
        loss = super().loss(model, batch, 0).loss
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def experiment(row: str, scale: Scale = "full") -> Experiment[FlowMemorySettings]:
    """Return the experiment of a row: one way of training, measured at every depth."""
    small = SceneData(height=16, width=24, train=8, test=1, frames=2)
    data = small if scale == "debug" else SceneData(train=8, test=1, frames=2)
    depths = DEPTHS[:2] if scale == "debug" else DEPTHS
    return Experiment(
        name=f"{MEMORY}-{row}",
        summary=f"memory of a training step of optical flow, {ROWS[row][0]}",
        settings=FlowMemorySettings(data=data, depths=depths, **ROWS[row][1]),
        training=Training(epochs=1, batch_size=8, eval_batch_size=8),
        make=FlowMemory,
        scale=scale,
    )


def memory_table() -> Table:
    most, least = f"bytes_{DEPTHS[-1]}", f"bytes_{DEPTHS[0]}"
    notes = (
        "What torch's allocator hands out during a training step of 8 pairs of 48x64 pixels, above weights and data. The "
        "solver, Anderson, takes exactly the steps that are asked for. Three iterates are kept, two of them supervised. "
        "The adjoint of the implicit gradient takes at most 12 products of GMRES, as in flow-scenes.",
    )
    return Table(
        name=MEMORY,
        title="Memory of a training step of optical flow over the steps of its solver",
        source="after Bai, Geng, Savani and Kolter 2022, Deep Equilibrium Optical Flow Estimation, arXiv:2204.08442",
        rows=tuple(TableRow(row, title, partial(experiment, row), limited=True) for row, (title, _) in ROWS.items()),
        columns=tuple(
            Column(f"bytes_{d}", f"peak of {d} steps, MB", f"train.bytes_{d}", digits=1, factor=1e-6) for d in DEPTHS
        ),
        claims=(
            *(
                column_at_most(
                    most, least, row, 1.05, f"{title}: the equilibrium takes as much memory with 48 steps as with 6, to 5 %"
                )
                for row, title in EQUILIBRIA.items()
            ),
            column_at_least(most, least, "unrolled", 4.0, "48 unrolled updates take at least 4 times the memory of 6"),
            *(
                at_most(
                    "bytes_12",
                    row,
                    "unrolled",
                    0.5,
                    f"{title}: with 12 steps the equilibrium takes at most half of the unrolled memory",
                )
                for row, title in EQUILIBRIA.items()
            ),
        ),
        profiles=(
            Profile(
                name="memory-steps",
                title="Peak memory of a training step",
                x_label="steps of the solver",
                y_label="MB",
                points=tuple((float(d), f"bytes_{d}") for d in DEPTHS),
                log=True,
            ),
        ),
        protocol={
            "debug": ("Debug scale: 16x24 pixels, 6 and 12 steps.", *notes),
            "reduced": notes,
            "full": notes,
        },
    )
