"""The tables of "JFB: Jacobian-Free Backpropagation for Implicit Networks" (Fung and others 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

from equilibria.lab.experiments.claims import Claim, at_least, higher
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Scale, Table, TableRow
from equilibria.lab.experiments.image_task import GUESS, ImageData
from equilibria.lab.experiments.jfb.task import (
    Flowing,
    ImplicitResNetSettings,
    ImplicitResNetTask,
    NeuralODESettings,
    Plain,
    PlainSettings,
)
from equilibria.lab.experiments.monotone.task import Monotone, MonotoneSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

JFBSet = Literal["mnist", "svhn", "cifar10"]

SOURCE = (
    "Fung, Heaton, Li, McKenzie, Osher and Yin 2022, JFB: Jacobian-Free Backpropagation for Implicit Networks, "
    "arXiv:2103.12803, Tables 1 and 2"
)
TITLES = {
    "explicit": "explicit twin",
    "node": "Neural ODE",
    "anode": "augmented Neural ODE",
    "mon": "MON",
    "resnet": "ResNet-56",
    "jfb": "implicit ResNet, JFB",
    "jacobian": "implicit ResNet, exact gradient",
}
# accuracy %, seconds of an epoch; the Neural ODEs' and MON's figures are those of their own papers
_PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "explicit": {"accuracy": 99.4},
        "node": {"accuracy": 96.4},
        "anode": {"accuracy": 98.2},
        "mon": {"accuracy": 99.2},
        "jfb": {"accuracy": 99.4, "epoch": 17.6},
        "jacobian": {"accuracy": 99.2, "epoch": 28.4},
    },
    "svhn": {
        "explicit": {"accuracy": 93.7},
        "node": {"accuracy": 81.0},
        "anode": {"accuracy": 83.5},
        "mon": {"accuracy": 92.3},
        "jfb": {"accuracy": 94.1, "epoch": 36.9},
        "jacobian": {"accuracy": 90.1, "epoch": 92.8},
    },
    "cifar10": {
        "explicit": {},
        "resnet": {"accuracy": 93.0},
        "mon": {"accuracy": 89.7},
        "jfb": {"accuracy": 93.7, "epoch": 146.6},
        "jacobian": {"accuracy": 87.9, "epoch": 530.9},
    },
}
_FASTER = {"mnist": 1.6, "svhn": 2.5, "cifar10": 3.6}
# optimiser and epochs of the implicit ResNets; batch 100
_FULL = {
    "mnist": (Optimizer(lr=2e-4, weight_decay=1e-6), Schedule(), 100),
    "svhn": (Optimizer(lr=1e-4, weight_decay=2e-4), Schedule(), 100),
    "cifar10": (
        Optimizer(lr=1e-3, weight_decay=1e-3),
        Schedule(name="step", milestones=(0.2, 0.4, 0.6, 0.8), factor=0.5),
        1000,
    ),
}
_TIERS = {"mnist": (16, 32, 32), "svhn": (16, 32, 60), "cifar10": (64, 128, 128)}
_EPOCHS: dict[str, dict[str, int]] = {  # of the reduced scale
    "mnist": {"explicit": 3, "jfb": 3, "jacobian": 3, "mon": 2, "node": 3, "anode": 3},
    "svhn": {"explicit": 5, "jfb": 5, "jacobian": 5, "mon": 2, "node": 2, "anode": 2},
    "cifar10": {"explicit": 5, "resnet": 5, "mon": 2, "jfb": 5, "jacobian": 5},
}
_IMAGES: dict[str, dict[str, int | None]] = {  # of the reduced scale, to train on
    "mnist": {"explicit": None, "jfb": None, "jacobian": None, "mon": 5_000, "node": 2_000, "anode": 2_000},
    "svhn": {"explicit": 3_000, "jfb": 3_000, "jacobian": 3_000, "mon": 2_000, "node": 500, "anode": 1_000},
    "cifar10": {"explicit": 6_000, "resnet": 6_000, "mon": 1_000, "jfb": 6_000, "jacobian": 6_000},
}


def experiment(data: JFBSet, row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a row of Table 1, or of the table of times."""
    images = _images(data, row, scale)
    settings, make = _settings(data, row, scale, images)
    return Experiment(
        name=f"jfb-{data}-{row}",
        summary=f"{TITLES[row]} on {data}",
        settings=settings,
        training=_training(data, row, scale),
        make=make,
        scale=scale,
    )


