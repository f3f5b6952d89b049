"""The report of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria.lab.reports.run import write_run_report

pytest.importorskip("matplotlib")


def make_run(folder: Path, *, finished: bool, epochs: int = 2) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"experiment": "a <b>", "training": {"epochs": 3}, "settings": {"x": 1}}))
    lines = [
        {
            "epoch": e,
            "step": e,
            "lr": 0.1,
            "seconds_train": 2.0,
            "split": {"train": {"loss": 1 / e, "failed": 0.0}, "test": {"loss": 2 / e}},
        }
        for e in range(1, epochs + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        summary = {"epochs": 2, "final": lines[-1], "best": {}, "seconds_train": 4.0, "parameters": 1, "finished": True}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_every_metric_is_drawn_and_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finished=True)
    page = write_run_report(folder).read_text()
    assert sorted(path.stem for path in (folder / "plots").iterdir()) == ["loss", "lr", "seconds_train"]
    assert page.count("data:image/png;base64,") == 3 and "http" not in page.replace("http-equiv", "")
    assert "<td>loss</td><td>0.5</td><td>1</td>" in page
    assert "<td>failed solves, %</td><td>0</td><td>–</td>" in page
    assert "a &lt;b&gt;" in page and "<b>" not in page and "2 epochs</span>" in page


def test_a_single_epoch_is_listed_and_not_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finished=False, epochs=1)
    page = write_run_report(folder).read_text()
    assert "<td>loss</td><td>1</td><td>2</td>" in page
    assert "data:image" not in page and "Curves" not in page and not (folder / "plots").exists()


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    assert "2 of 3 epochs, not finished" in write_run_report(make_run(tmp_path / "run", finished=False)).read_text()


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        write_run_report(tmp_path)
