"""Measurements of one row on one machine, read from the folders of its runs or from a stored report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria.lab.experiments.definitions import MACHINE, Column, Figure, Table
from equilibria.lab.training.durable import read_object
from equilibria.lab.training.folder import Run

UNKNOWN = "not known"  # stored reports have this text, too
AGAIN = "Remove it, and write the report again with `equilibria reproduce`."


@dataclass(frozen=True)
class Measured:
    """The measurements of one row on one machine.

    machine  processor, cores, threads and versions
    runs     names of the runs, ROW/seed-S
    commits  known commits of the source
    epochs   numbers of epochs of the runs
    values   values by column and run; empty for reports that store only means
    stored   figures of such reports by column
    changes  settings that differ from those of the table
    """

    machine: str
    runs: tuple[str, ...]
    commits: tuple[str, ...] = ()
    epochs: tuple[int, ...] = ()
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stored: Mapping[str, Figure] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    def figure(self, column: Column) -> Figure | None:
        """Return mean and deviation of a column that is not a ratio to another row; None without values."""
        found = list(self.values.get(column.name, {}).values())
        if not found:
            return self.stored.get(column.name)
        return Figure(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))

    def ratio(self, column: Column, reference: Measured | None) -> Figure | None:
        """Return the reference's figure divided by this one's, with the standard error of the quotient."""
        own, other = self.values.get(column.name), {} if reference is None else reference.values.get(column.name, {})
        if not own or not other:
            return self.stored.get(column.name)  # a report that stored only means still has its ratio
        mean = statistics.fmean(own.values())
        if not mean:
            return None
        quotient = statistics.fmean(other.values()) / mean
        runs = min(len(own), len(other))
        return Figure(quotient, None, runs, quotient_error(other, own))

    def plain(self, figures: Mapping[str, Figure | None]) -> dict[str, Any]:
        """Return the measurement as values for table.json."""
        return {
            "machine": self.machine,
            "commits": list(self.commits),
            "epochs": list(self.epochs),
            "runs": list(self.runs),
            "changes": list(self.changes),
            "ours": {name: None if figure is None else plain_figure(figure) for name, figure in figures.items()},
            "values": {name: dict(values) for name, values in self.values.items() if values},
        }


def from_runs(row: str, runs: Sequence[Run], columns: Iterable[Column], changes: Iterable[str]) -> Measured:
    """Return the measurements of runs on one machine."""
    named = {f"{row}/{run.folder.name}": run for run in runs}
    values = {
        column.name: {
            name: number * column.factor for name, run in named.items() if (number := value(run, column)) is not None
        }
        for column in columns
    }
    commits = dict.fromkeys(str(commit) for run in runs if (commit := read_machine(run.folder).get("commit")))
    return Measured(
        machine=machine_of(runs[0]),
        runs=tuple(named),
        commits=tuple(commits),
        epochs=tuple(sorted({run.training.epochs for run in runs})),
        values=values,
        changes=tuple(sorted(set(changes))),
    )


def from_plain(found: Mapping[str, Any]) -> Measured:
    """Return the measurement from an entry that `Measured.plain` wrote."""
    figures = {name: read_figure(figure) for name, figure in found["ours"].items() if figure is not None}
    values = found.get("values", {})
    return Measured(
        machine=found["machine"],
        runs=tuple(found["runs"]),
        commits=tuple(found.get("commits", ())),
        epochs=tuple(found.get("epochs", ())),
        values=values,
        stored=figures,
        changes=tuple(found.get("changes", ())),
    )


def read_rows(file: Path, table: Table) -> dict[str, tuple[Measured, ...]]:
    """Return the measurements in a table.json by row; rows that the table no longer has are left out."""
    rows = read_object(file, AGAIN).get("rows", {})
    try:
        return {row.name: tuple(map(from_plain, rows[row.name]["measured"])) for row in table.rows if row.name in rows}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} was changed or written by another version: {error!r}. {AGAIN}") from error


def plain_figure(figure: Figure) -> dict[str, float | None]:
    """Return a figure as values for JSON."""
    found: dict[str, float | None] = {"mean": figure.mean, "std": figure.std}
    return found | {name: number for name in ("runs", "error") if (number := getattr(figure, name)) is not None}


def read_figure(found: Mapping[str, Any]) -> Figure:
    """Return the figure that `plain_figure` wrote."""
    return Figure(found["mean"], found.get("std"), found.get("runs"), found.get("error"))


def quotient_error(left: Mapping[str, float], right: Mapping[str, float]) -> float | None:
    """Return the standard error of mean(left) / mean(right), by pairs if the seeds are equal; None with too few runs.

    To first order the error of a quotient q is that of left - q right, divided by mean(right).
    """
    bottom = statistics.fmean(right.values())
    quotient = statistics.fmean(left.values()) / bottom
    scaled = {name: quotient * number for name, number in right.items()}
    error = difference_error(left, scaled)
    return None if error is None else error / abs(bottom)


def difference_error(left: Mapping[str, float], right: Mapping[str, float]) -> float | None:
    """Return the standard error of mean(left) - mean(right), by pairs if the seeds are equal; None with too few runs."""
    one, other = by_seed(left), by_seed(right)
    if one.keys() == other.keys():
        # runs of one seed share data and order; the spread of their differences does not contain that of the seeds
        return mean_error([one[seed] - other[seed] for seed in one])
    errors = mean_error(list(one.values())), mean_error(list(other.values()))
    return None if errors[0] is None or errors[1] is None else (errors[0] ** 2 + errors[1] ** 2) ** 0.5


def mean_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def by_seed(values: Mapping[str, float]) -> dict[str, float]:
    """Return values by seed, which is the last part of a run's name."""
    return {name.rpartition("/")[2]: number for name, number in values.items()}


def value(run: Run, column: Column) -> float | None:
    """Return the value of a column for one run, in the unit of its files; None if it has none."""
    place, _, key = column.key.partition(".")
    if place == "summary":
        return (run.summary or {}).get(key)
    if column.epochs == "selected":
        best: Mapping[str, Any] = (run.summary or {}).get("best") or {}
        # without a validation split the best epoch was chosen on the test split, and its figure would be too good
        return look(best, column.key) if best.get("by", {}).get("split") == "valid" else None
    found = [number for record in run.metrics if (number := look(record, column.key)) is not None]
    if not found:
        return None
    mean = statistics.fmean(found)
    return {"first": found[0], "last": found[-1], "mean": mean, "min": min(found), "max": max(found)}[column.epochs]


def look(record: Mapping[str, Any], key: str) -> float | None:
    """Return a number from an epoch's record: "test.loss" is of a split, "seconds_step" of the epoch; None if absent."""
    split, _, name = key.partition(".")
    found = record.get("split", {}).get(split, {}).get(name) if name else record.get(key)
    return float(found) if isinstance(found, (int, float)) else None


def read_machine(folder: Path) -> dict[str, Any]:
    """Return the content of a run's machine.json; empty if there is none."""
    path = folder / MACHINE
    return read_object(path, "Remove it: a report does without it.") if path.is_file() else {}


def machine_of(run: Run) -> str:
    """Return hardware and versions of a run as text."""
    machine, versions = read_machine(run.folder), run.config.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    parts = [str(machine[key]) for key in ("processor", "cores", "threads", "devices") if key in machine]
    return ", ".join([*parts, *(f"{name} {versions[name]}" for name in ("torch", "python") if name in versions)]) or UNKNOWN
