"""The table on inversion of images through the sampling chain, with implicit gradients and with back-propagation."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import at_most, column_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.sampling.inversion_task import Inversion, InversionSettings, Way
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.models.diffusion.denoiser import DIGITS, DenoiserConfig

INVERSION = "sampling-inversion"
ROWS: dict[str, tuple[str, Way]] = {
    "sequential": ("back-propagation through the sequential chain", "sequential"),
    "implicit": ("parallel chain, implicit gradient", "implicit"),
    "jfb": ("parallel chain, one-step gradient", "jfb"),
}


def experiment(row: str, scale: Scale = "full") -> Experiment[InversionSettings]:
    """Return the experiment of a row of the table of inversions."""
    sizes: dict[Scale, dict[str, Any]] = {
        "debug": {
            "config": DenoiserConfig(width=16, blocks=1, embedding=8),
            "steps": 6,
            "samples": 2,
            "repeats": 1,
            "iterations": 3,
        },
        "reduced": {"config": DIGITS, "repeats": 60, "samples": 6, "iterations": 40},
        "full": {"config": DIGITS, "repeats": 400, "samples": 32, "iterations": 200},
    }
    title, way = ROWS[row]
    return Experiment(
        name=f"{INVERSION}-{row}",
        summary=f"inversion of digits, {title}",
        settings=InversionSettings(**sizes[scale], way=way),
        training=Training(
            epochs=1,
            batch_size=64,
            eval_batch_size=512,
            optimizer=Optimizer(name="adamw", lr=2e-3, weight_decay=1e-4),
            schedule=Schedule(name="cosine", warmup_steps=5 if scale == "debug" else 100),
        ),
        make=Inversion,
        scale=scale,
    )


_COMMON = (
    "The noise is trained by Adam (rate 0.1) so that its sample is a given test image. Parallel chains start at the chain "
    "of the iteration before and are solved to 1e-3 by Picard, and so is the adjoint. The error is that of the sequential "
    "chain from the last noise. Memory is what torch's allocator hands out in one iteration; weights have no gradients.",
)


def inversion_table() -> Table:
    columns = (
        Column("mse_first", "squared error, first noise", "test.mse_first", digits=3),
        Column("mse", "squared error, last noise", "test.mse", digits=4),
        Column("rounds", "rounds of an iteration, forward", "test.rounds", digits=1),
        Column("adjoint", "rounds of an iteration, backward", "test.adjoint", digits=1),
        Column("bytes", "peak of an iteration, MB", "test.bytes", digits=1, factor=1e-6),
        Column("iteration", "an iteration, ms", "test.seconds_iteration", digits=0, factor=1e3),
    )
    claims = (
        at_most("rounds", "implicit", "sequential", 0.5, "implicit gradient: at most half of the sequential rounds forward"),
        at_most(
            "adjoint", "implicit", "sequential", 0.5, "implicit gradient: at most half of the sequential rounds backward"
        ),
        column_at_most("mse", "mse_first", "implicit", 0.2, "implicit gradient: the squared error falls to a fifth"),
        at_most(
            "mse", "implicit", "sequential", 1.1, "implicit gradient: an error at most 10 % above that of the chain's own"
        ),
        at_most("mse", "implicit", "jfb", 1.0, "the implicit gradient ends no worse than that of one step"),
    )
    return Table(
        name=INVERSION,
        title="Inversion of images through the sampling chain",
        source="after Pokle, Geng and Kolter 2022, Deep Equilibrium Approaches to Diffusion Models, arXiv:2210.12867",
        rows=tuple(TableRow(row, title, partial(experiment, row)) for row, (title, _) in ROWS.items()),
        columns=columns,
        claims=claims,
        protocol={
            "debug": ("Debug scale: a tiny network, chains of 6. It proves nothing.", *_COMMON),
            "reduced": ("1,347 training steps; 6 images, chains of 50 steps, 40 iterations.", *_COMMON),
            "full": ("8,981 training steps; 32 images, chains of 50 steps, 200 iterations.", *_COMMON),
        },
        seeds={"debug": 1, "reduced": 3, "full": 3},
    )
