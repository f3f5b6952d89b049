"""Base class of networks on graphs, and graph convolutions (Kipf and Welling 2017).

NodeGCN()                                    a class per node
GraphGCN(GraphGCNConfig(features=35))        a class per graph
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from equilibria._core.checks import require
from equilibria.models.graphs.graph_input import GraphInput, GraphLike, read_graph
from equilibria.models.graphs.graph_ops import Adjacency


class GraphNet(nn.Module, ABC):
    """Base class of networks that accept a graph in any supported form."""

    normalize: bool = True  # use the adjacency D^(-1/2) (A + I) D^(-1/2)

    def forward(
        self,
        x: Tensor | GraphLike,
        edge_index: Tensor | Adjacency | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Return logits, one row per node or per graph; `batch` holds the graph index of each node."""
        return self.logits(read_graph(x, edge_index, edge_weight, batch, normalize=self.normalize))

    @abstractmethod
    def logits(self, graph: GraphInput) -> Tensor: ...


class GCNLayer(nn.Module):
    """A graph convolution: A'x W' + b with the normalised adjacency A, (nodes, features) -> (nodes, width)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.linear.weight)

    def forward(
        self, x: Tensor | GraphLike, edge_index: Tensor | Adjacency | None = None, edge_weight: Tensor | None = None
    ) -> Tensor:
        graph = read_graph(x, edge_index, edge_weight, normalize=True)
        return graph.adjacency.propagate(self.linear(graph.x)) + self.bias


@dataclass(frozen=True, kw_only=True)
class NodeGCNConfig:
    """Settings of `NodeGCN`; the defaults are those of Cora, 23,063 parameters."""

    features: int = 1433
    classes: int = 7
    width: int = 16
    layers: int = 2
    dropout: float = 0.5

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}.")


CORA_GCN = NodeGCNConfig()


class NodeGCN(GraphNet):
    """Graph convolutions with dropout before and relu between them; a node depends on nodes at most `layers` edges away."""

    def __init__(self, config: NodeGCNConfig = CORA_GCN) -> None:
        super().__init__()
        self.config = config
        self.layers = _convolutions([config.features, *[config.width] * (config.layers - 1), config.classes])
        self.dropout = nn.Dropout(config.dropout)

    def logits(self, graph: GraphInput) -> Tensor:
        x = row_normalized(graph.x)
        for layer in self.layers:
            x = layer(self.dropout(x), graph.adjacency)
            x = x if layer is self.layers[-1] else relu(x)
        return x


@dataclass(frozen=True, kw_only=True)
class GraphGCNConfig:
    """Settings of `GraphGCN`, named as in `GraphClassifierConfig`; there is no `kappa`, since nothing must contract."""

    features: int
    classes: int = 2
    width: int = 64
    layers: int = 3
    dropout: float = 0.5

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}.")


class GraphGCN(GraphNet):
    """`GraphClassifier` with graph convolutions and relu in place of implicit layers."""

    def __init__(self, config: GraphGCNConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = _convolutions([config.features, *[config.width] * config.layers])
        self.head = graph_head(config.width, config.classes, config.dropout)

    def logits(self, graph: GraphInput) -> Tensor:
        x = graph.x
        for layer in self.layers:
            x = relu(layer(x, graph.adjacency))
        return self.head(sum_pool(x, graph.batch))


def sum_pool(x: Tensor, batch: Tensor | None) -> Tensor:
    """Return the sum over the nodes of each graph, (graphs, channels); without a batch there is one graph."""
    if batch is None:
        return x.sum(dim=0, keepdim=True)
    if batch.shape != x.shape[:1]:
        raise ValueError(f"batch must hold one graph index for each of {len(x)} nodes: got shape {tuple(batch.shape)}.")
    graphs = int(batch.max()) + 1 if len(batch) else 0
    return x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)


def row_normalized(x: Tensor) -> Tensor:
    """Divide each row by its sum, as is usual for features of citation graphs; rows whose sum is 0 stay unchanged."""
    total = x.sum(dim=1, keepdim=True)
    # the inner `where` keeps nan out of the gradient of rows whose sum is 0
    return torch.where(total == 0, x, x / torch.where(total == 0, 1.0, total))


def graph_head(width: int, classes: int, dropout: float) -> nn.Sequential:
    """Return the classifier of pooled graphs, (graphs, width) -> (graphs, classes): two dense layers with dropout."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes))


def _convolutions(widths: Sequence[int]) -> nn.ModuleList:
    """Return graph convolutions in series, from each width to the next."""
    return nn.ModuleList(GCNLayer(p, m) for p, m in pairwise(widths))
