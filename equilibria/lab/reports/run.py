"""The report of a single run, in the folder of the run: every metric over the epochs, and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from equilibria._core.files import replace_file
from equilibria.analysis.html_document import document, plots
from equilibria.analysis.plots import COLOURS, finish, new_axes, png
from equilibria.lab.training.folder import Run
from equilibria.lab.training.gallery import read_gallery

PAGE = "report.html"
SHARE = ("%", 100.0)
MILLISECONDS = ("ms", 1e3)
PLAIN = ("", 1.0)
# metric: (label, (unit, factor from the stored unit to this one))
WORDS = {
    "loss": ("loss", PLAIN),
    "accuracy": ("accuracy", SHARE),
    "error": ("error", SHARE),
    "mean_iou": ("mean IoU", SHARE),
    "evaluations": ("evaluations of the cell per solve", PLAIN),
    "nfe": ("evaluations of the cell per sample (NFE)", PLAIN),
    "depth": ("steps to convergence, mean over samples", PLAIN),
    "failed": ("failed solves", SHARE),
    "failed_share": ("failed solves in training", SHARE),
    "residual": ("relative residual, mean over samples", PLAIN),
    "residual_max": ("relative residual, largest", PLAIN),
    "adjoint_evaluations": ("evaluations of the adjoint per solve", PLAIN),
    "adjoint_failed": ("failed adjoint solves", SHARE),
    "adjoint_residual": ("relative residual of the adjoint, mean over samples", PLAIN),
    "spectral_radius": ("spectral radius of the Jacobian", PLAIN),
    "lr": ("learning rate", PLAIN),
    "seconds_train": ("time of the epoch", ("s", 1.0)),
    "seconds_step": ("time of a training step, median", MILLISECONDS),
    "seconds_backward": ("time of its backward pass, median", MILLISECONDS),
    "peak_bytes": ("peak memory of the process", ("MB", 1e-6)),
    "bad_steps": ("skipped steps", PLAIN),
    "predict_seconds": ("prediction of a batch", MILLISECONDS),
    "explicit_loss": ("loss of the start alone", PLAIN),
    "explicit_accuracy": ("accuracy of the start alone", SHARE),
    "explicit_error": ("error of the start alone", SHARE),
}
LOGARITHMIC = ("loss", "residual", "residual_max", "lr")  # metrics that span several orders of magnitude


def write_run_report(folder: Path) -> Path:
    """Read the run, write its plots and page, and return the path of the page."""
    run = Run.open(folder)
    drawn = {name: (words(name), content) for name, content in _pictures(run).items()}
    for name, (_, content) in drawn.items():
        (folder / "plots").mkdir(exist_ok=True)
        replace_file(folder / "plots" / f"{name}.png", content)
    replace_file(folder / PAGE, _page(run, read_gallery(folder) | drawn).encode())
    return folder / PAGE


def _page(run: Run, drawn: Mapping[str, tuple[str, bytes]]) -> str:
    """Return the report as one HTML document."""
    name = str(run.config.get("experiment", run.folder.name))
    epochs, wanted = len(run.metrics), run.training.epochs
    state = f"{epochs} epochs" if run.summary is not None else f"{epochs} of {wanted} epochs, not finished"
    last = _table(run.metrics[-1]) if run.metrics else "<p>No epoch is finished.</p>"
    settings = escape(json.dumps({key: run.config[key] for key in run.config if key != "experiment"}, indent=1))
    body = f"<h1>{escape(name)} <span class='scale'>{state}</span></h1>\n<h2>Last epoch</h2>\n{last}"
    pictures = f"\n<h2>Curves</h2>\n{plots(drawn)}" if drawn else ""
    return document(name, f"{body}{pictures}\n<h2>Settings</h2>\n<pre>{settings}</pre>")


def _table(record: Mapping[str, Any]) -> str:
    """Return the metrics of an epoch as an HTML table with a column per split."""
    splits = record["split"]
    names = list(dict.fromkeys(name for metrics in splits.values() for name in metrics))
    head = "".join(f"<th>{escape(split)}</th>" for split in splits)
    lines = []
    for name in names:
        cells = "".join(f"<td>{_number(name, metrics.get(name))}</td>" for metrics in splits.values())
        lines.append(f"<tr><td>{escape(words(name))}</td>{cells}</tr>")
    others = [
        f"<tr><td>{escape(words(name))}</td><td colspan='{len(splits)}'>{_number(name, value)}</td></tr>"
        for name, value in _scalars(record)
    ]
    return f"<table class='report'><tr><th></th>{head}</tr>{''.join(lines + others)}</table>"


def _scalars(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the numbers of an epoch that belong to no split, as (name, value)."""
    skipped = ("epoch", "step", "split")
    return [(name, value) for name, value in record.items() if name not in skipped and isinstance(value, (int, float))]


def _number(name: str, value: Any) -> str:
    """Return a value as text in the unit of its metric."""
    return "–" if not isinstance(value, (int, float)) else f"{_meaning(name)[2] * value:.4g}"


def _pictures(run: Run) -> dict[str, bytes]:
    """Return a PNG per metric, with a line per split; none for a run of one epoch, whose numbers are in the table."""
    if len(run.metrics) < 2:
        return {}
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in run.metrics:
        found = [(split, name, value) for split, metrics in record["split"].items() for name, value in metrics.items()]
        found += [("", name, value) for name, value in _scalars(record)]
        for split, name, value in found:
            if isinstance(value, (int, float)) and (value > 0 or name not in LOGARITHMIC):
                lines.setdefault(name, {}).setdefault(split, []).append((record["epoch"], _meaning(name)[2] * value))
    # the plot of a metric that was zero throughout would show nothing
    return {
        name: _drawn(name, splits)
        for name, splits in lines.items()
        if not all(value == 0 for points in splits.values() for _, value in points)
    }


def words(name: str) -> str:
    """Return the label of a metric with its unit."""
    own, unit, _ = _meaning(name)
    return f"{own}, {unit}" if unit else own


def _meaning(name: str) -> tuple[str, str, float]:
    """Return the label of a metric, its unit, and the factor from the stored unit to this one."""
    own, (unit, factor) = WORDS.get(name, (name.replace("_", " "), PLAIN))
    return own, unit, factor


def _drawn(name: str, splits: Mapping[str, list[tuple[float, float]]]) -> bytes:
    """Return the plot of a metric over the epochs as a PNG file."""
    axes = new_axes()
    for i, (split, points) in enumerate(splits.items()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=COLOURS[i % len(COLOURS)], marker="." if len(x) == 1 else None, lw=1.8, label=split or None)
    if any(splits):
        axes.legend(frameon=False, fontsize=8)
    return png(finish(axes, "epoch", words(name), log=name in LOGARITHMIC))
