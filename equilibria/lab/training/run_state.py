"""The mutable state of a run, and its conversion to and from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from equilibria._core.compaction import set_verdicts, verdicts
from equilibria.lab.training.optimisers import Average
from equilibria.lab.training.processes import gather, rng_state, set_rng_state
from equilibria.lab.training.statistics import Meter
from equilibria.lab.training.task import Loaders, Task


@dataclass
class RunProgress:
    """Epoch, step and best record of a run."""

    epoch: int = 1  # the current epoch
    trained: bool = False  # True if the steps of this epoch are done, but not its evaluation
    step: int = 0  # number of batches so far, in all epochs
    bad_steps: int = 0  # number of skipped steps in this epoch
    bad_in_a_row: int = 0
    seconds_epoch: float = 0.0
    seconds_train: float = 0.0
    last: dict[str, Any] | None = None  # entry of the last epoch in metrics.jsonl
    best: dict[str, Any] | None = None  # entry of the best epoch
    best_value: float = math.nan  # its value of the metric `Task.better`


@dataclass
class RunState:
    """The state of a run that a checkpoint stores. `model` is Fabric's wrapper around `module`."""

    fabric: Fabric
    task: Task[Any]
    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    loaders: Loaders[Any]
    sharded: bool = False  # True with FSDP, where every use of a weight is a collective
    progress: RunProgress = field(default_factory=RunProgress)
    meter: Meter = field(default_factory=Meter)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a tree that is equal on all processes; a collective call."""
        own = {
            "rng": rng_state(),
            "meter": self.meter.state(),
            "task": self.task.state(),
            "verdicts": verdicts(self.module),
        }
        parts = {
            "model": whole(self.module.state_dict()),
            "optimizer": whole(self.optimizer.state_dict()),
            "progress": asdict(self.progress),
            "data": self.loaders.train.state(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "processes": gather(self.fabric, own),
        }
        if self.average is not None:
            parts["average"] = {"updates": self.average.updates, "means": whole(self.average.means)}
        return parts

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Restore a snapshot. Generators are restored only if the number of processes is the same."""
        self.module.load_state_dict(_shared_like(self.module.state_dict(), parts["model"]))
        # torch numbers the entries of an optimiser by parameter; each is sharded like its parameter
        saved = parts["optimizer"]
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        state = {
            i: {key: _like(weights[i], value) for key, value in entries.items()} for i, entries in saved["state"].items()
        }
        optimizer_state = {**saved, "state": state}
        self.optimizer.load_state_dict(optimizer_state)
        if self.average is not None:
            self.average.updates = parts["average"]["updates"]
            self.average.means = _shared_like(self.average.means, parts["average"]["means"])
        self.progress = RunProgress(**parts["progress"])
        self.loaders.train.resume(parts["data"])
        self.fabric.strategy.precision.load_state_dict(parts["precision"])
        processes = parts["processes"]
        rank = self.fabric.global_rank
        if len(processes) == self.fabric.world_size:
            own = processes[rank]
            set_rng_state(own["rng"])
            self.meter = Meter.merged([own["meter"]])
            self.task.resume(own["task"])
            set_verdicts(self.module, own["verdicts"])
        elif rank == 0:  # means are merged over ranks, so one rank may hold the sums of all former ones
            self.meter = Meter.merged([each["meter"] for each in processes])


def whole(tree: Any) -> Any:
    """Return the tree with sharded tensors gathered; a collective call."""
    return pytree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def _shared_like(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `saved` on the devices of those in `own`, sharded like them."""
    return {name: _like(own.get(name), value) for name, value in saved.items()}


def _like(own: Any, saved: Any) -> Any:
    """Return `saved` on the device of `own` and sharded like it; unchanged if they are not tensors of one shape."""
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor) or saved.shape != own.shape:
        return saved
    if isinstance(own, DTensor):
        return distribute_tensor(saved.to(own.device), own.device_mesh, own.placements)
    return saved.to(own.device)
