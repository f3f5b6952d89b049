"""The reports in results/ agree with the tables: verdicts recomputed from the stored figures, texts compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.catalogue import table as find_table
from equilibria.lab.experiments.catalogue import tables
from equilibria.lab.reports.overview import write_overview
from equilibria.lab.reports.table import TableResults, plain
from equilibria.lab.reports.write import stored_rows

RESULTS = Path(__file__).parents[3] / "results"
STORED = sorted(path.parent.name for path in RESULTS.glob("*/table.json"))


def test_there_are_stored_reports() -> None:
    assert len(STORED) > 20


@pytest.mark.parametrize("name", STORED)
def test_numbers_and_verdicts_recomputed_from_stored_measurements_are_the_stored_ones(name: str) -> None:
    numbers = json.loads((RESULTS / name / "table.json").read_text())
    table = find_table(numbers["table"])
    again = plain(TableResults(table, numbers["scale"], stored_rows(table, numbers["scale"], RESULTS / name)))
    for part in ("rows", "claims", "columns"):
        assert json.loads(json.dumps(again[part])) == numbers[part], f"{part}: run `equilibria report results`"


@pytest.mark.parametrize("name", STORED)
def test_no_verdict_is_of_fewer_than_three_runs(name: str) -> None:
    numbers = json.loads((RESULTS / name / "table.json").read_text())
    for claim, told in zip(find_table(numbers["table"]).claims, numbers["claims"], strict=True):
        rows = [numbers["rows"][row] for row in (claim.left, claim.right) if row is not None]
        assert told["held"] is None or all(len(row["runs"]) >= 3 for row in rows)


def test_the_overview_is_written_from_the_stored_reports(tmp_path: Path) -> None:
    for name in STORED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.json").write_bytes((RESULTS / name / "table.json").read_bytes())
    for name in ("NOTES.md", "earlier.json"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    assert write_overview(tmp_path, tables()).read_text() == (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("name", STORED)
def test_stored_texts_are_those_of_the_table(name: str) -> None:
    numbers = json.loads((RESULTS / name / "table.json").read_text())
    table = find_table(numbers["table"])
    lines = table.protocol.get(numbers["scale"], ())
    assert numbers["protocol"][: len(lines)] == list(lines)
    assert f"Command: equilibria reproduce {table.name} --scale {numbers['scale']}." in numbers["protocol"]
    assert name in (table.name, f"{table.name}-full")
    assert numbers["source"] == table.source
    assert numbers["columns"] == {column.name: column.title for column in (*table.columns, *table.hidden)}
    assert {row: found["title"] for row, found in numbers["rows"].items()} == {
        row.name: row.title_at(numbers["scale"]) for row in table.rows
    }
    report = (RESULTS / name / "report.md").read_text()
    assert all(f"- {line}\n" in f"{report}\n" for line in numbers["protocol"])
    assert all(f"{claim['claim']}. Seen: {claim['seen']}." in report for claim in numbers["claims"])
