"""Models: plain modules made of cells and equilibrium layers.

from equilibria import models

model = models.create("skip-mlp-v2", classes=10)
"""

from equilibria.models.entries import ModelInfo, parameters
from equilibria.models.explicit_nets import ResNet, ResNetConfig, UntiedStack, matched_width, untied, weight_tied
from equilibria.models.implicit_resnet import CIFARResNet, ImplicitResNet, ImplicitResNetConfig, MNISTResNet, SVHNResNet
from equilibria.models.lion import Lion, LionConfig, Pruning, PruningConfig
from equilibria.models.mdeq import MDEQ, pretraining
from equilibria.models.mdeq_configs import MDEQ_CONFIGS, MDEQConfig
from equilibria.models.monotone_nets import (
    MonotoneConvConfig,
    MonotoneMLPConfig,
    MonotoneNet,
    MonotoneTiersConfig,
    SplittingConfig,
)
from equilibria.models.neural_ode import AdaptiveSteps, FixedSteps, NeuralODE, NeuralODEConfig
from equilibria.models.registry import create, info, names
from equilibria.models.skip_mlp import SkipMLP, SkipNet, SkipPolynomial, SkipSolver

__all__ = [
    "MDEQ",
    "MDEQ_CONFIGS",
    "AdaptiveSteps",
    "CIFARResNet",
    "FixedSteps",
    "ImplicitResNet",
    "ImplicitResNetConfig",
    "Lion",
    "LionConfig",
    "MDEQConfig",
    "MNISTResNet",
    "ModelInfo",
    "MonotoneConvConfig",
    "MonotoneMLPConfig",
    "MonotoneNet",
    "MonotoneTiersConfig",
    "NeuralODE",
    "NeuralODEConfig",
    "Pruning",
    "PruningConfig",
    "ResNet",
    "ResNetConfig",
    "SVHNResNet",
    "SkipMLP",
    "SkipNet",
    "SkipPolynomial",
    "SkipSolver",
    "SplittingConfig",
    "UntiedStack",
    "create",
    "info",
    "matched_width",
    "names",
    "parameters",
    "pretraining",
    "untied",
    "weight_tied",
]
