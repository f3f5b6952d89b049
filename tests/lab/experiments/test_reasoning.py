"""Reasoners on puzzles: losses, scaling over depth and breadth, carried rows in the trainer."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning_fabric")
import equilibria as eq
from equilibria.analysis.diagnosis.attractors import area_under_curve
from equilibria.lab.experiments.reasoning import attractor_table
from equilibria.lab.experiments.reasoning.losses import answer_loss, halting_loss, log_stablemax
from equilibria.lab.experiments.reasoning.scaling import measure_scaling
from equilibria.lab.experiments.reasoning.table import PUZZLES, TITLES, experiment, tables
from equilibria.lab.experiments.reasoning.task import PuzzleData, Reasoning, ReasoningSettings
from equilibria.lab.training import Optimizer, Run, Trainer, Training
from equilibria.models import Reasoner, ReasonerConfig
from equilibria.models.reasoning.configs import REASONER_CONFIGS
from tests.lab.training.tasks import Noted, timeless

SMALL = ReasonerConfig(tokens=5, positions=16, width=16, layers=1, multiple=8, h_cycles=2, l_cycles=1).attractor()
SETTINGS = ReasoningSettings(
    data=PuzzleData(train=24, valid=8, test=8, repeats=2),
    config=SMALL,
    max_steps=3,
    depths=(1, 2),
    starts=(1, 2),
    halt_by="both",
)
TRAINING = Training(epochs=2, batch_size=8, eval_batch_size=8, optimizer=Optimizer(lr=1e-2), ema=0.9, checkpoint_minutes=0.0)


def test_stablemax_is_its_definition() -> None:
    x = torch.linspace(-5, 5, 24, dtype=torch.float64).view(4, 6)
    s = torch.where(x >= 0, x + 1, 1 / (1 - x))
    torch.testing.assert_close(log_stablemax(x).exp(), s / s.sum(dim=-1, keepdim=True))
    targets = torch.tensor([0, 2, 4, 5])
    direct = -(s / s.sum(dim=-1, keepdim=True))[torch.arange(4), targets].log().mean()
    torch.testing.assert_close(answer_loss(x, targets, "stablemax"), direct)
    torch.testing.assert_close(answer_loss(x, targets), torch.nn.functional.cross_entropy(x, targets))
    assert torch.autograd.gradcheck(log_stablemax, x.requires_grad_())
    assert float(halting_loss(torch.tensor([9.0, -9.0]), torch.tensor([True, False]))) < 1e-3


def test_the_area_under_the_curve_counts_pairs() -> None:
    draws = torch.Generator().manual_seed(0)
    score, positive = torch.randint(5, (40,), generator=draws).double(), torch.rand(40, generator=draws) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in score[positive].tolist() for b in score[~positive].tolist()]
    assert area_under_curve(score, positive) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(score, torch.ones(40, dtype=torch.bool)) != area_under_curve(score, positive)  # nan


def test_scaling_matches_supervised_steps() -> None:
    torch.manual_seed(0)
    model = Reasoner(dataclasses.replace(SMALL, start="fixed", noise=0.0)).double().eval()
    x, y = torch.randint(5, (7, 16)), torch.randint(5, (7, 16))
    y[:3] = model.think(x, model.think(x).state).logits.argmax(dim=-1)[:3]  # right after two steps
    found = measure_scaling(model, x, y, (1, 2, 3), starts=2)
    assert found.exact(2) == pytest.approx(3 / 7) and found.exact(2, 2) == pytest.approx(3 / 7)
    state = None
    changes = []
    for depth in (1, 2, 3):
        thought = model.think(x, state)
        state = thought.state
        right = (thought.logits.argmax(dim=-1) == y).all(dim=-1)
        assert torch.equal(found.right[depth - 1, 0], right) and torch.equal(found.right[depth - 1, 1], right)
        changes.append(thought.residual)
    torch.testing.assert_close(found.change[2, 0], torch.stack(changes).mean(dim=0), rtol=1e-8, atol=1e-8)


def test_breadth_takes_the_start_that_changes_least() -> None:
    torch.manual_seed(0)
    model = Reasoner(SMALL).eval()
    found = measure_scaling(model, torch.randint(5, (6, 16)), torch.randint(5, (6, 16)), (2,), starts=4)
    right = torch.zeros(1, 4, 6, dtype=torch.bool)
    right[0, found.change[0].argmin(dim=0), torch.arange(6)] = True
    found = dataclasses.replace(found, right=right)
    assert found.exact(2, 4) == 1.0 and found.exact(2) == 0.25


def test_depth_and_breadth_are_chosen_on_validation_and_reported_on_test() -> None:
    task = Reasoning(dataclasses.replace(SETTINGS, depths=(1, 2, 4), starts=(1, 2)))
    valid = {"exact_1x1": 0.1, "exact_1x2": 0.2, "exact_2x1": 0.6, "exact_2x2": 0.5, "exact_4x1": 0.5, "exact_4x2": 0.6}
    test = {name: 1 - value for name, value in valid.items()}
    found = task.conclude({"valid": valid, "test": test})
    assert found["test"]["chosen"] == test["exact_2x1"] and found["valid"]["chosen"] == 0.6  # of equal ones the cheapest
    assert found["test"]["chosen_depth"] == 2 and found["test"]["chosen_starts"] == 1
    assert task.conclude({"test": test}) == {"test": test}
    fixed = {name: value for name, value in valid.items() if name.endswith("x1")}  # a model whose start is fixed
    assert task.conclude({"valid": fixed, "test": fixed})["test"]["chosen_depth"] == 2


@pytest.mark.parametrize("row", TITLES)
def test_every_row_trains(row: str, tmp_path: Path) -> None:
    e = experiment("sudoku-4x4", row, "debug")
    summary = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit()
    test = summary.final["split"]["test"]
    assert 0 <= test["chosen"] <= 1 and torch.isfinite(torch.tensor(test["loss"]))


@pytest.mark.parametrize("puzzle", ["mazes", "prefix-sums", "sudoku-6x6"])
def test_every_puzzle_trains(puzzle: str, tmp_path: Path) -> None:
    e = experiment(puzzle, "eqr", "debug")
    summary = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit()
    assert {"exact_1x1", "exact_4x2", "steps_halted"} <= set(summary.final["split"]["test"])


@pytest.mark.parametrize("row", attractor_table.TITLES)
def test_attractor_language_models_train(row: str, tmp_path: Path) -> None:
    e = attractor_table.experiment(row, "debug")
    test = Trainer(e.task(), e.training, tmp_path, accelerator="cpu", listener=Noted()).fit().final["split"]["test"]
    assert 1 < test["perplexity"] < 100 and ("token_residual" in test) is (row != "layers")


def test_an_attractor_head_and_one_more_layer_have_equal_parameters() -> None:
    counts = {
        sum(w.numel() for w in attractor_table.experiment(row, "reduced").task().model().parameters())
        for row in attractor_table.TITLES
    }
    assert len(counts) == 1


def test_the_stacks_have_equal_parameters_and_equal_depth() -> None:
    for name, puzzle in PUZZLES.items():
        counts = {
            row: sum(w.numel() for w in experiment(name, row, "reduced").task().model().parameters())
            for row in ("stack", "deep-stack", "eqr", "trm")
        }
        head = puzzle.config.width + 1  # the halting head, which a stack does not have
        assert counts["eqr"] == counts["trm"] == counts["stack"] + head
        deep = experiment(name, "deep-stack", "reduced").settings.stack_layers
        unrolled = experiment(name, "bptt", "reduced").settings.unrolled
        assert deep == unrolled * (puzzle.config.l_cycles + 1) * puzzle.config.layers
    assert len(tables()) == len(PUZZLES)


def fit(folder: Path, stop_at: int | None = None, **options: Any) -> None:
    Trainer(Reasoning(SETTINGS), TRAINING, folder, accelerator="cpu", listener=Noted(stop_at), **options).fit()


def test_an_interrupted_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    """Carried rows, their starts, noise and exploration are part of the run's state."""
    fit(tmp_path / "whole")
    for step in (2, 7):
        with pytest.raises(RuntimeError, match="cut off"):
            fit(tmp_path / "cut", step)
    torch.rand(5)
    fit(tmp_path / "cut")
    first, second = (Run.open(tmp_path / name).model(Reasoning(SETTINGS), "raw").state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "cut")


