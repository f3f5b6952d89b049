"""Curves of the runs of a table over their epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from equilibria.analysis.plots import COLOURS, finish, new_axes, png
from equilibria.lab.experiments.definitions import Profile
from equilibria.lab.reports.measured import look
from equilibria.lab.reports.table import TableResults
from equilibria.lab.training.folder import Run
from equilibria.lab.training.gallery import SHOW_DATA, read_gallery

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("-", "--", ":")  # tell rows apart that share a colour


@dataclass(frozen=True)
class Curve:
    """A plot of one quantity over the epochs of all rows.

    key  name of the number in a run's files, as in `Column`
    """

    name: str
    title: str
    key: str
    label: str
    log: bool = False
    factor: float = 1.0
    seconds: bool = False  # the x axis is the time of training instead of epochs
    complete: bool = False  # draw it only if every run has the quantity


CURVES = (
    Curve("train-loss", "Training loss, penalties included", "train.loss", "loss", log=True),
    Curve("test-loss", "Test loss", "test.loss", "loss", log=True),
    Curve("test-accuracy", "Test accuracy", "test.accuracy", "%", factor=100),
    Curve("test-iou", "Test mean IoU", "test.mean_iou", "%", factor=100),
    Curve("loss-time", "Test loss over the time of training", "test.loss", "loss", log=True, seconds=True),
    Curve("train-nfe", "Evaluations of the cell in training", "train.nfe", "NFE"),
    Curve("test-nfe", "Evaluations of the cell in testing", "test.nfe", "NFE"),
    Curve("steps", "Steps of the solver in testing", "test.depth", "steps"),
    Curve("residual", "Residual in testing", "test.residual", "relative residual", log=True),
    Curve("radius", "Spectral radius of the Jacobian on one batch", "test.spectral_radius", "spectral radius"),
    Curve("memory", "Peak memory of the process", "peak_bytes", "MB", factor=1e-6, complete=True),
)


def pictures(results: TableResults, *, with_data: bool = True) -> dict[str, tuple[str, bytes]]:
    """Return (title, PNG) by name; curves without data are not drawn. with_data=False leaves out pictures of samples."""
    found = {}
    for profile in results.table.profiles:
        axes = new_axes()
        if _draw_profile(axes, results, profile):
            found[profile.name] = (profile.title, png(axes))
    for curve in CURVES:
        axes = new_axes()
        if _draw(axes, results, curve):
            found[curve.name] = (curve.title, png(axes))
    return found | _galleries(results, () if with_data else SHOW_DATA)


def _galleries(results: TableResults, hidden: Sequence[str]) -> dict[str, tuple[str, bytes]]:
    """Return the pictures of the first run of every row, without those named in `hidden`."""
    found = {}
    for row in results.table.rows:
        for run in results.runs.get(row.name, ())[:1]:
            for name, (title, content) in read_gallery(run.folder).items():
                if name not in hidden:
                    found[f"{row.name}-{name}"] = (f"{row.title_at(results.scale)}: {title}", content)
    return found


def _draw_profile(axes: Axes, results: TableResults, profile: Profile) -> bool:
    """Draw a line per row through its figures with their deviations; returns False if there are none."""
    drawn = False
    looks = _looks([row.name for row in results.table.rows])
    for row in results.table.rows:
        figures = [(x, results.figure(row.name, results.table.column(name))) for x, name in profile.points]
        known = [(x, figure) for x, figure in figures if figure is not None]
        if not known:
            continue
        colour, style = looks[row.name]
        axes.errorbar(
            [x for x, _ in known],
            [figure.mean for _, figure in known],
            yerr=[figure.std or 0.0 for _, figure in known],
            color=colour,
            ls=style,
            marker=".",
            lw=1.8,
            label=row.title_at(results.scale),
        )
        drawn = True
    if drawn:
        finish(axes, profile.x_label, profile.y_label, log=profile.log)
        axes.legend(frameon=False, fontsize=7)
    return drawn


def _draw(axes: Axes, results: TableResults, curve: Curve) -> bool:
    """Draw a line per row with a band over its runs; returns False if there is nothing to draw."""
    drawn = False
    if curve.complete and not all(_points(run, curve) for runs in results.runs.values() for run in runs):
        return False
    looks = _looks([row.name for row in results.table.rows])
    for row in results.table.rows:
        points = [line for run in results.runs.get(row.name, ()) if (line := _points(run, curve))]
        if not points:
            continue
        x, low, middle, high = _band(points)  # the band is the range over seeds, not a deviation
        colour, style = looks[row.name]
        marker = "." if len(x) == 1 else None
        axes.plot(x, middle, color=colour, ls=style, marker=marker, lw=1.8, label=row.title_at(results.scale))
        if len(points) > 1:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        drawn = True
    if drawn:
        finish(axes, "seconds of training" if curve.seconds else "epoch", curve.label, log=curve.log)
        axes.legend(frameon=False, fontsize=7)
        if not curve.seconds:
            from matplotlib.ticker import MaxNLocator

            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawn


def _looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and line style of every row; "v2-jr" has the colour of "v2", if there is one, and another style."""
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        base = next((other for other in found if name.startswith(f"{other}-")), None)  # a base row comes before its variants
        place = len({colour for colour, _ in found.values()})
        colour = COLOURS[place % len(COLOURS)] if base is None else found[base][0]
        found[name] = colour, STYLES[sum(colour == used for used, _ in found.values()) % len(STYLES)]
    return found


def _points(run: Run, curve: Curve) -> list[tuple[float, float]]:
    """Return the points (x, y) of a curve; values that a logarithmic axis cannot show are left out."""
    times = accumulate(look(record, "seconds_train") or 0.0 for record in run.metrics)
    pairs = zip(run.metrics, times, strict=True)
    found = [(seconds if curve.seconds else float(record["epoch"]), look(record, curve.key)) for record, seconds in pairs]
    return [(x, y * curve.factor) for x, y in found if y is not None and (y > 0 or not curve.log)]


def _band(lines: Sequence[list[tuple[float, float]]]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return mean x, and lowest, mean and highest y over the runs, up to the length of the shortest run."""
    length = min(map(len, lines))  # beyond it the mean would jump where a run ends
    rows = [[line[i] for line in lines] for i in range(length)]
    x = [sum(p[0] for p in row) / len(row) for row in rows]
    ys = [[p[1] for p in row] for row in rows]
    return x, [min(y) for y in ys], [sum(y) / len(y) for y in ys], [max(y) for y in ys]
