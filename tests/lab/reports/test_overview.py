"""The page over all tables."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.cli.tables import report_folder
from equilibria.lab.experiments.catalogue import table, tables
from equilibria.lab.reports.overview import NOTES, NUMBERED, page, write_overview
from equilibria.lab.reports.write import reported_scale, write_report
from tests.lab.reports.runs import write_run


def test_the_overview_lists_tables_and_claims_in_order(tmp_path: Path) -> None:
    for name, row, test in (
        ("jr-cifar10", "mdeq", {"accuracy": 0.9, "accuracy_at_6": 0.8}),
        ("mon", "mlp-mnist", {"error": 0.05}),
    ):
        for seed in range(3):
            write_run(tmp_path / "runs" / name, table(name), row, seed, test)
        write_report(table(name), "full", tmp_path / "runs" / name, tmp_path / "results" / name)
    (tmp_path / "results" / NOTES).write_text("Seen beside: nothing.\n")
    lines = write_overview(tmp_path / "results", tables()).read_text().splitlines()
    assert [line.split("]")[0] for line in lines if line.startswith("| [")] == ["| [mon", "| [jr-cifar10"]
    assert all(
        any(f"`equilibria reproduce {name}`" in line and "not run" in line for line in lines) for name in ("lion", "camvid")
    )
    early = next(line for line in lines if "stopping the unregularized model" in line)
    assert early.startswith("| C3 |") and "80.00 - 90.00 = -10" in early and "| held |" in early
    assert "| 89.10 - 93.60 = -4.5 |" in early  # published
    assert early.endswith("| [`reproduce jr-cifar10 --scale full`](jr-cifar10/report.md) |")
    error = next(line for line in lines if "dense, mnist: the error" in line)
    assert error.startswith("|  |") and "5.00" in error
    assert lines.index(early) < lines.index(error)
    assert any("undecided" in line for line in lines) and lines[-1] == "Seen beside: nothing."


def test_every_number_of_a_claim_is_explained() -> None:
    assert {claim.id for table in tables().values() for claim in table.claims if claim.id} == set(NUMBERED)


def test_all_tables_do_not_replace_a_report_of_a_larger_scale(tmp_path: Path) -> None:
    mon = table("mon")
    assert reported_scale(tmp_path / "mon") is None
    write_run(tmp_path / "runs", mon, "mlp-mnist", 0, {"error": 0.05})
    write_report(mon, "full", tmp_path / "runs", tmp_path / "mon")
    assert reported_scale(tmp_path / "mon") == "full"
    assert report_folder(mon, "reduced", tmp_path / "out", tmp_path, everything=True) == tmp_path / "out" / "mon" / "reduced"
    assert report_folder(mon, "full", tmp_path / "out", tmp_path, everything=True) == tmp_path / "mon"
    assert report_folder(mon, "reduced", tmp_path / "out", tmp_path, everything=False) == tmp_path
    assert report_folder(mon, "reduced", tmp_path / "out", None, everything=True) == tmp_path / "out" / "mon" / "reduced"


def test_the_overview_counts_changes_of_verdicts_with_their_reasons() -> None:
    def claim(text: str, held: bool | None, reason: str | None = None) -> dict[str, object]:
        return {"claim": text, "held": held, "reason": reason, "seen": "", "id": ""}

    few = "runs: 1 of a, 1 of b; a verdict needs 3 of each row"
    claims = [claim("a", None, few), claim("b", True), claim("c", False), claim("d", True), claim("new", True)]
    tables = {"some": {"table": "some", "source": "", "scale": "full", "rows": {}, "claims": claims}}
    text = page(tables, [], earlier={"some": {"a": True, "b": None, "c": True, "d": True}})
    assert "4 claims were evaluated then and still are; 1 were added since" in text
    assert (
        "| held | 1 | 1 | 1 | 3 |" in text and "| undecided | 1 | 0 | 0 | 1 |" in text and "| all | 2 | 1 | 1 | 4 |" in text
    )
    assert "- 1 decided then, undecided now: with fewer than three runs of a row" in text
    assert "- 1 undecided then, decided now: three or more runs" in text
    assert "- some: c: held, now did not hold" in text
    assert "Changes of verdicts" not in page(tables, [])