def _images(data: JFBSet, row: str, scale: Scale) -> ImageData:
    if scale == "debug":
        return ImageData(name="digits", train=64, test=32, size=12)
    if scale == "reduced":
        return ImageData(name=data, train=_IMAGES[data][row], test=None if data == "mnist" else 2_000)
    return ImageData(name=data, crop=2, flip=True, erase=0.95) if data == "cifar10" else ImageData(name=data)


def _settings(data: JFBSet, row: str, scale: Scale, images: ImageData) -> tuple[Any, Any]:
    small = scale != "full"
    match row:
        case "node" | "anode":
            filters = 92 if data == "mnist" else 124
            sizes: dict[str, Any] = {"filters": filters}
            if row == "anode":
                sizes = {"filters": 64, "augment": 5 if data == "mnist" else 10}
            flow = NeuralODESettings(data=images, method="heun" if small else "dopri5", steps=4 if small else None, **sizes)
            return flow, Flowing
        case "mon":
            conv = MonotoneSettings(data=images, kind="conv", channels=(4,))
            return (
                conv if scale == "debug" else MonotoneSettings(data=images, kind="tiers", channels=_TIERS[data])
            ), Monotone
        case "resnet":
            return PlainSettings(data=images, depth=8 if scale == "debug" else 20 if small else 56), Plain
    limits: dict[str, Any] = {"by": row, **_limits(data, row, small)}
    return ImplicitResNetSettings(data=images, kind=data, blocks=2 if small else 32, **limits), ImplicitResNetTask


def _limits(data: JFBSet, row: str, small: bool) -> dict[str, Any]:
    """Return tolerance and step limit if they differ from those of the published network."""
    if small:
        by_data: dict[str, dict[str, Any]] = {"svhn": {"tolerance": 1e-2, "max_steps": 30}, "cifar10": {"max_steps": 20}}
        return by_data.get(data, {})
    return {"tolerance": 1e-4, "max_steps": 500} if data == "cifar10" and row == "jacobian" else {}


def _training(data: JFBSet, row: str, scale: Scale) -> Training:
    if scale != "full":
        return Training(
            epochs=1 if scale == "debug" else _EPOCHS[data][row],
            batch_size=32 if scale == "debug" else 100,
            eval_batch_size=32 if scale == "debug" else 250,
            optimizer=Optimizer(lr=1e-3),
            schedule=Schedule(name="cosine"),
        )
    if row in ("node", "anode"):
        return Training(epochs=20, batch_size=256, optimizer=Optimizer(lr=1e-3))
    if row == "mon" and data == "cifar10":
        # the recipe for augmented CIFAR-10, which all rows of this table have
        cycle = Schedule(name="one-cycle")
        return Training(epochs=65, batch_size=128, optimizer=Optimizer(lr=1e-2), schedule=cycle)
    if row == "mon":
        step = Schedule(name="step", milestones=(0.25, 0.5, 0.75))
        return Training(epochs=40, batch_size=128, optimizer=Optimizer(lr=1e-3), schedule=step)
    optimizer, schedule, epochs = _FULL[data]
    return Training(epochs=epochs, batch_size=100, eval_batch_size=250, optimizer=optimizer, schedule=schedule)


def _row(data: JFBSet, name: str, published: Mapping[str, float]) -> TableRow:
    figures = {column: Figure(value) for column, value in published.items()}
    return TableRow(name, TITLES[name], partial(experiment, data, name), figures, _run_as(data, name))


def _run_as(data: JFBSet, row: str) -> dict[Scale, str]:
    """Return the titles of the networks that the smaller scales run in place of the published one."""
    if row == "resnet":
        return {"debug": "ResNet-8", "reduced": "ResNet-20"}
    if row in ("node", "anode"):
        return dict.fromkeys(("debug", "reduced"), f"{TITLES[row]}, 4 steps of Heun's method")
    if data == "cifar10" and row in ("explicit", "jfb", "jacobian"):
        return dict.fromkeys(("debug", "reduced"), f"{TITLES[row]}, encoder of 2 blocks")
    return {}


