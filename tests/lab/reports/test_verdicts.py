"""Verdicts: a claim is decided only where the runs can tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.catalogue import table, tables
from equilibria.lab.experiments.claims import alike, at_least, at_most, column_lower, higher, value_at_least
from equilibria.lab.experiments.definitions import Column, Figure
from equilibria.lab.reports.measured import difference_error, mean_error, quotient_error
from equilibria.lab.reports.table import TableResults, collect, protocol
from equilibria.lab.reports.verdicts import judge
from equilibria.lab.reports.write import rewrite_report, write_report
from tests.lab.reports.runs import write_run

MNIST = table("skipdeq-mnist-mlp")
JFB = table("jfb-svhn")


def runs(base: Path, row: str, accuracies: Sequence[float], machine: str = "abacus", **test: float) -> None:
    """Write runs of seeds 0, 1, ... with these accuracies in per cent."""
    for seed, accuracy in enumerate(accuracies):
        folder = write_run(base, MNIST, row, seed, {"accuracy": accuracy / 100, **test})
        (folder / "machine.json").write_text(json.dumps({"processor": machine, "commit": "0123456789ab"}))


def results(base: Path) -> TableResults:
    return collect(MNIST, "full", base)


AHEAD = higher("accuracy", "v2", "deq", "")


def test_a_margin_above_two_standard_errors_is_decided(tmp_path: Path) -> None:
    runs(tmp_path, "deq", (97.0, 97.2, 97.1))
    runs(tmp_path, "v2", (98.1, 98.0, 98.2))
    assert judge(AHEAD, results(tmp_path)).held is True
    assert judge(higher("accuracy", "deq", "v2", ""), results(tmp_path)).held is False


def test_a_margin_inside_two_standard_errors_is_undecided(tmp_path: Path) -> None:
    runs(tmp_path, "deq", (97.0, 98.0, 96.0))
    runs(tmp_path, "v2", (97.9, 96.1, 97.3))
    verdict = judge(AHEAD, results(tmp_path))
    assert verdict.held is None and verdict.reason == "the bound is within 2 standard errors"
    assert "± " in verdict.seen and verdict.word == "undecided"


def test_fewer_than_three_runs_decide_nothing(tmp_path: Path) -> None:
    runs(tmp_path, "deq", (90.0, 90.0))
    runs(tmp_path, "v2", (99.0, 99.0, 99.0))
    verdict = judge(AHEAD, results(tmp_path))
    assert verdict.held is None and verdict.reason == "runs: 2 of deq; a verdict needs 3 of each row"


def test_equal_seeds_are_compared_in_pairs(tmp_path: Path) -> None:
    """Folds differ by ten points, but rows differ by half a point on each fold."""
    runs(tmp_path, "deq", (80.0, 90.0, 85.0))
    runs(tmp_path, "v2", (80.5, 90.6, 85.4))
    assert judge(AHEAD, results(tmp_path)).held is True
    left, right = (
        {"a/seed-0": 80.5, "a/seed-1": 90.6, "a/seed-2": 85.4},
        {"b/seed-0": 80.0, "b/seed-1": 90.0, "b/seed-3": 85.0},
    )
    unpaired = difference_error(left, right)
    assert unpaired is not None and unpaired > 4.0  # seeds differ: the folds' own deviation counts


def test_errors_of_quotients_and_differences_match_their_formulas() -> None:
    left, right = {"a/seed-0": 2.0, "a/seed-1": 4.0, "a/seed-2": 6.0}, {"b/seed-0": 1.0, "b/seed-1": 2.0, "b/seed-2": 3.0}
    assert quotient_error(left, right) == pytest.approx(0.0)  # every pair has the quotient 2
    assert difference_error(left, right) == mean_error([1.0, 2.0, 3.0]) == pytest.approx(1 / 3**0.5)
    assert mean_error([1.0]) is None and difference_error({"a/seed-0": 1.0}, {"b/seed-0": 2.0}) is None
    assert Figure(1.0, 0.3, 9).standard_error == pytest.approx(0.1)
    assert Figure(1.0, None, 3).standard_error is None and Figure(1.0, None, 3, 0.2).standard_error == 0.2


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ({"accuracy": 0.187}, "jacobian scores 18.7 %, a constant answer 19.6 %: it has not trained"),
        ({"accuracy": 0.7, "failed": 0.9}, "90 % of the solves of jacobian fail: it has not trained"),
    ],
)
def test_a_baseline_that_has_not_trained_decides_nothing(tmp_path: Path, test: dict[str, float], why: str) -> None:
    for seed in range(3):
        write_run(tmp_path, JFB, "jfb", seed, {"accuracy": 0.73, "failed": 0.0}, seconds_train=1.0)
        write_run(tmp_path, JFB, "jacobian", seed, test, seconds_train=4.0)
    found = collect(JFB, "full", tmp_path)
    for claim in JFB.claims[:2]:  # faster, and as accurate
        verdict = judge(claim, found)
        assert verdict.held is None and verdict.reason == why


def test_a_claim_about_failed_solves_is_judged_on_failed_solves(tmp_path: Path) -> None:
    skip = table("skipdeq-mnist-mdeq")
    for seed in range(3):
        write_run(tmp_path, skip, "deq-continuous", seed, {"accuracy": 0.9, "failed": 1.0})
        write_run(tmp_path, skip, "v2-continuous", seed, {"accuracy": 0.9, "failed": 0.0})
    found = collect(skip, "full", tmp_path)
    claims = [claim for claim in skip.claims if claim.column == "failed" and claim.left == "v2-continuous"]
    assert [judge(claim, found).held for claim in claims] == [True]


def test_rows_that_stop_early_by_design_may_fail_to_converge(tmp_path: Path) -> None:
    language = table("jr-language")
    assert language.row("post-jr").limited and not language.row("post").limited
    for seed in range(3):
        write_run(tmp_path, language, "post", seed, {"failed": 0.0, "evaluations": 30.0})
        write_run(tmp_path, language, "post-jr", seed, {"failed": 0.9, "evaluations": 12.0})
    claim = at_most("nfe", "post-jr", "post", 0.5, "")
    assert judge(claim, collect(language, "full", tmp_path)).held is True


def test_machines_are_kept_apart(tmp_path: Path) -> None:
    runs(tmp_path / "here", "deq", (97.0, 97.1, 97.2), machine="abacus")
    runs(tmp_path / "there", "deq", (90.0, 90.1), machine="slide rule")
    runs(tmp_path / "there", "v2", (98.0, 98.1, 98.2), machine="slide rule")
    out = tmp_path / "report"
    write_report(MNIST, "full", tmp_path / "there", out)
    found = write_report(MNIST, "full", tmp_path / "here", out)
    assert len(found.measured["deq"]) == 2 and [len(m.runs) for m in found.measured["deq"]] == [3, 2]
    assert judge(AHEAD, found).held is True  # accuracies compare across machines, with three runs of each row
    minutes = judge(at_most("minutes", "v2", "deq", 1.0, ""), found)
    assert minutes.held is None and minutes.reason == "v2 and deq were timed on different machines"
    lines = (out / "report.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| DEQ |")] == ["3 on A", "2 on B"]
    assert sum(line.startswith("- Machine ") for line in lines) == 2
    assert any("abacus" in line and "seeds: 0, 1, 2; commit: 0123456789ab" in line for line in protocol(found))


def test_a_stored_report_has_the_verdicts_of_its_runs(tmp_path: Path) -> None:
    polynomial = table("skipdeq-polynomial")
    for row, nfe in (("deq", 84.0), ("skip", 30.0), ("v2", 56.0)):
        for seed in range(3):
            write_run(tmp_path / "runs", polynomial, row, seed, {"loss": 1e-4 * (1 + seed), "nfe": nfe + seed})
    out = tmp_path / "report"
    before = write_report(polynomial, "full", tmp_path / "runs", out)
    numbers = (out / "table.json").read_text()
    again = rewrite_report(polynomial, out)
    assert again is not None and again.verdicts() == before.verdicts()
    assert any(v.held for v in before.verdicts()) and (out / "table.json").read_text() == numbers
    assert rewrite_report(polynomial, tmp_path / "nothing") is None


def test_a_ratio_to_another_row_has_an_error(tmp_path: Path) -> None:
    polynomial = table("skipdeq-polynomial")
    for row, nfe in (("deq", 84.0), ("skip", 30.0)):
        for seed in range(3):
            write_run(tmp_path, polynomial, row, seed, {"loss": 1e-4, "nfe": nfe + 3 * (row == "deq") * seed})
    found = collect(polynomial, "full", tmp_path)
    figure = found.figure("skip", polynomial.column("reduction"))
    assert figure is not None and figure.mean == pytest.approx(87 / 30) and figure.runs == 3
    assert figure.error == pytest.approx(3 / 3**0.5 / 30)
    assert judge(value_at_least("reduction", "skip", 2.8, ""), found).held is None
    assert judge(value_at_least("reduction", "skip", 1.1, ""), found).held is True


def test_columns_of_a_row_are_compared_in_pairs(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.80, 0.90, 0.85)):
        write_run(tmp_path, MNIST, "deq", seed, {"accuracy": accuracy, "explicit_accuracy": accuracy - 0.01})
    found = results(tmp_path)
    assert judge(column_lower("explicit", "accuracy", "deq", "", by=0.5), found).held is True
    assert judge(alike("accuracy", "deq", "deq", 0.1, ""), found).held is True
    assert judge(at_least("accuracy", "deq", "deq", 1.0, ""), found).held is True


def test_times_are_recognized_by_their_keys() -> None:
    assert Column("a", "", "seconds_step").is_time and Column("a", "", "test.predict_seconds").is_time
    assert not Column("a", "", "test.accuracy").is_time


def test_every_row_that_a_claim_rests_on_is_run_with_three_seeds() -> None:
    for found in tables().values():
        if found.claims:
            assert all(found.seeds[scale] >= 3 for scale in ("reduced", "full")), found.name
