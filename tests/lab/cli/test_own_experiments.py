"""Experiments of the user's on the command line: train, sweep and extend, with settings from files."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")
from equilibria.lab.errors import SettingError
from equilibria.lab.experiments import cluster, own
from equilibria.lab.experiments.runner import THIS_PROCESS, Job
from equilibria.lab.experiments.settings_files import read_settings
from equilibria.lab.experiments.sweep import parse_grid
from equilibria.lab.training.folder import Run, extend_run
from tests.lab.cli.test_commands import alone, parsed, run  # noqa: F401

FILE = Path(__file__).parents[3] / "examples" / "own_experiment.py"
MINE = f"{FILE}:experiment"
SMALL = ["--set", "training.epochs=1", "--set", "training.batch_size=512", "--set", "width=8"]


def test_an_experiment_of_a_file_is_trained_evaluated_and_extended(tmp_path: Path) -> None:
    text = run("train", MINE, *SMALL)
    folder = tmp_path / "runs" / "my-digits" / "full" / "seed-0"
    assert f"report: {Path('runs/my-digits/full/seed-0/report.html')}" in text and (folder / "report.html").is_file()
    assert Run.open(folder).config["experiment"] == MINE and Run.open(folder).config["settings"]["width"] == 8
    metrics = parsed("evaluate", str(folder), "--experiment", MINE)["metrics"]
    assert metrics["accuracy"] == pytest.approx(Run.open(folder).metrics[-1]["split"]["test"]["accuracy"])
    run("extend", str(folder), "--epochs", "2", "--experiment", MINE)
    longer = Run.open(folder)
    assert longer.summary is not None and longer.summary["epochs"] == 2 and longer.config["extended"] == [1]
    assert "must exceed the 2 epochs" in run("extend", str(folder), "--epochs", "2", "--experiment", MINE, code=1)
    # a constant learning rate: the same bits as two epochs from the start
    run("train", MINE, *SMALL, "--set", "training.epochs=2", "--out", "whole")
    whole = Run.open(tmp_path / "whole" / "my-digits" / "full" / "seed-0")
    assert longer.metrics[-1]["split"] == whole.metrics[-1]["split"]


def test_an_unfinished_run_is_not_extended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"training": {"epochs": 3}}))
    with pytest.raises(ValueError, match="is not finished"):
        extend_run(tmp_path, 5)


OTHER = """
from equilibria.lab.experiments import Experiment
from own_experiment import Digits, Settings, experiment

def scaled(scale):
    return experiment.changed(["width=4"]) if scale == "debug" else experiment

def plain():
    return experiment

class Task(Digits):
    '''Digits, as a task alone.'''
    def __init__(self):
        super().__init__(Settings(width=4))

