"""Equilibrium fields compared with explicit networks of as many parameters, and of as much memory."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from equilibria.lab.experiments.claims import Claim, at_most, higher, value_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.fields.task import FieldSettings, Fitting
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.models.fields.filters import FieldKind

FIELDS = "fields"
WIDTH, NARROW = 40, 23  # two layers of 40, and four layers of 23, have about as many weights
# title, settings, learning rate
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "implicit": ("equilibrium, implicit gradient", {"network": "implicit", "solves": 8}),
    "jfb": ("equilibrium, one-step gradient", {"network": "jfb", "solves": 1}),
    "explicit": ("2 explicit layers as wide", {"network": "explicit", "layers": 2}),
    "deep": ("4 explicit layers, narrower", {"network": "explicit", "layers": 4, "width": NARROW}),
    "wide": ("4 explicit layers, equal memory", {"network": "explicit", "layers": 4}),
}
KINDS = {"siren": "sinusoids", "fourier": "Fourier filters"}
WIDE = {"siren": 180, "fourier": 100}  # a training step of four such layers takes the memory of the implicit row
RATES = {
    "siren": {"implicit": 5e-3, "jfb": 5e-3, "explicit": 5e-3, "deep": 2e-3, "wide": 2e-3},
    "fourier": {"implicit": 5e-3, "jfb": 5e-3, "explicit": 2e-2, "deep": 2e-2, "wide": 2e-2},
}


def experiment(row: str, scale: Scale = "full") -> Experiment[FieldSettings]:
    """Return the experiment of a row KIND-NETWORK."""
    kind, _, network = row.partition("-")
    sizes: dict[Scale, dict[str, Any]] = {
        "debug": {"steps": 4, "size": 8},
        "reduced": {"steps": 400, "size": 48},
        "full": {"steps": 4_000, "size": 96},
    }
    title, options = NETWORKS[network]
    width = WIDE[kind] if network == "wide" else WIDTH
    return Experiment(
        name=f"{FIELDS}-{row}",
        summary=f"image, sound and shape by {KINDS[kind]}, {title}",
        settings=FieldSettings(kind=cast(FieldKind, kind), **{"width": width, **sizes[scale], **options}),
        training=Training(
            epochs=1,
            batch_size=1,
            eval_batch_size=1,
            optimizer=Optimizer(name="adam", lr=RATES[kind][network]),
            schedule=Schedule(name="cosine"),
        ),
        make=Fitting,
        scale=scale,
    )


def _claims() -> tuple[Claim, ...]:
    found: list[Claim] = []
    for kind, what in KINDS.items():
        exact, rival, deep = f"{kind}-implicit", f"{kind}-explicit", f"{kind}-deep"
        found += [
            higher("psnr", exact, rival, f"{what}: above two explicit layers of as many weights and the same width"),
            higher("psnr", exact, deep, f"{what}: above four explicit layers of as many weights"),
            higher("psnr", exact, f"{kind}-wide", f"{what}: above four explicit layers of as much memory"),
            higher("psnr", exact, f"{kind}-jfb", f"{what}: the implicit gradient is above that of one step"),
            higher("psnr_image", exact, rival, f"{what}: above two explicit layers on the image"),
            at_most("bytes", f"{kind}-jfb", deep, 1.0, f"{what}: one-step training takes no more memory than four layers"),
            value_at_most("failed", exact, 5.0, f"{what}: at most 5 % of the points fail to converge in evaluation"),
        ]
    return tuple(found)


def _columns() -> tuple[Column, ...]:
    return (
        Column("parameters", "parameters", "summary.parameters", digits=0),
        Column("psnr", "PSNR, dB, mean", "test.psnr", digits=2),
        Column("psnr_image", "image", "test.psnr_image", digits=2),
        Column("psnr_sound", "sound", "test.psnr_sound", digits=2),
        Column("psnr_shape", "shape", "test.psnr_shape", digits=2),
        Column("nfe", "evaluations per point", "test.nfe", digits=1),
        Column("failed", "failed, %", "test.failed", digits=2, factor=100),
        Column("bytes", "peak of a training step on the image, MB", "test.bytes", digits=2, factor=1e-6),
        Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
    )


_COMMON = (
    "A photograph in grey, a sound and the signed distance of a shape, one network each, every step on all points. PSNR is "
    "of the same points, for values in [-1, 1].",
    "Adam, cosine. Rates per row were chosen by single trials on the image with another size, from 0.002, 0.005 and 0.02. "
    "Solves start at the equilibrium of the last step, Anderson, at most 8 steps (implicit) or 1 (one-step); the adjoint to "
    "0.01 by at most 15 products. Evaluation starts at zeros and solves to 1e-4.",
)


def tables() -> tuple[Table, ...]:
    rows = tuple(
        TableRow(f"{kind}-{network}", f"{what}: {title}", partial(experiment, f"{kind}-{network}"), limited=True)
        for kind, what in KINDS.items()
        for network, (title, _) in NETWORKS.items()
    )
    table = Table(
        name=FIELDS,
        title="Signals as functions of their coordinates, equilibria and explicit networks",
        source="after Huang, Bai and Kolter 2021, (Implicit)²: Implicit Layers for Implicit Representations, NeurIPS",
        rows=rows,
        columns=_columns(),
        claims=_claims(),
        protocol={
            "debug": ("Debug scale: 4 steps on 64 pixels. It proves nothing.", *_COMMON),
            "reduced": ("48x48 pixels, 1,152 samples of sound, 24x24 distances; 400 steps.", *_COMMON),
            "full": ("96x96 pixels, 4,608 samples of sound, 48x48 distances; 4,000 steps.", *_COMMON),
        },
        seeds={"debug": 1, "reduced": 3, "full": 3},
    )
    return (table,)
