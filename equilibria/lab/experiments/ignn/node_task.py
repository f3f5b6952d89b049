"""Classification of nodes as tasks: citation graphs, chains, and the many labels of PPI."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.lab.data.catalogue import load
from equilibria.lab.data.graphs import Graph
from equilibria.lab.data.sets import Dataset
from equilibria.lab.data.synthetic import chains
from equilibria.lab.experiments.ignn.data import CLASSES, FEATURES, LABELS, WholeGraphs, random_communities, random_labels
from equilibria.lab.experiments.ignn.task import GraphTask, LayerOptions, Net, chosen
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome
from equilibria.models.graphs.gcn import NodeGCN, NodeGCNConfig
from equilibria.models.graphs.graph_nets import (
    ChainNet,
    ChainNetConfig,
    PlanetoidNet,
    PlanetoidNetConfig,
    PPINet,
    PPINetConfig,
)
from equilibria.solution import record

NodeSet = Literal["cora", "citeseer", "pubmed", "random"]

SIZES: dict[NodeSet, tuple[int, int]] = {  # features, classes
    "cora": (1433, 7),
    "citeseer": (3703, 6),
    "pubmed": (500, 3),
    "random": (FEATURES, CLASSES),
}


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of node classification in one graph.

    data    a graph of Planetoid; "random": a generated graph of 120 nodes
    passes  number of steps in an epoch, each on the whole graph
    """

    data: NodeSet = "cora"
    net: Net = "ignn"
    layers: LayerOptions = field(default_factory=LayerOptions)
    width: int = 16
    dropout: float = 0.5
    passes: int = 1


