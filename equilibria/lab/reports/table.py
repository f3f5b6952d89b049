"""The results of a table: figures with their deviation over seeds for every machine, and the protocol of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria._core.plain import to_plain
from equilibria.lab.experiments.definitions import Column, Figure, Scale, Table, TableRow
from equilibria.lab.reports.measured import Measured, from_runs, machine_of, plain_figure
from equilibria.lab.reports.verdicts import Verdict, as_published, judge
from equilibria.lab.training.folder import Run

_FREE = {"training.seed", "training.checkpoint_minutes"}  # settings that may differ between runs of one protocol


@dataclass(frozen=True)
class TableResults:
    """The results of a table.

    measured    measurements by row, one for each machine
    runs        finished runs by row; measurements of a stored report have none
    unfinished  folders of runs that are not finished
    """

    table: Table
    scale: Scale
    measured: Mapping[str, tuple[Measured, ...]]
    runs: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()

    def main(self, row: str) -> Measured | None:
        """Return the measurement that the line of a row shows: the one with the most runs, or the first of them."""
        return max(self.measured.get(row, ()), key=lambda found: len(found.runs), default=None)

    def figure(self, row: str, column: Column, measured: Measured | None = None) -> Figure | None:
        """Return mean and deviation over the seeds of a measurement, by default the main one; None without values."""
        own = measured or self.main(row)
        if own is None:
            return None
        # most ratios are of times, which compare only on one machine
        return own.figure(column) if column.over is None else own.ratio(column, self.on(column.over, own.machine))

    def on(self, row: str, machine: str) -> Measured | None:
        """Return the measurement of a row on a machine; None if there is none."""
        return next((found for found in self.measured.get(row, ()) if found.machine == machine), None)

    def machines(self) -> list[str]:
        """Return all machines, those of the first rows first."""
        found = (measured.machine for row in self.table.rows for measured in self.measured.get(row.name, ()))
        return list(dict.fromkeys(found))

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts of these runs on all claims; none at debug scale, whose data and models are toys."""
        return [] if self.scale == "debug" else [judge(claim, self) for claim in self.table.claims]


def collect(table: Table, scale: Scale, folder: Path) -> TableResults:
    """Read the runs in the table's folder of this scale."""
    runs: dict[str, tuple[Run, ...]] = {}
    measured: dict[str, tuple[Measured, ...]] = {}
    unfinished: list[str] = []
    for row in table.rows:
        # a folder without config.json holds no run yet
        found = [Run.open(path.parent) for path in sorted((folder / row.name).glob("seed-*/config.json"))]
        runs[row.name] = tuple(run for run in found if run.summary is not None)
        unfinished += [f"{row.name}/{run.folder.name}" for run in found if run.summary is None]
        measured[row.name] = _by_machine(table, row, scale, runs[row.name])
    return TableResults(table, scale, measured, runs, tuple(unfinished))


def with_stored(results: TableResults, stored: Mapping[str, tuple[Measured, ...]]) -> TableResults:
    """Return results with measurements of an earlier report added, for rows and machines that have no run here."""
    measured = {}
    for row in results.table.rows:
        own = results.measured.get(row.name, ())
        machines = {found.machine for found in own}
        others = (found for found in stored.get(row.name, ()) if found.machine not in machines)
        measured[row.name] = (*own, *others)
    return TableResults(results.table, results.scale, measured, results.runs, results.unfinished)


