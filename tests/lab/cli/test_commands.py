"""The commands: train, evaluate, reproduce, demo, list, data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")
from typer.testing import CliRunner

import equilibria as eq
from equilibria._core.plain import to_plain
from equilibria.lab.cli.main import app
from equilibria.lab.data.catalogue import info
from equilibria.lab.experiments.catalogue import experiments, tables
from equilibria.lab.experiments.digits.argument import Trained
from equilibria.lab.experiments.digits.memory_row import peak_bytes
from equilibria.lab.experiments.digits.table import digits
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.training.folder import Run

ONE = ["--set", "training.epochs=1"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "data"))


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def parsed(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demo"],
        ["list"],
        ["train"],
        ["sweep"],
        ["extend"],
        ["evaluate"],
        ["reproduce"],
        ["report"],
        ["publish"],
        ["diagnose"],
        ["data"],
        ["data", "check"],
    ],
)
def test_every_command_has_help(arguments: list[str]) -> None:
    assert "Usage" in run(*arguments, "--help")


@pytest.mark.parametrize("table", ["skipdeq-mnist-mlp", "skipdeq-polynomial"])
def test_reproduce_runs_a_table_at_debug_scale(table: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", table, "--scale", "debug", *ONE])
    assert result.exit_code == 0, result.output
    text = result.stdout
    base = tmp_path / "runs" / table / "debug"
    assert f"report: {Path('runs') / table / 'debug' / 'report.html'}" in text
    rows = ("deq", "skip", "v2", "deq-jr", "skip-jr", "v2-jr")
    assert all(len(list((base / row).glob("seed-*/summary.json"))) == 1 for row in rows)
    numbers = json.loads((base / "table.json").read_text())
    assert all(numbers["rows"][row]["ours"]["nfe"]["mean"] >= 3 for row in rows)
    assert numbers["claims"] == []  # toys prove nothing
    assert result.stderr.count("toy data and a toy model") == 2
    report = (base / "report.md").read_text()
    assert "Debug scale" in report and "training.epochs=1 (not 2)" in report
    before = {path: path.stat().st_mtime_ns for path in base.glob("*/seed-*/*")}
    again = parsed("reproduce", table, "--scale", "debug", *ONE)
    assert again["rows"] == numbers["rows"]
    assert before == {path: path.stat().st_mtime_ns for path in base.glob("*/seed-*/*")}  # nothing was run again
    other = run("reproduce", table, "--scale", "debug", "--set", "training.epochs=2", code=1)
    assert "was started with other settings" in other and "training.epochs was 1, now 2" in other


@pytest.mark.parametrize(
    "row", ["v2", pytest.param("deq", marks=pytest.mark.slow), pytest.param("skip-jr", marks=pytest.mark.slow)]
)
def test_the_continuous_table_runs_at_debug_scale(row: str) -> None:
    found = parsed("reproduce", "skipdeq-mnist-mlp-tsit5", "--scale", "debug", "--row", row, *ONE)
    assert found["rows"][row]["ours"]["nfe"]["mean"] >= 11
    assert all(claim["held"] is None for claim in found["claims"] if "DEQ's" in claim["claim"])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(experiments()))
def test_every_experiment_takes_less_than_a_minute_at_debug_scale(name: str) -> None:
    begin = time.process_time()  # of one thread; other programs do not count
    run("train", name, "--scale", "debug")
    assert time.process_time() - begin < 60


def test_demo_trains_measures_and_writes_a_page(tmp_path: Path) -> None:
    text = run("demo", "--scale", "debug")
    for shown in ("explicit, 20 layers", "Status of the solve of every test digit: ", "slowest quarter"):
        assert shown in text
    assert all(len(line) <= 80 for line in text.splitlines()), max(text.splitlines(), key=len)
    folder = Path("runs") / "digits" / "debug"
    assert f"report: {folder / 'demo.html'}" in text and text.split("Next:")[1].count("  equilibria ") == 3
    trained = Trained(folder / "deq" / "seed-0", digits("deq", "debug").task())
    reported = Run.open(folder / "deq" / "seed-0").metrics[-1]["split"]["test"]["accuracy"]
    assert float(trained.solved()[0].float().mean()) == pytest.approx(reported, abs=0.01)  # the same digits, the same model
    page = (tmp_path / folder / "demo.html").read_text()
    assert "report.html" in page and (tmp_path / folder / "report.html").is_file()
    assert page.count("data:image/png;base64,") == 3
    assert not (tmp_path / folder / "memory.png").exists()  # three runs of one process have no peaks of their own


def test_the_memory_of_an_equilibrium_does_not_grow_with_its_steps() -> None:
    """Allocated bytes are counted, not times: the explicit network stores every layer, the equilibrium none."""
    peaks = {(kind, depth): peak_bytes(kind, depth) for kind in ("explicit", "equilibrium") for depth in (10, 40)}
    assert peaks["explicit", 40] > 2 * peaks["explicit", 10]
    assert peaks["equilibrium", 40] < 1.1 * peaks["equilibrium", 10]


def test_a_run_is_trained_evaluated_and_diagnosed(tmp_path: Path) -> None:
    folder = str(tmp_path / "mine")
    summary = parsed("train", "digits-deq", "--scale", "debug", "--folder", folder, "--seed", "3", "--set", "width=32", *ONE)
    final = summary[folder]["final"]["split"]["test"]
    assert (tmp_path / "mine" / "report.html").is_file()
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert (config["experiment"], config["settings"]["width"], config["training"]["seed"]) == ("digits-deq", 32, 3)
    metrics = parsed("evaluate", folder)["metrics"]
    assert metrics["accuracy"] == pytest.approx(final["accuracy"])
    counts = ("evaluations", "depth", "failed")
    assert [metrics[name] for name in counts] == [final[name] for name in counts]
    assert "accuracy" in run("evaluate", folder, "--which", "best")
    found = parsed("diagnose", folder)
    assert found["page"] == str(Path(folder) / "diagnosis" / "diagnosis.html")
    assert Path(found["page"]).is_file()


def test_several_seeds_are_trained_one_after_the_other(tmp_path: Path) -> None:
    text = run("train", "digits-explicit", "--scale", "debug", "--seeds", "2", *ONE)
    assert all(str(Path("runs/digits-explicit/debug") / f"seed-{seed}") in text for seed in (0, 1))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "digits-dek"], "There is no experiment 'digits-dek'. Did you mean digits-deq"),
        (["train", "digits-deq", "--set", "training.epoch=1"], "Did you mean training.epochs"),
        (["train", "digits-deq", "--set", "variant=v3"], "variant must be one of vanilla, skip, v2, got 'v3'"),
        (["train", "digits-deq", "--set", "training.epochs=many"], "training.epochs must be a whole number, got 'many'"),
        (["train", "digits-deq", "--set", "training.optimizer.name=adm"], "Did you mean adam"),
        (["train", "digits-deq", "--set", "width"], "Expected key=value"),
        (["train", "digits-deq", "--seeds", "2", "--folder", "x"], "--folder holds one run"),
        (["reproduce"], "Pass the name of one table"),
        (["reproduce", "digits", "--all"], "Pass the name of one table"),
        (["reproduce", "--all", "--json"], "work with one table"),
        (["train", "digits-deq", "--scale", "tiny"], "debug"),
        (["reproduce", "skipdeq-mnist"], "Did you mean skipdeq-mnist-mlp"),
        (["reproduce", "digits", "--row", "deqq"], "digits has no row 'deqq'. Did you mean deq"),
        (["data", "check", "mnits"], "Did you mean mnist"),
        (["data", "fetch", "cifar"], "Did you mean cifar10"),
        (["diagnose", "--example", "contractve"], "Did you mean contractive"),
    ],
)
def test_wrong_arguments_exit_with_2_and_list_the_choices(arguments: list[str], complaint: str) -> None:
    assert complaint in run(*arguments, code=2)


def test_failures_exit_with_1(tmp_path: Path) -> None:
    assert "is not the folder of a run" in run("evaluate", str(tmp_path), code=1)
    run("train", "digits-explicit", "--scale", "debug", "--folder", "x", *ONE)
    text = run("train", "digits-explicit", "--scale", "debug", "--folder", "x", "--set", "training.epochs=2", code=1)
    assert "training.epochs was 1, now 2" in text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"experiment": None}, "names no experiment"),
        ({"experiment": "digits-dek"}, "Did you mean digits-deq"),
        ({"scale": "tiny"}, "has the scale 'tiny', expected one of debug, reduced, full"),
        ({"scale": ["full"]}, "has the scale"),
        ({"settings": None}, "written by another version"),
        ({"settings": {"width": "wide"}}, "width must be int"),
        ({"training": {"epoch": 3}}, "There is no setting epoch. Did you mean epochs"),
        ({"training": None}, "has no object 'training'"),
    ],
)
def test_invalid_settings_of_a_run_are_named(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    e = digits("deq", "debug")
    config = {**e.config(), "training": to_plain(e.training), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in ("evaluate", "diagnose", "generate"):
        text = run(command, str(tmp_path), code=1)
        assert complaint in text and str(tmp_path / "config.json") in text


def test_list_shows_tables_models_and_datasets() -> None:
    found = parsed("list")
    assert {model["name"]: model["parameters"] for model in found["models"]}["skip-mlp-skip"] == 151_050
    listed = {name for table in found["tables"] for name in table["experiments"]}
    assert listed == set(experiments())
    text = run("list")
    assert "skipdeq-mnist-mlp-v2-jr" in text and "151,050" in text and "60,000" in text
    assert {table["table"]: table["seeds"]["full"] for table in found["tables"]} == {
        table.name: table.seeds["full"] for table in tables().values()
    }
    assert "200, 10" in text  # epochs and folds of ignn-cox2


def test_report_checks_the_claims_of_stored_reports_again(tmp_path: Path) -> None:
    run("reproduce", "digits", "--scale", "debug", "--row", "deq", "--report", "stored/digits", *ONE)
    page = tmp_path / "stored" / "digits" / "report.md"
    before = page.read_text()
    page.write_text("")
    assert "1 report;" in run("report", "stored")
    assert page.read_text().partition("## Curves")[0].strip() == before.partition("## Curves")[0].strip()
    assert "undecided" in (tmp_path / "stored" / "README.md").read_text()
    assert "has no report of a table" in run("report", "nothing", code=2)


def test_publish_writes_weights_card_results_and_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "mine")
    run("train", "digits-v2", "--scale", "debug", "--folder", folder, *ONE)
    found = parsed("publish", folder, "model")
    assert found["metrics"]["test"]["accuracy"] > 0 and len(found["config_sha256"]) == 64
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: equilibria\n") and "| test | accuracy |" in card
    results = (tmp_path / "model" / ".eval_results" / "digits-v2.yaml").read_text()
    assert f"value: {found['metrics']['test']['accuracy']!r}" in results
    assert '- dataset: {"id": "digits", "task_id": "image-classification"}' in results
    # no keys beside those of the hub's format
    assert {line.lstrip("- ").split(":")[0] for line in results.splitlines()} == {"dataset", "value", "notes"}
    assert f'notes: "accuracy on the test split; digits-v2, debug scale, seed {found["seed"]}"' in results
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{12}\+?", found["commit"])
    task = experiment_of(Run.open(Path(folder))).task()
    model = eq.models.load(tmp_path / "model" / "model.safetensors", task.model())
    expected = Run.open(Path(folder)).model(task, "best").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path / "model")
    names: dict[str, Any] = {}
    exec(code, names)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in names["model"].state_dict().items())
    monkeypatch.chdir(tmp_path)
    assert "do not fit the model 'mdeq-nano'" in run("publish", folder, "other", "--name", "mdeq-nano", code=1)
    (tmp_path / "mine" / "summary.json").unlink()
    assert "is not finished" in run("publish", folder, "other", code=1)


def test_weights_published_under_a_name_make_their_model(tmp_path: Path) -> None:
    run("train", "skipdeq-polynomial-v2", "--scale", "debug", "--folder", str(tmp_path / "mine"), *ONE)
    found = parsed("publish", str(tmp_path / "mine"), "model", "--name", "skip-polynomial-v2")
    results = (tmp_path / "model" / ".eval_results" / "skipdeq-polynomial-v2.yaml").read_text()
    assert '{"id": "generated", "task_id": "generated"}' in results and "loss on the test split" in results
    model = eq.models.load(tmp_path / "model" / "model.safetensors")
    assert found["model"] == "skip-polynomial-v2" == eq.models.read_info(tmp_path / "model" / "model.safetensors").name
    card = (tmp_path / "model" / "README.md").read_text()
    assert 'eq.models.load("model.safetensors")  # skip-polynomial-v2' in card
    trained = Run.open(tmp_path / "mine")
    expected = trained.model(experiment_of(trained).task(), "best").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_data_list_and_check_show_the_state_of_files(tmp_path: Path) -> None:
    file = info("mnist").files[0]
    (tmp_path / "data" / file.path).parent.mkdir(parents=True)
    (tmp_path / "data" / file.path).write_bytes(b"not MNIST")
    sets = {entry["name"]: entry for entry in parsed("data", "list")}
    assert (sets["digits"]["present"], sets["mnist"]["present"], sets["mnist"]["train"]) == (True, False, 60_000)
    assert "differs from the official file" in run("data", "check", "mnist", code=1)
    assert "missing" in run("data", "check", "svhn", code=1)
    assert "needs no files" in run("data", "check", "digits")
    other = str(tmp_path / "other")
    assert set(parsed("data", "check", "--data", other)) == set(sets)  # nothing there, and nobody asked for it


@pytest.mark.slow
def test_processes_run_a_table_and_resume_after_an_interruption(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "equilibria", "reproduce", "digits", "--scale", "debug", "--jobs", "2"]
    words += ["--set", "training.epochs=30"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    base = tmp_path / "runs" / "digits" / "debug"
    first = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not any(path.stat().st_size for path in base.glob("*/seed-*/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    assert first.wait(600) == 130
    assert len(list(base.glob("*/seed-*/summary.json"))) < 3
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Resuming from" in "".join(path.read_text() for path in base.glob("*/seed-*/log.txt"))
    assert len(list(base.glob("*/seed-*/summary.json"))) == 3


@pytest.mark.slow
def test_a_process_that_fails_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "equilibria", "reproduce", "skipdeq-mnist-mlp", "--scale", "reduced", "--row", "v2"]
    environment = os.environ | {
        "EQUILIBRIA_DATA": str(tmp_path / "nothing"),
        "no_proxy": "*",
        "https_proxy": "http://127.0.0.1:9",
    }
    (tmp_path / "nothing").write_text("no folder")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "v2 seed 6171 failed: exit code 1" in done.stderr
