"""Equilibrium reasoners on generated puzzles beside recursive models and explicit stacks."""

from __future__ import annotations

import dataclasses
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
    "deep-stack": "feed-forward stack, equal depth",
    "bptt": "recurrent, full back-propagation",
    "trm": "Tiny Recursive Model",
    "eqr": "Equilibrium Reasoner",
    "eqr-exact": "Equilibrium Reasoner, exact gradient",
    "eqr-jacobian": "Equilibrium Reasoner, Jacobian penalty",
}
_DEBUG_DEPTHS = (1, 2, 4)


@dataclass(frozen=True)
class Puzzle:
    """A table: its data, the size of the reasoner and how long it is trained at the reduced scale.

    steps       supervised steps of a row in training at most; depths go to four times that
    relaxation  of Equilibrium Reasoners; published 0.95, with which the larger cells settle in cycles of two steps
    explore     share of the rows that may not halt before a random number of steps; published 0.1. With more of them, states
                after the answer was found are trained as well, and more depth costs less
    """

    title: str
    data: PuzzleData
    config: ReasonerConfig
    steps: int
    epochs: int
    lr: float = 1e-3
    rise: float = 30.0  # points that depth and breadth add to one step
    relaxation: float = 0.7
    explore: float = 0.1

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(2**i for i in range(20) if 2**i <= 4 * self.steps)


_SMALL = ReasonerConfig(heads=4, layers=1, multiple=16, h_cycles=1)
PUZZLES = {
    "sudoku-4x4": Puzzle(
        "Sudoku 4x4",
        PuzzleData(size=4, train=250, test=128, low=4, high=6, repeats=192),
        dataclasses.replace(_SMALL, tokens=5, positions=16, width=32, l_cycles=1),
        steps=16,
        epochs=2,
        relaxation=0.95,
        explore=0.5,
    ),
    "sudoku-6x6": Puzzle(
        "Sudoku 6x6",
        PuzzleData(size=6, train=1_000, test=128, low=8, high=14, repeats=72),
        dataclasses.replace(_SMALL, tokens=7, positions=36, width=64, l_cycles=2),
        steps=16,
        epochs=2,
    ),
    "sudoku-9x9": Puzzle(
        "Sudoku 9x9, easy",
        PuzzleData(size=9, train=1_000, test=128, low=40, high=50, repeats=64),
        dataclasses.replace(_SMALL, tokens=10, positions=81, width=64, l_cycles=2),
        steps=16,
        epochs=3,
    ),
    "mazes": Puzzle(
        "Mazes 9x9",
        PuzzleData(name="mazes", size=9, train=1_000, test=128, low=4, high=24, repeats=48),
        dataclasses.replace(_SMALL, tokens=5, positions=81, width=48, l_cycles=1),
        steps=16,
        epochs=2,
    ),
    "prefix-sums": Puzzle(
        "Prefix sums",
        PuzzleData(name="prefix-sums", size=16, train=2_000, test=256, repeats=16),
        dataclasses.replace(_SMALL, tokens=2, positions=16, width=32, l_cycles=1),
        steps=8,
        epochs=2,
    ),
}


def experiment(puzzle: str, row: str, scale: Scale = "full") -> Experiment[ReasoningSettings]:
    """One row of a table of reasoners."""
    return Experiment(
        name=f"reasoner-{puzzle}-{row}",
        summary=f"{TITLES[row]}, {PUZZLES[puzzle].title}",
        settings=_settings(PUZZLES[puzzle], row, scale),
        training=_training(PUZZLES[puzzle], scale),
        make=Reasoning,
        scale=scale,
    )


