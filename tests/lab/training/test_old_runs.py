"""Run folders written by earlier versions are resumed, read and evaluated.

`old_runs/digits` is a run of `digits-deq` with 8 units, cut off during step 5 of 6. It was written at commit 3a999c5, before
the modules moved. `old_runs/digits-end.safetensors` holds the weights of the same run without an interruption.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from equilibria.lab.experiments.catalogue import experiment
from equilibria.lab.experiments.evaluation import evaluate, experiment_of
from equilibria.lab.training import Run, Silent, Trainer

OLD = Path(__file__).parent / "old_runs"
ASSIGNMENTS = (
    "width=8",
    *(f"training.{text}" for text in ("epochs=2", "batch_size=480", "checkpoint_minutes=0", "ema=0.9")),
)


class _Steps(Silent):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.messages: list[str] = []

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        self.steps.append(step)

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(OLD / "digits", tmp_path / "digits")


@pytest.mark.recorded
def test_an_old_run_resumes_at_its_step_and_ends_with_the_weights_it_had(folder: Path) -> None:
    old, listener = Run.open(folder).metrics[0], _Steps()
    found = experiment("digits-deq", "debug").changed(ASSIGNMENTS)
    trainer = Trainer(found.task(), found.training, folder, config=found.config(), accelerator="cpu", listener=listener)
    assert trainer.fit().finished
    assert listener.steps == [5, 6] and any("step-00000004" in text for text in listener.messages)
    run = Run.open(folder)
    assert [line["step"] for line in run.metrics] == [3, 6] and run.metrics[0] == old
    # equal to the bit where neither torch nor a solver changed; two steps of Adam move a weight by up to 3e-3
    expected = safetensors.torch.load_file(OLD / "digits-end.safetensors")
    torch.testing.assert_close(run.model(found.task(), "raw").state_dict(), expected, rtol=0, atol=2e-4)


def test_an_old_run_can_be_read_and_evaluated(folder: Path) -> None:
    run = Run.open(folder)
    assert experiment_of(run).config() == {key: run.config[key] for key in ("experiment", "scale", "settings")}
    metrics = evaluate(run, which="best")
    assert metrics["loss"] == pytest.approx(run.metrics[-1]["split"]["test"]["loss"], rel=1e-3)
