"""The reports in results/ agree with the tables: verdicts recomputed from the stored figures, texts compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.catalogue import table as find_table
from equilibria.lab.experiments.definitions import Column, Figure, Table
from equilibria.lab.reports.table import as_published, judge

RESULTS = Path(__file__).parents[3] / "results"
STORED = sorted(path.parent.name for path in RESULTS.glob("*/table.json"))


@dataclass(frozen=True)
class Stored:
    """The figures of a table.json."""

    table: Table
    rows: dict[str, Any]

    def figure(self, row: str, column: Column) -> Figure | None:
        found = self.rows[row]["ours"][column.name]
        return None if found is None else Figure(found["mean"], found["std"])


def test_there_are_stored_reports() -> None:
    assert len(STORED) > 20


@pytest.mark.parametrize("name", STORED)
def test_verdicts_recomputed_from_stored_figures_are_the_stored_ones(name: str) -> None:
    numbers = json.loads((RESULTS / name / "table.json").read_text())
    table = find_table(name)
    stored = Stored(table, numbers["rows"])
    again = [
        {"id": claim.id, "claim": claim.text, "published": as_published(claim, table), "held": v.held, "seen": v.seen}
        for claim in table.claims
        for v in [judge(claim, stored)]
    ]
    assert len(again) == len(numbers["claims"])
    for new, old in zip(again, numbers["claims"], strict=True):
        assert {key: new[key] for key in old} == old  # older reports have no "published"


@pytest.mark.parametrize("name", STORED)
def test_stored_texts_are_those_of_the_table(name: str) -> None:
    numbers = json.loads((RESULTS / name / "table.json").read_text())
    table = find_table(name)
    lines = table.protocol.get(numbers["scale"], ())
    assert numbers["protocol"][: len(lines)] == list(lines)
    assert f"Command: equilibria reproduce {name} --scale {numbers['scale']}." in numbers["protocol"]
    assert (numbers["table"], numbers["source"]) == (name, table.source)
    assert numbers["columns"] == {column.name: column.title for column in (*table.columns, *table.hidden)}
    assert {row: found["title"] for row, found in numbers["rows"].items()} == {row.name: row.title for row in table.rows}
    report = (RESULTS / name / "report.md").read_text()
    assert all(f"- {line}\n" in f"{report}\n" for line in numbers["protocol"])
    assert all(f"{claim['claim']}. Seen: {claim['seen']}." in report for claim in numbers["claims"])
