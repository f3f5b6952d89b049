"""Draws the pictures of docs/gallery.md from results/*/table.json and benchmarks/results/gallery.json.

python docs/gallery_pictures.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from equilibria.analysis.plots import COLOURS, finish, new_axes, png
from equilibria.lab.reports.headlines import speed_ups

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "images"


def table(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / name / "table.json").read_text())
    return found


def measured(part: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "gallery.json").read_text())[part]


def bars(axes: Any, labels: Sequence[str], groups: dict[str, Sequence[float | None]], unit: str) -> Any:
    """Groups of bars, one colour each; a number that is not known has no bar."""
    height = 0.8 / len(groups)
    for i, (name, values) in enumerate(groups.items()):
        known = [(place + i * height, value) for place, value in enumerate(values) if value is not None]
        axes.barh([place for place, _ in known], [value for _, value in known], height, color=COLOURS[i], label=name)
        for place, value in known:
            axes.text(value, place, f" {value:.3g}", va="center", fontsize=7)
    axes.set_yticks([place + (len(groups) - 1) * height / 2 for place in range(len(labels))], labels, fontsize=7)
    axes.invert_yaxis()
    finish(axes, unit, "")
    if len(groups) > 1:  # above the axes, where it hides no bar
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    axes.margins(x=0.12)
    return axes


def figure_of(found: dict[str, Any], row: str, column: str) -> float | None:
    value = found["rows"][row]["ours"].get(column)
    return None if value is None else float(value["mean"])


def regularization() -> Any:
    """Error, memory and time of a step, the largest of each 1."""
    found = table("jr-cifar10")
    peaks = {entry["name"]: entry["bytes"] for entry in measured("training_memory")}
    rows = {row: entry["title"] for row, entry in found["rows"].items()}
    measures = {
        "test error": [None if (a := figure_of(found, row, "accuracy")) is None else 100 - a for row in rows],
        "time of a step": [figure_of(found, row, "step") for row in rows],
        "memory of a step": [peaks[row] for row in rows],
    }
    scaled = {name: _shares(values) for name, values in measures.items()}
    return bars(new_axes(7, 3.4), list(rows.values()), scaled, "share of the largest")


def _shares(values: Sequence[float | None]) -> list[float | None]:
    most = max(value for value in values if value is not None)
    return [None if value is None else value / most for value in values]


def radii() -> Any:
    axes = new_axes()
    for i, name in enumerate(measured("radii")[0]):
        curves = [[(entry["step"], entry["radius"]) for entry in run[name]] for run in measured("radii")]
        _band(axes, curves, COLOURS[i], name)
    return finish(axes, "training step", "spectral radius", legend=True)


def skip_speed_ups() -> Any:
    names = [path.parent.name for path in sorted((ROOT / "results").glob("skipdeq-*/table.json"))]
    found = speed_ups({name: table(name) for name in names})
    places = list(dict.fromkeys((s.table, s.system) for s in found))
    groups = {
        measure: [next((s.times for s in found if (s.table, s.system, s.measure) == (*p, measure)), None) for p in places]
        for measure in dict.fromkeys(s.measure for s in found)
    }
    labels = [f"{name.removeprefix('skipdeq-')}, {system}" for name, system in places]
    return bars(new_axes(7, 4.2), labels, groups, "times faster than the plain DEQ")


def thought_experiment(evaluations: bool) -> Any:
    """u' = f(u) - u for f(u) = 0.9 u, by plain iteration and by the midpoint rule, over evaluations of f or over steps."""
    axes = new_axes()
    last = 40 if evaluations else 20
    axes.plot(range(last + 1), [0.9**n for n in range(last + 1)], color=COLOURS[0], label="u <- f(u), one evaluation a step")
    for i, step in enumerate((2.0, 5.0), start=1):
        factor = 1 + step * -0.1 + (step * -0.1) ** 2 / 2  # one step of the midpoint rule, two evaluations
        points = [((2 if evaluations else 1) * n, factor**n) for n in range(21)]
        label = f"midpoint rule, step {step:g}, two evaluations"
        axes.plot(*zip(*points, strict=True), color=COLOURS[i], ls="--", label=label)
    finish(axes, "evaluations of f" if evaluations else "steps", "u", log=True)
    axes.legend(frameon=False, fontsize=7)
    return axes


