"""Load the experiment and the model of a finished run, and evaluate it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from equilibria.lab.errors import SettingError, UnnamedCodeError
from equilibria.lab.experiments.catalogue import experiment
from equilibria.lab.experiments.definitions import SCALES, Experiment
from equilibria.lab.training.evaluating import evaluate_split
from equilibria.lab.training.folder import CONFIG, RESTORE, Run
from equilibria.lab.training.processes import deterministic, make_fabric, other_rng
from equilibria.lab.training.task import Loader


def experiment_of(run: Run, named: str | None = None) -> Experiment[Any]:
    """Return the experiment of a run with the settings of its config.json.

    named  FILE.py:NAME or package.module:NAME if it is an experiment of the user. Only what the caller names is imported,
           never what config.json names, since the folder may come from somebody else
    """
    name = run.config.get("experiment")
    file, scale = run.folder / CONFIG, run.config.get("scale", "full")
    if not isinstance(name, str):
        raise ValueError(f"{file} names no experiment. Pass a folder written by `equilibria train`.")
    if scale not in SCALES:
        raise ValueError(f"{file} has the scale {scale!r}, expected one of {', '.join(SCALES)}. {RESTORE}")
    if named is not None and ":" not in named:
        raise SettingError(f"Expected FILE.py:NAME or package.module:NAME, got {named!r}.")
    if named is not None and ":" not in name:
        raise SettingError(f"{file} names {name!r}, an experiment that is installed. Leave out {named!r}.")
    if named is None and ":" in name:
        raise UnnamedCodeError(
            f"{file} names the experiment {name!r}, which is not installed. What a folder names is not imported, because "
            "the folder may come from somebody else, and importing runs code. If you know and trust this code, name it "
            "yourself: --experiment FILE.py:NAME on the command line, named=... in Python.",
            name,
        )
    try:
        return experiment(named or name, scale).restored(run.config)
    except ValueError as error:
        raise ValueError(f"{file} does not fit this version: {error} {RESTORE}") from error


def evaluate(run: Run, *, which: str = "last", root: Path | None = None, named: str | None = None) -> dict[str, float]:
    """Return the metrics on the test split; without one on the validation split, or else on the training split."""
    e = experiment_of(run, named)
    return measure(e, run.model(e.task(), which), root)


def measure(e: Experiment[Any], model: nn.Module, root: Path | None = None) -> dict[str, float]:
    """Return the metrics of a model on the test split of an experiment; without one on validation, or else on training."""
    task, training = e.task(), e.training
    fabric = make_fabric(1, "auto", "auto", training.precision)
    model = fabric.setup_module(model).eval()
    # the random numbers with which the run evaluated its last epoch
    with deterministic(), other_rng(training.seed, training.epochs, 0):
        meter = evaluate_split(task, model, _held_out(e, root), fabric)
    return task.summarise(meter.means())


def model_and_batch(
    run: Run, *, which: str = "last", root: Path | None = None, named: str | None = None
) -> tuple[nn.Module, Any]:
    """Return the model of a run and the inputs of one batch, for diagnosis."""
    e = experiment_of(run, named)
    first = next(iter(_held_out(e, root)))
    return run.model(e.task(), which), first[0] if isinstance(first, (tuple, list)) else first


def _held_out(e: Experiment[Any], root: Path | None) -> Loader[Any]:
    """Return the first of test, validation and training batches that the task has."""
    loaders = e.task().batches(root, e.training, 0, 1)
    return loaders.test or loaders.valid or loaders.train
