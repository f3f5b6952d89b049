"""steps.jsonl: loss and convergence of training steps, for `equilibria watch`. No result depends on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibria._core.files import replace_file
from equilibria.lab.training.durable import as_line
from equilibria.lab.training.stepping import Stepped

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STEPS = "steps.jsonl"
POINTS = 2000  # largest number of points of a run: enough for a curve, and small compared with a checkpoint


class StepLog:
    """Writes points of a run to steps.jsonl and to TensorBoard: every step, or every n-th if `steps` exceeds POINTS."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.path, self.every = folder / STEPS, max(1, -(-steps // POINTS))

    def add(self, step: int, epoch: int, stepped: Stepped, events: SummaryWriter | None) -> None:
        """Write the point of a finished step; steps count from 1."""
        if step % self.every:
            return
        values = point(stepped)
        try:
            with open(self.path, "ab") as file:
                file.write(as_line({"step": step, "epoch": epoch, **values}))
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path}: {error.strerror or error}") from error
        if events is not None:
            for name, value in values.items():
                events.add_scalar(f"step/{name}", value, step)

    def cut(self, step: int) -> None:
        """Remove the points after `step`; after a kill they may be ahead of the checkpoint."""
        if self.path.exists():
            replace_file(self.path, b"".join(as_line(line) for line in read_steps(self.path.parent) if line["step"] <= step))


def point(stepped: Stepped) -> dict[str, float]:
    """Return the values of a step: its loss, 1 if it was skipped, and means over its samples."""
    values = {"loss": stepped.loss, "skipped": float(stepped.skipped is not None)}
    s = stepped.solves
    if s is None or s.samples == 0:
        return values
    values |= {"evaluations": float(s.evaluations), "depth": s.depth / s.samples, "failed": s.failed / s.samples}
    if s.finite:
        values |= {"residual": s.residual / s.finite, "residual_max": s.residual_max}
    if s.adjoint_evaluations is not None:
        values["adjoint_evaluations"] = float(s.adjoint_evaluations)
        values["adjoint_failed"] = s.adjoint_failed / s.samples
    return values


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the points of a run; damaged lines are left out, since no result depends on them."""
    file = folder / STEPS
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [found for line in lines if (found := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return dict(found) if isinstance(found, Mapping) and isinstance(found.get("step"), int) else None
