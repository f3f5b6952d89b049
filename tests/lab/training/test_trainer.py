from __future__ import annotations

import dataclasses
import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.lab.training import Loaders, Optimizer, Outcome, Run, RunSummary, Schedule, Trainer, Training, TrainingError
from equilibria.lab.training.processes import peak_bytes, step_clock
from equilibria.lab.training.statistics import BatchSolves
from equilibria.lab.training.step_log import POINTS, StepLog, read_steps
from equilibria.lab.training.stepping import Stepped
from tests.lab.training.tasks import CLASSES, Classifying, Noted, Pair, timeless, weights

TRAINING = Training(epochs=2, batch_size=8, optimizer=Optimizer(lr=0.05))
STEPS = 5  # of an epoch: 40 samples


def fit(folder: Path, task: Classifying | None = None, listener: Noted | None = None, **changes: Any) -> RunSummary:
    training = dataclasses.replace(TRAINING, **changes)
    return Trainer(task or Classifying(), training, folder, accelerator="cpu", listener=listener or Noted()).fit()


def test_a_run_learns_and_leaves_a_complete_folder(tmp_path: Path) -> None:
    listener = Noted()
    summary = fit(tmp_path, listener=listener, epochs=6, schedule=Schedule(name="cosine"))
    run = Run.open(tmp_path)
    assert [line["epoch"] for line in run.metrics] == [1, 2, 3, 4, 5, 6] and run.metrics[-1]["step"] == 6 * STEPS
    first, last = run.metrics[0]["split"], run.metrics[-1]["split"]
    guessing = 1 / CLASSES + 3 * math.sqrt(1 / CLASSES * (1 - 1 / CLASSES) / 24)  # by three standard errors of 24 samples
    assert last["train"]["loss"] < 0.6 * first["train"]["loss"] and last["valid"]["accuracy"] > guessing
    equilibrium = {"evaluations", "depth", "residual", "residual_max", "failed"}
    assert last["train"].keys() == {"loss", "accuracy", "adjoint_evaluations", "adjoint_failed"} | equilibrium
    assert last["valid"].keys() == {"loss", "accuracy", "spectral_radius"} | equilibrium
    assert 0 < last["valid"]["spectral_radius"] < 2 and 0 < last["train"]["residual"] < last["train"]["residual_max"] < 1e-2
    assert run.metrics[-1].keys() == {
        *(
            "epoch",
            "step",
            "split",
            "lr",
            "seconds_train",
            "seconds_step",
            "seconds_backward",
            "peak_bytes",
            "bad_steps",
            "failed_share",
        )
    }
    assert summary.final == run.metrics[-1] and summary.finished and run.summary == dataclasses.asdict(summary)
    assert summary.best["by"]["value"] == max(line["split"]["valid"]["accuracy"] for line in run.metrics)
    assert summary.parameters == sum(p.numel() for p in Classifying().model().parameters())
    assert listener.epochs == run.metrics and len(listener.losses) == 6 * STEPS
    assert run.training.epochs == 6 and run.config["versions"]["torch"] == torch.__version__


def test_steps_of_one_thread_are_timed_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, threads = torch.device("cpu"), 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert step_clock(cpu) is time.process_time and step_clock(torch.device("cuda")) is time.perf_counter
    threads = 2
    assert step_clock(cpu) is time.perf_counter


def test_metrics_are_the_means_over_samples(tmp_path: Path) -> None:
    """With lr 0 the weights do not change, so that evaluation by hand must agree, also with a smaller last batch."""
    fit(tmp_path, eval_batch_size=10, optimizer=Optimizer(lr=0.0))
    task, run = Classifying(), Run.open(tmp_path)
    loader = task.batches(None, dataclasses.replace(TRAINING, eval_batch_size=24), 0, 1).valid
    assert loader is not None
    outcome = task.evaluate(run.model(task), next(iter(loader)))
    seen = run.metrics[-1]["split"]["valid"]
    assert seen["loss"] == pytest.approx(float(outcome.loss), rel=1e-3)  # solves are good to the tolerance
    assert seen["accuracy"] == pytest.approx(float(outcome.metrics["accuracy"]))


def test_the_curves_are_in_tensorboard(tmp_path: Path) -> None:
    fit(tmp_path, epochs=4)
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    seen = [event.value for event in events.Scalars("valid/accuracy")]
    assert seen == pytest.approx([line["split"]["valid"]["accuracy"] for line in Run.open(tmp_path).metrics])
    steps = read_steps(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, 21)) and steps[-1]["epoch"] == 4
    for name in ("loss", "evaluations", "depth", "residual_max", "failed"):
        curve = [(event.step, event.value) for event in events.Scalars(f"step/{name}")]
        assert curve == [(line["step"], pytest.approx(line[name])) for line in steps]
    assert len(events.Scalars("step/adjoint_failed")) == 16  # after four steps of JFB, which solves no adjoint


