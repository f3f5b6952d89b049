"""Jacobian regularization of multiscale DEQs on CIFAR-10 (Bai, Koltun and Kolter 2021)."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import Claim, at_most, column_lower, higher
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.image_task import GUESS
from equilibria.lab.experiments.jfb.task import Plain, PlainSettings
from equilibria.lab.experiments.mdeq.cifar import COLUMNS, COSINE, experiment, images
from equilibria.lab.experiments.mdeq.task import MDEQOptions, MDEQSettings, Multiscale
from equilibria.lab.training.settings import Optimizer, Training

JR = "jr-cifar10"
SOURCE = (
    "Bai, Koltun and Kolter 2021, Stabilizing Equilibrium Models by Jacobian Regularization, arXiv:2106.14342, Table 2 and "
    "the ablation of the weight"
)
AT = (1, 2, 3, 4, 5, 6)  # numbers of steps after which the accuracy is measured, as in the paper

_ROWS = {
    "resnet": "ResNet-18",
    "mdeq": "MDEQ",
    "mdeq-short": "MDEQ, few steps",
    "mdeq-jr": "MDEQ + JR",
}
_PUBLISHED: dict[str, dict[str, Figure]] = {
    "resnet": {"accuracy": Figure(93.0, 0.1)},
    "mdeq": {"accuracy": Figure(93.6, 0.2), "nfe": Figure(17), "at_6": Figure(89.1)},
    "mdeq-jr": {"accuracy": Figure(93.1, 0.3), "nfe": Figure(6)}
    | {f"at_{k}": Figure(value) for k, value in zip(AT, (85.8, 91.5, 92.7, 93.0, 93.0, 93.1), strict=True)},
}


def regularized(name: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a CIFAR-10 row of Table 2; "mdeq-short" is the regularized model without its penalty."""
    data = images(scale, augmented=True)
    full = scale == "full"
    if name == "resnet":
        depth, channels = (20, (64, 128, 256)) if full else (8, (12, 24, 48))
        settings: Any = PlainSettings(data=data, depth=depth, channels=channels)
        return experiment(f"{JR}-{name}", "explicit ResNet", settings, _training(scale, 0), Plain, scale)
    short = name != "mdeq"
    model = MDEQOptions(
        size="cifar-regularized" if full else "nano",
        solver="broyden" if full else "anderson",
        forward_steps=7 if short else 18,
        backward_steps=8 if short else 20,
        pretraining_depth=8 if full else 5,
    )
    settings = MDEQSettings(
        data=data,
        model=model,
        jacobian_weight=(0.5 if full else 2.0) if name == "mdeq-jr" else 0.0,
        jacobian_frequency=0.05 if full else 0.4,
        jacobian_until=46_000 if full else None,
        jitter=2 if name == "mdeq-jr" else 0,
        at=AT,
    )
    training = _training(scale, 16_000 if full else 2 if scale == "debug" else 60)
    return experiment(f"{JR}-{name}", f"{_ROWS[name]} on CIFAR-10", settings, training, Multiscale, scale)


def _training(scale: Scale, pretraining: int) -> Training:
    return Training(
        epochs={"debug": 1, "reduced": 8, "full": 220}[scale],
        batch_size={"debug": 32, "reduced": 64, "full": 96}[scale],
        eval_batch_size=32 if scale == "debug" else 200,
        optimizer=Optimizer(lr=1e-3),
        schedule=COSINE,
        pretrain_steps=pretraining,
    )


def _run_as(name: str) -> dict[Scale, str]:
    """Return the titles of the networks that scales run in place of the published one."""
    if name == "resnet":
        return {"debug": "ResNet-8", "reduced": "ResNet-8", "full": "ResNet-20, 64 to 256 channels"}
    return {"debug": f"nano {_ROWS[name]}", "reduced": f"nano {_ROWS[name]}"}


def _claims() -> tuple[Claim, ...]:
    better = [
        higher(
            f"at_{k}",
            "mdeq-jr",
            "mdeq",
            f"stopped after {k} step{'s' * (k > 1)}, the regularized model is the more accurate one",
            id="C3",
        )
        for k in AT
    ]
    return (
        at_most(
            "nfe",
            "mdeq-jr",
            "mdeq",
            0.5,
            "Jacobian regularization halves the evaluations (published: 6 in place of 17)",
            id="C3",
        ),
        higher(
            "accuracy",
            "mdeq-jr",
            "mdeq",
            "Jacobian regularization costs at most a point of accuracy (published: 0.5)",
            by=-1.0,
            id="C3",
        ),
        at_most("radius", "mdeq-jr", "mdeq", 1.0, "Jacobian regularization lowers the spectral radius", id="C3"),
        column_lower(
            "at_6",
            "accuracy",
            "mdeq",
            "stopping the unregularized model after 6 steps costs accuracy (published: 4.5 points)",
            by=0.5,
            id="C3",
        ),
        *better,
    )


def tables() -> tuple[Table, ...]:
    notes = (
        "The unregularized model has at most 18 steps forward and 20 backward, the regularized one and the one with few "
        "steps 7 and 8; evaluation as in training. NFE counts the last residual too. One probe in the penalty.",
    )
    columns = tuple(Column(f"at_{k}", f"accuracy after {k}, %", f"test.accuracy_at_{k}", factor=100) for k in AT)
    table = Table(
        name=JR,
        title="Jacobian regularization: MDEQ on CIFAR-10",
        source=SOURCE,
        rows=tuple(
            TableRow(name, title, partial(regularized, name), _PUBLISHED.get(name, {}), _run_as(name))
            for name, title in _ROWS.items()
        ),
        columns=(
            *COLUMNS,
            Column("broyden", "memory of a prediction by Broyden's method, MB", "test.broyden_bytes", digits=1, factor=1e-6),
            *columns,
        ),
        claims=_claims(),
        guess={"accuracy": GUESS["cifar10"]},
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
                "Reduced: nano MDEQ and ResNet-8 on 6,000 images averaged to 16x16 pixels, 8 epochs of 93 steps of 64, 60 "
                "of them unrolled over 5 layers; Adam 1e-3 with a cosine; Anderson's method; penalty of weight 2 in 40 % of "
                "the steps; 2,000 test images.",
                *notes,
            ),
            "full": (
                "220 epochs, Adam 1e-3, batch 96, crops and flips, dropout 0.22, 16,000 steps of pre-training over 8 "
                "layers, penalty of weight 0.5 in 5 % of the steps until epoch 90. For ResNet-18 a ResNet-20, 64 to 256 "
                "channels.",
                *notes,
            ),
        },
    )
    return (table,)