@pytest.mark.slow
def test_two_processes_carry_their_own_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.lab.experiments.test_reasoning", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path)
    assert run.metrics[-1]["split"]["train"]["loss"] < 5
    found = run.model(Reasoning(SETTINGS), "raw")
    assert isinstance(found, Reasoner) and all(bool(torch.isfinite(w).all()) for w in found.parameters())


def test_carried_rows_train_deeper_states() -> None:
    """The task continues from the states of the last step, and replaces rows at the limit."""
    torch.manual_seed(0)
    task = Reasoning(dataclasses.replace(SETTINGS, halt_by="limit"))
    model = task.model()
    loader = task.batches(None, TRAINING, 0, 1).train
    batches = list(loader)
    task.loss(model, batches[0], 0)
    first = task.carry.steps  # rows begin at different ages
    assert len(set(first.tolist())) > 1
    for i, batch in enumerate(batches[1:4], start=1):
        task.loss(model, batch, i)
        assert torch.equal(task.carry.steps, (first - 1 + i) % 3 + 1)
    for weight, solves in ((0.0, 0), (0.1, 1)):  # the penalty needs a recorded solve, the published step is none
        task = Reasoning(dataclasses.replace(SETTINGS, jacobian_weight=weight))
        model = task.model()
        with eq.record(model) as solutions:
            task.loss(model, batches[4], 4)
        assert len(solutions) == solves


@pytest.mark.parametrize("size", ["4x4", "6x6"])
def test_reasoners_of_the_tables_have_names(size: str) -> None:
    config = experiment(f"sudoku-{size}", "eqr", "reduced").settings.config
    named = REASONER_CONFIGS[f"eqr-sudoku-{size}"]
    assert dataclasses.replace(named, summary="") == config


if __name__ == "__main__":
    fit(Path(sys.argv[1]), devices=2, strategy="ddp")
