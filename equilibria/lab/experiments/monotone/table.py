"""Monotone operator networks after one epoch, as in the notebook released with their paper (Winston and Kolter 2020)."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import Claim, value_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Scale, Table, TableRow
from equilibria.lab.experiments.image_task import ImageData, ImageSet
from equilibria.lab.experiments.monotone.task import Monotone, MonotoneSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

MON = "mon"
_KINDS = {"mlp": "dense", "conv": "one convolution", "tiers": "pyramid"}
# data, kind, channels, method, published error % after one epoch
_ROWS: dict[str, tuple[ImageSet, str, tuple[int, ...], str, float | None]] = {
    "mlp-mnist": ("mnist", "mlp", (87,), "peaceman-rachford", 5.57),
    "mlp-mnist-fb": ("mnist", "mlp", (87,), "forward-backward", None),
    "conv-mnist": ("mnist", "conv", (54,), "peaceman-rachford", 2.56),
    "tiers-mnist": ("mnist", "tiers", (16, 32, 32), "peaceman-rachford", 3.69),
    "conv-svhn": ("svhn", "conv", (81,), "peaceman-rachford", 21.8),
    "tiers-svhn": ("svhn", "tiers", (16, 32, 60), "peaceman-rachford", 20.7),
    "conv-cifar10": ("cifar10", "conv", (81,), "peaceman-rachford", 44.2),
    "tiers-cifar10": ("cifar10", "tiers", (16, 32, 60), "peaceman-rachford", 46.0),
}


def experiment(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a row: a network on a set of images."""
    data, kind, channels, method, _ = _ROWS[row]
    options: dict[str, Any] = {"kind": kind, "channels": channels, "method": method}
    images = ImageData(name=data)
    if scale == "debug":
        images, options["channels"] = ImageData(name="digits", train=64, test=32), (4,) * len(channels)
    late = kind == "conv" and data != "mnist"  # the rate falls once, after 25 epochs; in other rows every 10 epochs
    falling = Schedule(name="step", milestones=(0.625,) if late else (0.25, 0.5, 0.75))
    return Experiment(
        name=f"{MON}-{row}",
        summary=f"monotone operator network, {_KINDS[kind]}, on {data}",
        settings=MonotoneSettings(data=images, **options),
        training=Training(
            epochs=40 if scale == "full" else 1,
            batch_size=32 if scale == "debug" else 128,
            eval_batch_size=250,
            optimizer=Optimizer(lr=1e-2 if data == "cifar10" and kind == "tiers" else 1e-3),
            schedule=falling if scale == "full" else Schedule(),
        ),
        make=Monotone,
        scale=scale,
    )


def _row(name: str) -> TableRow:
    data, kind, _, method, published = _ROWS[name]
    title = f"{_KINDS[kind]}, {data}{', forward-backward' if method == 'forward-backward' else ''}"
    return TableRow(name, title, partial(experiment, name), {} if published is None else {"error": Figure(published)})


def _claims() -> tuple[Claim, ...]:
    found = []
    for name, (data, *_, published) in _ROWS.items():
        if published is not None and data != "svhn":
            found.append(
                value_at_most(
                    "error",
                    name,
                    published + 1.0,
                    f"{_row(name).title}: the error after one epoch is at most a point above the published one",
                )
            )
        if name.endswith("mnist"):
            found.append(
                value_at_most(
                    "steps",
                    name,
                    9.0,
                    f"{_row(name).title}: Peaceman-Rachford splitting takes at most 9 steps, as published",
                )
            )
    return tuple(found)


def tables() -> tuple[Table, ...]:
    notes = (
        "Adam 1e-3 (pyramid on CIFAR-10: 1e-2), batch 128, no augmentation; Peaceman-Rachford splitting to 0.01 within "
        "300 steps, its alpha chosen anew every 100 steps by trial from 1 on; forward-backward with half the largest alpha.",
        "SVHN: where the official files are not at hand, a subset of 12,000 and 5,000 re-cropped images, a sixth of the "
        "training set: its errors are not those of the published column.",
    )
    return (
        Table(
            name=MON,
            title="Monotone operator networks after one epoch",
            source="Winston and Kolter 2020, Monotone operator equilibrium networks, arXiv:2006.08591, its notebook",
            rows=tuple(map(_row, _ROWS)),
            columns=(
                Column("parameters", "parameters", "summary.parameters", digits=0),
                Column("error", "test error after one epoch, %", "test.error", factor=100, epochs="first"),
                Column("last", "test error at the end, %", "test.error", factor=100),
                Column("steps", "steps of a solve, test", "test.depth", digits=1),
                Column("train_steps", "steps of a solve, training", "train.depth", digits=1),
                Column("adjoint", "evaluations of the adjoint", "train.adjoint_evaluations", digits=1),
                Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
                Column("failed", "failed solves, %", "test.failed", factor=100),
            ),
            claims=_claims(),
            protocol={
                "debug": ("Debug scale: 64 digits of 8x8 pixels, small networks. It proves nothing.", *notes),
                "reduced": ("One epoch on all images.", *notes),
                "full": ("40 epochs, the rate falling to a tenth every 10 (convolution on SVHN and CIFAR-10: 25).", *notes),
            },
        ),
    )
