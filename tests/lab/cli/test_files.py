"""Files that cannot be read or written: every command says what it saw and what to do, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")
from typer.testing import CliRunner

from equilibria.lab.cli.main import COMMANDS, app

# {missing}: nothing there; {file}: a text file; {empty}: a folder without files; {below}: a path below the text file, which
# cannot be written even by root
READ = [
    "evaluate RUN",
    "extend RUN --epochs 3",
    "watch RUN --once",
    "generate RUN",
    "publish RUN other",
    "diagnose RUN",
    "serve RUN",
    "report RUN",
]
WRITE = [
    "demo --scale debug --out {below}",
    "train digits-deq --scale debug --out {below}",
    "train digits-deq --scale debug --folder {below}",
    "sweep digits-deq --scale debug --grid width=8,16 --out {below}",
    "reproduce digits --scale debug --out {below}",
    "reproduce digits --scale debug --report {below}",
    "diagnose --example contractive --output {below}",
    "data fetch mnist --data {below}",
    "bench --quick --json {below}",
    "bench --quick --json {missing}/x.json",
    "bench --quick --plot {empty}",
]
OTHERS = [
    "train digits-deq --config {missing}",
    "train digits-deq --config {empty}",
    "train digits-deq --config {file}",
    "train {missing}.py:experiment",
    "sweep {missing}.py:experiment --grid width=8",
    "sweep digits-deq --grid width=8 --config {missing}",
    "load http://127.0.0.1:9 --body {missing}",
    "load http://127.0.0.1:9 --body {empty}",
    "data check mnist --data {file}",
    "data check mnist --data {missing}",
]
NO_FILES = {"info"}  # commands that take no path
LISTS = {"list"}  # a folder of data that is not there is none of their errors


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")  # messages in one line
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("neither a run nor settings\n")
    return {name: str(tmp_path / name) for name in ("missing", "file", "empty")} | {"below": str(tmp_path / "file" / "x")}


def told(line: str, paths: dict[str, str]) -> str:
    """Return the output of a command that must fail with an exit code, not with an exception."""
    result = CliRunner().invoke(app, line.format(**paths).split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2) and "Traceback" not in result.output, result.output
    return result.output


@pytest.mark.parametrize("place", ["missing", "file", "empty"])
@pytest.mark.parametrize("line", READ)
def test_a_path_that_is_not_a_run_is_named(line: str, place: str, paths: dict[str, str]) -> None:
    text = told(line.replace("RUN", f"{{{place}}}"), paths)
    assert paths[place] in text and text.rstrip(" ╯│─╰\n").endswith(".")
    assert not Path("other").exists()


@pytest.mark.parametrize("line", [*WRITE, *OTHERS])
def test_a_path_that_cannot_be_used_is_named(line: str, paths: dict[str, str]) -> None:
    assert any(path in told(line, paths) for name, path in paths.items() if f"{{{name}}}" in line)


def test_every_command_that_takes_a_path_is_tried() -> None:
    tried = {line.split()[0] for line in (*READ, *WRITE, *OTHERS)}
    assert tried == {*COMMANDS, "bench"} - NO_FILES - LISTS


@pytest.mark.parametrize("line", ["bench --quick --json {below}", "bench --quick --plot {missing}/x.png"])
def test_the_benchmark_refuses_files_before_it_measures(
    line: str, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it measured")

    monkeypatch.setattr("equilibria.lab.bench.command.run", measured)
    assert "cannot be written" in told(line, paths)


@pytest.mark.parametrize(
    "line", ["reproduce digits --scale debug --report {below}", "diagnose --example contractive --output {below}"]
)
def test_nothing_is_computed_for_a_report_that_cannot_be_written(
    line: str, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: object, **__: object) -> None:
        raise AssertionError("it computed")

    # first the module that imports the function by name: imported after the patch, it would keep `computed` in later tests
    monkeypatch.setattr("equilibria.lab.cli.running.run_here", computed)
    monkeypatch.setattr("equilibria.lab.experiments.runner.run_here", computed)
    monkeypatch.setattr("equilibria.lab.cli.diagnosis.run_diagnosis", computed)
    assert paths["below"] in told(line, paths)
