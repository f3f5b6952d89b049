"""The command line."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import equilibria as eq

pytest.importorskip("typer")
from typer.testing import CliRunner

from equilibria.lab.cli.main import COMMANDS, app, load

BUILD = """
import torch, equilibria as eq
from neighbour import width
def build():
    cell = torch.nn.Linear(width, width)
    torch.nn.init.constant_(cell.weight, 0.1)
    return eq.DEQ(lambda z, x: torch.tanh(cell(z) + x)), torch.ones(3, width)
def wrong():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("width = 4\n")
    path = tmp_path / "build_model.py"
    path.write_text(BUILD)
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_diagnose_names_the_problem_of_an_example(tmp_path: Path) -> None:
    code, text = run("diagnose", "--example", "tolerance-out-of-reach", "--output", str(tmp_path))
    assert code == 0, text
    assert "tolerance below the reach of the dtype" in text
    assert json.loads((tmp_path / "diagnosis.json").read_text())["layers"][0]["findings"]
    assert (tmp_path / "diagnosis.html").is_file()


def test_diagnose_examines_a_model_from_a_function_of_the_user(script: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "equilibria",
        "diagnose",
        f"{script}:build",
        "--output",
        str(tmp_path / "out"),
        "--eval",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "3 samples of 4 numbers (float32), eval mode" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py:build"], "no file"),
        (["no.such.module:build"], "Cannot import"),
        (["build"], "FILE.py:NAME"),
        (["{script}:missing"], "has no 'missing'"),
        (["{script}:wrong"], "must return a pair"),
        ([], "Pass the folder of a run, a function"),
        (["--example", "plague"], "not-contractive"),
    ],
)
def test_wrong_targets_are_explained(
    arguments: list[str], complaint: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)  # the repository may have a folder named build
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setenv("COLUMNS", "400")  # the message in one line
    code, text = run("diagnose", *[argument.format(script=script) for argument in arguments])
    assert code == 2
    assert complaint in text


def test_bench_takes_its_own_options() -> None:
    code, text = run("bench", "--help")
    assert code == 0
    assert "--quick" in text


def test_the_version_is_printed() -> None:
    assert run("--version") == (0, f"{eq.__version__}\n")


def test_without_typer_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs the extra `train`: pip install 'equilibria\[train\]'"):
        runpy.run_path(str(Path(eq.__file__).parent / "lab" / "cli" / "main.py"))


@pytest.mark.parametrize(
    ("module", "error", "told"),
    [
        ("lightning_fabric", SystemExit, r"needs the extra `train`: pip install 'equilibria\[train\]'"),
        ("equilibria.lab.cli.generating", ModuleNotFoundError, r"equilibria\.lab\.cli\.generating"),
    ],
)
def test_an_import_error_names_only_missing_packages(
    module: str, error: type[BaseException], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"import of {module} halted", name=module)

    monkeypatch.setattr("equilibria.lab.cli.main.importlib.import_module", missing)
    with pytest.raises(error, match=told):
        load("generate")


def test_an_error_does_not_list_hundreds_of_names() -> None:
    code, told = run("train", "nosuch")
    assert code == 2 and "more." in told and len(told.splitlines()) < 40


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_in_the_overview_equal_those_of_the_commands(name: str) -> None:
    assert load(name).help.splitlines()[0] == COMMANDS[name][-1]


def test_info_says_whether_steps_are_compiled() -> None:
    code, text = run("info")
    assert code == 0 and f"native     {eq.native.available()}" in text
    found = json.loads(run("info", "--json")[1])
    assert found["equilibria"] == eq.__version__ and found["native"] is eq.native.available()
