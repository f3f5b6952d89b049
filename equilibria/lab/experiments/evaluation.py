"""A run that is over, taken up again: its experiment, its model, and its metrics on a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from equilibria._core.recording import record
from equilibria.lab.experiments.catalogue import experiment
from equilibria.lab.experiments.definitions import SCALES, Experiment
from equilibria.lab.training.folder import CONFIG, RESTORE, Run
from equilibria.lab.training.statistics import Meter, observe
from equilibria.lab.training.task import Loader


def experiment_of(run: Run) -> Experiment[Any]:
    """The experiment that a run was made with, its settings as they were."""
    name = run.config.get("experiment")
    file, scale = run.folder / CONFIG, run.config.get("scale", "full")
    if not isinstance(name, str):
        raise ValueError(f"{file} names no experiment. Pass a folder written by `equilibria train`.")
    if scale not in SCALES:
        raise ValueError(f"{file} has the scale {scale!r}, expected one of {', '.join(SCALES)}. {RESTORE}")
    try:
        return experiment(name, scale).restored(run.config)
    except ValueError as error:
        raise ValueError(f"{file} does not fit this version: {error} {RESTORE}") from error


def evaluate(run: Run, *, which: str = "last", root: Path | None = None) -> dict[str, float]:
    """Metrics on the test split, or where there is none on the validation split."""
    e = experiment_of(run)
    task = e.task()
    model = run.model(task, which)
    meter = Meter()
    for batch in _held_out(e, root):
        with torch.no_grad(), record(model) as solutions:
            outcome = task.evaluate(model, batch)
        meter.add_batch(observe(outcome, solutions))
    return task.summarise(meter.means())


def model_and_batch(run: Run, *, which: str = "last", root: Path | None = None) -> tuple[nn.Module, Any]:
    """The model of a run and the inputs of one batch, to look at."""
    e = experiment_of(run)
    first = next(iter(_held_out(e, root)))
    return run.model(e.task(), which), first[0] if isinstance(first, (tuple, list)) else first


def _held_out(e: Experiment[Any], root: Path | None) -> Loader[Any]:
    loaders = e.task().batches(root, e.training, 0, 1)
    return loaders.test or loaders.valid or loaders.train
