"""The demo: an equilibrium classifier of small digits, compared with its explicit twin."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import at_most, higher
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.image_task import GUESS
from equilibria.lab.experiments.skip_deq.task import Classify, MLPSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.models.images.skip_mlp import SkipSolver

DIGITS = "digits"
DEPTH = 20  # layers of the explicit twin
_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "deq": ("DEQ", {}),
    "v2": ("Skip DEQ V2", {"variant": "v2"}),
    "explicit": (f"explicit, {DEPTH} layers", {"depth": DEPTH}),
}


def digits(row: str, scale: Scale = "full") -> Experiment[MLPSettings]:
    """Return an experiment on scikit-learn's 8x8 digits; all rows have equally many weights with the same initial values."""
    title, options = _ROWS[row]
    solver = SkipSolver(tolerance=1e-3, adjoint_tolerance=1e-3, adjoint_steps=30)
    return Experiment(
        name=f"{DIGITS}-{row}",
        summary=f"{title} on 8x8 digits",
        settings=MLPSettings(data="digits", width=64, skip_weight=1.0, solver=solver, **options),
        training=Training(
            epochs={"debug": 2, "reduced": 6, "full": 15}[scale],
            batch_size=64,
            eval_batch_size=360,
            optimizer=Optimizer(lr=3e-3),
            schedule=Schedule(name="cosine", final=0.01),
        ),
        make=Classify,
        scale=scale,
    )


def tables() -> tuple[Table, ...]:
    notes = ("1,437 digits of 8x8 pixels to train on, 360 to test on; 64 units, Adam 3e-3 with a cosine, batch 64.",)
    return (
        Table(
            name=DIGITS,
            title="An equilibrium layer beside its explicit twin",
            source="the demo; nothing was published of it",
            rows=tuple(TableRow(name, title, partial(digits, name)) for name, (title, _) in _ROWS.items()),
            columns=(
                Column("parameters", "parameters", "summary.parameters", digits=0),
                Column("accuracy", "test accuracy, %", "test.accuracy", factor=100),
                Column("nfe", "NFE, test", "test.nfe", digits=1),
                Column("step", "training step, ms", "seconds_step", factor=1e3),
                Column("failed", "failed solves, %", "test.failed", factor=100),
                Column("radius", "spectral radius", "test.spectral_radius", digits=3),
            ),
            guess={"accuracy": GUESS["digits"]},
            claims=(
                higher(
                    "accuracy",
                    "deq",
                    "explicit",
                    "the equilibrium is as accurate as the explicit network, to 1 point",
                    by=-1.0,
                ),
                at_most("nfe", "v2", "deq", 0.999, "V2 needs fewer evaluations than DEQ"),
            ),
            protocol={
                "debug": ("Debug scale: 2 epochs.", *notes),
                "reduced": ("Reduced scale: 6 epochs.", *notes),
                "full": ("15 epochs.", *notes),
            },
        ),
    )
