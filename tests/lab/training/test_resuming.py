from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equilibria.lab.training import Interrupted, Optimizer, Outcome, Run, Trainer, Training
from equilibria.lab.training.durable import write_new
from tests.lab.training.tasks import Classifying, Noted, Pair, timeless, weights

EVERY_STEP = Training(epochs=3, batch_size=8, optimizer=Optimizer(lr=0.05), ema=0.9, checkpoint_minutes=0.0)
EVERY_EPOCH = dataclasses.replace(EVERY_STEP, checkpoint_minutes=60.0)


def trainer(folder: Path, training: Training = EVERY_STEP, listener: Noted | None = None) -> Trainer:
    return Trainer(Classifying(), training, folder, accelerator="cpu", listener=listener or Noted())


def same(a: Path, b: Path) -> None:
    """Check that weights, averages and metrics of two runs are equal bit by bit."""
    for which in ("raw", "last", "best"):
        first, second = (Run.open(folder).model(Classifying(), which).state_dict() for folder in (a, b))
        assert all(torch.equal(first[name], second[name]) for name in first), which
    assert timeless(a) == timeless(b)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer(folder).fit()
    return folder


CUTS = [(EVERY_STEP, (1,)), (EVERY_STEP, (5,)), (EVERY_STEP, (3, 4, 9)), (EVERY_EPOCH, (2, 15)), (EVERY_EPOCH, (7,))]


@pytest.mark.parametrize(("training", "steps"), CUTS)
def test_a_run_interrupted_at_any_step_ends_the_same(
    training: Training, steps: tuple[int, ...], uninterrupted: Path, tmp_path: Path
) -> None:
    for step in steps:
        with pytest.raises(RuntimeError, match="cut off"):
            trainer(tmp_path, training, Noted(stop_at=step)).fit()
    torch.rand(7)
    trainer(tmp_path, training).fit()
    same(tmp_path, uninterrupted)


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    with first.folder.held(), pytest.raises(BlockingIOError, match=r"another process is training in .* use another"):
        trainer(tmp_path).fit()
    assert not (tmp_path / "config.json").exists()
    assert first.fit().finished and trainer(tmp_path).fit().finished


class _CutAfterMetrics(Noted):
    def epoch_done(self, record: Mapping[str, Any]) -> None:
        if record["epoch"] == 2:
            raise RuntimeError("cut off")