def test_long_runs_log_every_nth_step_and_resumed_ones_cut_what_is_ahead(tmp_path: Path) -> None:
    solves = BatchSolves(7, None, 4, 12.0, 3, 0.3, 0.2, 1, 0)
    log = StepLog(tmp_path, 2 * POINTS + 1)
    for step in range(1, 8):
        log.add(step, 1, Stepped(math.nan, 0.0, "the loss is nan", False, False, solves), None)
    assert [line["step"] for line in read_steps(tmp_path)] == [3, 6]
    assert read_steps(tmp_path)[0] == {
        "step": 3, "epoch": 1, "loss": None, "skipped": 1.0, "evaluations": 7.0, "depth": 3.0, "failed": 0.25,
        "residual": pytest.approx(0.1), "residual_max": 0.2,
    }  # fmt: skip
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b'[1]\nnot JSON\n{"step": 9, "lo')
    log.cut(5)
    assert [line["step"] for line in read_steps(tmp_path)] == [3]


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(name))
        torch.rand(3)
        fit(tmp_path / name, seed=seed)
    a, b, c = (weights(tmp_path / name, Classifying()) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert not torch.equal(a["3.weight"], c["3.weight"])


def test_global_settings_of_torch_are_restored(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1)
    assert not torch.are_deterministic_algorithms_enabled()


class _Bad(Classifying):
    """A task whose loss, or only its gradient, is not finite at some steps."""

    def __init__(self, steps: set[int], gradient_alone: bool = False) -> None:
        super().__init__()
        self.steps, self.gradient_alone = steps, gradient_alone

    def loss(self, model: nn.Module, batch: Pair, step: int) -> Outcome:
        outcome = super().loss(model, batch, step)
        if step not in self.steps or not model.training:
            return outcome
        if self.gradient_alone:
            outcome.loss.register_hook(lambda grad: grad * math.nan)
            return outcome
        poisoned = super().loss(model, (batch[0] * math.nan, batch[1]), step)  # running statistics become nan
        return dataclasses.replace(outcome, loss=outcome.loss * math.nan + 0 * poisoned.loss)


@pytest.mark.parametrize(("gradient_alone", "reason"), [(False, "the loss is nan"), (True, "the gradient is not finite")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(gradient_alone: bool, reason: str, tmp_path: Path) -> None:
    listener = Noted()
    fit(tmp_path, _Bad({1, 3, 4, 6}, gradient_alone), listener, max_bad_steps=3)
    run = Run.open(tmp_path)
    assert [line["bad_steps"] for line in run.metrics] == [3, 1]
    assert all(math.isfinite(line["split"][split]["loss"]) for line in run.metrics for split in ("train", "valid"))
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path, Classifying()).values())
    assert listener.messages == [
        f"Step {step} is skipped: {reason}; {row} in a row, 3 end the run." for step, row in ((2, 1), (4, 1), (5, 2), (7, 1))
    ]


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="3 steps in a row were skipped, the last one, step 7, because the loss is nan"):
        fit(tmp_path, _Bad({4, 5, 6}), max_bad_steps=3)
    assert Run.open(tmp_path).summary is None


FAILING = eq.Stop(rtol=1e-9, max_steps=2, on_failure="ignore")


def test_failed_solves_are_counted(tmp_path: Path) -> None:
    fit(tmp_path, Classifying(FAILING))
    line = Run.open(tmp_path).metrics[-1]
    assert line["bad_steps"] == 0 and line["failed_share"] == 1.0 == line["split"]["valid"]["failed"]


def test_steps_with_failed_solves_are_skipped_if_requested(tmp_path: Path) -> None:
    listener = Noted()
    with pytest.raises(TrainingError, match=r"2 steps in a row .* solves failed \(8 forward, 0 adjoint of 8 "):
        fit(tmp_path, Classifying(FAILING), listener, failed_solves="skip", max_bad_steps=2)
    assert len(listener.messages) == 2


def test_failed_solves_stop_the_run_if_requested(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r'Step 1: solves failed .* failed_solves is "stop"'):
        fit(tmp_path, Classifying(FAILING), failed_solves="stop")


