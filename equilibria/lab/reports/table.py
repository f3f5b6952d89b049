"""The runs of a table: figures with their deviation over seeds, and whether the claims held."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from equilibria._core.plain import to_plain
from equilibria.lab.experiments.claims import Claim
from equilibria.lab.experiments.definitions import MACHINE, Column, Figure, Scale, Table, TableRow
from equilibria.lab.training.durable import read_object
from equilibria.lab.training.folder import Run

_FREE = {"training.seed", "training.checkpoint_minutes"}  # may differ between runs of one protocol


@dataclass(frozen=True)
class TableResults:
    """The finished runs of a table by row, and the folders of those that are not finished."""

    table: Table
    scale: Scale
    runs: Mapping[str, tuple[Run, ...]]
    unfinished: tuple[str, ...] = field(default=())

    def figure(self, row: str, column: Column) -> Figure | None:
        """Mean and deviation over seeds; None without a run that has the value."""
        found = self.values(row, column)
        if not found:
            return None
        if column.over is not None:
            reference = self.values(column.over, column)
            return Figure(_mean(reference) / _mean(found)) if reference and _mean(found) else None
        return Figure(_mean(found), statistics.stdev(found) if len(found) > 1 else None)

    def values(self, row: str, column: Column) -> list[float]:
        """The column's value of every run that has it."""
        found = (value(run, column) for run in self.runs.get(row, ()))
        return [number * column.factor for number in found if number is not None]

    def verdicts(self) -> list[Verdict]:
        """The claims judged by these runs; none at debug scale, whose data and models are toys."""
        return [] if self.scale == "debug" else [judge(claim, self) for claim in self.table.claims]


@dataclass(frozen=True)
class Verdict:
    """Whether a claim held in these runs, None if undecided. `seen` has the numbers."""

    claim: Claim
    held: bool | None
    seen: str

    @property
    def word(self) -> str:
        return {True: "held", False: "did not hold", None: "undecided"}[self.held]


def collect(table: Table, scale: Scale, folder: Path) -> TableResults:
    """Read the runs in the table's folder of this scale."""
    runs: dict[str, tuple[Run, ...]] = {}
    unfinished: list[str] = []
    for row in table.rows:
        found = [Run.open(path.parent) for path in sorted((folder / row.name).glob("seed-*/config.json"))]
        runs[row.name] = tuple(run for run in found if run.summary is not None)
        unfinished += [f"{row.name}/{run.folder.name}" for run in found if run.summary is None]
    return TableResults(table, scale, runs, tuple(unfinished))


def value(run: Run, column: Column) -> float | None:
    """A column's figure of one run, in the unit of its files."""
    place, _, key = column.key.partition(".")
    if place == "summary":
        return (run.summary or {}).get(key)
    if column.epochs == "selected":
        return _selected(run, column.key)
    found = [number for record in run.metrics if (number := look(record, column.key)) is not None]
    if not found:
        return None
    return {"first": found[0], "last": found[-1], "mean": _mean(found), "min": min(found), "max": max(found)}[column.epochs]


def _selected(run: Run, key: str) -> float | None:
    """A number of the epoch that the validation split chose."""
    best: Mapping[str, Any] = (run.summary or {}).get("best") or {}
    return look(best, key) if best.get("by", {}).get("split") == "valid" else None


def look(record: Mapping[str, Any], key: str) -> float | None:
    """A number of an epoch's record: "test.loss" of a split, "seconds_step" of the epoch."""
    split, _, name = key.partition(".")
    found = record.get("split", {}).get(split, {}).get(name) if name else record.get(key)
    return float(found) if isinstance(found, (int, float)) else None


class Figures(Protocol):
    """The figures of a table's rows, from runs or from a stored report."""

    @property
    def table(self) -> Table: ...

    def figure(self, row: str, column: Column) -> Figure | None: ...


def judge(claim: Claim, results: Figures) -> Verdict:
    """Compare the means of the runs as the claim says."""
    column = results.table.column(claim.column)
    other, compared = _opposite(claim, results.table)
    left = results.figure(claim.left, column)
    right = None if compared is None else results.figure(compared, other)
    missing = [name for name, figure in ((claim.left, left), (compared, right)) if name is not None and figure is None]
    if left is None or missing:
        return Verdict(claim, None, f"no finished run of {' and '.join(dict.fromkeys(missing))} with {column.title}")
    if right is not None and right.mean == 0 and claim.by == "ratio":
        return Verdict(claim, None, f"{other.title} of {compared} is 0: there is no ratio")
    number, shown = _comparison(claim, left, right, column.digits)
    low, high = claim.at_least, claim.at_most
    held = (low is None or number >= low) and (high is None or number <= high)
    return Verdict(claim, held, f"{column.title}: {shown}; asked for {_bounds(low, high)}")


