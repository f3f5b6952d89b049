"""The table of LION: its rows, the frozen backbone, and pruning that resumes after an interruption."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric")
pytest.importorskip("sklearn")
from equilibria.lab.experiments.definitions import SCALES
from equilibria.lab.experiments.lion.backbones import FEATURES, Backbone, Tuned, TuningKind, pretrained
from equilibria.lab.experiments.lion.table import experiment, tables
from equilibria.lab.experiments.lion.task import Prompt, PromptSettings
from equilibria.lab.training import Run, Trainer
from equilibria.lab.training.settings import Training
from equilibria.models.images.lion import Lion, LionConfig
from tests.lab.training.tasks import Noted, timeless

ROWS = [row.name for row in tables()[0].rows]
SMALL = PromptSettings(data="digits", train=64, test=32, pretrain_steps=5)
SHORT = Training(epochs=3, batch_size=32, eval_batch_size=32)
CONFIG = LionConfig(features=FEATURES, classes=5, image_channels=1, feature_hidden=16)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_runs(row: str, tmp_path: Path) -> None:
    e = experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, config=e.config(), listener=Noted()).fit().final["split"]["test"]
    assert 0 < test["accuracy"] <= 1 and test["loss"] > 0
    assert (test["moved"] == 0) == (row != "finetune")
    trained = {"probe": 325, "lion": 3_685, "lion-pruned": 2_370, "finetune": 23_733}
    assert test["trained"] == trained[row]
    model = Run.open(tmp_path).model(e.task())  # without pre-training: all of it is in the checkpoint
    assert isinstance(model, Tuned)
    assert float(model.moved()) == test["moved"]


def test_rows_have_the_known_numbers_of_parameters() -> None:
    assert sum(p.numel() for p in Backbone().parameters()) == 23_408
    for tuning, trained in {"probe": 325, "lion": 3_685, "finetune": 23_733}.items():
        tuned = Tuned(Backbone(), tuning, CONFIG)  # type: ignore[arg-type]
        assert tuned.trained() == trained
        assert tuned.trained_share() == trained / sum(p.numel() for p in tuned.parameters())
    (table,) = tables()
    assert 3_685 / 23_733 < 0.25 and any(claim.column == "trained" for claim in table.claims)


def test_pretraining_is_a_function_of_its_arguments() -> None:
    known, new = SMALL.load(None)
    state = torch.get_rng_state()
    first = pretrained(known, 5, 0)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    again, other = pretrained(known, 5, 0), pretrained(known, 5, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    assert not first.training and first(new.train.x[:2].float()).shape == (2, FEATURES)


def test_the_halves_share_no_class() -> None:
    known, new = SMALL.load(None)
    assert (known.classes, new.classes) == (tuple("01234"), tuple("56789"))
    assert (len(new.train), len(new.test)) == (64, 32)
    for half in (known, new):
        assert half.train.y.unique().tolist() == half.test.y.unique().tolist() == [0, 1, 2, 3, 4]
    again = SMALL.load(None)[1]
    assert torch.equal(new.train.x, again.train.x)
    with pytest.raises(ValueError, match=r"There are \d+ images of these classes, got test=9999"):
        dataclasses.replace(SMALL, test=9999).load(None)


@pytest.mark.parametrize("tuning", ["probe", "lion"])
def test_a_frozen_backbone_stays_in_eval_mode(tuning: TuningKind) -> None:
    backbone = Backbone()
    tuned = Tuned(backbone, tuning, CONFIG).train()
    tuned(torch.randn(4, 1, 8, 8)).sum().backward()
    assert tuned.moved() == 0
    assert all(p.grad is None for p in tuned.net.get_submodule("backbone").parameters())
    assert all(p.requires_grad for p in backbone.parameters())  # it was a copy


def test_moved_measures_weights_and_statistics() -> None:
    tuned = Tuned(Backbone(), "finetune", CONFIG).train()
    tuned(torch.randn(4, 1, 8, 8))
    assert tuned.moved() > 0  # running statistics
    tuned = Tuned(Backbone(), "finetune", CONFIG).eval()
    with torch.no_grad():
        next(iter(tuned.net.get_submodule("backbone").parameters()))[0, 0, 0, 0] += 0.5
    torch.testing.assert_close(tuned.moved(), torch.tensor(0.5))


def pruned_run(folder: Path, stop_at: int | None = None, training: Training = SHORT) -> Prompt:
    task = Prompt(dataclasses.replace(SMALL, keep=0.6))
    trainer = Trainer(task, training, folder, accelerator="cpu", listener=Noted(stop_at=stop_at))
    if stop_at is None:
        trainer.fit()
    else:
        with pytest.raises(RuntimeError, match="cut off"):
            trainer.fit()
    return task


def test_pruning_resumes_bit_by_bit(tmp_path: Path) -> None:
    every_step = dataclasses.replace(SHORT, checkpoint_minutes=0.0)
    whole = pruned_run(tmp_path / "whole").state()
    for stop_at in (2, 6):  # before the first choice is in a checkpoint, and after the removal
        pruned_run(tmp_path / "broken", stop_at, every_step)
    broken = pruned_run(tmp_path / "broken", training=every_step).state()
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "broken")
    assert whole["chosen"] == broken["chosen"] == 2 and whole["pruning"]["removed"]
    for part in ("critical", "scores"):
        pairs = zip(whole["pruning"][part].values(), broken["pruning"][part].values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("epochs", [1, 3])
def test_pruned_weights_stay_zero(epochs: int, tmp_path: Path) -> None:
    task = pruned_run(tmp_path, training=dataclasses.replace(SHORT, epochs=epochs))
    model = Run.open(tmp_path).model(task)
    assert isinstance(model, Tuned) and isinstance(model.net, Lion)
    weights = model.net.prunable()
    zeros = {name: p == 0 for name, p in weights.items()}
    assert all(torch.equal(zeros[name], ~task.state()["pruning"]["critical"][name]) for name in weights)
    whole = sum(p.numel() for p in weights.values())
    assert sum(int(zero.sum()) for zero in zeros.values()) == whole - round(0.6 * whole)


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_backbone_of_timm_needs_timm() -> None:
    with pytest.raises(ImportError, match=r"backbone='resnet18' needs timm.*pip install timm"):
        Prompt(dataclasses.replace(SMALL, backbone="resnet18")).prepare(None, SHORT)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match='keep needs tuning="lion"'):
        PromptSettings(tuning="probe", keep=0.5)
    with pytest.raises(ValueError, match="pretrain_steps must be at least 1"):
        PromptSettings(pretrain_steps=0)


def test_the_table_names_its_rows() -> None:
    (table,) = tables()
    columns = {column.name for column in table.columns}
    assert {claim.column for claim in table.claims} <= columns
    assert {claim.left for claim in table.claims} | {claim.right for claim in table.claims if claim.right} <= set(ROWS)
    for row in table.rows:
        assert [row.experiment(scale).name for scale in SCALES] == [f"lion-{row.name}"] * 3
