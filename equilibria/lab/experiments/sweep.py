"""Sweeps over a grid of settings: the runs of every point, and their results."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equilibria._core.files import replace_file
from equilibria.lab.errors import SettingError
from equilibria.lab.experiments.definitions import Experiment
from equilibria.lab.experiments.runner import Job, seed_number
from equilibria.lab.training.folder import Run

NUMBERS = "sweep.json"
MOST = 1000  # largest number of runs of a sweep; more are probably a mistake


@dataclass(frozen=True)
class Point:
    """A point of the grid: its values by setting, and one run per seed."""

    values: dict[str, str]
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class PointResult:
    """The result of a point.

    mean, deviation    of `metric` in the last epoch over the finished runs; None with no run, or for the deviation with one
    failed             share of failed solves in the last epoch, mean over runs
    seconds            training time, mean over runs
    runs               number of finished runs
    """

    values: dict[str, str]
    mean: float | None
    deviation: float | None
    failed: float | None
    seconds: float | None
    runs: int


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse texts `name=a,b,c` to lists of values by name; values that contain commas are separated by "|"."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, separator, values = (part.strip() for part in text.partition("="))
        found = [value.strip() for value in values.split("|" if "|" in values else ",") if value.strip()]
        if not separator or not name or not found:
            raise SettingError(f"Expected --grid key=value,value,..., got {text!r}.")
        if name in grid:
            raise SettingError(f"--grid {name} is given twice: give all its values in one --grid.")
        if len(set(found)) < len(found):
            raise SettingError(f"--grid {name} has a value twice: {', '.join(found)}.")
        grid[name] = found
    if not grid:
        raise SettingError("A sweep needs at least one --grid key=value,value,...")
    return grid


def points(
    experiment: Experiment[Any], grid: dict[str, list[str]], folder: Path, assignments: Sequence[str] = (), seeds: int = 1
) -> list[Point]:
    """Return the points of the grid with their runs; all combinations of values are checked before anything runs."""
    found = []
    for values in itertools.product(*grid.values()):
        own = dict(zip(grid, values, strict=True))
        changes = [*assignments, *(f"{name}={value}" for name, value in own.items())]
        changed = experiment.changed(changes)
        label = ", ".join(f"{name}={value}" for name, value in own.items())
        jobs = []
        # values may contain characters that a file system refuses
        place_of_point = folder / re.sub(r"[^\w.=,+-]", "_", ",".join(f"{name}={value}" for name, value in own.items()))
        for place in range(seeds):
            # a grid over seeds determines the seed of every point
            number = changed.training.seed if "training.seed" in own else seed_number(changed, place)
            jobs.append(Job(label, changed.seeded(number), place_of_point / f"seed-{number}", tuple(changes)))
        found.append(Point(own, tuple(jobs)))
    if (count := len(found) * seeds) > MOST:
        raise SettingError(f"This grid has {count} runs, at most {MOST} are allowed. Use fewer values or seeds.")
    if "training.seed" in grid and seeds > 1:
        raise SettingError("--grid training.seed=... already sets the seeds: leave --seeds out.")
    return found


def results(found: Sequence[Point], metric: str) -> list[PointResult]:
    """Return the results of the points in the order of the grid. `metric` is SPLIT.NAME, such as test.accuracy."""
    return [_result(point, metric) for point in found]


def default_metric(job: Job) -> tuple[str, str]:
    """Return the metric that selects the best epoch of a run, as SPLIT.NAME, and "max" or "min"."""
    name, way = job.experiment.task().better
    summary = Run.open(job.folder).summary
    assert summary is not None
    split = next(split for split in ("valid", "test", "train") if split in summary["final"]["split"])
    return f"{split}.{name}", way


def write_results(folder: Path, metric: str, found: Sequence[PointResult]) -> Path:
    """Write the results as JSON; returns the file."""
    path = folder / NUMBERS
    replace_file(
        path, (json.dumps({"metric": metric, "points": [asdict(each) for each in found]}, indent=1) + "\n").encode()
    )
    return path


def _result(point: Point, metric: str) -> PointResult:
    """Return the means over the finished runs of a point; raises SettingError for an unknown metric."""
    split, _, name = metric.partition(".")
    summaries = [Run.open(job.folder).summary for job in point.jobs if job.finished]
    finals = [summary["final"] for summary in summaries if summary is not None]
    for final in finals:
        if name not in final["split"].get(split, {}):
            known = [f"{part}.{key}" for part, values in final["split"].items() for key in values]
            raise SettingError(f"These runs have no metric {metric!r}. They have {', '.join(known)}.")
    values = [final["split"][split][name] for final in finals]
    return PointResult(
        point.values,
        statistics.fmean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(final["failed_share"] for final in finals) if finals else None,
        statistics.fmean(summary["seconds_train"] for summary in summaries if summary is not None) if finals else None,
        len(finals),
    )
