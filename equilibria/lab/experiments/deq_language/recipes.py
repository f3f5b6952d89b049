"""Parts that the tables of language models share: texts and training at every scale, columns, notes and claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from equilibria.lab.data.text import Level
from equilibria.lab.experiments.claims import Claim, at_most, column_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Profile, Scale, TableRow
from equilibria.lab.experiments.deq_language.data import TextData, TextName
from equilibria.lab.experiments.deq_language.models import LanguageModel
from equilibria.lab.experiments.deq_language.task import Language, LanguageSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

DEQ_SOURCE = "Bai, Kolter and Koltun 2019, Deep Equilibrium Models, arXiv:1909.01377"
CUTOFFS = (1000, 4000)  # of 10,000 words: 79 % and 94 % of the text of the Penn Treebank are words below them
LAYERS = 16  # layers of the weight-tied stacks
TRELLIS_LAYERS = 30  # layers of the TrellisNets at the reduced scale
DEPTHS = (1, 2, 4, 8, 16, 32, 64)  # depths at which the change of the state is measured
EPOCHS, STEPS, ROWS, LENGTH = 2, 600, 16, 32  # reduced scale: epochs, steps per epoch, rows and length of a segment
# Chosen for the reduced scale by validation perplexity and residual after an epoch on the words of PTB: at a rate of 3e-3
# solves of nano transformers without a penalty stop converging, and pre-training costs more than it helps.
RATE, GAIN = 1e-3, 5.0  # of transformers; the gain makes the initial deviation 0.05, as in the DEQ paper
TRELLIS_RATE, TRELLIS_PRETRAINING = 3e-3, 150
DIRECTIONS = 4  # that GMRES keeps at the reduced scale, where 20 of them are more than all the rest of a training step

BASIC = (
    Column("parameters", "parameters", "summary.parameters", digits=0),
    Column("inner", "without embedding", "train.inner_parameters", digits=0),
    Column("valid", "validation perplexity", "valid.perplexity"),
    Column("perplexity", "test perplexity", "test.perplexity"),
    Column("nfe", "NFE, test", "test.evaluations", digits=1),
    Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    Column("predict", "prediction of a batch, ms", "test.predict_seconds", digits=1, factor=1e3),
    Column("memory", "peak of a training step without embedding, MB", "train.peak_bytes_layer", digits=1, factor=1e-6),
    Column("memory_step", "with embedding, MB", "train.peak_bytes_step", digits=1, factor=1e-6),
    Column("residual", "residual, test", "test.residual", digits=4),
    Column("failed", "failed solves, test, %", "test.failed", factor=100, digits=1),
    Column("radius", "spectral radius", "valid.spectral_radius", digits=3),
)
CHANGES = tuple(
    Column(f"change_{d}", f"change at depth {d}", f"valid.change_{d}", digits=4) for d in DEPTHS
)  # of the state under plain iteration

DEBUG = "Debug scale: a few hundred words of sentences made by a rule, models of 16 channels, 1 epoch. It proves nothing."
MEMORY_NOTE = (
    "Memory: what loss and gradients of one training step hold at their peak beside the weights, counted block by block; "
    "without embedding as published, that is without the vectors of words and the softmax."
)


def reduced_note(what: str, vocabulary: str, memory: int = 64, steps: int = STEPS, rates: str = f"{RATE:g}") -> str:
    """Return the note on the budget that all rows of a reduced table have; `steps` is the number of steps per epoch."""
    return (
        f"Reduced: {what}; {EPOCHS} epochs over the first {ROWS * LENGTH * steps:,} tokens in {ROWS} rows, segments of "
        f"{LENGTH}, memory of {memory}; Adam {rates}, warm-up of 100 steps and a cosine, gradients clipped to 0.25; "
        f"{vocabulary}; 20,000 tokens of each of the other texts. GMRES keeps {DIRECTIONS} directions."
    )


def text(
    scale: Scale, name: TextName, *, length: int, eval_length: int | None = None, steps: int = STEPS, level: Level = "word"
) -> TextData:
    """Return the text of a table at a scale.

    length  length of a segment at full scale
    steps   number of steps of a reduced epoch
    """
    if scale == "debug":
        return TextData(name="toy", train=1_000, valid=300, test=300, length=8, level=level)
    if scale == "full":
        return TextData(name=name, length=length, eval_length=eval_length, level=level)
    train = ROWS * LENGTH * steps + 1
    return TextData(name=name, train=train, valid=20_000, test=20_000, length=LENGTH, level=level)


def small_training(scale: Scale, *, pretraining: bool = False, trellis: bool = False) -> Training:
    """Return the training settings of the debug and the reduced scale."""
    debug = scale == "debug"
    unrolled = 2 if debug else TRELLIS_PRETRAINING if trellis else 0
    return Training(
        epochs=1 if debug else EPOCHS,
        batch_size=4 if debug else ROWS,
        eval_batch_size=4 if debug else ROWS,
        optimizer=Optimizer(lr=TRELLIS_RATE if trellis else RATE),
        schedule=Schedule(name="cosine", warmup_steps=2 if debug else 100, final=0.01),
        clip_norm=0.25,
        pretrain_steps=unrolled if pretraining else 0,
    )


def transformer_training(steps_per_epoch: int, steps: int, batch: int, pretraining: int, warmup: int = 16_000) -> Training:
    """Return the published recipe on WikiText-103, with the number of epochs that comes closest to the published steps."""
    return Training(
        epochs=max(1, round(steps / steps_per_epoch)),
        batch_size=batch,
        eval_batch_size=10,
        optimizer=Optimizer(lr=2.5e-4),
        schedule=Schedule(name="cosine", warmup_steps=warmup),
        clip_norm=0.25,
        pretrain_steps=pretraining,
    )


def tiny(model: LanguageModel) -> LanguageModel:
    """Return a model of the same kind for the debug scale."""
    depth = None if model.depth is None else min(model.depth, 3)
    limits: dict[str, Any] = {
        "forward_steps": 6,
        "backward_steps": 6,
        "pretraining_depth": 2,
        "cutoffs": None,
        "divisor": None,
    }
    if model.kind == "trellis":
        return dataclasses.replace(model, size="nano", depth=depth, embedding=8, hidden=8, **limits)
    sizes: dict[str, Any] = {"width": 16, "heads": 2, "inner": 16, "memory": 8, "eval_memory": None, "vectors": None}
    return dataclasses.replace(model, size="nano", depth=depth, **sizes, **limits)


def made(name: str, summary: str, settings: LanguageSettings, training: Training, scale: Scale) -> Experiment[Any]:
    """Return an experiment on a language model."""
    return Experiment(name=name, summary=summary, settings=settings, training=training, make=Language, scale=scale)


def row(
    name: str,
    title: str,
    find: Callable[[str, Scale], Experiment[Any]],
    published: Mapping[str, float] | None = None,
    *,
    nano: str | None = None,
    limited: bool = False,
) -> TableRow:
    """Return a row of a table, whose experiment is find(name, scale).

    nano     title of the model that the debug and reduced scales run instead
    limited  True if solves end at a step limit by design, see `TableRow`
    """

    def experiment(scale: Scale) -> Experiment[Any]:
        return find(name, scale)

    figures = {column: Figure(value) for column, value in (published or {}).items()}
    run_as: dict[Scale, str] = {} if nano is None else {"debug": f"{nano}, tiny", "reduced": nano}
    return TableRow(name, title, experiment, figures, run_as, limited)


def as_good(better: str, other: str, text: str, most: float = 1.0) -> Claim:
    """Return the claim that the validation perplexity of one row is at most `most` times that of another."""
    return at_most("valid", better, other, most, text, id="C11")


def slower(other: str, name: str, training: str, prediction: str) -> tuple[Claim, Claim]:
    """Return claims that bound the time of the row "deq" relative to the row `other`; the texts quote published ratios."""
    return (
        at_most(
            "step",
            "deq",
            other,
            3.0,
            f"a training step takes at most 3 times that of {name} (published: {training})",
            id="C11",
        ),
        at_most(
            "predict",
            "deq",
            other,
            2.0,
            f"prediction takes at most 2 times that of {name} (published: {prediction})",
            id="C11",
        ),
    )


def settles(row: str) -> Claim:
    """Return the claim that plain iteration of a row's layer approaches a fixed point."""
    return column_at_most(
        f"change_{DEPTHS[-1]}",
        "change_2",
        row,
        0.1,
        f"plain iteration of the {'stack' if row != 'deq' else 'equilibrium'}'s layer approaches a fixed point: the "
        f"state moves ten times less at depth {DEPTHS[-1]} than at depth 2",
        id="C12",
    )


def settling() -> Profile:
    """Return the plot of the change of the state over depth."""
    return Profile(
        name="change-depth",
        title="How far the layer moves the state, over depth",
        x_label="depth",
        y_label="|z_d - z_(d-1)| / |z_d|",
        points=tuple((d, f"change_{d}") for d in DEPTHS),
        log=True,
    )
