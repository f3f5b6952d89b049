"""`equilibria watch`: the view of a run."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")
from rich.console import Console
from typer.testing import CliRunner

from equilibria.lab.cli.main import app
from equilibria.lab.cli.view import newest, sparkline, view
from equilibria.lab.training import Silent, Trainer, Training
from tests.lab.training.tasks import Classifying

COLUMNS = 80


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    Trainer(Classifying(), Training(epochs=2, batch_size=8), folder, accelerator="cpu", listener=Silent()).fit()
    return folder


def shown(folder: Path) -> str:
    out = io.StringIO()
    Console(file=out, width=COLUMNS).print(view(folder)[0])
    return out.getvalue()


def test_the_view_of_a_finished_run_is_printed_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    result = CliRunner().invoke(app, ["watch", str(run.parent)])
    assert result.exit_code == 0, result.output
    assert "epoch 2 of 2, step 10, finished" in result.stdout
    for words in ("loss", "adjoint evaluations", "residual, largest", "failed solves", "steps 1 to 10", "valid accuracy"):
        assert words in result.stdout
    assert "skipped" not in result.stdout  # none was


def test_the_view_fits_into_80_columns(run: Path) -> None:
    lines = shown(run).splitlines()
    table = [line for line in lines if "/" not in line]  # the path of the folder may be longer
    assert len(table) >= 12 and all(len(line) <= COLUMNS and "…" not in line for line in table)


def test_the_view_shows_a_run_that_is_training(run: Path, tmp_path: Path) -> None:
    """The view works with only settings, with steps but no epoch, and for runs of older versions without steps."""
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    assert "epoch 0 of 2, step 0, written" in shown(tmp_path)
    lines: list[dict[str, Any]] = [
        {"step": i, "epoch": 1, "loss": None if i == 2 else 1 / i, "skipped": 1.0} for i in (1, 2, 3)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, finished = shown(tmp_path), view(tmp_path)[1]
    assert "epoch 1 of 2, step 3, written" in text and "█ ▁" in text and "skipped steps" in text and not finished
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert "epoch 2 of 2, step 10" in shown(tmp_path)


def test_the_run_written_to_last_is_taken_from_a_folder_of_runs(run: Path, tmp_path: Path) -> None:
    assert newest(run) == run and newest(run.parent) == run
    result = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert result.exit_code == 1 and "is not the folder of a run" in result.output


def test_sparklines_show_means_and_blanks() -> None:
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([1e-6, 1e1, 0.0], logarithmic=True) == "▁█ "
    assert sparkline([5.0, 5.0]) == "▁▁" and sparkline([math.nan, math.inf]) == "  "
    assert sparkline([float(i) for i in range(100)], width=8) == "▁▂▃▄▅▆▇█"
