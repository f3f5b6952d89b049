"""The table of segmentation: a multiscale DEQ compared with its explicit twins on CamVid."""

from __future__ import annotations

from functools import partial

from equilibria.lab.experiments.claims import Claim, higher
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.mdeq.segmentation_task import Segmentation, SegmentSettings
from equilibria.lab.experiments.mdeq.task import MDEQOptions
from equilibria.lab.training.settings import Optimizer, Schedule, Training

CAMVID = "camvid"
SOURCE = (
    "Bai, Koltun and Kolter 2020, Multiscale Deep Equilibrium Models, arXiv:2006.08656, has MDEQs that segment Cityscapes; "
    "nothing was published of CamVid at 72x96"
)
_TITLES = {
    "mdeq": "MDEQ",
    "explicit": "weight-tied twin, a step as long as MDEQ's",
    "explicit-1": "weight-tied twin, 1 layer",
}
# depth of the twin at which a training step takes as long as one of the equilibrium, measured on one core
_DEPTH: dict[Scale, int] = {"debug": 9, "reduced": 9, "full": 15}
# epochs with which all rows of a scale train for the same time
_EPOCHS: dict[Scale, dict[str, int]] = {
    "debug": {"mdeq": 2, "explicit": 2, "explicit-1": 2},
    "reduced": {"mdeq": 20, "explicit": 20, "explicit-1": 100},
    "full": {"mdeq": 480, "explicit": 480, "explicit-1": 4800},
}


def experiment(row: str, scale: Scale = "full") -> Experiment[SegmentSettings]:
    """Return the experiment of a row; all rows have equally many weights with the same initial values."""
    return Experiment(
        name=f"{CAMVID}-{row}",
        summary=f"{_TITLES[row]}, segmentation of {'synthetic shapes' if scale == 'debug' else 'road scenes'}",
        settings=_settings(row, scale),
        training=_training(row, scale),
        make=Segmentation,
        scale=scale,
    )


def _settings(row: str, scale: Scale) -> SegmentSettings:
    depth = {"mdeq": None, "explicit": _DEPTH[scale], "explicit-1": 1}[row]
    if scale == "full":
        return SegmentSettings(model=MDEQOptions(size="cityscapes-small", depth=depth))
    options = MDEQOptions(
        size="nano-segmentation", solver="picard", relaxation=0.5, gradient="upg", forward_steps=8, depth=depth
    )
    if scale == "debug":
        return SegmentSettings(data="shapes", model=options, train=16, valid=8, test=8, size=16, crop=2, balance=1.1)
    return SegmentSettings(model=options, valid=32, balance=1.02)


def _training(row: str, scale: Scale) -> Training:
    if scale == "full":
        return Training(
            epochs=_EPOCHS[scale][row],
            batch_size=12,
            eval_batch_size=12,
            optimizer=Optimizer(name="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4),
            schedule=Schedule(name="cosine"),
            pretrain_steps=1_000 if row == "mdeq" else 0,
        )
    return Training(
        epochs=_EPOCHS[scale][row],
        batch_size=8,
        eval_batch_size=8 if scale == "debug" else 16,
        optimizer=Optimizer(lr=3e-3),
        schedule=Schedule(name="cosine"),
    )


def _claims() -> tuple[Claim, ...]:
    return tuple(
        higher(
            "iou", "mdeq", row, f"at the same training time the mean IoU of MDEQ is above that of its twin, {_TITLES[row]}"
        )
        for row in ("explicit", "explicit-1")
    )


_COMMON = (
    "Accuracy and IoU are of pixels with a label, counted over the whole split; mean IoU is over the classes that occur. "
    "Scores are interpolated to the size of the image. All rows have the same weights, in number and at the start.",
)
_REDUCED = (
    "Reduced: CamVid at 72x96, all 367 images to train on and 233 to test on, 32 of the 101 validation images; MDEQ of two "
    "resolutions with 12 channels each, 8 steps of Picard's method and an unrolled phantom gradient of 5 more, both damped "
    "by 0.5. Few solves reach the tolerance of 0.001 within 8 steps.",
    "20 epochs, batch 8, Adam 3e-3 with a cosine to 0, random crops (4 pixels) and mirror images; the training loss weighs "
    "a class with a share p of the pixels by 1 / ln(1.02 + p).",
    "Explicit twins are trained by back-propagation for about the same time: 9 layers for 20 epochs, or 1 for 100.",
)
_FULL = (
    "The published recipe of Cityscapes on CamVid at 72x96: the small model with 11 classes, 27 steps of Broyden's method, "
    "implicit gradient of 30; SGD 0.01, momentum 0.9, decay 5e-4, cosine to 0, batch 12, 480 epochs; 1,000 steps of "
    "unrolled pre-training.",
    "Explicit twins are trained by back-propagation for about the same time: 15 layers for 480 epochs, or 1 for 4,800.",
)


def tables() -> tuple[Table, ...]:
    return (
        Table(
            name=CAMVID,
            title="Segmentation of road scenes: an equilibrium beside its explicit twins",
            source=SOURCE,
            rows=tuple(
                TableRow(name, title, partial(experiment, name), limited=name == "mdeq") for name, title in _TITLES.items()
            ),
            columns=(
                Column("parameters", "parameters", "summary.parameters", digits=0),
                Column("iou", "mean IoU, test, %", "test.mean_iou", factor=100),
                Column("accuracy", "pixel accuracy, test, %", "test.accuracy", factor=100),
                Column("train", "training time, s", "summary.seconds_train", digits=0),
                Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
                Column("predict", "prediction of a batch, ms", "test.predict_seconds", digits=1, factor=1e3),
                Column("residual", "residual, test", "test.residual", digits=4),
                Column("failed", "solves that met the limit, test, %", "test.failed", factor=100),
            ),
            claims=_claims(),
            protocol={
                "debug": ("Debug scale: 16 pictures of shapes of 16x16 pixels, 2 epochs. It proves nothing.", *_COMMON),
                "reduced": (*_REDUCED, *_COMMON),
                "full": (*_FULL, *_COMMON),
            },
        ),
    )
