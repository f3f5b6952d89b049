"""Parts that the CIFAR-10 tables of multiscale DEQs share: columns, images, schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equilibria.lab.experiments.definitions import Column, Experiment, Scale
from equilibria.lab.experiments.image_task import ImageData
from equilibria.lab.training.settings import Schedule, Training
from equilibria.lab.training.task import Task

COSINE = Schedule(name="cosine", final=1e-3)
COLUMNS = (
    Column("parameters", "parameters", "summary.parameters", digits=0),
    Column("accuracy", "test accuracy, %", "test.accuracy", factor=100),
    Column("nfe", "test NFE", "test.evaluations", digits=1),
    Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    Column("backward", "backward pass, ms", "seconds_backward", digits=1, factor=1e3),
    Column("peak", "peak memory of the process, MB", "peak_bytes", digits=0, factor=1e-6, epochs="max"),
    Column("residual", "residual, test", "test.residual", digits=4),
    Column("radius", "spectral radius", "test.spectral_radius", digits=3),
)


def images(scale: Scale, augmented: bool) -> ImageData:
    """Return the images of a scale; only the full scale is augmented."""
    if scale == "debug":
        return ImageData(name="digits", train=64, test=32)
    if scale == "reduced":
        return ImageData(name="cifar10", train=6_000, test=2_000, size=16)
    return ImageData(name="cifar10", crop=4, flip=True) if augmented else ImageData(name="cifar10")


def experiment(
    name: str, summary: str, settings: Any, training: Training, make: Callable[[Any], Task[Any]], scale: Scale
) -> Experiment[Any]:
    """Return an Experiment with positional arguments."""
    return Experiment(name=name, summary=summary, settings=settings, training=training, make=make, scale=scale)
