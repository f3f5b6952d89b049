"""Averages of the speed-ups of Skip DEQs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning_fabric")
from equilibria.lab.experiments.catalogue import table
from equilibria.lab.reports.headlines import lines, speed_ups
from equilibria.lab.reports.overview import page
from equilibria.lab.reports.table import collect, plain
from tests.lab.reports.runs import write_run

SKIP = table("skipdeq-mnist-mdeq")


def test_speed_ups_are_those_of_the_best_skip_model(tmp_path: Path) -> None:
    for row, predict, depth in (("deq-discrete", 0.4, 20.0), ("skip-discrete", 0.1, 12.0), ("v2-discrete", 0.2, 5.0)):
        for seed in range(3):
            write_run(tmp_path, SKIP, row, seed, {"accuracy": 0.9, "predict_seconds": predict, "depth": depth})
    numbers = {SKIP.name: plain(collect(SKIP, "full", tmp_path))}
    found = {s.measure: (s.row, round(s.times, 9), s.runs) for s in speed_ups(numbers)}
    assert found == {
        "training": ("skip-discrete", 1.0, 3),
        "prediction": ("skip-discrete", 4.0, 3),
        "depth": ("v2-discrete", 4.0, 3),
    }
    shown = lines(numbers)
    assert "| average | 1.00 | 4.00 | 4.00 |" in shown and "| published average | 2.55 | 3.35 | 3.74 |" in shown
    text = page(numbers, [])
    assert "## Speed-ups of Skip DEQs" in text and "12 claims: " in text


def test_other_tables_have_no_speed_ups(tmp_path: Path) -> None:
    digits = table("digits")
    for row in ("deq", "v2"):
        write_run(tmp_path, digits, row, 0, {"accuracy": 0.9, "nfe": 4.0, "depth": 3.0})
    numbers = {"digits": plain(collect(digits, "full", tmp_path))}
    assert lines(numbers) == [] and "Speed-ups" not in page(numbers, [])


def test_rows_of_different_machines_are_not_compared(tmp_path: Path) -> None:
    for row, machine in (("deq-discrete", "abacus"), ("v2-discrete", "slide rule")):
        folder = write_run(tmp_path, SKIP, row, 0, {"accuracy": 0.9, "predict_seconds": 0.1, "depth": 3.0})
        (folder / "machine.json").write_text(f'{{"processor": "{machine}"}}')
    assert speed_ups({SKIP.name: plain(collect(SKIP, "full", tmp_path))}) == []