class Nodes(GraphTask):
    """Trains a network to classify the nodes of a citation graph."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        s = self.settings
        features, classes = SIZES[s.data]
        sizes: dict[str, Any] = {"features": features, "classes": classes, "width": s.width, "dropout": s.dropout}
        if s.net == "gcn":
            return NodeGCN(NodeGCNConfig(**sizes))
        return PlanetoidNet(PlanetoidNetConfig(**sizes, kappa=s.layers.kappa), **s.layers.parts())

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Graph]:
        s = self.settings
        return whole(random_communities() if s.data == "random" else load(s.data, root), training, world_size, s.passes)


@dataclass(frozen=True, kw_only=True)
class ChainSettings:
    """Settings of chains whose class only the first node shows; computed in float64, because distant signals are small.

    lengths         lengths of the chains; a separate network is trained for each of them
    chains          number of chains per class
    train           share of the nodes for training; valid and test are numbers of nodes
    gcn_layers      number of graph convolutions of the explicit network
    clip            largest norm of the gradient of each parameter
    passes          number of steps of each network in an epoch
    """

    lengths: tuple[int, ...] = (10, 20, 50, 100)
    net: Net = "ignn"
    layers: LayerOptions = field(default_factory=LayerOptions)
    chains: int = 20
    train: float = 0.05
    valid: int = 100
    test: int = 200
    gcn_layers: int = 2
    clip: float | None = 0.5
    passes: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"lengths must be different numbers, at least one, got {self.lengths}.")


class ChainNets(nn.Module):
    """One network per length of chains; a graph is passed to the network for its number of nodes.

    They share no weights, so training them in turn is the same as training them one after the other.
    """

    def __init__(self, nets: dict[int, nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({str(nodes): net for nodes, net in nets.items()})

    def forward(self, graph: Graph) -> Tensor:
        nodes = str(len(graph.x))
        if nodes not in self.nets:
            raise ValueError(f"There are networks for graphs of {', '.join(self.nets)} nodes, got a graph of {nodes} nodes.")
        scores: Tensor = self.nets[nodes](graph)
        return scores


class Chains(GraphTask):
    """Trains networks on chains of several lengths; accuracy and evaluations are reported for each length."""

    def __init__(self, settings: ChainSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        s = self.settings
        return ChainNets({2 * s.chains * length: self._net() for length in s.lengths}).double()

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Graph]:
        s = self.settings
        options = {"chains": s.chains, "valid": s.valid, "test": s.test, "seed": 42 + training.seed}
        nodes = {length: round(s.train * 2 * s.chains * length) for length in s.lengths}
        sets = [chains(length=length, train=train, **options) for length, train in nodes.items()]
        train, valid, test = (
            [dataclasses.replace(graph, x=graph.x.double()) for (graph,) in split]
            for split in zip(*map(_splits, sets), strict=True)
        )
        return whole(Dataset("chains", tuple(train), tuple(test), tuple(valid)), training, world_size, s.passes)

    def loss(self, model: nn.Module, batch: Graph, step: int) -> Outcome:
        with record(model) as solutions:
            outcome = super().loss(model, batch, step)
        length = len(batch.x) // (2 * self.settings.chains)
        metrics = {**outcome.metrics, f"accuracy_{length}": outcome.metrics["accuracy"]}
        if solutions:
            metrics[f"evaluations_{length}"] = float(solutions[0].stats.evaluations)
        return Outcome(outcome.loss, metrics, outcome.size)

    def improve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.clip is not None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    nn.utils.clip_grad_norm_([parameter], self.settings.clip)
        super().improve(model, optimizer)

    def _net(self) -> nn.Module:
        """Return a new network for one length."""
        s = self.settings
        if s.net == "gcn":
            return NodeGCN(NodeGCNConfig(features=100, classes=2, layers=s.gcn_layers))
        return ChainNet(ChainNetConfig(kappa=s.layers.kappa), **s.layers.parts())


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """Settings of multi-label node classification.

    data   "ppi"; "random": 6 generated graphs like those of PPI
    width  h; the layers have 4h, 2h, 2h and h channels, and the last one has a channel per label
    """

    data: Literal["ppi", "random"] = "ppi"
    layers: LayerOptions = field(default_factory=lambda: LayerOptions(kappa=0.98))
    width: int = 256


class Labels(GraphTask):
    """Trains a network on the proteins of PPI with one graph per step; a label is predicted if its logit is positive."""

    better = ("micro_f1", "max")

    def __init__(self, settings: LabelSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        s = self.settings
        sizes = {"features": FEATURES, "labels": LABELS} if s.data == "random" else {}
        config = PPINetConfig.of_size(s.width, **sizes)
        return PPINet(dataclasses.replace(config, kappa=s.layers.kappa), **s.layers.parts())

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Graph]:
        found = random_labels() if self.settings.data == "random" else load("ppi", root)
        return whole(found, training, world_size, shuffle=True)

    def loss(self, model: nn.Module, batch: Graph, step: int) -> Outcome:
        scores, y = chosen(model(batch), batch)
        given, true = scores.detach() > 0, y > 0.5
        counts = {"hits": given & true, "false_alarms": given & ~true, "misses": ~given & true}
        # means per node: weighted by size over batches, they give the counts of the whole split
        metrics: dict[str, Tensor | float] = {name: count.float().sum() / len(y) for name, count in counts.items()}
        return Outcome(F.binary_cross_entropy_with_logits(scores, y), metrics, len(y))

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """Replace the counts per node by the micro-F1 of the whole split."""
        counts = {name: means[name] for name in ("hits", "false_alarms", "misses")}
        total = 2 * counts["hits"] + counts["false_alarms"] + counts["misses"]
        kept = {name: value for name, value in means.items() if name not in counts}
        return kept | {"micro_f1": 2 * counts["hits"] / total if total else 1.0}


def whole(
    found: Dataset[tuple[Graph, ...]], training: Training, world_size: int, passes: int = 1, *, shuffle: bool = False
) -> Loaders[Graph]:
    """Return loaders with one graph per step."""
    if world_size > 1 or training.batch_size != 1:
        raise ValueError(
            f"A step takes one whole graph of {found.name}, which processes cannot share: got training.batch_size="
            f"{training.batch_size} and {world_size} processes. Set training.batch_size=1 and use one process."
        )
    train, valid, test = _splits(found)
    return Loaders(
        WholeGraphs(train, passes=passes, shuffle=shuffle, seed=training.seed), WholeGraphs(valid), WholeGraphs(test)
    )


def _splits(found: Dataset[tuple[Graph, ...]]) -> tuple[tuple[Graph, ...], tuple[Graph, ...], tuple[Graph, ...]]:
    """Return the graphs of the training, validation and test splits."""
    assert found.valid is not None
    return found.train, found.valid, found.test
