"""Commands that open a run import no code that its config.json names; the user names it on the command line."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")
from typer.testing import CliRunner

from equilibria.lab.cli.main import app
from equilibria.lab.errors import SettingError, UnnamedCodeError
from equilibria.lab.experiments import own
from equilibria.lab.experiments.evaluation import evaluate, experiment_of, model_and_batch
from equilibria.lab.experiments.lion.backbones import timm_backbone
from equilibria.lab.publishing import publish
from equilibria.lab.training.folder import Run
from tests.lab.cli.test_commands import alone, parsed, run  # noqa: F401

FILE = Path(__file__).parents[3] / "examples" / "own_experiment.py"
MINE = f"{FILE}:experiment"
EVIL = "import pathlib\npathlib.Path({marker!r}).touch()\nfrom own_experiment import experiment\n"
COMMANDS = {
    "evaluate": ["{run}"],
    "generate": ["{run}"],
    "serve": ["{run}"],
    "diagnose": ["{run}"],
    "extend": ["{run}", "--epochs", "2"],
    "publish": ["{run}", "published"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    small = ["--set", "training.epochs=1", "--set", "training.batch_size=512", "--set", "width=4"]
    result = CliRunner().invoke(app, ["train", MINE, *small, "--folder", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def hostile(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, beside files and modules that would leave a mark if they were imported."""
    monkeypatch.syspath_prepend(str(FILE.parent))
    folder = tmp_path / "theirs"
    shutil.copytree(trained, folder)
    for place in (tmp_path / "evil.py", tmp_path / "evil_module.py", folder / "evil.py"):
        place.write_text(EVIL.format(marker=str(tmp_path / "imported")))
    return folder


def names(folder: Path, name: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": name}))


def words(command: str, folder: Path) -> list[str]:
    return [command, *(word.format(run=folder) for word in COMMANDS[command])]


NAMES = [
    "evil.py:experiment",
    "theirs/evil.py:experiment",
    "theirs/../evil.py:experiment",
    "../{tmp}/evil.py:experiment",
    "{tmp_path}/evil.py:experiment",
    "evil_module:experiment",
    "theirs.evil:experiment",
    ":evil.py:experiment",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_folder_names_is_not_imported(command: str, name: str, hostile: Path, tmp_path: Path) -> None:
    names(hostile, name := name.format(tmp=tmp_path.name, tmp_path=tmp_path))
    if command == "serve":
        pytest.importorskip("uvicorn")
    before = {path: path.read_bytes() for path in hostile.rglob("*") if path.is_file()}
    text = run(*words(command, hostile), code=2)
    assert repr(name) in text and str(hostile / "config.json") in text and "--experiment" in text
    assert not (tmp_path / "imported").exists() and "evil_module" not in sys.modules
    assert {path: path.read_bytes() for path in hostile.rglob("*") if path.is_file()} == before


def test_the_error_ends_with_the_command_to_type(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hostile.rename(hostile.parent / "a run")
    monkeypatch.setattr(sys, "argv", ["equilibria", "evaluate", str(folder), "--json"])
    command = run("evaluate", str(folder), "--json", code=2).splitlines()[-1]
    assert shlex.split(command) == ["equilibria", "evaluate", str(folder), "--json", "--experiment", MINE]
    assert "accuracy" in json.loads(run(*shlex.split(command)[1:]))["metrics"]
    names(folder, "a\x1b[2K.py:experiment")  # would show another text in a terminal
    text = run("evaluate", str(folder), code=2)
    assert "\x1b" not in text and "a\\x1b[2K.py:experiment" in text and "The command is" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_only_what_the_user_names_is_imported(command: str, hostile: Path, tmp_path: Path) -> None:
    names(hostile, f"{tmp_path}/evil.py:experiment")
    if command == "serve":  # the command itself would not return
        from equilibria.lab.cli.serving import served_model

        assert not served_model(hostile, named=MINE).training
    else:  # generate: the run of no language model; extend: the run of another file
        expected = {"generate": 1, "extend": 1}.get(command, 0)
        text = run(*words(command, hostile), "--experiment", MINE, code=expected)
        assert command != "generate" or "not a language model" in text
        assert command != "extend" or "experiment" in text
    assert not (tmp_path / "imported").exists()


def test_commands_take_the_name_in_the_same_way(hostile: Path, tmp_path: Path) -> None:
    before = parsed("evaluate", str(hostile), "--experiment", MINE)["metrics"]
    run("extend", str(hostile), "--epochs", "2", "--experiment", MINE)
    assert Run.open(hostile).config["extended"] == [1] and before
    for wrong, text in {"experiment": "Expected FILE.py:NAME", "nowhere.py:experiment": "no file"}.items():
        assert text in run("evaluate", str(hostile), "--experiment", wrong, code=2 if wrong == "experiment" else 1)
    names(hostile, "skipdeq-polynomial-deq")
    assert "Leave out" in run("evaluate", str(hostile), "--experiment", MINE, code=2)
    assert "folder of a run" in run("diagnose", "--example", "healthy", "--experiment", MINE, code=2)
    assert "folder of a run" in run("serve", str(tmp_path / "model"), "--experiment", MINE, code=1)


def test_training_names_its_experiment_and_resumes_without_more_words(hostile: Path) -> None:
    small = ["--set", "training.epochs=1", "--set", "training.batch_size=512", "--set", "width=4"]
    run("train", MINE, *small, "--folder", str(hostile))  # finished already
    (hostile / "summary.json").unlink()
    run("train", MINE, *small, "--folder", str(hostile))
    assert Run.open(hostile).summary is not None


def test_a_table_does_not_import_what_folders_of_its_runs_name(hostile: Path, tmp_path: Path) -> None:
    place = tmp_path / "runs" / "skipdeq-polynomial" / "debug" / "deq" / "seed-0"
    place.mkdir(parents=True)
    shutil.copy(hostile / "config.json", place)
    names(place, f"{tmp_path}/evil.py:experiment")
    CliRunner().invoke(app, ["reproduce", "skipdeq-polynomial", "--scale", "debug", "--seeds", "1", "--row", "deq"])
    run("watch", str(place), "--once")
    assert not (tmp_path / "imported").exists()


def test_functions_import_what_their_caller_names(hostile: Path, tmp_path: Path) -> None:
    names(hostile, f"{tmp_path}/evil.py:experiment")
    found = Run.open(hostile)
    for function in (experiment_of, evaluate, model_and_batch, lambda run: publish(run, tmp_path / "published")):
        with pytest.raises(UnnamedCodeError, match="named=") as caught:
            function(found)
        assert caught.value.name == f"{tmp_path}/evil.py:experiment"
    assert not (tmp_path / "imported").exists()
    assert experiment_of(found, MINE).name == "my-digits" and evaluate(found, named=MINE)
    with pytest.raises(SettingError, match=r"Expected FILE\.py:NAME"):
        experiment_of(found, "skipdeq-polynomial-deq")


def test_experiments_of_installed_packages_need_no_name(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("their-digits", "own_experiment:experiment", own.GROUP)
    monkeypatch.setattr(own, "entry_points", lambda group: [entry])
    names(hostile, "their-digits")
    assert experiment_of(Run.open(hostile)).reference == "their-digits"


@pytest.mark.parametrize("name", ["hf-hub:somebody/model", "local-dir:theirs", "timm/resnet18", "../resnet18", ""])
def test_backbones_of_other_places_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="backbone must be"):
        timm_backbone(name, 3, weights=True)
