"""DEQ-TrellisNet on the Penn Treebank, compared with TrellisNet (Bai, Kolter and Koltun 2019)."""

from __future__ import annotations

from typing import Any

from equilibria.lab.experiments.claims import at_most
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
    MEMORY_NOTE,
    TRELLIS_LAYERS,
    TRELLIS_RATE,
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

TRELLIS = "ptb-trellisnet"
_NANO = {  # titles of what the reduced scale runs
    "trellisnet": f"nano TrellisNet, {TRELLIS_LAYERS} layers",
    "trellisnet-checkpointed": f"nano TrellisNet, {TRELLIS_LAYERS} layers, checkpointed",
    "deq": "nano DEQ-TrellisNet",
}
_TRELLIS_TITLES = {
    "trellisnet": "TrellisNet",
    "trellisnet-checkpointed": "TrellisNet, checkpointed",
    "deq": "DEQ-TrellisNet",
}


def trellisnet(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return an experiment on the words of the Penn Treebank: TrellisNet, or its equilibrium."""
    deq, full = row == "deq", scale == "full"
    model = LanguageModel(
        kind="trellis",
        size=("deq-word-ptb" if deq else "word-ptb") if full else "nano",
        depth=None if deq else 58 if full else TRELLIS_LAYERS,
        checkpoint="sqrt" if row.endswith("checkpointed") else None,
        # Broyden's method, as published, keeps 2 states per step, which at this size would be most of the memory
        solver=None if full else "anderson",
        embedding=None if full else 32,
        hidden=None if full else 64,
        cutoffs=None if full else CUTOFFS,
        directions=None if full else DIRECTIONS,
    )
    model = tiny(model) if scale == "debug" else model
    settings = LanguageSettings(
        data=text(scale, "ptb", length=52),
        model=model,
        activation=(2.0, 1.0) if full else (0.0, 0.0),
        depths=DEPTHS if scale != "debug" else DEPTHS[:2],
    )
    training = _full_trellis(deq) if full else small_training(scale, pretraining=deq, trellis=True)
    return made(f"{TRELLIS}-{row}", f"{_TRELLIS_TITLES[row]} on PTB", settings, training, scale)


def _full_trellis(deq: bool) -> Training:
    return Training(
        epochs=500,
        batch_size=16,
        eval_batch_size=10,
        optimizer=Optimizer(name="sgd", lr=20.0, weight_decay=1.2e-6),
        schedule=Schedule(name="step", milestones=(0.8, 0.9)),
        clip_norm=0.225,
        pretrain_steps=30_000 if deq else 0,
    )


def tables() -> tuple[Table, ...]:
    notes = ("All rows see the same tokens; the equilibrium is unrolled over 10 layers at first.", MEMORY_NOTE)
    table = Table(
        name=TRELLIS,
        title="DEQ-TrellisNet on the Penn Treebank",
        source=f"{DEQ_SOURCE}, the table on the Penn Treebank; speeds are those published for WikiText-103",
        rows=tuple(
            row(name, _TRELLIS_TITLES[name], trellisnet, published, nano=_NANO[name])
            for name, published in {
                "trellisnet": {"parameters": 24e6, "inner": 20e6, "perplexity": 57.0, "memory": 8500.0},
                "trellisnet-checkpointed": {},
                "deq": {"parameters": 24e6, "inner": 20e6, "perplexity": 57.1, "memory": 1200.0, "speed": 1 / 2.40},
            }.items()
        ),
        columns=(*BASIC, Column("speed", "training speed over TrellisNet", "seconds_step", over="trellisnet")),
        hidden=CHANGES,
        claims=(
            as_good("deq", "trellisnet", "the equilibrium's validation perplexity is within 2 % of TrellisNet's", 1.02),
            at_most(
                "memory",
                "deq",
                "trellisnet",
                1 / 3,
                "a training step takes at most a third of TrellisNet's memory (published: 1.2 of 8.5 GB)",
                id="C10",
            ),
            *slower("trellisnet", "TrellisNet", "2.40, 70 layers", "1.64, 70 layers"),
            settles("trellisnet"),
        ),
        profiles=(settling(),),
        protocol={
            "debug": (DEBUG, *notes),
            "reduced": (
                reduced_note(
                    f"{TRELLIS_LAYERS} layers of 32 + 64 channels",
                    f"softmax in clusters beginning at {CUTOFFS[0]:,} and {CUTOFFS[1]:,}",
                    memory=1,
                    rates=f"{TRELLIS_RATE:g}",
                ),
                "Anderson's method in place of Broyden's, which keeps two states for every step.",
                *notes,
            ),
            "full": (
                "The published recipe: SGD 20 with clipping to 0.225, 500 epochs in 16 rows, segments of 52 after 58 tokens "
                "that are read again (the equilibrium carries its state instead), dropout, auxiliary losses and activation "
                "penalties as released. The rate falls to a tenth at 80 % and 90 %, where the released code averages.",
                *notes,
            ),
        },
    )
    return (table,)
