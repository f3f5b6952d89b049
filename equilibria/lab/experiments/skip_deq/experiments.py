"""The MLP experiments of "Mixing Implicit and Explicit Deep Learning with Skip DEQs" (Pal, Edelman and Rackauckas 2022)."""

from __future__ import annotations

from equilibria.lab.experiments.definitions import Experiment, Scale
from equilibria.lab.experiments.skip_deq.task import Classify, Fit, MLPSettings, PolynomialSettings
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.models.images.skip_mlp import Method, SkipSolver, Variant

VARIANTS: dict[str, tuple[Variant, float]] = {
    "deq": ("vanilla", 0.0),
    "skip": ("skip", 0.0),
    "v2": ("v2", 0.0),
    "deq-jr": ("vanilla", 1.0),
    "skip-jr": ("skip", 1.0),
    "v2-jr": ("v2", 1.0),
}
TITLES = {
    "deq": "DEQ",
    "skip": "Skip DEQ",
    "v2": "Skip DEQ V2",
    "deq-jr": "DEQ + JR",
    "skip-jr": "Skip DEQ + JR",
    "v2-jr": "Skip DEQ V2 + JR",
}
MNIST, MNIST_TSIT5, POLYNOMIAL = "skipdeq-mnist-mlp", "skipdeq-mnist-mlp-tsit5", "skipdeq-polynomial"


def mnist_mlp(row: str, scale: Scale = "full", method: Method = "broyden") -> Experiment[MLPSettings]:
    """One row of Table 1 with the settings of the released script, which produced it."""
    variant, jacobian_weight = VARIANTS[row]
    return Experiment(
        name=f"{MNIST if method == 'broyden' else MNIST_TSIT5}-{row}",
        summary=f"{TITLES[row]} on MNIST, {'discrete (Broyden)' if method == 'broyden' else 'continuous (Tsit5)'}",
        settings=MLPSettings(
            data="digits" if scale == "debug" else "mnist",
            variant=variant,
            jacobian_weight=jacobian_weight,
            solver=SkipSolver(method=method, together=True, first_step=0.5),
        ),
        training=Training(
            epochs={"debug": 2, "reduced": 5, "full": 25}[scale],
            batch_size=32,
            eval_batch_size=32,
            optimizer=Optimizer(name="adamw", lr=1e-3, weight_decay=2.5e-6),
            schedule=Schedule(name="cosine", final=1e-3),
        ),
        make=Classify,
        scale=scale,
        seeds=(6171, 3859, 2961),
    )


def polynomial(row: str, scale: Scale = "full") -> Experiment[PolynomialSettings]:
    """One curve of the regression's figure."""
    variant, jacobian_weight = VARIANTS[row]
    return Experiment(
        name=f"{POLYNOMIAL}-{row}",
        summary=f"{TITLES[row]} fits a polynomial, continuous (BS3)",
        settings=PolynomialSettings(variant=variant, jacobian_weight=jacobian_weight),
        training=Training(
            epochs={"debug": 2, "reduced": 60, "full": 300}[scale],
            batch_size=32,
            eval_batch_size=32,
            optimizer=Optimizer(lr=1e-3),
            schedule=Schedule(name="step", milestones=(0.5,), factor=0.1),
        ),
        make=Fit,
        scale=scale,
        seeds=(1, 11, 1111),
    )
