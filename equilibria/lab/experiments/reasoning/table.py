"""Equilibrium reasoners on generated puzzles, compared with recursive models and explicit stacks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import Claim, column_higher, higher, value_at_least, value_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.reasoning.task import PuzzleData, Reasoning, ReasoningSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.models.reasoning.configs import ReasonerConfig

SOURCE = (
    "after Jolicoeur-Martineau 2025, Less is More: Recursive Reasoning with Tiny Networks, arXiv:2510.04871, and "
    "Equilibrium Reasoners 2026, arXiv:2605.21488; puzzles generated here, so that no published figure compares"
)
TITLES = {
    "stack": "feed-forward stack, equal parameters",
    "deep-stack": "feed-forward stack, depth of the recurrent row",
    "bptt": "recurrent, full back-propagation",
    "trm": "Tiny Recursive Model",
    "eqr": "Equilibrium Reasoner",
    "eqr-exact": "Equilibrium Reasoner, exact gradient",
    "eqr-jacobian": "Equilibrium Reasoner, Jacobian penalty",
}
_DEBUG_DEPTHS = (1, 2, 4)


@dataclass(frozen=True)
class Puzzle:
    """The settings of a table: its data, the size of the reasoner and its training.

    steps        largest number of supervised steps of a row in training; models are tested to four times that depth
    updates      number of training steps at the reduced scale
    relaxation   relaxation of Equilibrium Reasoners; with the published 0.95 larger cells end in cycles of two states
    watched      depth at which the change is compared with correctness. At larger depths right and wrong answers are both
                 converged to rounding. None: all answers are right at larger depths
    wide_deep    True if a claim says that several starts help at the largest depth too
    explore      share of the rows that may not halt before a random number of steps; published: 0.1. A larger share trains
                 more states after the answer was found, and accuracy then falls less with depth
    tried        a sentence on the choice of the settings
    noise        noise of Equilibrium Reasoners in training; published: 0.01. More noise widens attractors
    """

    title: str
    data: PuzzleData
    config: ReasonerConfig
    steps: int
    updates: int
    lr: float = 2e-3
    weight_decay: float = 0.5
    ema: float = 0.995
    rise: float = 30.0  # points that depth and breadth add to one step
    relaxation: float = 0.5
    explore: float = 0.5
    noise: float = 0.1
    watched: int | None = 32
    tried: str = "Settings were those of 4x4, which were chosen on validation boards of all its seeds."
    wide_deep: bool = True

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(2**i for i in range(20) if 2**i <= 4 * self.steps)


BATCH = 32
MIXERS = {
    "mlp": "an MLP over all of them",
    "attention": "attention with rotary positions",
    "line": "a convolution over three neighbours",
    "square": "a convolution over 3x3 neighbours",
}
STARTS = (1, 2, 4)
_SMALL = ReasonerConfig(heads=4, layers=1, multiple=16, h_cycles=3, l_cycles=1)
VALID, TEST = 256, 512  # numbers of validation and test puzzles
PUZZLES = {
    "sudoku-4x4": Puzzle(
        "Sudoku 4x4",
        PuzzleData(size=4, train=400, low=4, high=7, valid=VALID, test=TEST),
        dataclasses.replace(_SMALL, tokens=5, positions=16, width=32),
        steps=16,
        updates=1_500,
        tried="Settings and the depth of the AUC were chosen on validation boards of all three seeds.",
    ),
    "sudoku-6x6": Puzzle(
        "Sudoku 6x6",
        PuzzleData(size=6, train=2_000, low=8, high=14, valid=VALID, test=TEST),
        dataclasses.replace(_SMALL, tokens=7, positions=36, width=64),
        steps=16,
        updates=6_000,
        tried="Settings and the depth of the AUC were chosen on validation boards of 4x4 and of seeds 0 and 1 of 6x6.",
    ),
    "sudoku-9x9": Puzzle(
        "Sudoku 9x9, easy",
        PuzzleData(size=9, train=1_000, low=40, high=50, valid=VALID, test=TEST),
        dataclasses.replace(_SMALL, tokens=10, positions=81, width=64),
        steps=16,
        updates=3_000,
    ),
    "mazes": Puzzle(
        "Mazes 9x9",
        PuzzleData(name="mazes", size=9, train=2_000, low=4, high=24, valid=VALID // 4, test=TEST // 4),
        dataclasses.replace(_SMALL, tokens=5, positions=81, width=32, mixer="square"),
        steps=8,
        updates=1_250,
        weight_decay=0.2,
        watched=16,
        tried="The mixer, the width and the steps were chosen on validation puzzles with another seed of training.",
    ),
    "prefix-sums": Puzzle(
        "Prefix sums",
        PuzzleData(name="prefix-sums", size=16, held_size=40, train=4_000, valid=VALID, test=TEST),
        dataclasses.replace(_SMALL, tokens=2, positions=16, width=32, mixer="line"),
        # a step moves information six positions: enough for the 16 bits of training, too little for the 40 of testing
        steps=8,
        updates=875,
        tried="The mixer, the sizes and the steps were chosen on validation puzzles with another seed of training.",
        watched=None,
        wide_deep=False,
    ),
}


def experiment(puzzle: str, row: str, scale: Scale = "full") -> Experiment[ReasoningSettings]:
    """Return the experiment of a row of a table of reasoners."""
    return Experiment(
        name=f"reasoner-{puzzle}-{row}",
        summary=f"{TITLES[row]}, {PUZZLES[puzzle].title}",
        settings=_settings(PUZZLES[puzzle], row, scale),
        training=_training(PUZZLES[puzzle], scale),
        make=Reasoning,
        scale=scale,
    )


def _settings(puzzle: Puzzle, row: str, scale: Scale) -> ReasoningSettings:
    by_row: dict[str, dict[str, Any]] = {
        "stack": {"kind": "stack", "stack_layers": puzzle.config.layers},
        "deep-stack": {"kind": "stack", "stack_layers": puzzle.steps * (puzzle.config.l_cycles + 1) * puzzle.config.layers},
        "bptt": {"kind": "bptt", "unrolled": puzzle.steps},
        "eqr-exact": {"kind": "exact"},
        "eqr-jacobian": {"jacobian_weight": 0.1},
    }
    plain = row in ("trm", "stack", "deep-stack")
    config = (
        puzzle.config
        if plain
        else dataclasses.replace(
            puzzle.config.attractor(), relaxation=puzzle.relaxation, noise=puzzle.noise, eval_noise=False
        )
    )
    depths = _DEBUG_DEPTHS if scale == "debug" else puzzle.depths
    return ReasoningSettings(
        data=_data(puzzle, scale),
        config=config,
        max_steps=2 if scale == "debug" else puzzle.steps,
        depths=depths,
        starts=(1, 2) if scale == "debug" else STARTS,
        halt_by="head" if plain else "both",
        explore=0.1 if plain else puzzle.explore,
        **by_row.get(row, {}),
    )


def _data(puzzle: Puzzle, scale: Scale) -> PuzzleData:
    """Return the puzzles of a scale, repeated so often that one epoch is the whole training."""
    data = puzzle.data
    if scale == "debug":
        return dataclasses.replace(data, train=24, valid=8, test=8)
    return dataclasses.replace(data, repeats=math.ceil(_updates(puzzle, scale) * BATCH / data.train))


def _updates(puzzle: Puzzle, scale: Scale) -> int:
    return puzzle.updates if scale == "reduced" else 8 * puzzle.updates


def _training(puzzle: Puzzle, scale: Scale) -> Training:
    debug = scale == "debug"
    return Training(
        epochs=1,
        batch_size=8 if debug else BATCH,
        eval_batch_size=8 if debug else TEST,
        optimizer=Optimizer(name="adamw", lr=puzzle.lr, betas=(0.9, 0.95), weight_decay=puzzle.weight_decay),
        schedule=Schedule(name="cosine", warmup_steps=1 if debug else 100, final=0.05),
        ema=puzzle.ema,
    )


def _claims(p: Puzzle) -> tuple[Claim, ...]:
    deep, trained, half, wide = max(p.depths), p.steps, p.steps // 2, max(STARTS)
    first, last = "exact_1x1", f"exact_{deep}x1"
    return (
        value_at_least(
            "chosen",
            "eqr",
            95.0,
            "at the depth and breadth chosen on validation 95 % of the test puzzles are solved exactly",
        ),
        column_higher("chosen", first, "eqr", f"depth and breadth add {p.rise:g} points to one supervised step", by=p.rise),
        column_higher(
            last, f"exact_{half}x1", "eqr", "exact answers rise by a point beyond half the depth of training", by=1.0
        ),
        *(
            column_higher(
                f"exact_{depth}x{wide}",
                f"exact_{depth}x1",
                "eqr",
                f"at {depth} steps {wide} starts add a point of exact answers",
                by=1.0,
            )
            for depth in ((trained, deep) if p.wide_deep else (trained,))
        ),
        column_higher(
            last, f"exact_{trained}x1", "eqr", "four times the depth of training costs at most one point", by=-1.0
        ),
        *(
            [value_at_least("auc", "eqr", 0.9, "the residual tells wrong answers from right ones: AUC of 0.9 or more")]
            if p.watched
            else []
        ),
        higher("chosen", "eqr", "stack", "the equilibrium beats the untied stack of equal parameters"),
        column_higher("exact_halted", last, "eqr", "halting costs at most one point of accuracy", by=-1.0),
        value_at_most("steps_halted", "eqr", deep / 2, f"halting takes at most half of the {deep} steps"),
    )


def _columns(p: Puzzle) -> tuple[Column, ...]:
    trained, deep, half, wide = p.steps, max(p.depths), p.steps // 2, max(STARTS)

    def exact(depth: int, starts: int = 1) -> Column:
        key = f"exact_{depth}x{starts}"
        title = f"exact, {depth} step{'s' * (depth > 1)}{f', best of {starts}' if starts > 1 else ''}, %"
        return Column(key, title, f"test.{key}", digits=1, factor=100)

    return (
        Column("parameters", "parameters", "summary.parameters", digits=0),
        *(exact(1), exact(half), exact(trained), exact(deep), exact(trained, wide), exact(deep, wide)),
        Column("chosen", "exact, depth and breadth chosen on validation, %", "test.chosen", digits=1, factor=100),
        *([Column("auc", f"AUC of the change, {p.watched} steps", f"test.auc_{p.watched}", digits=3)] if p.watched else []),
        Column("change", f"median change, {deep} steps", f"test.change_{deep}", digits=4),
        Column("exact_halted", "exact, halting, %", "test.exact_halted", digits=1, factor=100),
        Column("steps_halted", "steps, halting", "test.steps_halted", digits=1),
        Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    )


def _hidden(p: Puzzle) -> tuple[Column, ...]:
    shown = {column.name for column in _columns(p)}
    keys = [f"exact_{depth}x{width}" for depth in p.depths for width in STARTS]
    return tuple(Column(key, key, f"test.{key}", digits=1, factor=100) for key in keys if key not in shown)


def _profiles(p: Puzzle) -> tuple[Profile, ...]:
    return tuple(
        Profile(
            name=f"depth-{width}",
            title=f"exact answers over depth, {'one start' if width == 1 else f'best of {width} starts'}",
            x_label="supervised steps",
            y_label="exact, %",
            points=tuple((float(depth), f"exact_{depth}x{width}") for depth in p.depths),
        )
        for width in (1, max(STARTS))
    )


def _protocol(name: str, p: Puzzle) -> dict[Scale, tuple[str, ...]]:
    d, line = p.data, p.data.name == "prefix-sums"
    held = f" of {d.held_size} bits, those to train on have {d.size}" if line else ""
    images = "" if line else "; no two are images of each other under the puzzle's symmetries"
    common = (
        f"{d.train:,} puzzles to train on{'' if line else ', under random symmetries'}, {d.valid} to validate on and "
        f"{d.test} to test on{held}{images}. The depth and breadth of each run are chosen on the validation puzzles.",
        f"Positions are mixed by {MIXERS[p.config.mixer]}. {p.tried}",
        f"Deep supervision with carried states, at most {p.steps} supervised steps of {p.config.h_cycles} recursions with "
        f"{p.config.l_cycles} update of the scratch pad. Rows are replaced when the halting head is positive; those of "
        "Equilibrium Reasoners only if the residual is below 0.05 as well, in evaluation below 0.01. With the noise of "
        "training it rarely is: most of their rows run to the limit. Rows begin at different depths.",
        f"Equilibrium Reasoners: relaxation {p.relaxation:g} (published 0.95), and {p.explore:g} of the rows may not halt "
        f"before a random number of steps (published 0.1). Noise {p.noise:g} (published 0.01) is in training alone: without "
        "it the state settles.",
        f"The recurrent row is unrolled for {p.steps} recursions, and the stack of equal depth has as many layers as these "
        f"apply: {p.steps * (p.config.l_cycles + 1) * p.config.layers}.",
        "An answer is exact if every position is right. With several starts the one with the smallest change over the last "
        f"three steps counts. One start: the mean over {max(STARTS)}, and over one for models whose start is fixed.",
        f"Weights are averaged with a decay of {p.ema:g}. AdamW {p.lr:g}, betas 0.9 and 0.95, decay {p.weight_decay:g}, "
        f"batch {BATCH}.",
    )
    return {
        "debug": ("Debug scale: 24 puzzles, 3 steps. It proves nothing.", *common),
        "reduced": (f"Reduced: {_updates(p, 'reduced'):,} training steps.", *common),
        "full": (f"{_updates(p, 'full'):,} training steps.", *common),
    }


def _table(name: str) -> Table:
    p = PUZZLES[name]
    return Table(
        name=f"reasoner-{name}",
        title=f"Equilibrium reasoners: {p.title}",
        source=SOURCE,
        rows=tuple(TableRow(row, TITLES[row], partial(experiment, name, row)) for row in TITLES),
        columns=_columns(p),
        hidden=_hidden(p),
        claims=_claims(p),
        profiles=_profiles(p),
        protocol=_protocol(name, p),
        seeds={"debug": 1, "reduced": 3, "full": 3},
    )


def tables() -> tuple[Table, ...]:
    return tuple(map(_table, PUZZLES))
