"""The table of DEQ-Transformer and DEQ-TrellisNet on WikiText-103 (Bai, Kolter and Koltun 2019)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from equilibria.lab.experiments.claims import Claim, at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table
from equilibria.lab.experiments.deq_language.data import TextName
from equilibria.lab.experiments.deq_language.models import LanguageModel
from equilibria.lab.experiments.deq_language.recipes import (
    BASIC,
    DEBUG,
    DEQ_SOURCE,
    DIRECTIONS,
    GAIN,
    LAYERS,
    MEMORY_NOTE,
    RATE,
    TRELLIS_LAYERS,
    TRELLIS_RATE,
    made,
    reduced_note,
    row,
    small_training,
    text,
    tiny,
    transformer_training,
)
from equilibria.lab.experiments.deq_language.task import LanguageSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

WIKITEXT = "wikitext"
CUTOFFS = (2000, 8000)  # of the 33,278 words of WikiText-2
STEPS = 250  # steps of a reduced epoch; few, because the table has many rows and a large vocabulary
STEPS_PER_EPOCH = 103_227_021 // (60 * 150)  # tokens of WikiText-103 over batch size times length
Family = Literal["transformer", "trellisnet"]

_SMALL: dict[str, Any] = {"cutoffs": CUTOFFS}
_MEDIUM: dict[str, Any] = {"width": 96, "heads": 4, "inner": 512, "cutoffs": CUTOFFS}
_UNTIED: dict[str, Any] = {"width": 40, "heads": 4, "inner": 40, "vectors": 96, "cutoffs": CUTOFFS}
_TRELLIS: dict[str, Any] = {"embedding": 32, "hidden": 64, "solver": "anderson", "cutoffs": CUTOFFS}

# title, model at full scale, changes at the reduced scale, and published figures: parameters, parameters without embedding,
# perplexity, MB
_ROWS: dict[str, tuple[str, LanguageModel, dict[str, Any], tuple[float, float, float, float]]] = {
    "trellisnet": (
        "TrellisNet, 70 layers",
        LanguageModel(kind="trellis", size="wikitext-103", depth=75),
        {"depth": TRELLIS_LAYERS, **_TRELLIS},
        (180e6, 45e6, 29.2, 24_700),
    ),
    "trellisnet-checkpointed": (
        "TrellisNet, 70 layers, checkpointed",
        LanguageModel(kind="trellis", size="wikitext-103", depth=75, checkpoint="sqrt"),
        {"depth": TRELLIS_LAYERS, **_TRELLIS},
        (180e6, 45e6, 29.2, 5_200),
    ),
    "deq-trellisnet": (
        "DEQ-TrellisNet",
        LanguageModel(kind="trellis", size="deq-wikitext-103"),
        _TRELLIS,
        (180e6, 45e6, 29.0, 3_300),
    ),
    "medium-16": (
        "Transformer-XL medium, 16 layers",
        LanguageModel(kind="untied", size="base", divisor=1, cutoffs=()),
        {"depth": 16, **_UNTIED},
        (165e6, 44e6, 24.3, 8_500),
    ),
    "deq-medium": (
        "DEQ-Transformer medium",
        LanguageModel(size="medium-plain"),
        _MEDIUM,
        (172e6, 43e6, 24.2, 2_700),
    ),
    "adaptive-18": (
        "Transformer-XL medium, 18 layers, adaptive",
        LanguageModel(kind="untied", size="base", depth=18, width=500, heads=10, inner=2750, divisor=4),
        {**_UNTIED, "depth": 18, "width": 40, "heads": 4, "inner": 32, "divisor": 2},
        (110e6, 72e6, 23.6, 9_000),
    ),
    "deq-adaptive": (
        "DEQ-Transformer medium, adaptive",
        LanguageModel(size="medium"),
        {**_MEDIUM, "divisor": 2},
        (110e6, 70e6, 23.2, 3_700),
    ),
    "small-4": (
        "Transformer-XL small, 4 layers",
        LanguageModel(kind="untied", size="small"),
        {**_SMALL, "depth": 4},
        (139e6, 4.9e6, 35.8, 4_800),
    ),
    "small-tied": (
        f"Transformer-XL small, weight-tied {LAYERS} layers",
        LanguageModel(size="small", depth=LAYERS),
        _SMALL,
        (138e6, 4.5e6, 34.9, 6_800),
    ),
    "deq-small": ("DEQ-Transformer small", LanguageModel(size="small"), _SMALL, (138e6, 4.5e6, 32.4, 1_100)),
}


def wikitext(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a row; full scale uses WikiText-103, the reduced scale WikiText-2."""
    title, model, reduced, _ = _ROWS[row]
    if scale != "full":
        gain = 1.0 if model.kind == "trellis" else GAIN
        model = dataclasses.replace(model, size="nano", directions=DIRECTIONS, gain=gain, **reduced)
    if scale == "debug":
        model = tiny(model)
    trellis, deq = model.kind == "trellis", model.depth is None and model.kind != "untied"
    name: TextName = "wikitext-103" if scale == "full" else "wikitext-2"
    data = text(scale, name, length=(100 if deq else 75) if trellis else 150, steps=STEPS)
    if scale != "full":
        training = small_training(scale, pretraining=deq, trellis=trellis)
    elif trellis:
        training = _trellis_training(deq)
    else:
        training = transformer_training(STEPS_PER_EPOCH, 300_000, 60, 32_000 if deq else 0)
    return made(f"{WIKITEXT}-{row}", title, LanguageSettings(data=data, model=model), training, scale)


