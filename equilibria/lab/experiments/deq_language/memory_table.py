"""The memory of a training step of a DEQ-Transformer over the steps of its solver, compared with stacks of its layer."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from equilibria.lab.experiments.claims import Claim, at_least, column_at_least, column_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table
from equilibria.lab.experiments.deq_language.models import Checkpointing, LanguageModel
from equilibria.lab.experiments.deq_language.recipes import (
    CUTOFFS,
    DEBUG,
    DEQ_SOURCE,
    DIRECTIONS,
    LENGTH,
    MEMORY_NOTE,
    ROWS,
    made,
    row,
    text,
    tiny,
)
from equilibria.lab.experiments.deq_language.task import LanguageSettings
from equilibria.lab.training.settings import Training

MEMORY = "language-memory"
MEMORY_DEPTHS = (5, 10, 20, 40, 80)  # number of layers of the stacks

_KINDS = {
    "deq": "DEQ, implicit",
    "upg": "DEQ, UPG of 5 steps",
    "tied": "weight-tied stack",
    "sqrt": "weight-tied, checkpointed",
    "recursive": "weight-tied, checkpointed recursively",
}


def memory(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a row: the memory of training steps over solver steps or layers; training is minimal."""
    full, explicit = scale == "full", row in ("tied", "sqrt", "recursive")
    model = LanguageModel(
        size="small" if full else "nano",
        depth=MEMORY_DEPTHS[0] if explicit else None,
        checkpoint=next((way for way in get_args(Checkpointing) if way == row), None),
        gradient="upg" if row == "upg" else "implicit",
        cutoffs=None if full else CUTOFFS,
        directions=DIRECTIONS,  # a bound on what the linear solver keeps, so that only the steps differ
    )
    data = text(scale, "wikitext-103" if full else "ptb", length=150)
    rows, length = (15, 150) if full else (4, 8) if scale == "debug" else (ROWS, LENGTH)
    short = dataclasses.replace(data, train=6 * rows * length + 1, valid=rows * length + 1, test=rows * length + 1)
    settings = LanguageSettings(
        data=short,
        model=tiny(model) if scale == "debug" else model,
        memory_depths=MEMORY_DEPTHS[:2] if scale == "debug" else MEMORY_DEPTHS,
    )
    training = Training(epochs=1, batch_size=rows, eval_batch_size=rows)
    return made(f"{MEMORY}-{row}", f"memory of a training step, {_KINDS[row]}", settings, training, scale)


def _claims() -> tuple[Claim, ...]:
    most, least = f"bytes_{MEMORY_DEPTHS[-1]}", f"bytes_{MEMORY_DEPTHS[0]}"
    times = MEMORY_DEPTHS[-1] / MEMORY_DEPTHS[0]
    return (
        column_at_most(
            most,
            least,
            "deq",
            1.05,
            "implicit training takes no more memory with 80 steps than with 5, to 5 %",
            id="C10",
        ),
        column_at_most(most, least, "upg", 1.05, "UPG takes no more memory with 80 steps than with 5, to 5 %", id="C10"),
        column_at_least(most, least, "tied", times / 2, "the stack's memory grows with its layers", id="C10"),
        column_at_most(
            most,
            "bytes_20",
            "sqrt",
            2.5,
            "checkpointed, with their root: from 20 to 80 to less than 2.5 times",
            id="C10",
        ),
        column_at_most(
            most,
            "bytes_20",
            "recursive",
            1.6,
            "recursively, with their logarithm: from 20 to 80 to less than 1.6 times",
            id="C10",
        ),
        at_least(most, "sqrt", "deq", 1.0, "with 80 steps the checkpointed stack takes more than the equilibrium", id="C10"),
    )


def tables() -> tuple[Table, ...]:
    kept = f"GMRES keeps {DIRECTIONS} directions, whatever the number of its steps."

    table = Table(
        name=MEMORY,
        title="Memory of a training step of DEQ-Transformer",
        source=f"{DEQ_SOURCE}; the checkpoints are those of Chen and others 2016, arXiv:1604.06174",
        rows=tuple(row(name, title, memory) for name, title in _KINDS.items()),
        columns=tuple(
            Column(f"bytes_{k}", f"MB with {k} steps", f"train.peak_bytes_{k}", digits=1, factor=1e-6) for k in MEMORY_DEPTHS
        ),
        claims=_claims(),
        profiles=(
            Profile(
                name="memory-steps",
                title="Peak memory of a training step without embedding",
                x_label="steps of the solver, or layers",
                y_label="MB",
                points=tuple((k, f"bytes_{k}") for k in MEMORY_DEPTHS),
                log=True,
            ),
        ),
        protocol={
            "debug": (DEBUG,),
            "reduced": (
                f"Reduced: nano model on the Penn Treebank, {ROWS} segments of {LENGTH} with full memory.",
                kept,
                MEMORY_NOTE,
            ),
            "full": (
                "The small model of WikiText-103, 15 segments of 150, as in the published measurements.",
                kept,
                MEMORY_NOTE,
            ),
        },
    )
    return (table,)
