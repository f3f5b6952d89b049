"""Phantom gradients in multiscale DEQs on CIFAR-10 (Geng, Zhang, Bai, Wang and Lin 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from equilibria.lab.experiments.claims import Claim, at_least, column_higher, column_lower, higher, lower, value_at_least
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.image_task import GUESS, ImageData
from equilibria.lab.experiments.mdeq.cifar import COLUMNS, COSINE, experiment, images
from equilibria.lab.experiments.mdeq.task import MDEQGradientName, MDEQOptions, MDEQSettings, Multiscale
from equilibria.lab.training.settings import Optimizer, Training

PHANTOM, LARGE = "phantom-cifar10", "phantom-cifar10-large"
SOURCE = "Geng, Zhang, Bai, Wang and Lin 2021, On Training Implicit Models, arXiv:2111.05177"
COSINES = (1, 3, 5, 9, 15)  # numbers of steps of the phantom gradients that are compared with the exact one
TIGHT = 1e-6  # not reached by nano models within the published limits, so that their solves take all steps


@dataclass(frozen=True)
class _MDEQRecipe:
    """The settings of a column of Table 1, with its published accuracy."""

    title: str
    accuracy: Figure | None
    gradient: MDEQGradientName = "implicit"
    steps: int = 5
    optimizer: Literal["adam", "sgd"] = "adam"
    pretraining: bool = True
    dropout: bool = True
    cosines: tuple[int, ...] = ()
    reduced_lr: float = 0.1  # learning rate of SGD at the reduced scale; with NPG a nano model diverges at 0.1
    adaptive: bool = False  # stop at a relative residual of 0.001, as the library does; else run to the limit of steps


_RECIPES = {
    "implicit": _MDEQRecipe("implicit", Figure(85.0, 0.2)),
    "implicit-no-pretraining": _MDEQRecipe("implicit, no pre-training", Figure(82.3, 1.3), pretraining=False),
    "implicit-no-dropout": _MDEQRecipe("implicit, no dropout", Figure(83.7, 0.1), dropout=False),
    "implicit-sgd": _MDEQRecipe("implicit, SGD", Figure(84.5, 0.3), optimizer="sgd"),
    "implicit-sgd-no-pretraining": _MDEQRecipe(
        "implicit, SGD, no pre-training", Figure(82.9, 1.5), optimizer="sgd", pretraining=False, cosines=COSINES
    ),
    "implicit-sgd-adaptive": _MDEQRecipe(
        "implicit, SGD, no pre-training, to 0.001", None, optimizer="sgd", pretraining=False, adaptive=True
    ),
    "upg": _MDEQRecipe(
        "UPG, 5 steps",
        Figure(85.8, 0.5),
        "upg",
        optimizer="sgd",
        pretraining=False,
        dropout=False,
        cosines=COSINES,
    ),
    "npg": _MDEQRecipe(
        "NPG, 5 steps",
        Figure(85.6, 0.5),
        "npg",
        optimizer="sgd",
        reduced_lr=0.03,
        pretraining=False,
        dropout=False,
        cosines=COSINES,
    ),
    "upg-9": _MDEQRecipe("UPG, 9 steps, dropout", Figure(86.1, 0.5), "upg", 9, optimizer="sgd", pretraining=False),
}
_SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
_ADAM = Optimizer(lr=1e-3, weight_decay=2.5e-6)


def phantom(name: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a column of Table 1, the ablation on MDEQ-TINY."""
    recipe, full = _RECIPES[name], scale == "full"
    dropout = (0.25 if full else 0.1) if recipe.dropout else 0.0
    model = MDEQOptions(
        size="cifar-tiny-2021" if full else "nano",
        solver="broyden" if full else "anderson",
        gradient=recipe.gradient,
        phantom_steps=recipe.steps,
        dropout=dropout,
        forward_steps=22 if full else None,
        backward_steps=24 if full else None,
        tolerance=None if recipe.adaptive or full else TIGHT,
        pretraining_depth=10 if full else 5,
    )
    settings = MDEQSettings(
        data=images(scale, augmented=False),
        model=model,
        cosines=recipe.cosines if scale != "debug" else recipe.cosines[:1],
        cosines_every=1000 if full else 60,
    )
    sgd = _SGD if full else replace(_SGD, lr=recipe.reduced_lr)
    pretraining = {"debug": 1, "reduced": 60, "full": 3000}[scale] if recipe.pretraining else 0
    training = Training(
        epochs={"debug": 1, "reduced": 3, "full": 50}[scale],
        batch_size={"debug": 32, "reduced": 64, "full": 128}[scale],
        eval_batch_size=32 if scale == "debug" else 200,
        optimizer=sgd if recipe.optimizer == "sgd" else _ADAM,
        schedule=COSINE,
        pretrain_steps=pretraining,
    )
    return experiment(f"{PHANTOM}-{name}", f"MDEQ on CIFAR-10, {recipe.title}", settings, training, Multiscale, scale)