def _trellis_training(deq: bool) -> Training:
    return Training(
        epochs=25,
        batch_size=49 if deq else 40,
        eval_batch_size=10,
        optimizer=Optimizer(lr=1e-3),
        schedule=Schedule(name="step", milestones=(0.6, 0.8)),
        clip_norm=0.07,
        pretrain_steps=30_000 if deq else 0,
    )


_NANO = {  # titles of what the reduced scale runs
    "trellisnet": f"nano TrellisNet, {TRELLIS_LAYERS} layers",
    "trellisnet-checkpointed": f"nano TrellisNet, {TRELLIS_LAYERS} layers, checkpointed",
    "deq-trellisnet": "nano DEQ-TrellisNet",
    "medium-16": "nano Transformer-XL, 16 layers of 40 channels",
    "deq-medium": "nano DEQ-Transformer, 96 channels",
    "adaptive-18": "nano Transformer-XL, 18 layers of 40 channels, adaptive",
    "deq-adaptive": "nano DEQ-Transformer, 96 channels, adaptive",
    "small-4": "nano Transformer-XL, 4 layers",
    "small-tied": f"nano Transformer-XL, weight-tied {LAYERS} layers",
    "deq-small": "nano DEQ-Transformer, 64 channels",
}
# equilibrium, explicit network, published perplexities, largest ratio of memory (1.0 for a network of only 4 layers)
_PAIRS = (
    ("deq-trellisnet", "trellisnet", "29.0 to 29.2", 0.5),
    ("deq-medium", "medium-16", "24.2 to 24.3", 0.5),
    ("deq-adaptive", "adaptive-18", "23.2 to 23.6", 0.5),
    ("deq-small", "small-4", "32.4 to 35.8", 1.0),
    ("deq-small", "small-tied", "32.4 to 34.9", 0.5),
)


def _claims() -> tuple[Claim, ...]:
    found = []
    for deq, explicit, published, most in _PAIRS:
        names = f"{deq} beside {explicit}"
        found.append(
            at_most(
                "valid",
                deq,
                explicit,
                1.02,
                f"{names}: validation perplexity at most 2 % above (published, test: {published})",
                id="C11",
            )
        )
        found.append(
            at_most(
                "memory",
                deq,
                explicit,
                most,
                f"{names}: at most {'half of ' * (most < 1)}the memory of a training step",
                id="C10",
            )
        )
    for deq, explicit, train, predict in (
        ("deq-adaptive", "adaptive-18", 2.82, 1.76),
        ("deq-trellisnet", "trellisnet", 2.40, 1.64),
    ):
        names = f"{deq} beside {explicit}"
        for column, what, ratio in (("step", "training step", train), ("predict", "prediction", predict)):
            found.append(
                at_most(
                    column,
                    deq,
                    explicit,
                    1.5 * ratio,
                    f"{names}: a {what} takes at most 1.5 times as long as published ({ratio})",
                    id="C11",
                )
            )
    return tuple(found)


def _published(name: str) -> dict[str, float]:
    found = dict(zip(("parameters", "inner", "perplexity", "memory"), _ROWS[name][3], strict=True))
    speeds = {"deq-adaptive": {"speed": 1 / 2.82}, "deq-trellisnet": {"trellis_speed": 1 / 2.40}}
    return found | speeds.get(name, {})


def tables() -> tuple[Table, ...]:
    notes = (
        "All rows of a kind see the same tokens, equilibria unrolled over a few layers at first, but for nano "
        "transformers; at full scale DEQ-TrellisNet has 49 rows, TrellisNet 40, as published.",
        MEMORY_NOTE,
    )
    return (
        Table(
            name=WIKITEXT,
            title="DEQ-Transformer and DEQ-TrellisNet on WikiText",
            source=f"{DEQ_SOURCE}, the table on WikiText-103",
            rows=tuple(row(name, _ROWS[name][0], wikitext, _published(name), nano=_NANO[name]) for name in _ROWS),
            columns=(
                *BASIC,
                Column("speed", "training speed over Transformer-XL, 18 layers", "seconds_step", over="adaptive-18"),
                Column("trellis_speed", "over TrellisNet", "seconds_step", over="trellisnet"),
            ),
            claims=_claims(),
            protocol={
                "debug": (DEBUG, *notes),
                "reduced": (
                    reduced_note(
                        "WikiText-2 in place of WikiText-103; nano models of 64 channels (small) and 96 (medium), untied "
                        f"ones of 40 to 48, TrellisNet of {TRELLIS_LAYERS} layers with 32 + 64 channels",
                        f"softmax in clusters beginning at {CUTOFFS[0]:,} and {CUTOFFS[1]:,}, vectors half as wide from "
                        "cluster to cluster where it says adaptive",
                        steps=STEPS,
                        rates=f"{RATE:g} (TrellisNet {TRELLIS_RATE:g})",
                    ),
                    *notes,
                ),
                "full": (
                    "The published recipes: transformers Adam 2.5e-4 with a warm-up of 16,000 steps and a cosine, 300,000 "
                    "steps in 60 rows of 150, 32,000 of them unrolled; TrellisNet Adam 1e-3, a tenth at epochs 15 and "
                    "20 of 25. Sizes that were not published are reconstructed from the counts of parameters.",
                    *notes,
                ),
            },
        ),
    )