def _claims(data: str) -> tuple[Claim, ...]:
    return (
        at_least(
            "epoch",
            "jacobian",
            "jfb",
            _FASTER[data],
            f"JFB trains an epoch at least {_FASTER[data]} times faster than the exact gradient, as published",
            id="C5",
        ),
        higher("accuracy", "jfb", "jacobian", "JFB is at least as accurate as the exact gradient", id="C5"),
        higher("accuracy", "jfb", "explicit", "the implicit network is at least as accurate as its explicit twin", id="C6"),
        at_least(
            "step",
            "jfb",
            "explicit",
            1.0,
            "a step of the implicit network takes longer than one of the explicit network",
            id="C11",
        ),
    )


_NOTES: dict[str, tuple[str, ...]] = {
    "mnist": (
        "Reduced: 60,000 images, 3 epochs, Adam 1e-3 with a cosine to 0, batch 100 (full: 2e-4, decay 1e-6, 100 epochs). "
        "MON on 5,000 images for 2 epochs, the Neural ODEs on 2,000 for 3, with 4 steps of Heun's method.",
    ),
    "svhn": (
        "Reduced: the SVHN subset of 12,000 and 5,000 re-cropped images where the official files are not at hand; 3,000 of "
        "them, 5 epochs, Adam 1e-3 with a cosine to 0, batch 100; equilibria to 0.01 within 30 steps (full: 1e-4, 200). MON "
        "on 2,000 images for 2 epochs, NODE on 500 and ANODE on 1,000 for 2, with 4 steps of Heun's method.",
    ),
    "cifar10": (
        "Reduced: 6,000 images without augmentation, 5 epochs, Adam 1e-3 with a cosine to 0, batch 100; encoder of 2 blocks "
        "in place of 32, ResNet-20 in place of ResNet-56, at most 20 steps; MON on 1,000 images for 2 epochs.",
    ),
}
_FULL_NOTES = {
    "mnist": "100 epochs of Adam 2e-4, decay 1e-6, batch 100; MON: 40 epochs of Adam 1e-3, a tenth every 10.",
    "svhn": "100 epochs of Adam 1e-4, decay 2e-4, batch 100; MON: 40 epochs of Adam 1e-3, a tenth every 10.",
    "cifar10": "1,000 epochs of Adam 1e-3, decay 1e-3, halved every 200, batch 100; MON: 65 epochs of one cycle up to 0.01.",
}
_COMMON = (
    "The exact gradient is by conjugate gradients on the normal equations to 1e-3, with the limit of the forward solve, on "
    "the network without latent batch norms; weights of the cell are scaled after a step where it does not contract.",
    "The published accuracies of the Neural ODEs and MON are those of their own papers. Published seconds are of the "
    "authors' GPU. The test set is never augmented, unlike in the released script.",
)


def _table(data: JFBSet) -> Table:
    published = _PUBLISHED[data]
    notes = (*_NOTES[data], *_COMMON)
    return Table(
        name=f"jfb-{data}",
        title=f"JFB: implicit ResNets on {data}",
        source=SOURCE,
        rows=tuple(_row(data, name, figures) for name, figures in published.items()),
        columns=(
            Column("parameters", "parameters", "summary.parameters", digits=0),
            Column("accuracy", "test accuracy, %", "test.accuracy", factor=100),
            Column("epoch", "epoch, s", "seconds_train", digits=1),
            Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
            Column("backward", "backward pass, ms", "seconds_backward", digits=1, factor=1e3),
            Column("evaluations", "evaluations, training", "train.evaluations", digits=1),
            Column("products", "products with the Jacobian in a step", "train.adjoint_evaluations", digits=1),
            Column("failed", "failed solves, test, %", "test.failed", factor=100),
            Column("radius", "spectral radius", "test.spectral_radius", digits=3),
        ),
        claims=_claims(data),
        guess={"accuracy": GUESS[data]},
        protocol={
            "debug": ("Debug scale: 64 digits of 12x12 pixels, 1 epoch. It proves nothing.", *_COMMON),
            "reduced": notes,
            "full": ("The published protocol.", _FULL_NOTES[data], *_COMMON),
        },
    )


def tables() -> tuple[Table, ...]:
    return tuple(_table(data) for data in get_args(JFBSet))
