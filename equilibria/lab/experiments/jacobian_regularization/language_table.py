"""Jacobian regularization of DEQ-Transformers (Bai, Koltun and Kolter 2021): recipes of norms, solver steps, penalties."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from equilibria.lab.experiments.claims import Claim, at_most, column_at_least, value_at_least
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table
from equilibria.lab.experiments.deq_language.data import TextName
from equilibria.lab.experiments.deq_language.models import Adjoint, LanguageGradientName, LanguageModel
from equilibria.lab.experiments.deq_language.recipes import (
    BASIC,
    CUTOFFS,
    DEBUG,
    DIRECTIONS,
    GAIN,
    LENGTH,
    MEMORY_NOTE,
    STEPS,
    made,
    reduced_note,
    row,
    small_training,
    text,
    tiny,
    transformer_training,
)
from equilibria.lab.experiments.deq_language.task import LanguageSettings
from equilibria.lab.training.settings import Training
from equilibria.models.language.transformer_configs import NormPlace

JR = "jr-language"
JR_SOURCE = (
    "Bai, Koltun and Kolter 2021, Stabilizing Equilibrium Models by Jacobian Regularization, arXiv:2106.14342, Table 1 "
    "(WikiText-103)"
)
AT = (1, 2, 4, 6, 8, 12)  # numbers of steps after which the perplexity is measured
STEPS_PER_EPOCH = 103_227_021 // (56 * 150)  # of WikiText-103 in 56 rows of segments of 150
WORDS = f"softmax in clusters beginning at {CUTOFFS[0]:,} and {CUTOFFS[1]:,}"


@dataclass(frozen=True)
class Recipe:
    """The settings of a row: position of the norms, steps of the solvers, and the penalty.

    steps      step limits of the forward and backward solver
    nano       the same at the smaller scales; None: as at full scale
    weight     weight of the Jacobian penalty at full scale, which grows every `every` steps
    frequency  share of the steps in which the penalty is applied
    extra      steps of the forward solver in addition to `steps`
    length     length of a segment at full scale
    plain      with pre-LN, add the feed-forward layer to the state, not to its norm as in the released code
    """

    title: str
    norm: NormPlace = "post"
    steps: tuple[int, int] = (30, 35)
    nano: tuple[int, int] | None = None
    weight: float = 0.0
    frequency: float = 0.0
    every: int = 1
    gradient: LanguageGradientName = "implicit"
    adjoint: Adjoint = "gmres"
    extra: int = 0
    length: int = 150
    plain: bool = False

    def model(self, scale: Scale) -> LanguageModel:
        full = scale == "full"
        forward, backward = self.steps if full else self.nano or self.steps
        published = f"medium-regularized{'-pre' * (self.norm == 'pre')}" if self.weight else "medium"
        model = LanguageModel(
            size=published if full else "nano",
            norm=self.norm,
            skip_from_norm=self.norm == "pre" and not self.plain,
            forward_steps=forward + self.extra,
            backward_steps=backward,
            gradient=self.gradient,
            adjoint=self.adjoint,
            directions=None if full else DIRECTIONS,
            gain=1.0 if full else GAIN,
            cutoffs=None if full else CUTOFFS,
        )
        return tiny(model) if scale == "debug" else model

    def settings(self, scale: Scale, at: tuple[int, ...] = (), steps: int = STEPS) -> LanguageSettings:
        """Return the settings at a scale; a reduced epoch has `steps` steps."""
        full = scale == "full"
        name: TextName = "wikitext-103" if full else "ptb"
        data = text(scale, name, length=self.length, eval_length=150 if full else None, steps=steps)
        if not full and self.length > 150:
            data = dataclasses.replace(data, length=2 * data.length, eval_length=data.length)
        return LanguageSettings(
            data=data,
            model=self.model(scale),
            jacobian_weight=self.weight if full else NANO_WEIGHT * (self.weight > 0),
            jacobian_frequency=self.frequency if self.weight else 1.0,
            jacobian_increment=(0.1 if full else NANO_WEIGHT) * (self.weight > 0),
            jacobian_every=self.every if full else NANO_EVERY,
            jitter=2 if self.weight else 0,
            at=at if scale != "debug" else at[:1],
        )


def methods_training(scale: Scale, explicit: bool = False, pretraining: bool = True) -> Training:
    if scale != "full":
        return small_training(scale, pretraining=pretraining and not explicit)
    steps = 32_000 if pretraining and not explicit else 0
    return transformer_training(STEPS_PER_EPOCH, 250_000, 56, steps)


# Reduced scale: the weight begins at NANO_WEIGHT and grows by NANO_WEIGHT every NANO_EVERY steps. A constant weight of 0.1
# raised the validation perplexity after an epoch by 4 % (468 instead of 452), one of 0.5 by more than twice as much.
NANO_WEIGHT, NANO_EVERY = 0.02, 200
NANO_STEPS = {"post": (11, 12), "pre": (12, 13)}  # forward and backward, with the penalty
POST = Recipe("DEQ, post-LN")
_JR_POST = Recipe("DEQ + JR, post-LN", steps=(12, 13), nano=NANO_STEPS["post"], weight=1.9, frequency=0.35, every=35_000)
JR_PRE = Recipe("DEQ + JR, pre-LN", "pre", (14, 14), nano=NANO_STEPS["pre"], weight=2.0, frequency=0.4, every=30_000)
_JR_ROWS = {
    "post": POST,
    "post-20": Recipe("DEQ, post-LN, 20 steps", steps=(20, 23)),
    "post-15": Recipe("DEQ, post-LN, 15 steps", steps=(15, 17)),
    "post-12": Recipe("DEQ, post-LN, as few steps as with JR", steps=(12, 13), nano=NANO_STEPS["post"]),
    "pre": Recipe("DEQ, pre-LN", "pre"),
    "post-jr": _JR_POST,
    "pre-jr": JR_PRE,
    "pre-plain": Recipe("DEQ, pre-LN, plain sums", "pre", plain=True),
    "pre-jr-long": dataclasses.replace(JR_PRE, title="DEQ + JR, pre-LN, segments of 300", length=300),
}
_JR_PUBLISHED = {
    "untied": {"perplexity": 24.1, "memory": 9000.0, "speed": 1.0, "parameters": 110e6},
    "post": {"perplexity": 24.0, "nfe": 30.0, "memory": 3900.0, "speed": 1 / 3.1, "parameters": 98e6, "at_12": 29.2},
    "post-20": {"perplexity": 26.0, "nfe": 20.0, "speed": 1 / 2.2, "parameters": 98e6},
    "post-jr": {"perplexity": 24.9, "nfe": 12.0, "speed": 1 / 1.45, "parameters": 98e6},
    "pre-jr": {"perplexity": 24.5, "nfe": 14.0, "memory": 4800.0, "speed": 1 / 1.55, "parameters": 98e6},
    "pre-jr-long": {"perplexity": 23.8, "nfe": 14.0, "memory": 6500.0, "speed": 1 / 2.2, "parameters": 98e6},
}


_LIMITED = {"post-20", "post-15", "post-12", "post-jr", "pre-jr", "pre-jr-long"}  # few steps by design


def regularized(row: str, scale: Scale = "full") -> Experiment[Any]:
    """Return the experiment of a row of Table 1 on Jacobian regularization."""
    name = f"{JR}-{row}"
    if row == "untied":
        settings = _untied(scale)
        return made(name, "Transformer-XL", settings, methods_training(scale, explicit=True), scale)
    recipe = _JR_ROWS[row]
    return made(name, recipe.title, recipe.settings(scale, AT), methods_training(scale), scale)


def _untied(scale: Scale) -> LanguageSettings:
    if scale == "full":
        model = LanguageModel(kind="untied", size="base", depth=18, width=500, heads=10, inner=2750, divisor=4)
        return LanguageSettings(data=text(scale, "wikitext-103", length=150, eval_length=150), model=model)
    model = LanguageModel(kind="untied", gain=GAIN, cutoffs=CUTOFFS)
    return LanguageSettings(data=text(scale, "ptb", length=150), model=tiny(model) if scale == "debug" else model)


def _jr_claims() -> tuple[Claim, ...]:
    return (
        at_most("nfe", "post-jr", "post", 0.5, "post-LN, Jacobian regularization halves the evaluations", id="C3"),
        at_most(
            "valid",
            "post-jr",
            "post",
            1.02,
            "post-LN, Jacobian regularization raises the validation perplexity by at most 2 %",
            id="C3",
        ),
        at_most("radius", "post-jr", "post", 1.0, "post-LN, Jacobian regularization lowers the spectral radius", id="C3"),
        at_most("valid", "post-jr", "post-12", 1.0, "trained with as few steps, the model without it is no better", id="C3"),
        column_at_least(
            "at_6",
            "perplexity",
            "post",
            1.01,
            "stopping the unregularized model after 6 steps costs perplexity (published: 24.0 to 29.2, after 12)",
            id="C3",
        ),
        *(
            at_most(
                f"at_{k}", "post-jr", "post", 1.0, f"stopped after {k}, the regularized model is the better one", id="C3"
            )
            for k in AT[:3]
        ),
        at_most("nfe", "pre-jr", "pre", 0.5, "pre-LN, Jacobian regularization halves the evaluations", id="C3"),
        at_most(
            "valid",
            "pre-jr",
            "pre",
            1.02,
            "pre-LN, Jacobian regularization raises the validation perplexity by at most 2 %",
            id="C3",
        ),
        value_at_least(
            "failed", "pre", 50.0, "pre-LN without it, at least half of the solves fail (published: diverged)", id="C3"
        ),
        value_at_least(
            "failed",
            "pre-plain",
            50.0,
            "pre-LN with plain sums and without regularization, at least half of the solves fail",
            id="C3",
        ),
        at_most("residual", "pre-jr", "pre", 0.1, "pre-LN with it, the residual is at most a tenth", id="C3"),
        at_most(
            "valid",
            "pre-jr",
            "post",
            1.02,
            "pre-LN, the regularized model's perplexity is at most 2 % above post-LN's",
            id="C3",
        ),
    )


def tables() -> tuple[Table, ...]:
    post, pre = (f"{forward} and {backward}" for forward, backward in NANO_STEPS.values())
    notes = (
        "Steps forward and backward: 30 and 35 without the penalty; with it 12 and 13 (post-LN), 14 and 14 (pre-LN), at the "
        f"reduced scale {post} (post-LN), {pre} (pre-LN); the limit of every training step is drawn from up to 2 "
        "below. A solve fails if its residual stays above 1e-3.",
        "Pre-LN adds the feed-forward layer to its normalized input, as released; `plain sums` adds it to the state itself.",
        MEMORY_NOTE,
    )
    titles = {"untied": "Transformer-XL"} | {name: recipe.title for name, recipe in _JR_ROWS.items()}
    columns = tuple(Column(f"at_{k}", f"test perplexity after {k}", f"test.perplexity_at_{k}") for k in AT)
    table = Table(
        name=JR,
        title="Jacobian regularization: DEQ-Transformer",
        source=JR_SOURCE,
        rows=tuple(
            row(
                name,
                title,
                regularized,
                _JR_PUBLISHED.get(name),
                nano="nano Transformer-XL, 4 layers" if name == "untied" else f"nano {title}",
                limited=name in _LIMITED,
            )
            for name, title in titles.items()
        ),
        columns=(*BASIC, Column("speed", "training speed over Transformer-XL", "seconds_step", over="untied"), *columns),
        claims=_jr_claims(),
        profiles=(
            Profile(
                name="perplexity-nfe",
                title="Test perplexity with the solver stopped early",
                x_label="steps of the solver",
                y_label="perplexity",
                points=tuple((k, f"at_{k}") for k in AT),
                log=True,
            ),
        ),
        protocol={
            "debug": (DEBUG, *notes),
            "reduced": (
                reduced_note("nano models on the Penn Treebank", WORDS),
                f"Penalty: weight {NANO_WEIGHT:g}, as much more every {NANO_EVERY} steps, in 35 % (post-LN) or 40 % "
                f"(pre-LN) of the steps. Segments of {2 * LENGTH} where it says 300.",
                *notes,
            ),
            "full": (
                "WikiText-103, 98M parameters, Adam 2.5e-4 with a warm-up of 16,000 steps and a cosine, 250,000 steps in 56 "
                "rows of 150, 32,000 of them unrolled over 2 layers; penalty 1.9 (2.0 pre-LN), 0.1 more every 35,000 "
                "(30,000) steps. Transformer-XL of 18 layers with 500 channels, reconstructed from its count of parameters.",
                *notes,
            ),
        },
    )
    return (table,)