def _by_machine(table: Table, row: TableRow, scale: Scale, runs: Iterable[Run]) -> tuple[Measured, ...]:
    """Return the measurements of a row's runs, one for each machine."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(machine_of(run), []).append(run)
    columns = (*table.columns, *table.hidden)
    return tuple(
        from_runs(row.name, group, columns, (line for run in group for line in deviations(row, scale, run)))
        for group in groups.values()
    )


def protocol(results: TableResults) -> list[str]:
    """Return the lines of the protocol: the table's notes, machines, seeds, epochs, commits, and settings that differ."""
    lines = list(results.table.protocol.get(results.scale, ()))
    lines.append(f"Command: equilibria reproduce {results.table.name} --scale {results.scale}.")
    for place, machine in enumerate(results.machines()):
        label = f"Machine {letter(place)}" if len(results.machines()) > 1 else "Machine"
        lines.append(f"{label}: {machine}. {_ran(results, machine)}")
    for row in results.table.rows:
        changed = sorted({line for found in results.measured.get(row.name, ()) for line in found.changes})
        if changed:
            lines.append(f"{row.title_at(results.scale)} differs from the table's settings: {'; '.join(changed)}.")
    if results.unfinished:
        lines.append(f"Not finished, hence not counted: {', '.join(results.unfinished)}.")
    return lines


def _ran(results: TableResults, machine: str) -> str:
    """Return a sentence with runs, epochs, seeds and commits on a machine."""
    found = [measured for row in results.table.rows if (measured := results.on(row.name, machine)) is not None]
    runs = [name for measured in found for name in measured.runs]
    epochs = sorted({number for measured in found for number in measured.epochs})
    seeds = sorted({int(name.rpartition("seed-")[2]) for name in runs})
    commits = dict.fromkeys(commit for measured in found for commit in measured.commits)
    return (
        f"Runs: {len(runs)}, {_listed(epochs)} epochs; seeds: {_listed(seeds)}; "
        f"commit: {', '.join(commits) or 'not recorded'}."
    )


def letter(place: int) -> str:
    """Return the letter by which a report names a machine: A, B, C, ..."""
    return chr(ord("A") + place)


def deviations(row: TableRow, scale: Scale, run: Run) -> list[str]:
    """Return the settings of a run that differ from those of its row, as texts."""
    experiment = row.experiment(scale)
    # both sides in the form of config.json, in which tuples are lists
    meant = {"settings": to_plain(experiment.settings), "training": to_plain(experiment.training)}
    flat, found = dict(_flat(meant)), dict(_flat({key: run.config.get(key, {}) for key in meant}))
    differing = (key for key in flat | found if flat.get(key) != found.get(key) and key not in _FREE)
    return [f"{key.removeprefix('settings.')}={found.get(key)} (not {flat.get(key)})" for key in differing]


def plain(results: TableResults) -> dict[str, Any]:
    """Return the report as values for table.json."""
    columns = (*results.table.columns, *results.table.hidden)
    return {
        "table": results.table.name,
        "scale": results.scale,
        "source": results.table.source,
        "protocol": protocol(results),
        "columns": {column.name: column.title for column in columns},
        "rows": {row.name: _plain_row(results, row, columns) for row in results.table.rows},
        "claims": [
            {
                "id": v.claim.id,
                "claim": v.claim.text,
                "published": as_published(v.claim, results.table),
                "held": v.held,
                "seen": v.seen,
                "reason": v.reason,
            }
            for v in results.verdicts()
        ],
    }


def _plain_row(results: TableResults, row: TableRow, columns: Iterable[Column]) -> dict[str, Any]:
    """Return a row as values for table.json."""
    main = results.main(row.name)
    return {
        "title": row.title_at(results.scale),
        "published_as": row.title if row.published else None,
        "runs": [] if main is None else list(main.runs),
        "published": {name: plain_figure(figure) for name, figure in row.published.items()},
        "ours": {c.name: None if (f := results.figure(row.name, c)) is None else plain_figure(f) for c in columns},
        "measured": [
            found.plain({column.name: results.figure(row.name, column, found) for column in columns})
            for found in results.measured.get(row.name, ())
        ],
    }


def figure_text(figure: Figure | None, column: Column) -> str:
    """Return a figure as text, with its deviation if known; a dash for None."""
    if figure is None:
        return "–"
    mean = number_text(figure.mean, column.digits)
    return mean if figure.std is None else f"{mean} ± {number_text(figure.std, column.digits)}"


def number_text(number: float, digits: int) -> str:
    return f"{number:,.{digits}f}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested settings as pairs of dotted name and value."""
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}.{key}" if prefix else str(key))]
