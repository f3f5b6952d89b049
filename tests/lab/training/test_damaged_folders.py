"""Damaged run folders are refused with the file, what was seen and what to do; nothing in them is lost or overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equilibria.lab.training import CorruptCheckpointError, Optimizer, Run, Trainer, Training
from equilibria.lab.training.checkpoints import Checkpoints
from tests.lab.training.damages import DAMAGES, rewrite_state
from tests.lab.training.tasks import Classifying, Noted, timeless

TRAINING = Training(epochs=3, batch_size=8, optimizer=Optimizer(lr=0.05), ema=0.9, checkpoint_minutes=0.0)
REFUSED = (CorruptCheckpointError, ValueError, OSError)  # what the command line explains


def trainer(folder: Path, listener: Noted | None = None) -> Trainer:
    return Trainer(Classifying(), TRAINING, folder, accelerator="cpu", listener=listener or Noted())


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was interrupted in step 8 of 15, with checkpoints of steps 6 and 7 and one epoch."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(RuntimeError, match="cut off"):
        trainer(folder, Noted(stop_at=8)).fit()
    return folder


@pytest.fixture
def folder(cut: Path, tmp_path: Path) -> Path:
    return shutil.copytree(cut, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(cut, tmp_path_factory.mktemp("finished") / "run")
    trainer(folder).fit()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder except the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def checkpoints(folder: Path) -> list[Path]:
    return Checkpoints(folder / "checkpoints").paths()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def without(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: part for name, part in state.items() if name not in names}


def test_without_an_intact_checkpoint_every_start_raises_and_changes_nothing(folder: Path) -> None:
    for path in checkpoints(folder):
        flip(path / "model.safetensors")
    before = contents(folder)
    for _ in range(3):
        listener = Noted()
        with pytest.raises(CorruptCheckpointError, match=r"step-00000006, step-00000007.*another folder"):
            trainer(folder, listener).fit()
        assert not listener.losses and contents(folder) == before


def test_checkpoints_set_aside_by_an_earlier_start_are_remembered(folder: Path) -> None:
    """Earlier versions renamed all checkpoints before they raised."""
    for path in checkpoints(folder):
        path.rename(path.with_name(f"{path.name}.corrupt"))
    before = contents(folder)
    with pytest.raises(CorruptCheckpointError, match=r"step-00000006\.corrupt"):
        trainer(folder).fit()
    assert contents(folder) == before


def test_missing_checkpoints_of_a_run_with_metrics_are_refused(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    before = contents(folder)
    with pytest.raises(CorruptCheckpointError, match=r"metrics\.jsonl has 3 epochs.*no checkpoint.*another folder"):
        trainer(folder).fit()
    assert contents(folder) == before


def test_a_kill_between_the_two_renames_loses_nothing(folder: Path, finished: Path) -> None:
    """A checkpoint of the same step is being replaced: the old one is set aside, and the new one is not renamed yet."""
    older, newest = checkpoints(folder)
    shutil.rmtree(older)
    shutil.copytree(newest, newest.with_name(f".{newest.name}.tmp-77"))
    newest.rename(newest.with_name(f".{newest.name}.old"))
    listener = Noted()
    trainer(folder, listener).fit()
    assert listener.messages == [f"Resuming from {newest}."] and len(listener.losses) == 15 - 7
    assert timeless(folder) == timeless(finished)
    assert not list((folder / "checkpoints").glob(".step-*"))


def test_a_run_with_its_only_checkpoint_between_the_renames_can_be_read(folder: Path) -> None:
    older, newest = checkpoints(folder)
    shutil.rmtree(older)
    aside = newest.rename(newest.with_name(f".{newest.name}.old"))
    Run.open(folder).model(Classifying(), "last")
    assert aside.is_dir()  # reading changes nothing


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_damage_to_a_file_of_an_unfinished_run_is_named(name: str, damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder / name)
    before = contents(folder)
    with pytest.raises(REFUSED) as error:
        trainer(folder).fit()
    _check_error(error.value, folder / name)
    assert contents(folder) == before


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_to_the_summary_is_named(damage: Callable[[Path], None], finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    damage(folder / "summary.json")
    before = contents(folder)
    for act in (trainer(folder).fit, lambda: Run.open(folder)):
        with pytest.raises(REFUSED) as error:
            act()
        _check_error(error.value, folder / "summary.json")
    assert contents(folder) == before


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["state.json", "manifest.json", "model.safetensors"])
def test_damage_to_a_file_of_the_only_checkpoint_is_named(name: str, damage: Callable[[Path], None], folder: Path) -> None:
    older, newest = checkpoints(folder)
    shutil.rmtree(older)
    damage(newest / name)
    before = contents(folder)
    for act in (trainer(folder).fit, lambda: Run.open(folder).model(Classifying())):
        with pytest.raises(REFUSED) as error:
            act()
        _check_error(error.value, newest / name)
    assert contents(folder) == before


def _check_error(error: BaseException, path: Path) -> None:
    text = str(error)
    assert path.name in text and str(path.parent) in text, text
    assert not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)), repr(error)


TAMPERINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model": without("model"),
    "no progress": without("progress"),
    "no processes": without("processes"),
    "no average": without("average"),
    "progress of another version": lambda state: state | {"progress": {"dict": {"epoch": 1, "unheard": 2}}},
    "progress is a list": lambda state: state | {"progress": [1]},
    "an empty object": lambda state: state | {"progress": {}},
    "a tensor that is not there": lambda state: state | {"progress": {"dict": {"epoch": {"tensor": "none"}}}},
    "a word for a number": lambda state: state | {"progress": {"float": "many"}},
    "a weight less": lambda state: state | {"model": {"dict": {}}},
    "a process of another kind": lambda state: state | {"processes": [3]},
    "a list": lambda state: [state],
}


@pytest.mark.parametrize("change", TAMPERINGS.values(), ids=TAMPERINGS)
def test_a_state_that_does_not_fit_is_named(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    older, newest = checkpoints(folder)
    shutil.rmtree(older)
    rewrite_state(newest, change)
    before = contents(folder)
    with pytest.raises(CorruptCheckpointError) as error:
        trainer(folder).fit()
    assert str(newest) in str(error.value) and "another folder" in str(error.value)
    assert contents(folder) == before


@pytest.mark.parametrize("change", [without("model"), TAMPERINGS["a weight less"], TAMPERINGS["a list"]])
def test_weights_that_do_not_fit_are_named(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    for path in checkpoints(folder):
        rewrite_state(path, change)
    with pytest.raises(REFUSED) as error:
        Run.open(folder).model(Classifying())
    assert str(checkpoints(folder)[-1]) in str(error.value) and not isinstance(error.value, KeyError)


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ('{"epoch": 1', "line 1 is not valid JSON"),
        ("[]", r"line 1 .*\[\]"),
        ('{"epoch": 1, "step": 5}', "line 1 has no 'split'"),
        ('{"epoch": 2, "step": 5, "split": {}, "seconds_train": 1.0}', "line 1 is of epoch 2, expected 1"),
        ('{"epoch": 1, "step": 5, "split": {"train": 3}, "seconds_train": 1.0}', "line 1 .*split"),
    ],
)
def test_a_line_of_metrics_that_is_wrong_is_named(line: str, seen: str, folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(f"{line}\n")
    before = contents(folder)
    for act in (trainer(folder).fit, lambda: Run.open(folder)):
        with pytest.raises(ValueError, match=rf"{folder / 'metrics.jsonl'}.*{seen}"):
            act()
    assert contents(folder) == before


def test_a_file_without_read_access_is_not_a_corrupt_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, before = checkpoints(folder)[-1], contents(folder)
    read_bytes = Path.read_bytes

    def denied(self: Path) -> bytes:
        if self == newest / "model.safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return read_bytes(self)

    with monkeypatch.context() as patch, pytest.raises(PermissionError, match=r"model\.safetensors"):
        patch.setattr(Path, "read_bytes", denied)
        trainer(folder).fit()
    assert contents(folder) == before


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_file_of_a_run_without_read_access_is_named(name: str, folder: Path) -> None:
    (folder / name).chmod(0)
    with pytest.raises(PermissionError, match=name):
        trainer(folder).fit()