def _cost_claims() -> tuple[Claim, ...]:
    faster_step = "a training step with UPG is at least 1.4 times faster than an implicit one"
    faster = {
        "implicit-sgd-no-pretraining": faster_step,
        "implicit-sgd-adaptive": f"{faster_step} that stops at a residual of 0.001",
    }
    return (
        *(at_least("step", row, "upg", 1.4, text, id="C7") for row, text in faster.items()),
        *(
            higher(
                "accuracy",
                row,
                "implicit",
                f"{row.upper()} is at most 0.5 points less accurate than implicit training",
                by=-0.5,
                id=id,
            )
            for row, id in (("upg", "C7"), ("npg", ""))
        ),
    )


def _cosine_claims() -> tuple[Claim, ...]:
    positive = (
        value_at_least(
            f"low_upg_{k}",
            "upg",
            0.0,
            f"UPG of {k} step{'s' * (k > 1)} is an ascent direction in every epoch: its cosine with the exact "
            "gradient is positive",
            id="C8",
        )
        for k in COSINES
    )
    below = "of 15 steps, NPG's cosine is below UPG's in the model trained with NPG, by 0.01 or more"
    npg_falls = "in the model trained with NPG, NPG's cosine falls from 5 to 15 steps, by 0.01 or more"
    upg_holds = "in the model trained with UPG, UPG's cosine does not fall from 5 to 15 steps"
    return (
        *positive,
        column_higher("upg_9", "upg_1", "upg", "the cosine rises with the steps, from 1 to 9", id="C8"),
        column_lower("npg_15", "upg_15", "npg", below, by=0.01, id="C9"),
        column_lower("npg_15", "npg_5", "npg", npg_falls, by=0.01, id="C9"),
        column_higher("upg_15", "upg_5", "upg", upg_holds, id="C9"),
    )


def _pretraining_claims() -> tuple[Claim, ...]:
    adam, sgd = "implicit-no-pretraining", "implicit-sgd-no-pretraining"
    loses = "implicit training loses accuracy without pre-training (published: 2.7 points)"
    loses_sgd = "implicit training with SGD loses accuracy without pre-training (published: 1.6 points)"
    upg = "UPG, without pre-training, is more accurate than implicit training without it"
    return (
        lower("accuracy", adam, "implicit", loses, id="C14"),
        lower("accuracy", sgd, "implicit-sgd", loses_sgd, id="C14"),
        higher("accuracy", "upg", sgd, upg, id="C14"),
    )


