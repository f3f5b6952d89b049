"""Figures and verdicts, computed from runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.catalogue import table
from equilibria.lab.experiments.claims import Claim
from equilibria.lab.experiments.definitions import Column
from equilibria.lab.reports.measured import value
from equilibria.lab.reports.table import TableResults, collect, deviations, figure_text, plain, protocol
from equilibria.lab.reports.verdicts import as_published, judge
from equilibria.lab.reports.write import write_report
from tests.lab.reports.runs import write_run

MNIST = table("skipdeq-mnist-mlp")
GOOD = {
    "deq": {"accuracy": 0.979, "nfe": 18.0},
    "skip": {"accuracy": 0.977, "nfe": 4.0},
    "v2": {"accuracy": 0.980, "nfe": 4.0},
}


@pytest.fixture
def results(tmp_path: Path) -> TableResults:
    for row, test in GOOD.items():
        for seed, shift in ((1, -0.001), (2, 0.0), (3, 0.001)):
            write_run(tmp_path, MNIST, row, seed, test | {"accuracy": test["accuracy"] + shift}, peak_bytes=1e8)
    return collect(MNIST, "full", tmp_path)


def word(results: TableResults, text: str) -> str:
    return next(verdict.word for verdict in results.verdicts() if text in verdict.claim.text)


def test_figures_are_means_with_the_deviation_over_seeds(results: TableResults) -> None:
    column = MNIST.column("accuracy")
    figure = results.figure("deq", column)
    assert figure is not None and figure.std is not None
    assert figure.mean == pytest.approx(97.9)
    assert figure.std == pytest.approx(statistics.stdev([97.8, 97.9, 98.0]))
    assert figure_text(figure, column) == "97.900 ± 0.100"
    assert figure_text(None, column) == "–"
    assert results.figure("deq-jr", column) is None


def test_claims_are_judged_by_the_runs(results: TableResults) -> None:
    assert word(results, "V2 needs at most half") == "held"
    assert word(results, "V2 loses less than 0.5") == "held"
    assert word(results, "Jacobian regularization at least halves") == "undecided"


def test_a_claim_that_fails_is_reported_as_such(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path, MNIST, "deq", seed, {"accuracy": 0.98, "nfe": 18.0})
        write_run(tmp_path, MNIST, "v2", seed, {"accuracy": 0.97, "nfe": 17.0})
    elsewhere = tmp_path / "elsewhere"
    found = write_report(MNIST, "full", tmp_path, elsewhere)
    assert word(found, "V2 needs at most half") == "did not hold"
    assert not (tmp_path / "report.md").exists()
    text, page = (elsewhere / "report.md").read_text(), (elsewhere / "report.html").read_text()
    assert "- Command: equilibria reproduce skipdeq-mnist-mlp --scale full." in text
    assert "**did not hold**: V2 needs at most half of DEQ's evaluations. Seen: test NFE: 17.000 / 18.000 = 0.9444" in text
    assert '<li class="error"><b>Did not hold:</b> V2 needs at most half of DEQ&#x27;s evaluations.' in page
    assert "asked for at most 0.5" in page
    claims = {c["claim"]: c["held"] for c in json.loads((elsewhere / "table.json").read_text())["claims"]}
    assert claims["V2 needs at most half of DEQ's evaluations"] is False
    assert claims["V2 loses less than 0.5 points of accuracy to DEQ"] is False
    assert claims["Skip needs at most half of DEQ's evaluations"] is None


@pytest.mark.parametrize(
    ("claim", "held"),
    [
        (Claim(text="", column="nfe", left="v2", at_most=4.1), True),
        (Claim(text="", column="nfe", left="v2", at_most=3.9), False),
        (Claim(text="", column="nfe", left="deq", right="v2", at_least=4.5, at_most=4.5), True),
        (Claim(text="", column="nfe", left="deq", right="v2", by="difference", at_least=14.5), False),
        (Claim(text="", column="nfe", left="deq", right="deq-jr", at_most=1.0), None),
        (Claim(text="", column="explicit", left="deq", at_most=1.0), None),
    ],
)
def test_every_kind_of_claim_is_decided_by_its_bounds(results: TableResults, claim: Claim, held: bool | None) -> None:
    assert judge(claim, results).held is held


def test_equal_counts_are_equal_whatever_their_last_bits(tmp_path: Path) -> None:
    for row, accuracy in (("deq", 0.993100001), ("v2", 0.9931)):
        for seed in (1, 2, 3):
            write_run(tmp_path, MNIST, row, seed, {"accuracy": accuracy})
    found = collect(MNIST, "full", tmp_path)
    verdict = judge(Claim(text="", column="accuracy", left="v2", right="deq", by="difference", at_least=0.0), found)
    assert verdict.held and "= +0 ±" in verdict.seen
    assert judge(Claim(text="", column="accuracy", left="deq", at_most=99.31), found).held


def test_claims_are_shown_with_published_figures() -> None:
    ratio = Claim(text="", column="nfe", left="v2", right="deq", at_most=0.5)
    deq, v2 = (MNIST.row(row).published["nfe"].mean for row in ("deq", "v2"))
    assert as_published(ratio, MNIST).endswith(f"= {v2 / deq:.4g}")
    assert as_published(Claim(text="", column="radius", left="v2", right="deq"), MNIST) == "–"


def test_a_reduction_is_against_the_row_it_names(tmp_path: Path) -> None:
    polynomial = table("skipdeq-polynomial")
    for row, nfe in (("deq", 84.0), ("skip", 30.0), ("v2", 56.0)):
        for seed in (1, 11, 1111):
            write_run(tmp_path, polynomial, row, seed, {"loss": 1e-4, "nfe": nfe})
    found = collect(polynomial, "full", tmp_path)
    figure = found.figure("skip", polynomial.column("reduction"))
    assert figure is not None and figure.mean == pytest.approx(2.8)
    assert word(found, "Skip saves more than V2") == "held"


def test_the_report_has_published_figures_ours_and_the_protocol(results: TableResults, tmp_path: Path) -> None:
    write_report(MNIST, "full", tmp_path)
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    for document in (text, page):
        assert "97.926 ± 0.107" in document  # published
        assert "97.900 ± 0.100" in document  # ours
        assert "25 epochs; seeds: 1, 2, 3" in document
        assert "abacus, 2 cores, torch 2.0, python 3.12" in document
    assert "prefers-color-scheme: dark" in page
    assert 'src="http' not in page and "<link" not in page and "<script" not in page
    assert page.count("data:image/png;base64,") == text.count("![") >= 4
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["rows"]["deq"]["ours"]["accuracy"]["mean"] == pytest.approx(97.9)
    assert numbers["rows"]["deq"]["published"]["nfe"] == {"mean": 18.345, "std": 0.732}
    assert numbers == json.loads(json.dumps(plain(results)))


def test_a_column_may_be_taken_at_the_epoch_that_validation_chose(tmp_path: Path) -> None:
    chosen = Column("chosen", "test accuracy", "test.accuracy", epochs="selected")
    for seed, split in ((1, "valid"), (2, "test")):
        folder = write_run(tmp_path, MNIST, "deq", seed, {"accuracy": 0.9})
        summary = json.loads((folder / "summary.json").read_text())
        by = {"split": split, "metric": "accuracy", "value": 0.8}
        summary["best"] = {"epoch": 1, "split": {split: {"accuracy": 0.8}, "test": {"accuracy": 0.7}}, "by": by}
        (folder / "summary.json").write_text(json.dumps(summary))
    write_run(tmp_path, MNIST, "v2", 1, {"accuracy": 0.9})  # whose summary does not tell how the best epoch was found
    found = collect(MNIST, "full", tmp_path)
    assert [value(run, chosen) for run in found.runs["deq"]] == [
        0.7,
        None,
    ]  # and nothing of the run whose best epoch the test split chose
    assert [value(run, chosen) for run in found.runs["v2"]] == [None]


def test_other_settings_and_unfinished_runs_are_reported(results: TableResults, tmp_path: Path) -> None:
    folder = write_run(tmp_path, MNIST, "v2-jr", 1, {"nfe": 4.0})
    config = json.loads((folder / "config.json").read_text())
    config["training"]["epochs"], config["settings"]["solver"]["tolerance"] = 2, 0.1
    (folder / "config.json").write_text(json.dumps(config))
    unfinished = write_run(tmp_path, MNIST, "deq-jr", 1, {"nfe": 4.0})
    (unfinished / "summary.json").unlink()
    found = collect(MNIST, "full", tmp_path)
    lines = "\n".join(protocol(found))
    assert "training.epochs=2 (not 25)" in lines and "solver.tolerance=0.1 (not 0.005)" in lines
    assert "Not finished, hence not counted: deq-jr/seed-1" in lines
    assert found.figure("deq-jr", MNIST.column("nfe")) is None
    assert deviations(MNIST.row("deq"), "full", found.runs["deq"][0]) == []
