"""Averages over the Skip DEQ tables: the speed-up of the best Skip model over the plain DEQ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# published averages of the best Skip model over all tables
PUBLISHED = {"training": 2.55, "prediction": 3.349, "depth": 3.74}
# columns for each measure; the first one that a table has is used
COLUMNS = {"training": ("hours", "minutes"), "prediction": ("predict",), "depth": ("depth",)}
SKIPS = ("skip", "v2")  # rows that are compared with the plain DEQ


@dataclass(frozen=True)
class SpeedUp:
    """The ratio of the plain DEQ's figure to that of the best Skip model, in one table and system.

    runs  the smaller number of runs of both rows
    """

    table: str
    system: str
    measure: str
    row: str
    times: float
    runs: int


def speed_ups(tables: Mapping[str, Mapping[str, Any]]) -> list[SpeedUp]:
    """Return the speed-ups in tables by name, each a result of `reports.table.plain`; only Skip DEQs on images count."""
    found = []
    for name, table in tables.items():
        rows = table["rows"]
        # plain DEQs: "deq" in tables of one system, "deq-SYSTEM" in others; "-jr" marks Jacobian regularization
        for deq in (row for row in rows if row == "deq" or (row.startswith("deq-") and not row.endswith("-jr"))):
            suffix = deq.removeprefix("deq")
            skips = [row for row in (f"{skip}{suffix}" for skip in SKIPS) if row in rows]
            if name.startswith("skipdeq-mnist-mlp") or suffix:
                found += [s for measure in COLUMNS if (s := _best(name, rows, deq, skips, measure)) is not None]
    return found


def _best(table: str, rows: Mapping[str, Any], deq: str, skips: list[str], measure: str) -> SpeedUp | None:
    """Return the speed-up of the best Skip row among those measured on the machine of the DEQ; None if there are none."""
    column = next((name for name in COLUMNS[measure] if rows[deq]["ours"].get(name)), None)
    if column is None:
        return None
    known = [row for row in skips if rows[row]["ours"].get(column) and _machine(rows[row]) == _machine(rows[deq])]
    if not known:
        return None
    row = min(known, key=lambda name: float(rows[name]["ours"][column]["mean"]))
    times = rows[deq]["ours"][column]["mean"] / rows[row]["ours"][column]["mean"]
    system = deq.removeprefix("deq").strip("-") or ("continuous" if table.endswith("tsit5") else "discrete")
    return SpeedUp(table, system, measure, row, times, min(len(rows[r]["runs"]) for r in (deq, row)))


def _machine(row: Mapping[str, Any]) -> str | None:
    """Return the machine of the measurement that a row shows."""
    return next((found["machine"] for found in row.get("measured", ()) if found["runs"] == row["runs"]), None)


def lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the speed-ups as lines of a Markdown table, their averages last; empty if there are none."""
    found = speed_ups(tables)
    if not found:
        return []
    places = list(dict.fromkeys((s.table, s.system) for s in found))
    by_place = {(s.table, s.system, s.measure): s for s in found}
    out = [f"| table | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for place in places:
        cells = [by_place.get((*place, measure)) for measure in COLUMNS]
        shown = " | ".join("–" if s is None else f"{s.times:.2f} ({s.row}, {_count(s.runs)})" for s in cells)
        out.append(f"| {place[0]}, {place[1]} | {shown} |")
    means = [[s.times for s in found if s.measure == measure] for measure in COLUMNS]
    out.append(f"| average | {' | '.join(f'{statistics.fmean(m):.2f}' if m else '–' for m in means)} |")
    out.append(f"| published average | {' | '.join(f'{number:.2f}' for number in PUBLISHED.values())} |")
    return out


def _count(runs: int) -> str:
    return f"{runs} run{'s' * (runs != 1)}"
