"""The table of prompts: LION compared with a linear probe and full fine-tuning."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import Claim, at_most, higher, value_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.lion.backbones import TuningKind
from equilibria.lab.experiments.lion.task import Prompt, PromptSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

LION = "lion"
SOURCE = (
    "Wang and others, AAAI 2024, LION: Implicit Vision Prompt Tuning. Only the abstract was at hand, which tells of up to "
    "11.5 % fewer trained parameters than VPT at a better accuracy; no figure of it is for the data used here"
)
_TITLES: dict[str, str] = {
    "probe": "linear probe",
    "lion": "LION",
    "lion-pruned": "LION, pruned to 60 %",
    "finetune": "full fine-tuning",
}
_TUNING: dict[str, TuningKind] = {"probe": "probe", "lion": "lion", "lion-pruned": "lion", "finetune": "finetune"}


def experiment(row: str, scale: Scale = "full") -> Experiment[PromptSettings]:
    """Return the experiment of a row; all rows begin with the same pre-trained backbone."""
    return Experiment(
        name=f"{LION}-{row}",
        summary=f"{_TITLES[row]} of a backbone that knows other classes",
        settings=_settings(row, scale),
        training=_training(row, scale),
        make=Prompt,
        scale=scale,
    )


def _settings(row: str, scale: Scale) -> PromptSettings:
    options: dict[str, Any] = {"tuning": _TUNING[row], "keep": 0.6 if row == "lion-pruned" else None}
    if scale == "debug":
        return PromptSettings(data="digits", train=128, test=64, pretrain_steps=30, **options)
    if scale == "reduced":
        return PromptSettings(data="mnist", train=1_000, **options)
    return PromptSettings(data="mnist", pretrain_steps=3_000, **options)


def _training(row: str, scale: Scale) -> Training:
    return Training(
        epochs={"debug": 3, "reduced": 15, "full": 30}[scale],
        batch_size=32 if scale == "debug" else 50,
        eval_batch_size=64 if scale == "debug" else 500,
        optimizer=Optimizer(lr=1e-3 if row == "finetune" else 3e-3),
        schedule=Schedule(name="cosine"),
    )


def _claims() -> tuple[Claim, ...]:
    return (
        higher("accuracy", "lion", "probe", "LION is more accurate than a linear probe"),
        at_most("trained", "lion", "finetune", 0.25, "LION trains at most a quarter of the weights of full fine-tuning"),
        higher("accuracy", "lion-pruned", "lion", "pruned LION is as accurate as LION, to 1 point", by=-1.0),
        *(
            value_at_most("moved", row, 0.0, f"{_TITLES[row]} leaves the backbone as it was")
            for row in ("probe", "lion", "lion-pruned")
        ),
    )


_COMMON = (
    "The backbone is pre-trained on the first half of the classes, the same one for all rows and seeds; then it is tuned to "
    "the other half with a new classifier. Trained parameters do not count those that were pruned; the backbone's movement "
    "is the largest change of a weight or running statistic since pre-training.",
    "The equations of the prompts and the details of pruning are this library's own: scores are |w dL/dw| summed over an "
    "epoch, the best 60 % are chosen after every epoch, the rest shrinks and is removed before the last one.",
)
_CNN = "a CNN of three convolutions with 16, 32 and 64 channels"
_PROTOCOL: dict[Scale, tuple[str, ...]] = {
    "debug": ("Debug scale: 8x8 digits, 30 steps of pre-training, 128 images of 5 to 9, 3 epochs. It proves nothing.",),
    "reduced": (
        f"Reduced: {_CNN}, 400 steps of Adam on MNIST's 0 to 4, batch 64; then 1,000 images of 5 to 9, 15 epochs of Adam "
        "with a cosine to 0, batch 50, at 3e-3 (fine-tuning: 1e-3); tested on all 4,861 images of 5 to 9.",
    ),
    "full": (
        f"Full: {_CNN}, 3,000 steps of Adam on MNIST's 0 to 4, batch 64; then all images of 5 to 9, 30 epochs of Adam with "
        "a cosine to 0, batch 50, at 3e-3 (fine-tuning: 1e-3).",
        "A backbone of timm, as in the paper, is for --set backbone=NAME, where timm and its weights are at hand.",
    ),
}


def tables() -> tuple[Table, ...]:
    return (
        Table(
            name=LION,
            title="LION: prompts that are equilibria, around a frozen backbone",
            source=SOURCE,
            rows=tuple(TableRow(name, title, partial(experiment, name)) for name, title in _TITLES.items()),
            columns=(
                Column("accuracy", "test accuracy, %", "test.accuracy", factor=100),
                Column("loss", "test loss", "test.loss", digits=4),
                Column("trained", "trained parameters", "test.trained", digits=0),
                Column("share", "share of all parameters, %", "test.trained_share", factor=100),
                Column("moved", "movement of the backbone", "test.moved", digits=4),
                Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
                Column("evaluations", "evaluations, test", "test.evaluations", digits=1),
                Column("failed", "failed solves, test, %", "test.failed", factor=100),
            ),
            claims=_claims(),
            protocol={scale: (*lines, *_COMMON) for scale, lines in _PROTOCOL.items()},
        ),
    )
