"""DEQ-Transformer on the Penn Treebank, compared with explicit networks (Bai, Kolter and Koltun 2019)."""

from __future__ import annotations

import dataclasses
from typing import Any

from equilibria.lab.data.text import Level
from equilibria.lab.experiments.claims import Claim, at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table
from equilibria.lab.experiments.deq_language.models import LanguageModel
from equilibria.lab.experiments.deq_language.recipes import (
    BASIC,
    CHANGES,
    CUTOFFS,
    DEBUG,
    DEPTHS,
    DEQ_SOURCE,
    DIRECTIONS,
    GAIN,
    LAYERS,
    MEMORY_NOTE,
    as_good,
    made,
    reduced_note,
    row,
    settles,
    settling,
    slower,
    small_training,
    text,
    tiny,
)
from equilibria.lab.experiments.deq_language.task import LanguageSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

PTB, CHARACTERS = "ptb-transformer", "ptb-characters"
MEMORIES = (128, 256)  # lengths of memory that are evaluated in addition to that of training

_TITLES = {
    "untied": "Transformer-XL, 4 layers",
    "tied": f"weight-tied, {LAYERS} layers",
    "tied-checkpointed": f"weight-tied, {LAYERS} layers, checkpointed",
    "deq": "DEQ-Transformer",
}
_WIDE: dict[str, Any] = {"width": 256, "heads": 8, "inner": 1024, "dropout": 0.3, "memory": 128, "eval_memory": 256}
_WIDE_UNTIED = _WIDE | {"width": 192, "inner": 176, "vectors": 256}  # 1.06M parameters inside, as the others


def transformer_row(row: str) -> LanguageModel:
    """Return the nano model of a row."""
    if row == "untied":
        return LanguageModel(kind="untied")
    return LanguageModel(depth=None if row == "deq" else LAYERS, checkpoint="sqrt" if row == "tied-checkpointed" else None)


def ptb(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return an experiment on the words of the Penn Treebank: DEQ-Transformer, or an explicit network of its size."""
    return _ptb(PTB, row, scale, "word")


def characters(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return an experiment on the characters of the Penn Treebank."""
    return _ptb(CHARACTERS, row, scale, "character")


def _ptb(table: str, row: str, scale: Scale, level: Level) -> Experiment[Any]:
    model = transformer_row(row)
    if scale == "debug":
        model = tiny(model)
    elif scale == "full":
        model = dataclasses.replace(model, **(_WIDE_UNTIED if row == "untied" else _WIDE))
    else:
        model = dataclasses.replace(model, directions=DIRECTIONS, gain=GAIN, cutoffs=CUTOFFS if level == "word" else None)
    training = small_training(scale, pretraining=row == "deq") if scale != "full" else _full_ptb(row)
    data = text(scale, "ptb", length=128, level=level)
    debug = scale == "debug"
    settings = LanguageSettings(
        data=data, model=model, depths=DEPTHS[:2] if debug else DEPTHS, memories=(12,) if debug else MEMORIES
    )
    return made(f"{table}-{row}", f"{_TITLES[row]}, PTB by {level}s", settings, training, scale)


def _full_ptb(row: str) -> Training:
    return Training(
        epochs=40,
        batch_size=32,
        eval_batch_size=10,
        optimizer=Optimizer(lr=5e-4),
        schedule=Schedule(name="cosine", warmup_steps=1_000),
        clip_norm=0.25,
        pretrain_steps=1_000 if row == "deq" else 0,
    )


def _untied_claim() -> Claim:
    return as_good(
        "deq", "untied", "the equilibrium's validation perplexity is at most that of the untied stack of as many parameters"
    )


def _stack_claims() -> tuple[Claim, ...]:
    return (
        as_good("deq", "tied", f"the equilibrium's validation perplexity is at most that of the {LAYERS}-layer stack"),
        _untied_claim(),
        at_most(
            "memory_step",
            "deq",
            "tied",
            1 / 3,
            f"a training step of the equilibrium takes at most a third of the memory of the {LAYERS}-layer stack's",
            id="C10",
        ),
        at_most(
            "memory_step",
            "deq",
            "tied-checkpointed",
            1.0,
            "checkpointing saves memory, but less than the equilibrium does",
            id="C10",
        ),
        *slower("untied", "the untied stack", "2.82, 18 layers", "1.76, 18 layers"),
        settles("tied"),
        settles("deq"),
    )


def tables() -> tuple[Table, ...]:
    full = (
        "Ours, nothing was published of it: 256 channels, 8 heads, 1.05M parameters without embedding, dropout 0.3, 40 "
        "epochs in 32 rows, segments and memory of 128, Adam 5e-4 with a cosine; evaluation with a memory of 256."
    )
    nano = "nano models of 64 channels; the untied one has 4 layers of 48, and as many parameters"
    words = f"softmax in clusters beginning at {CUTOFFS[0]:,} and {CUTOFFS[1]:,}"
    notes = (
        "All rows see the same tokens and have the same rates and initial deviations; at full scale the equilibrium is "
        "unrolled over 2 layers for 1,000 steps.",
        MEMORY_NOTE,
    )
    protocol: dict[str, dict[Scale, tuple[str, ...]]] = {
        level: {
            "debug": (DEBUG, *notes),
            "reduced": (reduced_note(nano, vocabulary), *notes),
            "full": (full, *notes),
        }
        for level, vocabulary in (("word", words), ("character", "50 characters"))
    }
    longer = tuple(Column(f"with_{m}", f"test perplexity, memory of {m}", f"test.perplexity_memory_{m}") for m in MEMORIES)
    speed = Column("speed", "training speed over the untied stack", "seconds_step", over="untied")
    bits = Column("bits", "bits per character, test", "test.bits", digits=3)
    published = {"deq": {"speed": 1 / 2.82}}
    return (
        Table(
            name=PTB,
            title="DEQ-Transformer on the Penn Treebank",
            source=f"{DEQ_SOURCE}; the comparison is that of its WikiText-103 table, its speed the published one there",
            rows=tuple(row(name, title, ptb, published.get(name), nano=f"nano {title}") for name, title in _TITLES.items()),
            columns=(*BASIC, speed, *longer),
            protocol=protocol["word"],
            hidden=CHANGES,
            claims=_stack_claims(),
            profiles=(settling(),),
        ),
        Table(
            name=CHARACTERS,
            title="DEQ-Transformer on the characters of the Penn Treebank",
            source="ours; nothing was published of it",
            rows=tuple(row(name, _TITLES[name], characters) for name in ("untied", "deq")),
            columns=(bits, *BASIC, speed, *longer),
            protocol=protocol["character"],
            hidden=CHANGES,
            claims=(_untied_claim(),),
            profiles=(settling(),),
        ),
    )