def _settings(puzzle: Puzzle, row: str, scale: Scale) -> ReasoningSettings:
    loops = puzzle.steps * puzzle.config.h_cycles
    by_row: dict[str, dict[str, Any]] = {
        "stack": {"kind": "stack", "stack_layers": puzzle.config.layers},
        "deep-stack": {"kind": "stack", "stack_layers": loops * (puzzle.config.l_cycles + 1) * puzzle.config.layers},
        "bptt": {"kind": "bptt", "unrolled": puzzle.steps // 2},
        "eqr-exact": {"kind": "exact"},
        "eqr-jacobian": {"jacobian_weight": 0.1},
    }
    plain = row in ("trm", "stack", "deep-stack")
    config = (
        puzzle.config
        if plain
        else dataclasses.replace(puzzle.config.attractor(), relaxation=puzzle.relaxation, eval_noise=False)
    )
    depths = _DEBUG_DEPTHS if scale == "debug" else puzzle.depths
    return ReasoningSettings(
        data=_data(puzzle.data, scale),
        config=config,
        max_steps=2 if scale == "debug" else puzzle.steps,
        depths=depths,
        starts=(1, 2) if scale == "debug" else (1, 4, 8),
        halt_by="head" if plain else "both",
        explore=0.1 if plain else puzzle.explore,
        **by_row.get(row, {}),
    )


def _data(data: PuzzleData, scale: Scale) -> PuzzleData:
    match scale:
        case "debug":
            return dataclasses.replace(data, train=24, test=8, repeats=1)
        case "reduced":
            return data
        case _:
            return dataclasses.replace(data, repeats=8 * data.repeats)


def _training(puzzle: Puzzle, scale: Scale) -> Training:
    debug = scale == "debug"
    return Training(
        epochs=1 if debug else puzzle.epochs,
        batch_size=8 if debug else 64,
        eval_batch_size=8 if debug else 256,
        optimizer=Optimizer(name="adamw", lr=puzzle.lr, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=Schedule(name="cosine", warmup_steps=1 if debug else 100, final=0.1),
        ema=0.99,
    )


def _claims(p: Puzzle) -> tuple[Claim, ...]:
    deep, trained = max(p.depths), p.steps
    first, last, wide = "exact_1x1", f"exact_{deep}x1", f"exact_{trained}x8"
    return (
        value_at_least("best", "eqr", 95.0, "at some depth and breadth 95 % of the unseen puzzles are solved exactly"),
        column_higher("best", first, "eqr", f"depth and breadth add {p.rise:g} points to one supervised step", by=p.rise),
        column_higher(
            last, f"exact_{trained // 2}x1", "eqr", "exact answers rise by a point beyond half the depth of training", by=1.0
        ),
        column_higher(wide, f"exact_{trained}x1", "eqr", "exact answers rise by a point with breadth", by=1.0),
        column_higher(
            last, f"exact_{trained}x1", "eqr", "four times the depth of training costs at most one point", by=-1.0
        ),
        value_at_least("auc", "eqr", 0.9, "the residual tells wrong answers from right ones: AUC of 0.9 or more"),
        higher("best", "eqr", "stack", "the equilibrium beats the untied stack of equal parameters"),
        column_higher("exact_halted", last, "eqr", "halting costs at most one point of accuracy", by=-1.0),
        value_at_most("steps_halted", "eqr", deep / 2, f"halting takes at most half of the {deep} steps"),
    )


def _columns(p: Puzzle) -> tuple[Column, ...]:
    trained, deep = p.steps, max(p.depths)
    return (
        Column("parameters", "parameters", "summary.parameters", digits=0),
        Column("exact_1x1", "exact, 1 step, %", "test.exact_1x1", digits=1, factor=100),
        Column(f"exact_{trained}x1", f"exact, {trained} steps, %", f"test.exact_{trained}x1", digits=1, factor=100),
        Column(f"exact_{deep}x1", f"exact, {deep} steps, %", f"test.exact_{deep}x1", digits=1, factor=100),
        Column(
            f"exact_{trained}x8", f"exact, {trained} steps, best of 8, %", f"test.exact_{trained}x8", digits=1, factor=100
        ),
        Column("best", "exact, best of all, %", "test.best", digits=1, factor=100),
        Column("auc", f"AUC of the change, {deep} steps", f"test.auc_{deep}", digits=3),
        Column("change", f"median change, {deep} steps", f"test.change_{deep}", digits=4),
        Column("exact_halted", "exact, halting, %", "test.exact_halted", digits=1, factor=100),
        Column("steps_halted", "steps, halting", "test.steps_halted", digits=1),
        Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    )


def _hidden(p: Puzzle) -> tuple[Column, ...]:
    shown = {column.name for column in _columns(p)}
    keys = [f"exact_{depth}x{width}" for depth in p.depths for width in (1, 4, 8)]
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
        for width in (1, 8)
    )


def _protocol(name: str, p: Puzzle) -> dict[Scale, tuple[str, ...]]:
    steps = p.data.train * p.data.repeats // 64 * p.epochs
    common = (
        f"{p.data.train} puzzles to train on, under random symmetries, {p.data.test} others to test on; no two are images "
        "of each other."
        if name != "prefix-sums"
        else f"{p.data.train} sequences to train on, {p.data.test} others to test on.",
        f"Deep supervision with carried states, at most {p.steps} supervised steps of {p.config.h_cycles} recursion with "
        f"{p.config.l_cycles} updates of the scratch pad. Rows are replaced when the halting head is positive; those of "
        "Equilibrium Reasoners only if the residual is below 0.05 as well.",
        f"Equilibrium Reasoners: relaxation {p.relaxation:g} (published 0.95), and {p.explore:g} of the rows may not halt "
        "before a random number of steps (published 0.1). Noise is in training alone: without it the state settles.",
        "An answer is exact if every position is right. With several starts the one with the smallest change over the last "
        "three steps counts. One start: the mean over eight, and over one for models whose start is fixed.",
        "There is no validation split: the settings of Equilibrium Reasoners were chosen on these test puzzles, with seeds "
        "0 and 1 of 4x4, so that their figures are optimistic. The best of all is the largest over all depths and breadths.",
        "Weights are averaged with a decay of 0.99. AdamW 1e-3, betas 0.9 and 0.95, decay 0.1, batch 64.",
    )
    return {
        "debug": ("Debug scale: 24 puzzles, 3 steps. It proves nothing.", *common),
        "reduced": (f"Reduced: {steps:,} training steps.", *common),
        "full": (f"{8 * steps:,} training steps.", *common),
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