def _phantom_table() -> Table:
    names = [(f"{kind}_{k}", kind, k) for kind in ("upg", "npg") for k in COSINES]
    cosines = tuple(
        Column(name, f"cosine of {kind.upper()}, {k} steps", f"train.cosine_{name}", digits=4, epochs="mean")
        for name, kind, k in names
    )
    lows = tuple(
        Column(f"low_{name}", f"lowest cosine of {kind.upper()}, {k} steps", f"train.cosine_{name}", digits=4, epochs="min")
        for name, kind, k in names
    )
    notes = ("UPG and NPG with damping 0.5; cosines with the exact gradient of the cell's weights on 16 training images.",)
    return Table(
        name=PHANTOM,
        title="Phantom gradients: MDEQ on CIFAR-10",
        source=f"{SOURCE}, Table 1",
        rows=tuple(
            TableRow(
                name,
                recipe.title,
                partial(phantom, name),
                {} if recipe.accuracy is None else {"accuracy": recipe.accuracy},
                {"debug": f"nano MDEQ, {recipe.title}", "reduced": f"nano MDEQ, {recipe.title}"},
            )
            for name, recipe in _RECIPES.items()
        ),
        columns=(*COLUMNS, Column("known", "gradients compared, %", "train.cosines_known", factor=100, epochs="mean")),
        hidden=(*cosines, *lows),
        guess={"accuracy": GUESS["cifar10"]},
        claims=(*_cost_claims(), *_cosine_claims(), *_pretraining_claims()),
        profiles=tuple(
            Profile(
                name=f"cosine-{kind}",
                title=f"Cosine of {kind.upper()} with the exact gradient, mean over training",
                x_label="steps",
                y_label="cosine",
                points=tuple((k, f"{kind}_{k}") for k in COSINES),
            )
            for kind in ("upg", "npg")
        ),
        protocol={
            "debug": ("Debug scale: 64 digits of 8x8 pixels, 1 epoch. It proves nothing.", *notes),
            "reduced": (
                "Reduced: nano MDEQ on 6,000 images averaged to 16x16 pixels, 3 epochs of 93 steps of 64, of them 60 "
                "of pre-training over 5 layers; Adam 1e-3 or SGD 0.1 (NPG: 0.03), momentum 0.9, decay 1e-4, cosine; dropout "
                "0.1; Anderson's method with 18 steps, GMRES with 20 backward; 2,000 test images.",
                "Published solves run into their limit of steps, and so do these, whose tolerance is 1e-6; one row stops at "
                "0.001, where a nano model needs no more than a dozen evaluations either way.",
                *notes,
            ),
            "full": (
                "50 epochs, batch 128, dropout 0.25, 3,000 steps of pre-training over 10 layers; Broyden's method with 22 "
                "steps, backward 24, as in the released configuration.",
                *notes,
            ),
        },
    )


def large(name: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a CIFAR-10 row of Table 3: MDEQ of ten million parameters."""
    size = {"debug": "nano", "reduced": "cifar-large-2021", "full": "cifar-large-2021"}[scale]
    upg = name == "upg"
    model = MDEQOptions(size=size, gradient="upg" if upg else "implicit", dropout=0.0 if upg else None)
    data = images(scale, augmented=True)
    if scale == "reduced":
        data = ImageData(name="cifar10", train=40, test=8)
    training = Training(
        epochs={"debug": 1, "reduced": 1, "full": 220}[scale],
        batch_size={"debug": 32, "reduced": 8, "full": 128}[scale],
        eval_batch_size={"debug": 32, "reduced": 8, "full": 200}[scale],
        optimizer=_SGD if upg else _ADAM,
        schedule=COSINE,
        pretrain_steps=20_000 if scale == "full" and not upg else 0,
    )
    settings = MDEQSettings(data=data, model=model)
    return experiment(f"{LARGE}-{name}", f"MDEQ, 10M, {name}", settings, training, Multiscale, scale)


def _large_table() -> Table:
    rows = {"implicit": ("implicit", Figure(93.8, 0.17)), "upg": ("UPG, 5 steps", Figure(95.0, 0.16))}
    return Table(
        name=LARGE,
        title="Phantom gradients: MDEQ of 10M parameters on CIFAR-10",
        source=f"{SOURCE}, Table 3",
        rows=tuple(
            TableRow(name, title, partial(large, name), {"accuracy": accuracy}) for name, (title, accuracy) in rows.items()
        ),
        columns=(*COLUMNS, Column("speed", "speed over implicit", "seconds_step", over="implicit")),
        claims=(
            value_at_least(
                "speed",
                "upg",
                1.4,
                "a training step with UPG is at least 1.4 times faster than an implicit one, as published",
                id="C7",
            ),
        ),
        protocol={
            "debug": ("Debug scale: nano MDEQ on 64 digits. It proves nothing.",),
            "reduced": ("Reduced: 5 steps on 8 images each, which tell the time of a step and nothing of accuracy.",),
            "full": ("220 epochs; implicit: Adam 1e-3, dropout 0.3, 20,000 steps of pre-training; UPG: SGD 0.1, none.",),
        },
    )


def tables() -> tuple[Table, ...]:
    return _phantom_table(), _large_table()
