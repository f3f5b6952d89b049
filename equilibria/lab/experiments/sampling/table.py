"""The tables on sampling a diffusion model by a chain that is solved in parallel, and on inversion through that chain."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import Claim, at_most, column_at_most, value_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.sampling.inversion_table import inversion_table
from equilibria.lab.experiments.sampling.task import Sampling, SamplingSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.models.diffusion.denoiser import DIGITS, DenoiserConfig

SAMPLING = "sampling-digits"
SOURCE = (
    "after Pokle, Geng and Kolter 2022, Deep Equilibrium Approaches to Diffusion Models, arXiv:2210.12867, and Shih and "
    "others 2023, Parallel Sampling of Diffusion Models, arXiv:2305.16317; digits of scikit-learn, so that no published "
    "figure compares"
)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "picard": ("sum of velocities, Picard", {"solver": "picard"}),
    "anderson": ("sum of velocities, Anderson", {"solver": "anderson"}),
    "picard-noise": ("sum of noises as published, Picard", {"solver": "picard", "form": "noise"}),
    "anderson-noise": ("sum of noises as published, Anderson", {"solver": "anderson", "form": "noise"}),
    "step": ("single steps of the chain, Picard", {"solver": "picard", "form": "step"}),
}
SMALL = DenoiserConfig(width=16, blocks=1, embedding=8)


def training(scale: Scale) -> Training:
    """Return the training settings of the denoiser: one epoch over repeated images."""
    return Training(
        epochs=1,
        batch_size=64,
        eval_batch_size=512,
        optimizer=Optimizer(name="adamw", lr=2e-3, weight_decay=1e-4),
        schedule=Schedule(name="cosine", warmup_steps=5 if scale == "debug" else 100),
    )


def experiment(row: str, scale: Scale = "full") -> Experiment[SamplingSettings]:
    """Return the experiment of a row of the table of samples."""
    sizes: dict[Scale, dict[str, Any]] = {
        "debug": {"config": SMALL, "steps": 8, "samples": 4, "repeats": 1},
        "reduced": {"config": DIGITS, "steps": 100, "samples": 32, "repeats": 60},
        "full": {"config": DIGITS, "steps": 100, "samples": 360, "repeats": 400},
    }
    title, options = ROWS[row]
    return Experiment(
        name=f"{SAMPLING}-{row}",
        summary=f"samples of digits, {title}",
        settings=SamplingSettings(**sizes[scale], **options),
        training=training(scale),
        make=Sampling,
        scale=scale,
    )


def _claims() -> tuple[Claim, ...]:
    found: list[Claim] = []
    for row in ("picard", "anderson", "picard-noise", "anderson-noise"):
        title = ROWS[row][0]
        found += [
            value_at_most("error_4", row, 1.0, f"{title}: every sample equals that of the sequential chain to 1 %"),
            column_at_most("rounds_4", "steps", row, 0.5, f"{title}: at most half of the sequential rounds"),
        ]
    found += [
        column_at_most("rounds_4", "steps", "picard", 0.25, "sum of velocities, Picard: at most a quarter of the rounds"),
        at_most("rounds_4", "anderson", "picard", 1.0, "sum of velocities: Anderson takes no more rounds than Picard"),
        at_most("calls_4", "anderson", "picard", 0.9, "sum of velocities: Anderson takes a tenth fewer calls per sample"),
        at_most("rounds_4", "picard", "picard-noise", 0.9, "Picard: velocities take a tenth fewer rounds than noises"),
    ]
    return tuple(found)


def _columns() -> tuple[Column, ...]:
    found = [
        Column("loss", "test loss", "test.loss", digits=3),
        Column("steps", "rounds, sequential", "test.steps", digits=0),
    ]
    for e in (2, 3, 4):
        found += [
            Column(f"rounds_{e}", f"rounds to 1e-{e}", f"test.rounds_{e}", digits=1),
            Column(f"error_{e}", f"largest error at 1e-{e}, %", f"test.error_{e}", digits=3, factor=100),
        ]
    return (*found, Column("calls_4", "calls of the denoiser, times the chain's", "test.calls_4", digits=1))


_COMMON = (
    "A dense denoiser of 8x8 digits. Samples are compared with those of the sequential chain from the same noise: the error "
    "is the largest relative distance over the samples. A round is one call of the denoiser on all states of all samples; "
    "the calls with which a solve checks rows that stopped count too.",
    "Rows with one seed have the same weights; they differ in the solve alone. AdamW 2e-3, cosine, batch 64.",
)


def sampling_table() -> Table:
    return Table(
        name=SAMPLING,
        title="Samples of a diffusion model, all states of the chain at once",
        source=SOURCE,
        rows=tuple(TableRow(row, title, partial(experiment, row)) for row, (title, _) in ROWS.items()),
        columns=_columns(),
        claims=_claims(),
        profiles=(
            Profile(
                name="rounds-tolerance",
                title="Sequential rounds to a tolerance",
                x_label="digits of the tolerance",
                y_label="rounds",
                points=tuple((float(e), f"rounds_{e}") for e in (2, 3, 4)),
            ),
        ),
        protocol={
            "debug": ("Debug scale: a tiny network, 22 training steps, chains of 8. It proves nothing.", *_COMMON),
            "reduced": ("1,347 training steps, 32 samples, chains of 100 steps.", *_COMMON),
            "full": ("8,981 training steps, 360 samples, chains of 100 steps.", *_COMMON),
        },
        seeds={"debug": 1, "reduced": 3, "full": 3},
    )


def tables() -> tuple[Table, ...]:
    return sampling_table(), inversion_table()