number = 3
"""


def test_a_file_may_hold_an_experiment_a_task_or_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "others.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(FILE.parent))

    def load(name: str, scale: Any = "full") -> Any:
        return own.load_experiment(f"{tmp_path / 'others.py'}:{name}", scale)

    assert load("scaled", "debug").settings.width == 4 and load("scaled").settings.width == 32
    assert load("plain").name == "my-digits" and load("experiment").origin.endswith("others.py:experiment")
    task = load("Task")
    assert task.name == "Task" and task.summary == "Digits, as a task alone." and task.task().settings.width == 4
    for name, text in {"number": "is a int; expected", "nothing": "has no 'nothing'"}.items():
        with pytest.raises(SettingError, match=text):
            load(name)
    with pytest.raises(SettingError, match="has no scale"):
        load("plain", "debug")
    with pytest.raises(SettingError, match="There is no file"):
        own.load_experiment("nowhere.py:experiment", "full")
    with pytest.raises(SettingError, match="Cannot import 'no_such_package'"):
        own.load_experiment("no_such_package:experiment", "full")


def test_experiments_of_installed_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FILE.parent))
    entry = EntryPoint("their-digits", "own_experiment:experiment", own.GROUP)
    monkeypatch.setattr(own, "entry_points", lambda group: [entry] if group == own.GROUP else [])
    from equilibria.lab.experiments.catalogue import experiment

    found = experiment("their-digits")
    assert found.name == "my-digits" and found.reference == "their-digits"


def test_settings_of_the_command_line_override_those_of_files(tmp_path: Path) -> None:
    files = {
        "a.yaml": "width: 8\ntraining:\n  epochs: 1\n  optimizer: {lr: 3e-3, betas: [0.8, 0.9]}\n  clip_norm: null\n",
        "a.toml": 'width = 8\n[training]\nepochs = 1\noptimizer = {lr = 3e-3, betas = [0.8, 0.9]}\nclip_norm = "none"\n',
        "a.json": '{"width": 8, "training": {"epochs": 1, "optimizer": {"lr": 3e-3, "betas": [0.8, 0.9]}}}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found = own.load_experiment(MINE, "full").changed([*read_settings(tmp_path / name), "width=4"])
        assert found.settings.width == 4 and found.training.epochs == 1 and found.training.clip_norm is None
        assert found.training.optimizer.lr == 3e-3 and found.training.optimizer.betas == (0.8, 0.9)


def test_bad_settings_files_are_named(tmp_path: Path) -> None:
    for name, text, message in [
        ("a.yaml", "width: [", "is not valid YAML"),
        ("a.toml", "width = ", "is not valid TOML"),
        ("a.json", "[1]", "must hold a table"),
        ("a.txt", "width=3", "must end with"),
        ("b.toml", "width = 2026-01-01", "must be a number"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(SettingError, match=message):
            read_settings(tmp_path / name)
    assert "No such file" in run("train", MINE, "--config", str(tmp_path / "no.yaml"), code=1)
    (tmp_path / "c.yaml").write_text("widht: 3")
    assert "Did you mean width" in run("train", MINE, "--config", str(tmp_path / "c.yaml"), code=2)


def test_a_sweep_ends_with_a_table(tmp_path: Path) -> None:
    words = ["sweep", MINE, "--grid", "width=4,8", "--grid", "rtol=1e-2,1e-3", *SMALL[:4]]
    shown = run(*words)
    lines = shown.splitlines()
    assert lines[1].split()[:2] == ["width", "rtol"] and len([line for line in lines if line.startswith(("4 ", "8 "))]) == 4
    stored = json.loads((tmp_path / "runs/my-digits/full/sweep/sweep.json").read_text())
    assert stored["metric"] == "test.accuracy" and len(stored["points"]) == 4
    again = parsed(*words, "--metric", "test.loss")  # nothing runs again
    assert again["metric"] == "test.loss" and all(point["runs"] == 1 for point in again["points"])
    assert "no metric 'test.nothing'" in run(*words, "--metric", "test.nothing", code=2)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["width"], "Expected --grid"),
        (["width="], "Expected --grid"),
        (["width=1,1"], "twice"),
        (["width=1", "width=2"], "twice"),
        ([], "at least one"),
    ],
)
def test_bad_grids_are_refused(grid: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_grid(grid)


def test_values_with_commas_are_separated_by_bars() -> None:
    assert parse_grid(["betas=0.9,0.99|0.8,0.9", "width=1"]) == {"betas": ["0.9,0.99", "0.8,0.9"], "width": ["1"]}


def test_a_misspelt_setting_of_a_grid_ends_before_any_run(tmp_path: Path) -> None:
    assert "Did you mean width" in run("sweep", MINE, "--grid", "widht=4,8", code=2)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of submitit
def test_a_sweep_runs_with_submitit(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs the extra `cluster`")
    options = ["--cluster", "local", "--cluster-set", "timeout_min=10"]
    shown = run("sweep", MINE, "--grid", "width=4,8", *SMALL[:4], *options)
    assert "best first" in shown and Run.open(tmp_path / "runs/my-digits/full/sweep/width=4/seed-0").summary is not None


ONCE_STOPPED = """
import os, pathlib, sys, time
started = pathlib.Path(sys.argv[1])
if started.exists():
    sys.exit(0)
started.with_suffix(".part").write_text(str(os.getppid()))
started.with_suffix(".part").rename(started)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of submitit
def test_a_job_that_reaches_its_time_limit_is_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below ten minutes counts as reached at every signal, so the signal of a limit need not be waited for."""
    pytest.importorskip("submitit", reason="needs the extra `cluster`")
    started, experiment = tmp_path / "started", own.load_experiment(MINE, "full")
    monkeypatch.setattr(cluster, "command", lambda job, place: [sys.executable, "-c", ONCE_STOPPED, str(started)])

    def stop() -> None:
        while not started.exists():
            time.sleep(0.05)
        os.kill(int(started.read_text()), signal.SIGUSR2)

    def watch(job: Job, event: str) -> None:
        if event.startswith("submitted"):
            threading.Thread(target=stop, daemon=True).start()

    jobs = [Job("mine", experiment, tmp_path / "run")]
    logs = tmp_path / "logs"
    failures = cluster.run_on_cluster(jobs, "local", {"timeout_min": 9}, logs, THIS_PROCESS, watch)
    text = "".join(path.read_text() for path in logs.rglob("*") if path.suffix in (".out", ".err"))
    assert "timed-out" in text and "Requeued job" in text
    assert not failures
    assert [path.stat().st_mode & 0o077 for path in logs.iterdir()] == [0]  # pickles that others cannot have written


def test_diagnose_names_what_it_expects(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\ndef build():\n    return model\n")
    assert "must be a function that returns a pair (model, batch), got Linear" in run("diagnose", "mine.py:model", code=2)
    assert "must return a pair (model, batch), got Linear" in run("diagnose", "mine.py:build", code=2)
    assert "has no 'other'" in run("diagnose", "mine.py:other", code=2)