def newton_memory() -> Any:
    axes = new_axes()
    names = dict.fromkeys(entry["name"] for entry in measured("newton_memory"))
    for i, name in enumerate(names):
        points = [(entry["steps"], entry["bytes"] / 1e6) for entry in measured("newton_memory") if entry["name"] == name]
        axes.plot(*zip(*points, strict=True), color=COLOURS[i], marker=".", label=name)
    finish(axes, "steps of the solver", "MB", log=True)
    axes.legend(frameon=False, fontsize=7)
    return axes


def cosines() -> Any:
    axes = new_axes()
    names = [name for name in measured("cosines")[0][0] if name.startswith("UPG")]
    for i, name in enumerate(names):
        curves = [[(entry["step"], entry[name]) for entry in run] for run in measured("cosines")]
        _band(axes, curves, COLOURS[i], f"{name} step{'s' * (not name.endswith(' 1'))}")
    return finish(axes, "training step", "cosine with the exact gradient", legend=True)


def phantom_grid() -> Any:
    axes = new_axes(6.2, 3.6)
    runs = [entry for run in measured("grid") for entry in run]
    for i, damping in enumerate(sorted({entry["damping"] for entry in runs})):
        for kind, style in (("UPG", "-"), ("NPG", "--")):
            points: dict[int, list[float]] = {}
            for entry in runs:
                if (entry["gradient"], entry["damping"]) == (kind, damping):
                    points.setdefault(entry["steps"], []).append(entry["accuracy"])
            x = sorted(points)
            means, deviations = ([f(points[k]) for k in x] for f in (statistics.fmean, statistics.stdev))
            axes.errorbar(x, means, deviations, color=COLOURS[i], ls=style, marker=".", label=f"{kind}, damping {damping:g}")
    finish(axes, "steps", "test accuracy, %")
    axes.legend(frameon=False, fontsize=7)
    return axes


def inference_memory() -> Any:
    found = measured("inference_memory")
    return bars(new_axes(6, 2), [entry["name"] for entry in found], {"MB": [entry["bytes"] / 1e6 for entry in found]}, "MB")


def runtimes() -> Any:
    """Time of a training step and of a prediction over those of the explicit network."""
    found = table("wikitext")
    pairs = (("deq-adaptive", "adaptive-18", (2.82, 1.76)), ("deq-trellisnet", "trellisnet", (2.40, 1.64)))
    groups: dict[str, list[float | None]] = {"training, ours": [], "prediction, ours": []}
    for deq, explicit, _ in pairs:
        for name, column in (("training, ours", "step"), ("prediction, ours", "predict")):
            top, bottom = figure_of(found, deq, column), figure_of(found, explicit, column)
            groups[name].append(None if top is None or bottom is None else top / bottom)
    published = {f"{name}, published": [pair[2][i] for pair in pairs] for i, name in enumerate(("training", "prediction"))}
    labels = ["DEQ-Transformer / 18 layers", "DEQ-TrellisNet / TrellisNet"]
    return bars(new_axes(7, 3.2), labels, {**groups, **published}, "times the explicit network's")


def _band(axes: Any, curves: Sequence[Sequence[tuple[float, float]]], colour: str, label: str) -> None:
    """The mean of several runs, and their range."""
    x = [point[0] for point in curves[0]]
    columns = [[curve[i][1] for curve in curves] for i in range(len(x))]
    axes.plot(x, [statistics.fmean(column) for column in columns], color=colour, lw=1.8, label=label)
    axes.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, lw=0)


PICTURES: dict[str, Callable[[], Any]] = {
    "regularization": regularization,
    "radius": radii,
    "speed-ups": skip_speed_ups,
    "thought-steps": partial(thought_experiment, evaluations=False),
    "thought-experiment": partial(thought_experiment, evaluations=True),
    "cosines": cosines,
    "phantom-grid": phantom_grid,
    "inference-memory": inference_memory,
    "runtimes": runtimes,
    "newton-memory": newton_memory,
}


# pictures of reports that the page shows as they are: name, file below results/
REPORTED = {
    "jfb-accuracy": "jfb-cifar10/test-accuracy.png",
    "jfb-time": "jfb-cifar10/loss-time.png",
    "continuous-loss": "skipdeq-mnist-mdeq/test-loss.png",
    "continuous-steps": "skipdeq-mnist-mdeq/steps.png",
    "mdeq-radius": "jr-cifar10/radius.png",
    "memory-steps": "mdeq-memory/memory-steps.png",
}


if __name__ == "__main__":
    for name, path in REPORTED.items():
        (FOLDER / f"gallery-{name}.png").write_bytes((ROOT / "results" / path).read_bytes())
    for name, draw in PICTURES.items():
        (FOLDER / f"gallery-{name}.png").write_bytes(png(draw()))
