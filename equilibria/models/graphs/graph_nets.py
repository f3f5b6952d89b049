"""Implicit networks on graphs (Gu and others 2020).

    GraphClassifier(GraphClassifierConfig(features=35))        a class per graph: COX2, PROTEINS and others of the TU sets
    PPINet()                                                   many labels per node: PPI
    ChainNet()                                                 a class per node, decided by one distant node: chains
    PlanetoidNet()                                             a class per node: Cora, Citeseer, Pubmed

All take a graph (`data.Graph` or torch_geometric's) or the tensors (x, edge_index, edge_weight, batch), and return logits.
Solver, stop and gradient apply to every implicit layer. The explicit counterparts are `NodeGCN` and `GraphGCN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import elu, normalize

from equilibria._core.checks import require
from equilibria.gradients.base import Gradient
from equilibria.models.graphs.gcn import GraphNet, graph_head, row_normalized, sum_pool
from equilibria.models.graphs.graph_input import GraphInput
from equilibria.models.graphs.ignn import PICARD, PUBLISHED_GRADIENT, PUBLISHED_STOP, IGNNLayer
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop


@dataclass(frozen=True, kw_only=True)
class GraphClassifierConfig:
    """Settings of `GraphClassifier`, whose implicit layers have equal widths.

    COX2 (35 features): 37,634 parameters, of which 10,624 are not used. PROTEINS (3 features): 33,538 and 8,576. The
    published code has the same unused parameters; see `IGNNCell`.
    """

    features: int
    classes: int = 2
    width: int = 64
    layers: int = 3
    kappa: float = 0.9
    dropout: float = 0.5

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}.")


class GraphClassifier(GraphNet):
    """Implicit layers in series, a sum over the nodes of each graph, and two dense layers."""

    def __init__(
        self,
        config: GraphClassifierConfig,
        *,
        solver: AnySolver = PICARD,
        stop: Stop = PUBLISHED_STOP,
        gradient: Gradient = PUBLISHED_GRADIENT,
    ) -> None:
        super().__init__()
        self.config = config
        widths = [config.features, *[config.width] * config.layers]
        self.layers = nn.ModuleList(
            IGNNLayer(p, m, kappa=config.kappa, solver=solver, stop=stop, gradient=gradient) for p, m in pairwise(widths)
        )
        self.head = graph_head(config.width, config.classes, config.dropout)

    def logits(self, graph: GraphInput) -> Tensor:
        x = graph.x
        for layer in self.layers:
            x = layer(x, graph.adjacency)
        return self.head(sum_pool(x, graph.batch))


@dataclass(frozen=True, kw_only=True)
class PPINetConfig:
    """Settings of `PPINet`: implicit layers of these widths, then one with a channel per label.

    The defaults have 4,656,931 parameters, of which 1,002,105 are not used; see `IGNNCell`.
    """

    features: int = 50
    labels: int = 121
    widths: tuple[int, ...] = (1024, 512, 512, 256)
    kappa: float = 0.98

    def __post_init__(self) -> None:
        require(all(width >= 1 for width in self.widths), f"widths must be at least 1, got {self.widths}.")

    @staticmethod
    def of_size(h: int, features: int = 50, labels: int = 121) -> PPINetConfig:
        """Return the published widths 4h, 2h, 2h, h; h is 256 in the paper."""
        return PPINetConfig(features=features, labels=labels, widths=(4 * h, 2 * h, 2 * h, h))


PPI = PPINetConfig()


class PPINet(GraphNet):
    """x <- elu(IGNN(x) + V x) per layer, the last one without elu. The adjacency is not normalised."""

    normalize = False

    def __init__(
        self,
        config: PPINetConfig = PPI,
        *,
        solver: AnySolver = PICARD,
        stop: Stop = PUBLISHED_STOP,
        gradient: Gradient = PUBLISHED_GRADIENT,
    ) -> None:
        super().__init__()
        self.config = config
        widths = [config.features, *config.widths, config.labels]
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList(
            IGNNLayer(p, m, kappa=config.kappa, solver=solver, stop=stop, gradient=gradient) for p, m in pairs
        )
        self.skips = nn.ModuleList(nn.Linear(p, m) for p, m in pairs)

    def logits(self, graph: GraphInput) -> Tensor:
        x = graph.x
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = layer(x, graph.adjacency) + skip(x)
            x = x if layer is self.layers[-1] else elu(x)  # the last layer returns logits
        return x


@dataclass(frozen=True, kw_only=True)
class NodeNetConfig:
    """Sizes of a network with one implicit layer that predicts a class for every node."""

    features: int
    classes: int
    width: int = 16
    kappa: float = 0.9
    dropout: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ChainNetConfig(NodeNetConfig):
    """Settings of `ChainNet`: 3,504 parameters, of which 1,616 are not used; see `IGNNCell`."""

    features: int = 100
    classes: int = 2


@dataclass(frozen=True, kw_only=True)
class PlanetoidNetConfig(NodeNetConfig):
    """Settings of `PlanetoidNet`; the defaults are those of Cora: 46,247 parameters, of which 23,303 are used.

    A GCN has about as many as are used. Citeseer has 3,703 features and 6 classes, Pubmed 500 and 3.
    """

    features: int = 1433
    classes: int = 7


CHAINS = ChainNetConfig()
CORA = PlanetoidNetConfig()


class NodeNet(GraphNet):
    """One implicit layer started from zeros, dropout and a linear layer; a subclass defines `logits`."""

    default: ClassVar[NodeNetConfig]
    head_bias: ClassVar[bool] = True

    def __init__(
        self,
        config: NodeNetConfig | None = None,
        *,
        solver: AnySolver = PICARD,
        stop: Stop = PUBLISHED_STOP,
        gradient: Gradient = PUBLISHED_GRADIENT,
    ) -> None:
        super().__init__()
        self.config = config = self.default if config is None else config
        self.layer = IGNNLayer(
            config.features, config.width, kappa=config.kappa, start="zeros", solver=solver, stop=stop, gradient=gradient
        )
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.classes, bias=self.head_bias)


class ChainNet(NodeNet):
    """One implicit layer started from zeros, normalised embeddings, dropout, and a linear layer without bias."""

    default = CHAINS
    head_bias = False

    def logits(self, graph: GraphInput) -> Tensor:
        x = self.layer(row_normalized(graph.x), graph.adjacency)
        # states shrink with the distance to the first node; normalising leaves only their direction
        return self.head(self.dropout(normalize(x, dim=1)))


class PlanetoidNet(NodeNet):
    """Dropout, one implicit layer, dropout, a linear layer; the features of a node are divided by their sum."""

    default = CORA

    def logits(self, graph: GraphInput) -> Tensor:
        x = self.layer(self.dropout(row_normalized(graph.x)), graph.adjacency)
        return self.head(self.dropout(x))
