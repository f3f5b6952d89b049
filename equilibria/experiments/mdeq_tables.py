"""Multiscale DEQs on CIFAR-10: Jacobian regularization (Bai and others 2021), phantom gradients (Geng and others 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from equilibria.experiments.base import Claim, Column, Experiment, Figure, Profile, Row, Scale, Table
from equilibria.experiments.images import ImageData
from equilibria.experiments.mdeq_task import Differentiating, MDEQOptions, MDEQSettings, Multiscale
from equilibria.experiments.vision_tasks import Plain, PlainSettings
from equilibria.training.settings import Optimizer, Schedule, Training

JR, PHANTOM, LARGE = "jr-cifar10", "phantom-cifar10", "phantom-cifar10-large"
JR_SOURCE = (
    "Bai, Koltun and Kolter 2021, Stabilizing Equilibrium Models by Jacobian Regularization, arXiv:2106.14342, Table 2 and "
    "the ablation of the weight"
)
PHANTOM_SOURCE = "Geng, Zhang, Bai, Wang and Lin 2021, On Training Implicit Models, arXiv:2111.05177"
AT = (1, 2, 3, 4, 5, 6)
COSINES = (1, 3, 5, 9, 15)
COSINE = Schedule(name="cosine", final=1e-3)

_BASIC = (
    Column("parameters", "parameters", "summary.parameters", digits=0),
    Column("accuracy", "test accuracy, %", "test.accuracy", factor=100),
    Column("nfe", "test NFE", "test.evaluations", digits=1),
    Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    Column("residual", "residual, test", "test.residual", digits=4),
    Column("radius", "spectral radius", "test.spectral_radius", digits=3),
)


def _images(scale: Scale, augmented: bool) -> ImageData:
    if scale == "debug":
        return ImageData(name="digits", train=64, test=32)
    if scale == "reduced":
        return ImageData(name="cifar10", train=6_000, test=2_000, size=16)
    return ImageData(name="cifar10", crop=4, flip=True) if augmented else ImageData(name="cifar10")


# Jacobian regularization


_JR_ROWS = {
    "resnet": "ResNet-18",
    "mdeq": "MDEQ",
    "mdeq-short": "MDEQ, few steps",
    "mdeq-jr": "MDEQ + JR",
}
_JR_PUBLISHED: dict[str, dict[str, Figure]] = {
    "resnet": {"accuracy": Figure(93.0, 0.1)},
    "mdeq": {"accuracy": Figure(93.6, 0.2), "nfe": Figure(17), "at_6": Figure(89.1)},
    "mdeq-jr": {"accuracy": Figure(93.1, 0.3), "nfe": Figure(6)}
    | {f"at_{k}": Figure(value) for k, value in zip(AT, (85.8, 91.5, 92.7, 93.0, 93.0, 93.1), strict=True)},
}


def regularized(row: str, scale: Scale = "full") -> Experiment[Any]:
    """A row of the CIFAR-10 part of Table 2; "mdeq-short" has the steps of the regularized model without its penalty."""
    images = _images(scale, augmented=True)
    full = scale == "full"
    if row == "resnet":
        depth, channels = (20, (64, 128, 256)) if full else (8, (12, 24, 48))
        settings: Any = PlainSettings(data=images, depth=depth, channels=channels)
        return _experiment(f"{JR}-{row}", "explicit ResNet", settings, _jr_training(scale, 0), Plain, scale)
    short = row != "mdeq"
    model = MDEQOptions(
        size="cifar-regularized" if full else "nano",
        solver="broyden" if full else "anderson",
        forward_steps=7 if short else 18,
        backward_steps=8 if short else 20,
        pretraining_depth=8 if full else 5,
    )
    settings = MDEQSettings(
        data=images,
        model=model,
        jacobian_weight=0.5 if row == "mdeq-jr" else 0.0,
        jacobian_frequency=0.05 if full else 0.4,
        jacobian_until=46_000 if full else None,
        jitter=2 if row == "mdeq-jr" else 0,
        at=AT,
    )
    training = _jr_training(scale, 16_000 if full else 2 if scale == "debug" else 60)
    return _experiment(f"{JR}-{row}", f"{_JR_ROWS[row]} on CIFAR-10", settings, training, Multiscale, scale)


def _jr_training(scale: Scale, pretraining: int) -> Training:
    return Training(
        epochs={"debug": 1, "reduced": 3, "full": 220}[scale],
        batch_size={"debug": 32, "reduced": 64, "full": 96}[scale],
        eval_batch_size=32 if scale == "debug" else 200,
        optimizer=Optimizer(lr=1e-3),
        schedule=COSINE,
        pretrain_steps=pretraining,
    )


def _jr_claims() -> tuple[Claim, ...]:
    better = [
        Claim(
            id="C3",
            text=f"stopped after {k} step{'s' * (k > 1)}, the regularized model is the more accurate one",
            column=f"at_{k}",
            left="mdeq-jr",
            right="mdeq",
            by="difference",
            at_least=0.0,
        )
        for k in AT
    ]
    return (
        Claim(
            id="C3",
            text="Jacobian regularization halves the evaluations (published: 6 in place of 17)",
            column="nfe",
            left="mdeq-jr",
            right="mdeq",
            at_most=0.5,
        ),
        Claim(
            id="C3",
            text="Jacobian regularization costs at most a point of accuracy (published: 0.5)",
            column="accuracy",
            left="mdeq-jr",
            right="mdeq",
            by="difference",
            at_least=-1.0,
        ),
        Claim(
            id="C3",
            text="Jacobian regularization lowers the spectral radius",
            column="radius",
            left="mdeq-jr",
            right="mdeq",
            at_most=1.0,
        ),
        Claim(
            id="C3",
            text="stopping the unregularized model after 6 steps costs accuracy (published: 4.5 points)",
            column="at_6",
            left="mdeq",
            against="accuracy",
            by="difference",
            at_most=-0.5,
        ),
        *better,
    )


def _jr_table() -> Table:
    notes = (
        "The unregularized model has at most 18 steps forward and 20 backward, the regularized one and the one with few "
        "steps 7 and 8; evaluation as in training. NFE counts the last residual too. Penalty: weight 0.5, one probe.",
    )
    columns = tuple(Column(f"at_{k}", f"accuracy after {k}, %", f"test.accuracy_at_{k}", factor=100) for k in AT)
    return Table(
        name=JR,
        title="Jacobian regularization: MDEQ on CIFAR-10",
        source=JR_SOURCE,
        rows=tuple(_row(name, title, regularized, _JR_PUBLISHED.get(name, {})) for name, title in _JR_ROWS.items()),
        columns=(*_BASIC, *columns),
        claims=_jr_claims(),
        profiles=(
            Profile(
                name="accuracy-nfe",
                title="Test accuracy with the solver stopped early",
                x_label="steps of the solver",
                y_label="%",
                points=tuple((k, f"at_{k}") for k in AT),
            ),
        ),
        protocol={
            "debug": ("Debug scale: 64 digits of 8x8 pixels, 1 epoch. It proves nothing.", *notes),
            "reduced": (
                "Reduced: nano MDEQ and ResNet-8 on 6,000 images averaged to 16x16 pixels, 3 epochs of 93 steps of 64, 60 "
                "of them unrolled over 5 layers; Adam 1e-3 with a cosine; Anderson's method; penalty in 40 % of the steps; "
                "2,000 test images.",
                *notes,
            ),
            "full": (
                "220 epochs, Adam 1e-3, batch 96, crops and flips, dropout 0.22, 16,000 steps of pre-training over 8 "
                "layers, penalty in 5 % of the steps until epoch 90. ResNet-20, 64 to 256 channels, for ResNet-18.",
                *notes,
            ),
        },
        seeds={"debug": 1, "reduced": 1, "full": 3},
    )


# phantom gradients


@dataclass(frozen=True)
class _Recipe:
    title: str
    accuracy: Figure
    gradient: Differentiating = "implicit"
    steps: int = 5
    optimizer: Literal["adam", "sgd"] = "adam"
    pretraining: bool = True
    dropout: bool = True
    cosines: tuple[int, ...] = ()


_RECIPES = {
    "implicit": _Recipe("implicit", Figure(85.0, 0.2)),
    "implicit-no-pretraining": _Recipe("implicit, no pre-training", Figure(82.3, 1.3), pretraining=False),
    "implicit-no-dropout": _Recipe("implicit, no dropout", Figure(83.7, 0.1), dropout=False),
    "implicit-sgd": _Recipe("implicit, SGD", Figure(84.5, 0.3), optimizer="sgd"),
    "implicit-sgd-no-pretraining": _Recipe(
        "implicit, SGD, no pre-training", Figure(82.9, 1.5), optimizer="sgd", pretraining=False
    ),
    "upg": _Recipe(
        "UPG, 5 steps",
        Figure(85.8, 0.5),
        "upg",
        optimizer="sgd",
        pretraining=False,
        dropout=False,
        cosines=COSINES,
    ),
    "npg": _Recipe(
        "NPG, 5 steps",
        Figure(85.6, 0.5),
        "npg",
        optimizer="sgd",
        pretraining=False,
        dropout=False,
        cosines=COSINES,
    ),
    "upg-9": _Recipe("UPG, 9 steps, dropout", Figure(86.1, 0.5), "upg", 9, optimizer="sgd", pretraining=False),
}
_SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
_ADAM = Optimizer(lr=1e-3, weight_decay=2.5e-6)


def phantom(row: str, scale: Scale = "full") -> Experiment[Any]:
    """A column of Table 1, the ablation on MDEQ-TINY."""
    recipe, full = _RECIPES[row], scale == "full"
    dropout = (0.25 if full else 0.1) if recipe.dropout else 0.0
    model = MDEQOptions(
        size="cifar-tiny-2021" if full else "nano",
        solver="broyden" if full else "anderson",
        gradient=recipe.gradient,
        phantom_steps=recipe.steps,
        dropout=dropout,
        pretraining_depth=10 if full else 5,
    )
    settings = MDEQSettings(
        data=_images(scale, augmented=False),
        model=model,
        cosines=recipe.cosines if scale != "debug" else recipe.cosines[:1],
        cosines_every=1000 if full else 60,
    )
    sgd = recipe.optimizer == "sgd"
    pretraining = {"debug": 1, "reduced": 60, "full": 3000}[scale] if recipe.pretraining else 0
    training = Training(
        epochs={"debug": 1, "reduced": 3, "full": 50}[scale],
        batch_size={"debug": 32, "reduced": 64, "full": 128}[scale],
        eval_batch_size=32 if scale == "debug" else 200,
        optimizer=_SGD if sgd else _ADAM,
        schedule=COSINE,
        pretrain_steps=pretraining,
    )
    return _experiment(f"{PHANTOM}-{row}", f"MDEQ on CIFAR-10, {recipe.title}", settings, training, Multiscale, scale)


def _phantom_claims() -> tuple[Claim, ...]:
    return (
        Claim(
            id="C7",
            text="a training step with UPG is at least 1.4 times faster than an implicit one",
            column="step",
            left="implicit-sgd-no-pretraining",
            right="upg",
            at_least=1.4,
        ),
        Claim(
            id="C7",
            text="UPG is at most 0.5 points less accurate than implicit training",
            column="accuracy",
            left="upg",
            right="implicit",
            by="difference",
            at_least=-0.5,
        ),
        Claim(
            text="NPG is at most 0.5 points less accurate than implicit training",
            column="accuracy",
            left="npg",
            right="implicit",
            by="difference",
            at_least=-0.5,
        ),
        *(
            Claim(
                id="C8",
                text=f"UPG of {k} step{'s' * (k > 1)} is an ascent direction in every epoch: its cosine with the exact "
                "gradient is positive",
                column=f"low_upg_{k}",
                left="upg",
                at_least=0.0,
            )
            for k in COSINES
        ),
        Claim(
            id="C8",
            text="the cosine rises with the steps, from 1 to 9",
            column="upg_9",
            left="upg",
            against="upg_1",
            by="difference",
            at_least=0.0,
        ),
        Claim(
            id="C9",
            text="of 15 steps, NPG's cosine is below UPG's in the model trained with NPG",
            column="npg_15",
            left="npg",
            against="upg_15",
            by="difference",
            at_most=0.0,
        ),
        Claim(
            id="C9",
            text="in the model trained with NPG, NPG's cosine falls from 5 to 15 steps",
            column="npg_15",
            left="npg",
            against="npg_5",
            by="difference",
            at_most=0.0,
        ),
        Claim(
            id="C9",
            text="in the model trained with UPG, UPG's cosine does not fall from 5 to 15 steps",
            column="upg_15",
            left="upg",
            against="upg_5",
            by="difference",
            at_least=0.0,
        ),
        Claim(
            id="C14",
            text="implicit training loses accuracy without pre-training (published: 2.7 points)",
            column="accuracy",
            left="implicit-no-pretraining",
            right="implicit",
            by="difference",
            at_most=0.0,
        ),
        Claim(
            id="C14",
            text="so it does with SGD (published: 1.6 points)",
            column="accuracy",
            left="implicit-sgd-no-pretraining",
            right="implicit-sgd",
            by="difference",
            at_most=0.0,
        ),
        Claim(
            id="C14",
            text="UPG, without pre-training, is more accurate than implicit training without it",
            column="accuracy",
            left="upg",
            right="implicit-sgd-no-pretraining",
            by="difference",
            at_least=0.0,
        ),
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
        source=f"{PHANTOM_SOURCE}, Table 1",
        rows=tuple(_row(name, recipe.title, phantom, {"accuracy": recipe.accuracy}) for name, recipe in _RECIPES.items()),
        columns=(*_BASIC, Column("known", "gradients compared, %", "train.cosines_known", factor=100, epochs="mean")),
        hidden=(*cosines, *lows),
        claims=_phantom_claims(),
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
                "Reduced: nano MDEQ on 6,000 images averaged to 16x16 pixels, 3 epochs of 93 steps of 64, of them 60 of "
                "pre-training over 5 layers; Adam 1e-3 or SGD 0.1, momentum 0.9, decay 1e-4, cosine; dropout 0.1; "
                "Anderson's method with 18 steps, GMRES with 20 backward; 2,000 test images.",
                *notes,
            ),
            "full": ("50 epochs, batch 128, dropout 0.25, 3,000 steps of pre-training over 10 layers.", *notes),
        },
        seeds={"debug": 1, "reduced": 1, "full": 3},
    )


def large(row: str, scale: Scale = "full") -> Experiment[Any]:
    """A CIFAR-10 row of Table 3: MDEQ of ten million parameters."""
    size = {"debug": "nano", "reduced": "cifar-large-2021", "full": "cifar-large-2021"}[scale]
    upg = row == "upg"
    model = MDEQOptions(size=size, gradient="upg" if upg else "implicit", dropout=0.0 if upg else None)
    images = _images(scale, augmented=True)
    if scale == "reduced":
        images = ImageData(name="cifar10", train=40, test=8)
    training = Training(
        epochs={"debug": 1, "reduced": 1, "full": 220}[scale],
        batch_size={"debug": 32, "reduced": 8, "full": 128}[scale],
        eval_batch_size={"debug": 32, "reduced": 8, "full": 200}[scale],
        optimizer=_SGD if upg else _ADAM,
        schedule=COSINE,
        pretrain_steps=20_000 if scale == "full" and not upg else 0,
    )
    settings = MDEQSettings(data=images, model=model)
    return _experiment(f"{LARGE}-{row}", f"MDEQ, 10M, {row}", settings, training, Multiscale, scale)


def _large_table() -> Table:
    rows = {"implicit": ("implicit", Figure(93.8, 0.17)), "upg": ("UPG, 5 steps", Figure(95.0, 0.16))}
    return Table(
        name=LARGE,
        title="Phantom gradients: MDEQ of 10M parameters on CIFAR-10",
        source=f"{PHANTOM_SOURCE}, Table 3",
        rows=tuple(_row(name, title, large, {"accuracy": accuracy}) for name, (title, accuracy) in rows.items()),
        columns=(*_BASIC, Column("speed", "speed over implicit", "seconds_step", over="implicit")),
        claims=(
            Claim(
                id="C7",
                text="a training step with UPG is at least 1.4 times faster than an implicit one, as published",
                column="speed",
                left="upg",
                at_least=1.4,
            ),
        ),
        protocol={
            "debug": ("Debug scale: nano MDEQ on 64 digits. It proves nothing.",),
            "reduced": ("Reduced: 5 steps on 8 images each, which tell the time of a step and nothing of accuracy.",),
            "full": ("220 epochs; implicit: Adam 1e-3, dropout 0.3, 20,000 steps of pre-training; UPG: SGD 0.1, none.",),
        },
        seeds={"debug": 1, "reduced": 1, "full": 1},
    )


def _experiment(name: str, summary: str, settings: Any, training: Training, make: Any, scale: Scale) -> Experiment[Any]:
    return Experiment(name=name, summary=summary, settings=settings, training=training, make=make, scale=scale)


def _row(name: str, title: str, made: Any, published: dict[str, Figure]) -> Row:
    def experiment(scale: Scale) -> Experiment[Any]:
        found: Experiment[Any] = made(name, scale)
        return found

    return Row(name, title, experiment, published)


def tables() -> tuple[Table, ...]:
    return _jr_table(), _phantom_table(), _large_table()
