"""Deblurring as an equilibrium compared with the same cell unrolled, plug-and-play, total variation and ISTA."""

from __future__ import annotations

from functools import partial
from typing import Any

from equilibria.lab.experiments.claims import (
    Claim,
    at_most,
    column_at_least,
    column_at_most,
    column_higher,
    column_lower,
    higher,
)
from equilibria.lab.experiments.definitions import Column, Experiment, Profile, Scale, Table, TableRow
from equilibria.lab.experiments.inverse.task import DEPTHS, Deblurring, InverseSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training

DEBLURRING = "inverse-deblurring"
# title, settings, learning rate
ROWS: dict[str, tuple[str, dict[str, Any], float]] = {
    "proximal": ("proximal gradient, equilibrium", {"method": "proximal"}, 3e-2),
    "unrolled-5": ("proximal gradient, 5 unrolled steps", {"method": "proximal", "depth": 5}, 3e-2),
    "unrolled-10": ("proximal gradient, 10 unrolled steps", {"method": "proximal", "depth": 10}, 1e-2),
    "tv": ("total variation, weight learned", {"method": "tv"}, 1e-1),
    "ista": ("ISTA on cosines, threshold learned", {"method": "ista"}, 1e-1),
    "plug-and-play": ("proximal gradient, fixed denoiser", {"method": "proximal", "plugged": True}, 1e-2),
    "hqs": ("half-quadratic splitting, equilibrium", {"method": "hqs"}, 1e-2),
    "admm": ("ADMM, equilibrium of a pair", {"method": "admm"}, 1e-2),
}
EQUILIBRIA = ("proximal", "hqs", "admm")  # the rows that solve for an equilibrium


def experiment(row: str, scale: Scale = "full") -> Experiment[InverseSettings]:
    """Return the experiment of a row."""
    sizes: dict[Scale, dict[str, Any]] = {
        "debug": {"size": 8, "valid": 2, "test": 2, "repeats": 1, "most": 16},
        "reduced": {"repeats": 4},
        "full": {"repeats": 20},
    }
    title, options, rate = ROWS[row]
    return Experiment(
        name=f"{DEBLURRING}-{row}",
        summary=f"deblurring of photographs, {title}",
        settings=InverseSettings(**sizes[scale], **options),
        training=Training(
            epochs=1,
            batch_size=8,
            eval_batch_size=64,
            optimizer=Optimizer(name="adam", lr=rate),
            schedule=Schedule(name="cosine"),
        ),
        make=Deblurring,
        scale=scale,
    )


def _claims() -> tuple[Claim, ...]:
    found: list[Claim] = []
    for row in EQUILIBRIA:
        title = ROWS[row][0]
        found.append(
            column_higher("psnr_100", "psnr_30", row, f"{title}: PSNR does not fall from 30 to 100 steps", by=-0.05)
        )
    for depth in (5, 10):
        row = f"unrolled-{depth}"
        found += [
            column_lower("psnr_100", f"psnr_{depth}", row, f"{depth} unrolled steps: PSNR falls with 100 steps", by=0.05),
            higher("psnr", "proximal", row, f"the equilibrium is above {depth} unrolled steps of equal parameters"),
            higher("psnr_100", "proximal", row, f"after 100 steps the equilibrium is above the cell trained with {depth}"),
        ]
    found += [
        higher("psnr", "proximal", "tv", "the equilibrium is above total variation"),
        higher("psnr", "proximal", "ista", "the equilibrium is above ISTA"),
        higher("psnr", "proximal", "plug-and-play", "the equilibrium is above plug-and-play with a fixed denoiser"),
        column_at_most(
            "bytes_40", "bytes_10", "proximal", 1.05, "the equilibrium takes as much memory with 40 steps as with 10"
        ),
        column_at_least(
            "bytes_40", "bytes_10", "unrolled-10", 2.0, "40 unrolled steps take at least twice the memory of 10"
        ),
        at_most("bytes_40", "proximal", "unrolled-10", 0.5, "with 40 steps at most half of the unrolled memory"),
    ]
    return tuple(found)


def _columns() -> tuple[Column, ...]:
    return (
        Column("parameters", "parameters", "summary.parameters", digits=0),
        Column("psnr", "PSNR, dB", "test.psnr", digits=2),
        Column("psnr_measured", "of the measurement", "test.psnr_measured", digits=2),
        *(Column(f"psnr_{d}", f"after {d} steps", f"test.psnr_{d}", digits=2) for d in DEPTHS),
        Column("nfe", "evaluations", "test.nfe", digits=1),
        Column("failed", "failed, %", "test.failed", digits=1, factor=100),
        Column("bytes_10", "training step of 10 steps, MB", "test.bytes_10", digits=2, factor=1e-6),
        Column("bytes_40", "of 40 steps, MB", "test.bytes_40", digits=2, factor=1e-6),
        Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    )


_COMMON = (
    "Tiles of 24 x 24 pixels of scikit-learn's two photographs, 64 of them for validation, on which settings are chosen, "
    "and 64 for testing. Circular Gaussian blur of deviation 1 pixel, noise of deviation 0.02 on values in [0, 1]. PSNR is "
    "that of the mean squared error over the test tiles.",
    "All learned rows but plug-and-play are trained end to end on the mean squared error: Adam, cosine, batch 8. The rate "
    "of the proximal gradient, of its unrolled twins and of HQS is 0.03 or 0.01, the better one on validation with seed 0. "
    "0.01 for ADMM and plug-and-play, and 0.1 for the one or two numbers of total variation and ISTA, were not compared "
    "with others. Denoisers contract by 0.99 at most, unrolled ones too.",
    "Equilibria: Anderson to 1e-4, at most 50 steps, in evaluation to 1e-5; the adjoint to 0.03 by at most 30 products.",
)


def tables() -> tuple[Table, ...]:
    table = Table(
        name=DEBLURRING,
        title="Deblurring as an equilibrium",
        source=(
            "after Gilton, Ongie and Willett 2021, Deep Equilibrium Architectures for Inverse Problems in Imaging, "
            "arXiv:2102.07944; other images and smaller networks, so that no published figure compares"
        ),
        rows=tuple(TableRow(row, title, partial(experiment, row)) for row, (title, _, _) in ROWS.items()),
        columns=_columns(),
        claims=_claims(),
        profiles=(
            Profile(
                name="psnr-steps",
                title="PSNR over plain iterations",
                x_label="iterations",
                y_label="dB",
                points=tuple((float(d), f"psnr_{d}") for d in DEPTHS),
            ),
        ),
        protocol={
            "debug": ("Debug scale: tiles of 8 x 8 pixels, 2 steps. It proves nothing.", *_COMMON),
            "reduced": ("756 tiles to train on, 378 training steps.", *_COMMON),
            "full": ("756 tiles to train on, 1,890 training steps.", *_COMMON),
        },
        seeds={"debug": 1, "reduced": 3, "full": 3},
    )
    return (table,)
