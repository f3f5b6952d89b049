"""Measurements of the demo besides accuracy: memory over depth, evaluations by difficulty, and by test tolerance."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.lab.experiments.definitions import Scale
from equilibria.lab.training.folder import Run
from equilibria.solution import Stats, Status, record

DEPTHS: dict[Scale, tuple[int, ...]] = {"debug": (8,), "reduced": (10, 40, 160), "full": (10, 40, 160)}
TOLERANCES = (3e-1, 1e-1, 1e-2, 1e-3, 1e-4)  # tolerances at test time that are compared
AT_ONCE = 2  # number of measuring processes at a time
MEMORY_ROW = "equilibria.lab.experiments.digits.memory_row"


@dataclass(frozen=True)
class Quarter:
    """Means over a quarter of the test samples, which are ordered by the steps of their solves."""

    name: str
    steps: float
    accuracy: float


@dataclass(frozen=True)
class DemoSetting:
    """Results of the trained model at one test tolerance; `evaluations` are rows of the cell per sample."""

    tolerance: float
    evaluations: float
    accuracy: float


def memory(scale: Scale) -> dict[int, dict[str, int]]:
    """Return peak bytes of a training step by depth and kind of network, each measured in a separate process."""
    jobs = [(depth, kind) for depth in DEPTHS[scale] for kind in ("explicit", "equilibrium")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(_peak, jobs))
    rows: dict[int, dict[str, int]] = {}
    for (depth, kind), peak in zip(jobs, found, strict=True):
        rows.setdefault(depth, {})[kind] = peak
    return rows


def _peak(job: tuple[int, str]) -> int:
    """Run a measuring process and return its result in bytes; raises OSError if it fails."""
    depth, kind = job
    done = subprocess.run([sys.executable, "-m", MEMORY_ROW, kind, str(depth)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"measuring the memory of {kind}, {depth}, failed: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])


class Trained:
    """The equilibrium classifier of a run on the test digits."""

    def __init__(self, folder: Path, task: Any) -> None:
        run = Run.open(folder)
        self.model: Any = run.model(task)
        batches = list(task.batches(None, run.training, 0, 1).test)  # as the run itself was evaluated
        self.x, self.y = (torch.cat(parts) for parts in zip(*batches, strict=True))

    @torch.no_grad()
    def solved(self, tolerance: float | None = None) -> tuple[Tensor, Stats]:
        """Return a mask of right answers, (batch,), and the statistics of the solve; `tolerance` replaces the model's."""
        layer, stop = self.model.layer, self.model.layer.stop
        if tolerance is not None:
            # atol = 0, so that the relative tolerance alone decides
            layer.stop = dataclasses.replace(stop, rtol=tolerance, atol=0.0, on_failure="ignore")
        try:
            with record(self.model) as solutions:
                right = self.model(self.x).argmax(1) == self.y
        finally:
            layer.stop = stop
        return right, solutions[0].stats

    def quarters(self) -> list[Quarter]:
        """Return the results of the four quarters, from the fastest samples to the slowest."""
        right, stats = self.solved()
        parts = stats.steps.argsort(stable=True).chunk(4)
        names = ("fastest quarter", "second", "third", "slowest quarter")
        return [
            Quarter(name, float(stats.steps[part].float().mean()), float(right[part].float().mean()))
            for name, part in zip(names, parts, strict=True)
        ]

    def dial(self) -> list[DemoSetting]:
        """Return accuracy and evaluations for every test tolerance."""
        found = [(tolerance, *self.solved(tolerance)) for tolerance in TOLERANCES]
        return [
            DemoSetting(tolerance, stats.sample_evaluations / len(self.y), float(right.float().mean()))
            for tolerance, right, stats in found
        ]

    def statuses(self) -> dict[str, int]:
        """Return the number of test samples by status, without statuses that do not occur."""
        _, stats = self.solved()
        return {status.name.lower(): stats.count(status) for status in Status if stats.count(status)}
