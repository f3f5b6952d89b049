"""The catalogue of models: names, descriptions, classes and default options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from equilibria.models.diffusion.denoiser import DIGITS, Denoiser
from equilibria.models.fields.field import EquilibriumField, ExplicitField, FieldConfig
from equilibria.models.flow.configs import FLOW_CONFIGS
from equilibria.models.flow.deq_flow import DEQFlow
from equilibria.models.graphs.gcn import GraphGCN, GraphGCNConfig, NodeGCN, NodeGCNConfig
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
from equilibria.models.images.explicit_nets import ResNet
from equilibria.models.images.implicit_resnet import JACOBIAN, CIFARResNet, ImplicitResNet, MNISTResNet, SVHNResNet
from equilibria.models.images.mdeq import MDEQ
from equilibria.models.images.mdeq_configs import MDEQ_CONFIGS
from equilibria.models.images.monotone_nets import MonotoneConvConfig, MonotoneMLPConfig, MonotoneNet, MonotoneTiersConfig
from equilibria.models.images.neural_ode import ANODE_CIFAR10, ANODE_MNIST, NODE_CIFAR10, NODE_MNIST, NeuralODE
from equilibria.models.images.skip_mlp import SkipMLP, SkipPolynomial
from equilibria.models.language.deq_transformer import DEQTransformer, TransformerXL
from equilibria.models.language.sequence import GRUModel
from equilibria.models.language.transformer_configs import TRANSFORMER_CONFIGS, TRANSFORMER_XL_CONFIGS
from equilibria.models.language.trellis_cell import TRELLIS_CONFIGS
from equilibria.models.language.trellisnet import TrellisNet
from equilibria.models.reasoning.configs import REASONER_CONFIGS
from equilibria.models.reasoning.reasoner import Reasoner


@dataclass(frozen=True)
class ModelInfo:
    """The description of a model: its name, class and default options.

    build    its class, or a function that returns it
    options  default arguments of `build`
    """

    name: str
    summary: str
    build: Callable[..., nn.Module]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def parameters(self) -> int:
        """The number of trained parameters with the default options."""
        with torch.device("meta"):  # counts without allocating or initialising the weights
            return parameters(self.build(**dict(self.options)))


def parameters(model: nn.Module) -> int:
    """Return the number of trained parameters of a model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


_STARTS = {"vanilla": "starts at zero", "skip": "starts at a prediction", "v2": "starts at f(0, x)"}


def _mdeq_models() -> list[ModelInfo]:
    """Return the multiscale DEQs; Skip DEQ configurations appear once per variant."""
    tiny = MDEQ_CONFIGS["cifar-tiny"]
    found = [ModelInfo("mdeq-tiny", "short for mdeq-cifar-tiny", MDEQ, (("config", tiny),))]
    for name, config in MDEQ_CONFIGS.items():
        summary, option = f"multiscale DEQ, {config.summary}", ("config", config)
        if not name.startswith("skip-"):
            found.append(ModelInfo(f"mdeq-{name}", summary, MDEQ, (option,)))
            continue
        for variant, start in _STARTS.items():
            full = f"skip-mdeq-{name.removeprefix('skip-')}-{variant}"
            found.append(ModelInfo(full, f"{summary}, {start}", MDEQ, (option, ("variant", variant))))
    return found


def _skip_models() -> list[ModelInfo]:
    """Return the dense Skip DEQs, one classifier and one regressor per variant."""
    found = []
    for variant, start in _STARTS.items():
        option = (("variant", variant),)
        found.append(ModelInfo(f"skip-mlp-{variant}", f"dense DEQ classifier, {start}", SkipMLP, option))
        found.append(
            ModelInfo(f"skip-polynomial-{variant}", f"DEQ regressor of one number, {start}", SkipPolynomial, option)
        )
    return found


def _vision_models() -> list[ModelInfo]:
    """Return the residual network and the implicit ones of JFB, each with its exact and explicit twins."""
    found = [ModelInfo("resnet-56", "residual network, explicit", ResNet)]
    for name, kind in (("mnist", MNISTResNet), ("svhn", SVHNResNet), ("cifar10", CIFARResNet)):
        plain, bare = ("config", kind()), ("config", kind(latent_norm=False))
        exact = (bare, ("gradient", JACOBIAN))
        found += [
            ModelInfo(f"jfb-resnet-{name}", "implicit residual network, Jacobian-free", ImplicitResNet, (plain,)),
            ModelInfo(f"jfb-resnet-{name}-jacobian", "the same, exact gradients", ImplicitResNet, exact),
            ModelInfo(f"jfb-resnet-{name}-explicit", "the same, one application", ImplicitResNet, (plain, ("depth", 1))),
        ]
    return found


def _monotone_models() -> list[ModelInfo]:
    """Return the monotone operator networks."""
    colour = (3, 32, 32)
    configs = {
        "mlp-mnist": MonotoneMLPConfig(),
        "conv-mnist": MonotoneConvConfig(),
        "tiers-mnist": MonotoneTiersConfig(),
        "conv-cifar10": MonotoneConvConfig(image=colour, channels=81),
        "conv-cifar10-large": MonotoneConvConfig(image=colour, channels=200),
        "tiers-cifar10": MonotoneTiersConfig(image=colour, channels=(16, 32, 60)),
        "tiers-cifar10-large": MonotoneTiersConfig(image=colour, channels=(64, 128, 128)),
    }
    return [ModelInfo(f"mon-{n}", "monotone operator network", MonotoneNet, (("config", c),)) for n, c in configs.items()]


