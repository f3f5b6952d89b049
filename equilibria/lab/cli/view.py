"""A run as text for the terminal: its curves over the steps and its last epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from equilibria.lab.cli.progress import SHOWN, metric_text
from equilibria.lab.training.folder import CONFIG, METRICS, Run
from equilibria.lab.training.step_log import STEPS, read_steps

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # characters of a curve, so that the view fits into 80 columns
EPOCHS = 5  # number of epochs that are shown
# name in steps.jsonl: (label, number format, True for a logarithmic scale)
CURVES = {
    "loss": ("loss", "{:.4g}", False),
    "evaluations": ("evaluations", "{:.0f}", False),
    "adjoint_evaluations": ("adjoint evaluations", "{:.0f}", False),
    "depth": ("steps per sample", "{:.1f}", False),
    "residual": ("residual, mean", "{:.1e}", True),
    "residual_max": ("residual, largest", "{:.1e}", True),
    "failed": ("failed solves", "{:.1%}", False),
    "adjoint_failed": ("failed adjoints", "{:.1%}", False),
    "skipped": ("skipped steps", "{:.0%}", False),
}


def newest(folder: Path) -> Path:
    """Return `folder` if it is a run, else the run inside it that was written to last."""
    runs = [] if (folder / CONFIG).is_file() else [path.parent for path in folder.rglob(CONFIG)]
    return max(runs, key=_written, default=folder)


def view(folder: Path) -> tuple[Group, bool]:
    """Return the view of a run, and True if the run is finished."""
    found, steps = Run.open(folder), read_steps(folder)
    parts: list[Any] = [_head(found, steps)]
    if steps:
        parts += [Text(""), curves(steps)]
    if found.metrics:
        parts += [Text(""), _epochs(found.metrics[-EPOCHS:])]
    return Group(*parts), found.summary is not None


def curves(steps: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a line per quantity of the run: its last value and its curve over all points."""
    table = Table("", "now", f"steps {steps[0]['step']} to {steps[-1]['step']}", "low", "high", box=None, pad_edge=False)
    for name, (words, form, logarithmic) in CURVES.items():
        values = [math.nan if line.get(name) is None else float(line[name]) for line in steps if name in line]
        known = [value for value in values if math.isfinite(value)]
        if not known or (name == "skipped" and not any(known)):
            continue  # a line of zeros for skipped steps has no information
        last = form.format(values[-1])
        table.add_row(words, last, sparkline(values, logarithmic), form.format(min(known)), form.format(max(known)))
    return table


def sparkline(values: Sequence[float], logarithmic: bool = False, width: int = WIDTH) -> str:
    """Return values as a line of at most `width` blocks, each for the mean of its share; blank if none is finite."""
    if logarithmic:
        values = [math.log10(value) if value > 0 else math.nan for value in values]
    count = min(width, len(values))
    # rounded edges give shares whose lengths differ by one at most, so no point is left out
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [_mean(values[a:b]) for a, b in pairwise(edges)]
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return " " * count
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0  # a constant curve has the lowest block
    return "".join(BLOCKS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means)


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; nan if there are none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _head(run: Run, steps: Sequence[Mapping[str, Any]]) -> Text:
    """Return two lines: the folder of the run, and its progress."""
    epochs = run.training.epochs
    epoch = steps[-1].get("epoch", len(run.metrics)) if steps else len(run.metrics)
    step = max([line["step"] for line in (*steps[-1:], *run.metrics[-1:])], default=0)
    state = "finished" if run.summary is not None else f"written {_ago(time.time() - _written(run.folder))} ago"
    return Text(f"{run.folder}\nepoch {epoch} of {epochs}, step {step}, {state}", overflow="fold")


def _written(folder: Path) -> float:
    """Return the time of the last write to a run."""
    return max((path.stat().st_mtime for name in (CONFIG, METRICS, STEPS) if (path := folder / name).exists()), default=0.0)


def _ago(seconds: float) -> str:
    """Return a duration as text in seconds, minutes or hours."""
    return (
        f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
    )


def _epochs(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of epochs with a column per metric of the split that was evaluated last."""
    split = list(records[-1]["split"])[-1]
    names = [name for name in SHOWN if name in records[-1]["split"][split]]
    table = Table("epoch", *(f"{split} {SHOWN[name]}" for name in names), "seconds", box=None, pad_edge=False)
    for record in records:
        values = [metric_text(name, record["split"].get(split, {}).get(name)) for name in names]
        table.add_row(str(record["epoch"]), *values, f"{record['seconds_train']:.1f}")
    return table