def test_metrics_ahead_of_the_checkpoint_are_removed(uninterrupted: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cut off"):
        trainer(tmp_path, listener=_CutAfterMetrics()).fit()
    assert len(Run.open(tmp_path).metrics) == 2
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "st')
    assert len(Run.open(tmp_path).metrics) == 2
    trainer(tmp_path).fit()
    same(tmp_path, uninterrupted)


class _Interrupting(Noted):
    """A task that sends Ctrl-C during a step, which must still be completed."""

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        super().step_done(step, loss, seconds)
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_with_a_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    listener, before = _Interrupting(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"Interrupted after step 7\. The checkpoint is in .*step-00000007") as error:
        trainer(tmp_path, EVERY_EPOCH, listener).fit()
    assert error.type is Interrupted and signal.getsignal(signal.SIGINT) is before
    again = Noted()
    trainer(tmp_path, EVERY_EPOCH, again).fit()
    assert again.messages == [f"Resuming from {tmp_path / 'checkpoints' / 'step-00000007'}."]
    assert len(listener.losses) == 7 and len(again.losses) == 15 - 7
    same(tmp_path, uninterrupted)


def test_ctrl_c_during_evaluation_repeats_the_evaluation(uninterrupted: Path, tmp_path: Path) -> None:
    class Interrupting(Classifying):
        def evaluate(self, model: nn.Module, batch: Pair) -> Outcome:
            os.kill(os.getpid(), signal.SIGINT)
            return super().evaluate(model, batch)

    with pytest.raises(Interrupted, match="while epoch 1 was evaluated"):
        Trainer(Interrupting(), EVERY_EPOCH, tmp_path, accelerator="cpu", listener=Noted()).fit()
    trainer(tmp_path, EVERY_EPOCH).fit()
    same(tmp_path, uninterrupted)


def test_ctrl_c_twice_interrupts_at_once(tmp_path: Path) -> None:
    class Impatient(Noted):
        def step_done(self, step: int, loss: float, seconds: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="twice"):
        trainer(tmp_path, listener=Impatient()).fit()


def test_a_run_resumes_from_the_checkpoint_before_a_corrupt_one(uninterrupted: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cut off"):
        trainer(tmp_path, listener=Noted(stop_at=8)).fit()
    newest = tmp_path / "checkpoints" / "step-00000007"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 128
    (newest / "model.safetensors").write_bytes(data)
    with pytest.warns(UserWarning, match="step-00000007 is corrupt.*Weights of the earlier .*step-00000006"):
        Run.open(tmp_path).model(Classifying())
    listener = Noted()
    trainer(tmp_path, listener=listener).fit()
    assert f"{newest} is corrupt: model.safetensors" in listener.messages[0] and "step-00000006" in listener.messages[1]
    same(tmp_path, uninterrupted)


def test_a_full_disk_ends_the_run_which_can_be_resumed(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        if "step-00000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_new(path, data)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"{tmp_path}.*No space left.*step-00000007 is kept"):
        patch.setattr("equilibria.lab.training.checkpoints.write_new", full)
        trainer(tmp_path).fit()
    trainer(tmp_path).fit()
    same(tmp_path, uninterrupted)


def test_a_finished_run_is_not_changed(uninterrupted: Path) -> None:
    listener = Noted()
    summary = trainer(uninterrupted, listener=listener).fit()
    assert summary.final == Run.open(uninterrupted).metrics[-1] and not listener.losses
    assert listener.messages == [f"The run in {uninterrupted} is finished."]


def test_another_config_is_refused_with_its_differences(uninterrupted: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(EVERY_STEP, epochs=4, optimizer=Optimizer(lr=0.1))
    with pytest.raises(ValueError, match=r"training\.epochs was 3, now 4; training\.optimizer\.lr was 0\.05, now 0\.1"):
        trainer(uninterrupted, other).fit()
    with pytest.raises(ValueError, match="experiment was None, now 'other'"):
        Trainer(Classifying(), EVERY_STEP, uninterrupted, config={"experiment": "other"}, accelerator="cpu").fit()


def test_other_versions_are_reported(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    config = json.loads((folder / "config.json").read_text())
    config["versions"]["torch"] = "1.0"
    (folder / "config.json").write_text(json.dumps(config))
    listener = Noted()
    trainer(folder, listener=listener).fit()
    assert "versions.torch was '1.0', now" in listener.messages[0]


class _Remembering(Classifying):
    """A task with a state on which its loss depends."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Any] = {"mean": torch.zeros(()), "count": 0}

    def loss(self, model: nn.Module, batch: Pair, step: int) -> Outcome:
        outcome = super().loss(model, batch, step)
        if model.training:
            self.memory = {"mean": (self.memory["mean"] + outcome.loss.detach()) / 2, "count": self.memory["count"] + 1}
        return dataclasses.replace(outcome, loss=outcome.loss * (1 + self.memory["mean"]))

    def state(self) -> Any:
        return self.memory

    def resume(self, state: Any) -> None:
        self.memory = state


def test_a_task_may_have_a_state_of_its_own(tmp_path: Path) -> None:
    def run(folder: Path, stop_at: int | None = None) -> None:
        Trainer(_Remembering(), EVERY_STEP, folder, accelerator="cpu", listener=Noted(stop_at)).fit()

    run(tmp_path / "a")
    with pytest.raises(RuntimeError):
        run(tmp_path / "b", stop_at=8)
    run(tmp_path / "b")
    a, b = (weights(tmp_path / name, _Remembering()) for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def _killed(folder: Path, moments: int, chain: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.lab.training.killing", str(folder), str(moments), str(chain)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(out.stdout.splitlines()[-1])


def _check_killed(found: list[dict[str, Any]]) -> None:
    assert all(each["kills"] > 0 for each in found)
    assert all(each["weights"] and each["metrics"] for each in found), found


def test_a_run_killed_at_a_random_moment_ends_the_same(tmp_path: Path) -> None:
    _check_killed(_killed(tmp_path, moments=2, chain=0))


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_ends_the_same(tmp_path: Path) -> None:
    _check_killed(_killed(tmp_path, moments=10, chain=10))