class _Watched(Classifying):
    """A task that records the weights at the beginning of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def loss(self, model: nn.Module, batch: Pair, step: int) -> Outcome:
        if model.training:
            self.seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        return super().loss(model, batch, step)


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    for name, clip in (("clipped", 1e-3), ("free", None)):
        task = _Watched()
        fit(tmp_path / name, task, clip_norm=clip, optimizer=Optimizer(name="sgd", lr=1.0))
        moves = [float((b - a).norm()) for a, b in zip(task.seen, task.seen[1:], strict=False)]
        assert moves == pytest.approx([1e-3] * len(moves), rel=1e-2) if clip else min(moves) > 1e-2


def test_evaluation_uses_the_average(tmp_path: Path) -> None:
    task = _Watched()
    fit(tmp_path, task, epochs=1, ema=0.9)
    run = Run.open(tmp_path)
    expected, states = task.seen[0], [*task.seen[1:], nn.utils.parameters_to_vector(run.model(task, "raw").parameters())]
    for n, state in enumerate(states):
        expected = torch.lerp(expected, state, 1 - min(0.9, (1 + n) / (10 + n)))
    for which in ("last", "best"):
        averaged = nn.utils.parameters_to_vector(run.model(task, which).parameters())
        torch.testing.assert_close(averaged, expected, rtol=1e-5, atol=1e-6)
    loader = task.batches(None, TRAINING, 0, 1).valid
    assert loader is not None
    outcome = task.evaluate(run.model(task), next(iter(loader)))
    assert run.metrics[0]["split"]["valid"]["loss"] == pytest.approx(float(outcome.loss), rel=1e-6)


class _Pretrained(Classifying):
    def __init__(self) -> None:
        super().__init__()
        self.switches: list[bool] = []
        self.seen: list[str] = []
        self.judged: set[str] = set()

    def gradient(self) -> eq.Gradient:
        return eq.Implicit()

    def pretrain(self, model: nn.Module, on: bool) -> None:
        self.switches.append(on)
        layer = model.get_submodule("2")
        assert isinstance(layer, eq.DEQ)
        layer.gradient = eq.Unrolled(depth=4) if on else eq.Implicit()

    def loss(self, model: nn.Module, batch: Pair, step: int) -> Outcome:
        layer = model.get_submodule("_forward_module.2")
        assert isinstance(layer, eq.DEQ)
        if model.training:
            self.seen.append(type(layer.gradient).__name__)
        else:
            self.judged.add(type(layer.gradient).__name__)
        return super().loss(model, batch, step)


def test_pretraining_is_switched_on_and_off(tmp_path: Path) -> None:
    task, listener = _Pretrained(), Noted()
    fit(tmp_path, task, listener, pretrain_steps=7)
    assert task.switches == [True, False] * 2  # evaluated after 5 and 10 steps are equilibria
    assert task.seen == ["Unrolled"] * 7 + ["Implicit"] * 3
    assert task.judged == {"Implicit"}
    assert listener.messages == ["Unrolled pre-training begins at step 1.", "Unrolled pre-training ends at step 8."]
    with pytest.raises(NotImplementedError, match=r"pretrain_steps needs Classifying\.pretrain"):
        fit(tmp_path / "without", pretrain_steps=7)


def test_a_run_without_a_checkpoint_may_restart_with_other_settings(tmp_path: Path) -> None:
    class Failing(Classifying):
        def model(self) -> nn.Module:
            raise ValueError("heads must divide the width.")

    with pytest.raises(ValueError, match="heads must divide"):
        fit(tmp_path, Failing(), seed=1)
    fit(tmp_path, seed=2)
    with pytest.raises(ValueError, match=r"training\.seed was 2, now 3"):
        fit(tmp_path, seed=3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_a_run_trains_in_other_precisions(precision: str, tmp_path: Path) -> None:
    fit(tmp_path, Classifying(eq.Stop(rtol=1e-2, max_steps=20, on_failure="ignore")), precision=precision)
    assert Run.open(tmp_path).metrics[-1]["split"]["train"]["loss"] < 1.2
    if precision == "64-true":
        (path,) = (tmp_path / "best").glob("step-*/model.safetensors")
        assert b'"F64"' in path.read_bytes()


class _WithoutSplits(Classifying):
    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Pair]:
        return Loaders(super().batches(root, training, rank, world_size).train)


def test_a_model_without_equilibria_and_other_splits_is_trained(tmp_path: Path) -> None:
    class Plain(_WithoutSplits):
        def model(self) -> nn.Module:
            return nn.Linear(6, 3)

    summary = fit(tmp_path, Plain())
    assert summary.final["split"].keys() == {"train"} and summary.final["split"]["train"].keys() == {"loss", "accuracy"}
    assert summary.best["by"]["split"] == "train" and summary.final["failed_share"] == 0.0


def test_a_missing_metric_is_named(tmp_path: Path) -> None:
    task = Classifying()
    task.better = ("f1", "max")
    with pytest.raises(ValueError, match="better is 'f1', but the metrics of valid are loss, accuracy"):
        fit(tmp_path, task)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not the folder of a run: it has no config\.json"):
        Run.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="it does not exist"):
        Run.open(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"training": {}}))
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in .* yet"):
        Run.open(tmp_path).model(Classifying())
    with pytest.raises(ValueError, match="no choice of weights 'first'"):
        Run.open(tmp_path).model(Classifying(), "first")


def test_strict_json_has_no_nan(tmp_path: Path) -> None:
    class Undefined(Classifying):
        def evaluate(self, model: nn.Module, batch: Pair) -> Outcome:
            outcome = super().evaluate(model, batch)
            return dataclasses.replace(outcome, metrics={**outcome.metrics, "ratio": math.nan})

    fit(tmp_path, Undefined())
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert Run.open(tmp_path).metrics[0]["split"]["valid"]["ratio"] is None


def test_only_the_first_run_of_a_process_reports_peak_memory(tmp_path: Path) -> None:
    for name in ("first", "second"):
        fit(tmp_path / name, epochs=1)
    assert Run.open(tmp_path / "second").metrics[-1]["peak_bytes"] is None
    peak = peak_bytes(torch.device("cpu"), alone=True)
    assert peak is None or peak > 0
