"""Pictures of a table: profiles through columns, and what tasks drew of their models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.catalogue import table
from equilibria.lab.experiments.claims import Claim
from equilibria.lab.experiments.definitions import Column
from equilibria.lab.reports.figures import pictures
from equilibria.lab.reports.measured import value
from equilibria.lab.reports.table import TableResults, collect
from equilibria.lab.reports.verdicts import judge
from equilibria.lab.reports.write import write_report
from equilibria.lab.training.gallery import read_gallery, write_gallery
from tests.lab.reports.runs import write_run

JR = table("jr-cifar10")
PNG = b"\x89PNG\r\n"


@pytest.fixture
def results(tmp_path: Path) -> TableResults:
    for row, accuracies in {"mdeq": (0.3, 0.5, 0.8), "mdeq-jr": (0.6, 0.7, 0.75)}.items():
        test = {f"accuracy_at_{k}": a for k, a in zip((1, 2, 6), accuracies, strict=True)} | {"accuracy": 0.9}
        for seed in range(3):
            write_run(tmp_path, JR, row, seed, test)
    write_gallery(tmp_path / "mdeq" / "seed-0", {"looks": ("what it sees", PNG)})
    return collect(JR, "full", tmp_path)


def test_a_profile_has_a_line_through_the_known_columns(results: TableResults) -> None:
    drawn = pictures(results)
    title, content = drawn["accuracy-nfe"]
    assert title == JR.profiles[0].title and content.startswith(PNG)
    assert "accuracy-nfe" not in pictures(TableResults(JR, "full", {}))


def test_a_gallery_is_shown_under_the_name_of_its_row(results: TableResults, tmp_path: Path) -> None:
    assert pictures(results)["mdeq-looks"] == ("MDEQ: what it sees", PNG)
    write_report(JR, "full", tmp_path)
    assert (tmp_path / "mdeq-looks.png").read_bytes() == PNG
    assert "![MDEQ: what it sees](mdeq-looks.png)" in (tmp_path / "report.md").read_text()
    assert read_gallery(tmp_path) == {}


@pytest.mark.parametrize(
    ("right", "against", "seen"), [(None, "accuracy", "80.00 - 90.00 = -10"), ("mdeq-jr", "at_1", "80.00 - 60.00 = +20")]
)
def test_a_claim_may_compare_two_columns(results: TableResults, right: str | None, against: str, seen: str) -> None:
    claim = Claim(text="", column="at_6", left="mdeq", right=right, against=against, by="difference", at_least=0.0)
    verdict = judge(claim, results)
    assert verdict.held is (right is not None) and seen in verdict.seen


def test_a_column_takes_one_of_the_epochs_or_all(tmp_path: Path) -> None:
    write_run(tmp_path, JR, "mdeq", 0, {"accuracy": 0.5})
    run = collect(JR, "full", tmp_path).runs["mdeq"][0]
    shared = {"step": 1, "seconds_train": 1.0}
    records = [{"epoch": i, "split": {"test": {"accuracy": a}}, **shared} for i, a in enumerate((0.2, 0.8, 0.5), start=1)]
    summary = json.loads((run.folder / "summary.json").read_text())
    (run.folder / "summary.json").write_text(json.dumps({**summary, "epochs": 3}))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = collect(JR, "full", tmp_path).runs["mdeq"][0]
    for epochs, expected in {"first": 0.2, "last": 0.5, "min": 0.2, "max": 0.8, "mean": 0.5}.items():
        assert value(run, Column("a", "", "test.accuracy", epochs=epochs)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_pictures_of_the_data_are_not_in_other_reports(results: TableResults, tmp_path: Path) -> None:
    run = results.runs["mdeq"][0].folder
    write_gallery(run, {"looks": ("what it sees", PNG), "segmentation": ("images", PNG)})
    runs, elsewhere = run.parent.parent, tmp_path / "elsewhere"
    write_report(results.table, results.scale, runs)
    write_report(results.table, results.scale, runs, elsewhere)
    assert (runs / "mdeq-segmentation.png").is_file() and "mdeq-segmentation.png" in (runs / "report.md").read_text()
    assert (elsewhere / "mdeq-looks.png").is_file() and not (elsewhere / "mdeq-segmentation.png").exists()
    assert "segmentation.png" not in (elsewhere / "report.md").read_text()
