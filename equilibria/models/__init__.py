"""Models: plain modules made of cells and equilibrium layers.

from equilibria import models

model = models.create("skip-mlp-v2", classes=10)
"""

from equilibria.models.mdeq import MDEQ, pretraining
from equilibria.models.mdeq_configs import MDEQ_CONFIGS, MDEQConfig
from equilibria.models.registry import ModelInfo, create, info, names, parameters
from equilibria.models.skip_mlp import SkipMLP, SkipNet, SkipPolynomial, SkipSolver

__all__ = [
    "MDEQ",
    "MDEQ_CONFIGS",
    "MDEQConfig",
    "ModelInfo",
    "SkipMLP",
    "SkipNet",
    "SkipPolynomial",
    "SkipSolver",
    "create",
    "info",
    "names",
    "parameters",
    "pretraining",
]
