"""Models: plain modules made of cells and equilibrium layers.

from equilibria import models

model = models.create("skip-mlp-v2", classes=10)
"""

from equilibria.analysis.summary import summary
from equilibria.analysis.summary_table import Summary
from equilibria.models import pretrained
from equilibria.models.diffusion.chain import ChainCell, ParallelSampler
from equilibria.models.diffusion.denoiser import Denoiser, DenoiserConfig, diffusion_loss
from equilibria.models.entries import ModelInfo, parameters
from equilibria.models.fields.field import EquilibriumField, ExplicitField, FieldConfig
from equilibria.models.fields.filters import coordinate_grid
from equilibria.models.files import ModelFileError, SavedModel, load, read_info, save
from equilibria.models.flow.configs import FLOW_CONFIGS, FlowConfig
from equilibria.models.flow.deq_flow import DEQFlow
from equilibria.models.graphs.gcn import GCNLayer, GraphGCN, GraphGCNConfig, NodeGCN, NodeGCNConfig
from equilibria.models.graphs.graph_nets import (
    ChainNet,
    ChainNetConfig,
    GraphClassifier,
    GraphClassifierConfig,
    PlanetoidNet,
    PlanetoidNetConfig,
    PPINet,
    PPINetConfig,
)
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.models.graphs.ignn import IGNNCell, IGNNLayer
from equilibria.models.images.explicit_nets import ResNet, ResNetConfig, UntiedStack, matched_width, untied, weight_tied
from equilibria.models.images.implicit_resnet import (
    CIFARResNet,
    ImplicitResNet,
    ImplicitResNetConfig,
    MNISTResNet,
    SVHNResNet,
)
from equilibria.models.images.inverse.cells import ADMM, HQS, ProximalGradient, ReconstructionCell, TotalVariation
from equilibria.models.images.inverse.deepinv import DeepinvDenoiser, DeepinvOperator
from equilibria.models.images.inverse.operators import (
    Blur,
    FourierRows,
    Inpainting,
    Operator,
    adjoint_error,
    gaussian_kernel,
    random_mask,
)
from equilibria.models.images.inverse.radon import Radon
from equilibria.models.images.inverse.regularizers import ContractiveDenoiser, SoftThreshold
from equilibria.models.images.inverse.restoration import Restoration
from equilibria.models.images.lion import Lion, LionConfig, Pruning, PruningConfig
from equilibria.models.images.mdeq import MDEQ, pretraining
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS, MDEQConfig
from equilibria.models.images.monotone_nets import (
    MonotoneConvConfig,
    MonotoneMLPConfig,
    MonotoneNet,
    MonotoneTiersConfig,
    SplittingConfig,
)
from equilibria.models.images.neural_ode import AdaptiveSteps, FixedSteps, NeuralODE, NeuralODEConfig
from equilibria.models.images.revnet import ReversibleStack, RevNet
from equilibria.models.images.skip_mlp import SkipMLP, SkipNet, SkipPolynomial, SkipSolver
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary, VocabularyConfig
from equilibria.models.language.attractor import AttractorHead, AttractorModel, CausalBackbone, token_residuals
from equilibria.models.language.deq_transformer import DEQTransformer, TransformerXL
from equilibria.models.language.sequence import GRUModel, SequenceModel, generate, unrolled_pretraining
from equilibria.models.language.transformer_configs import TRANSFORMER_CONFIGS, TRANSFORMER_XL_CONFIGS, TransformerConfig
from equilibria.models.language.trellis_cell import TRELLIS_CONFIGS, TrellisConfig
from equilibria.models.language.trellisnet import TrellisNet, TrellisParts, activation_penalty
from equilibria.models.reasoning.configs import REASONER_CONFIGS, ReasonerConfig
from equilibria.models.reasoning.reasoner import Reasoner, Thought
from equilibria.models.registry import create, info, names

__all__ = [
    "ADMM",
    "FLOW_CONFIGS",
    "HQS",
    "MDEQ",
    "MDEQ_CONFIGS",
    "REASONER_CONFIGS",
    "TRANSFORMER_CONFIGS",
    "TRANSFORMER_XL_CONFIGS",
    "TRELLIS_CONFIGS",
    "AdaptiveSteps",
    "AdaptiveVocabulary",
    "Adjacency",
    "AttractorHead",
    "AttractorModel",
    "Blur",
    "CIFARResNet",
    "CausalBackbone",
    "ChainCell",
    "ChainNet",
    "ChainNetConfig",
    "ContractiveDenoiser",
    "DEQFlow",
    "DEQTransformer",
    "DeepinvDenoiser",
    "DeepinvOperator",
    "Denoiser",
    "DenoiserConfig",
    "EquilibriumField",
    "ExplicitField",
    "FieldConfig",
    "FixedSteps",
    "FlowConfig",
    "FourierRows",
    "GCNLayer",
    "GRUModel",
    "GraphClassifier",
    "GraphClassifierConfig",
    "GraphGCN",
    "GraphGCNConfig",
    "IGNNCell",
    "IGNNLayer",
    "ImplicitResNet",
    "ImplicitResNetConfig",
    "Inpainting",
    "Lion",
    "LionConfig",
    "MDEQConfig",
    "MNISTResNet",
    "ModelFileError",
    "ModelInfo",
    "MonotoneConvConfig",
    "MonotoneMLPConfig",
    "MonotoneNet",
    "MonotoneTiersConfig",
    "NeuralODE",
    "NeuralODEConfig",
    "NodeGCN",
    "NodeGCNConfig",
    "Operator",
    "PPINet",
    "PPINetConfig",
    "ParallelSampler",
    "PlanetoidNet",
    "PlanetoidNetConfig",
    "ProximalGradient",
    "Pruning",
    "PruningConfig",
    "Radon",
    "Reasoner",
    "ReasonerConfig",
    "ReconstructionCell",
    "ResNet",
    "ResNetConfig",
    "Restoration",
    "RevNet",
    "ReversibleStack",
    "SVHNResNet",
    "SavedModel",
    "SequenceModel",
    "SkipMLP",
    "SkipNet",
    "SkipPolynomial",
    "SkipSolver",
    "SoftThreshold",
    "SplittingConfig",
    "Summary",
    "Thought",
    "TotalVariation",
    "TransformerConfig",
    "TransformerXL",
    "TrellisConfig",
    "TrellisNet",
    "TrellisParts",
    "UntiedStack",
    "VocabularyConfig",
    "activation_penalty",
    "adjoint_error",
    "coordinate_grid",
    "create",
    "diffusion_loss",
    "gaussian_kernel",
    "generate",
    "info",
    "load",
    "matched_width",
    "names",
    "parameters",
    "pretrained",
    "pretraining",
    "random_mask",
    "read_info",
    "save",
    "summary",
    "token_residuals",
    "unrolled_pretraining",
    "untied",
    "weight_tied",
]