def as_published(claim: Claim, table: Table) -> str:
    """The comparison with the published figures; "–" where there are none."""
    other, compared = _opposite(claim, table)
    left = table.row(claim.left).published.get(claim.column)
    right = None if compared is None else table.row(compared).published.get(other.name)
    if left is None or (compared is not None and (right is None or right.mean == 0)):
        return "–"
    return _comparison(claim, left, right, table.column(claim.column).digits)[1]


def _opposite(claim: Claim, table: Table) -> tuple[Column, str | None]:
    """The column and the row that `left` is compared with; the row is None for a claim about one value."""
    column = table.column(claim.against or claim.column)
    return column, claim.right or (None if claim.against is None else claim.left)


def _comparison(claim: Claim, left: Figure, right: Figure | None, digits: int) -> tuple[float, str]:
    """The number that a claim bounds, and its computation as text.

    Values and differences are rounded three digits beyond those shown: means of the same counts differ in their last bits.
    """
    if right is None:
        return round(left.mean, digits + 3), number_text(left.mean, digits)
    first, second = number_text(left.mean, digits), number_text(right.mean, digits)
    if claim.by == "ratio":
        return left.mean / right.mean, f"{first} / {second} = {left.mean / right.mean:.4g}"
    number = round(left.mean - right.mean, digits + 3) + 0.0  # 0, not -0
    return number, f"{first} - {second} = {number:+.4g}"


def protocol(results: TableResults) -> list[str]:
    """What was run, as the runs themselves say: seeds, epochs, data, machine, and what differs from the table's settings."""
    runs = [run for found in results.runs.values() for run in found]
    lines = list(results.table.protocol.get(results.scale, ()))
    lines.append(f"Command: equilibria reproduce {results.table.name} --scale {results.scale}.")
    if runs:
        epochs = sorted({run.training.epochs for run in runs})
        lines.append(f"Runs: {len(runs)}, {_listed(epochs)} epochs; seeds: {_seeds(results)}.")
        lines.append(f"Machine: {'; '.join(dict.fromkeys(map(_machine, runs)))}.")
    for row in results.table.rows:
        if changed := sorted(
            {line for run in results.runs.get(row.name, ()) for line in deviations(row, results.scale, run)}
        ):
            lines.append(f"{row.title} differs from the table's settings: {'; '.join(changed)}.")
    if results.unfinished:
        lines.append(f"Not finished, hence not counted: {', '.join(results.unfinished)}.")
    return lines


def deviations(row: TableRow, scale: Scale, run: Run) -> list[str]:
    """Settings of a run that are not those of its row."""
    experiment = row.experiment(scale)
    meant = {"settings": to_plain(experiment.settings), "training": to_plain(experiment.training)}
    flat, found = dict(_flat(meant)), dict(_flat({key: run.config.get(key, {}) for key in meant}))
    differing = (key for key in flat | found if flat.get(key) != found.get(key) and key not in _FREE)
    return [f"{key.removeprefix('settings.')}={found.get(key)} (not {flat.get(key)})" for key in differing]


def plain(results: TableResults) -> dict[str, Any]:
    """The report as JSON values, for table.json."""
    columns = (*results.table.columns, *results.table.hidden)
    return {
        "table": results.table.name,
        "scale": results.scale,
        "source": results.table.source,
        "protocol": protocol(results),
        "columns": {column.name: column.title for column in columns},
        "rows": {
            row.name: {
                "title": row.title,
                "runs": [f"{row.name}/{run.folder.name}" for run in results.runs.get(row.name, ())],
                "published": {name: _figure(figure) for name, figure in row.published.items()},
                "ours": {column.name: _figure(results.figure(row.name, column)) for column in columns},
            }
            for row in results.table.rows
        },
        "claims": [
            {
                "id": v.claim.id,
                "claim": v.claim.text,
                "published": as_published(v.claim, results.table),
                "held": v.held,
                "seen": v.seen,
            }
            for v in results.verdicts()
        ],
    }


def figure_text(figure: Figure | None, column: Column) -> str:
    if figure is None:
        return "–"
    mean = number_text(figure.mean, column.digits)
    return mean if figure.std is None else f"{mean} ± {number_text(figure.std, column.digits)}"


def number_text(number: float, digits: int) -> str:
    return f"{number:,.{digits}f}"


def read_machine(folder: Path) -> dict[str, Any]:
    path = folder / MACHINE
    return read_object(path, "Remove it: a report does without it.") if path.is_file() else {}


def _machine(run: Run) -> str:
    machine, versions = read_machine(run.folder), run.config.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    parts = [str(machine[key]) for key in ("processor", "cores", "threads", "devices") if key in machine]
    return (
        ", ".join([*parts, *(f"{name} {versions[name]}" for name in ("torch", "python") if name in versions)]) or "not known"
    )


def _seeds(results: TableResults) -> str:
    found = sorted({run.training.seed for runs in results.runs.values() for run in runs})
    return _listed(found)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"


def _figure(figure: Figure | None) -> dict[str, float | None] | None:
    return None if figure is None else {"mean": figure.mean, "std": figure.std}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [pair for key, part in value.items() for pair in _flat(part, f"{prefix}.{key}" if prefix else str(key))]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