def _neural_odes() -> list[ModelInfo]:
    """Return the neural ODEs."""
    configs = {
        "node-mnist": NODE_MNIST,
        "anode-mnist": ANODE_MNIST,
        "node-cifar10": NODE_CIFAR10,
        "anode-cifar10": ANODE_CIFAR10,
    }
    return [ModelInfo(name, "neural ODE", NeuralODE, (("config", config),)) for name, config in configs.items()]


def _sequence_models() -> list[ModelInfo]:
    """Return the sequence models: GRU, DEQ transformers, Transformer-XL and TrellisNets."""
    found = [ModelInfo("gru-copy", "GRU, copy memory", GRUModel)]
    for name, config in TRANSFORMER_CONFIGS.items():
        summary = f"DEQ transformer, {config.summary}"
        found.append(ModelInfo(f"deq-transformer-{name}", summary, DEQTransformer, (("config", config),)))
    for name, config in TRANSFORMER_XL_CONFIGS.items():
        summary = f"Transformer-XL, {config.summary}"
        found.append(ModelInfo(f"transformer-xl-{name}", summary, TransformerXL, (("config", config),)))
    for name, trellis in TRELLIS_CONFIGS.items():
        size, option = name.removeprefix("deq-"), ("config", trellis)
        # released equilibria and explicit networks have separate configurations; "nano" serves both
        if name.startswith("deq-") or name == "nano":
            found.append(ModelInfo(f"deq-trellisnet-{size}", f"DEQ TrellisNet, {trellis.summary}", TrellisNet, (option,)))
        if not name.startswith("deq-"):
            options = (option, ("depth", trellis.layers))
            found.append(ModelInfo(f"trellisnet-{size}", f"TrellisNet, {trellis.summary}", TrellisNet, options))
    return found


def _graph_models() -> list[ModelInfo]:
    """Return the implicit graph networks and the graph convolutions."""
    kinds: dict[str, tuple[str, Callable[..., nn.Module], Any]] = {
        "ignn-cox2": ("implicit graph network, a class per graph", GraphClassifier, GraphClassifierConfig(features=35)),
        "ignn-proteins": ("implicit graph network, a class per graph", GraphClassifier, GraphClassifierConfig(features=3)),
        "ignn-ppi": ("implicit graph network, labels of nodes", PPINet, PPINetConfig()),
        "ignn-chains": ("implicit graph network, long range", ChainNet, ChainNetConfig()),
        "ignn-cora": ("implicit graph network, a class per node", PlanetoidNet, PlanetoidNetConfig()),
        "ignn-citeseer": (
            "implicit graph network, a class per node",
            PlanetoidNet,
            PlanetoidNetConfig(features=3703, classes=6),
        ),
        "ignn-pubmed": (
            "implicit graph network, a class per node",
            PlanetoidNet,
            PlanetoidNetConfig(features=500, classes=3),
        ),
        "gcn-cora": ("graph convolutions, a class per node", NodeGCN, NodeGCNConfig()),
        "gcn-chains": ("graph convolutions, a class per node", NodeGCN, NodeGCNConfig(features=100, classes=2)),
        "gcn-cox2": ("graph convolutions, a class per graph", GraphGCN, GraphGCNConfig(features=35)),
        "gcn-proteins": ("graph convolutions, a class per graph", GraphGCN, GraphGCNConfig(features=3)),
    }
    return [ModelInfo(name, summary, build, (("config", config),)) for name, (summary, build, config) in kinds.items()]


def _reasoners() -> list[ModelInfo]:
    """Return the looped reasoners."""
    return [
        ModelInfo(f"reasoner-{name}", f"looped reasoner, {config.summary}", Reasoner, (("config", config),))
        for name, config in REASONER_CONFIGS.items()
    ]


def _fields() -> list[ModelInfo]:
    """Return the implicit representations of signals, each as an equilibrium and as a stack of four layers."""
    kinds: dict[str, tuple[str, FieldConfig]] = {
        "siren": ("sinusoids", FieldConfig()),
        "fourier": ("multiplicative Fourier filters", FieldConfig(kind="fourier")),
        "gabor": ("multiplicative Gabor filters", FieldConfig(kind="gabor")),
    }
    found = []
    for name, (what, config) in kinds.items():
        option = ("config", config)
        found.append(ModelInfo(f"field-{name}", f"equilibrium field, {what}", EquilibriumField, (option,)))
        explicit = f"explicit field of 4 layers, {what}"
        found.append(ModelInfo(f"field-{name}-explicit", explicit, ExplicitField, (option, ("layers", 4))))
    return found


def _flow_models() -> list[ModelInfo]:
    """Return the optical-flow networks, each as an equilibrium and as RAFT's twelve unrolled updates."""
    found = []
    for name, config in FLOW_CONFIGS.items():
        summary, unrolled = config.summary, (("config", replace(config, detached=True)), ("depth", 12))
        found.append(
            ModelInfo(f"deq-flow-{name}", f"optical flow as an equilibrium, {summary}", DEQFlow, (("config", config),))
        )
        found.append(ModelInfo(f"raft-{name}", f"optical flow, 12 updates, {summary}", DEQFlow, unrolled))
    return found


def entries() -> list[ModelInfo]:
    """Return all models, sorted by name."""
    vision = [*_mdeq_models(), *_skip_models(), *_vision_models(), *_monotone_models(), *_neural_odes()]
    others = [
        *_sequence_models(),
        *_graph_models(),
        *_reasoners(),
        *_flow_models(),
        *_fields(),
        ModelInfo("denoiser-digits", "diffusion model of 8x8 digits", Denoiser, (("config", DIGITS),)),
    ]
    return sorted([*vision, *others], key=lambda entry: entry.name)
