"""Graphs for the experiments: cross-validation folds, whole graphs as batches, and small random sets for the debug scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equilibria.lab.data.batches import GraphBatches
from equilibria.lab.data.graphs import Graph
from equilibria.lab.data.sets import Dataset, generator, stratified_folds

DEGREES = 10  # features of `random_graphs`: one-hot degrees from 0 to 9, where 9 stands for all larger ones
CLASSES = 3  # classes of `random_communities`
FEATURES = 8  # features of `random_communities` and `random_labels`
LABELS = 5  # labels of `random_labels`


class WholeGraphs(GraphBatches):
    """Batches of one graph each; the same objects every epoch, so that cached adjacency data is reused.

    passes  how often every graph occurs in an epoch
    """

    def __init__(self, graphs: Sequence[Graph], *, passes: int = 1, shuffle: bool = False, seed: int = 0) -> None:
        if passes < 1:
            raise ValueError(f"passes must be at least 1, got {passes}.")
        super().__init__(tuple(graphs) * passes, 1, shuffle=shuffle, seed=seed)

    def batch(self, epoch: int, position: int) -> Graph:
        return self.graphs[int(self.index(epoch, position))]


def parted(graphs: Sequence[Graph], folds: int, fold: int) -> tuple[tuple[Graph, ...], tuple[Graph, ...]]:
    """Return the graphs of all other folds and those of this fold; every class has the same share in each fold."""
    part = stratified_folds(torch.cat([graph.y for graph in graphs]), folds).tolist()
    others = tuple(graph for graph, k in zip(graphs, part, strict=True) if k != fold)
    return others, tuple(graph for graph, k in zip(graphs, part, strict=True) if k == fold)


def random_graphs(count: int = 60, *, least: int = 20, most: int = 40, seed: int = 0) -> tuple[Graph, ...]:
    """Generate graphs of two classes in turn: 0 has uniformly drawn edges, 1 grows by preferential attachment.

    A graph of n nodes has 2 n - 3 edges. The features of a node are its one-hot degree.
    """
    draws = generator(seed, "random graphs")
    sizes = torch.randint(least, most + 1, (count,), generator=draws).tolist()
    return tuple(_random_graph(n, i % 2, draws) for i, n in enumerate(sizes))


def random_communities(nodes: int = 120, *, seed: int = 0) -> Dataset[tuple[Graph, ...]]:
    """Generate a graph of three communities with most edges inside them; noisy features indicate the community.

    Splits are given by `mask`, as for Planetoid's graphs: a quarter of the nodes is for training, a quarter for validation.
    """
    draws = generator(seed, "communities")
    y = torch.randint(CLASSES, (nodes,), generator=draws)
    edges = torch.randint(nodes, (2, 16 * nodes), generator=draws)
    same = y[edges[0]] == y[edges[1]]
    x = torch.rand(nodes, FEATURES, generator=draws)
    x[torch.arange(nodes), y] += 0.5
    whole = Graph(x, _undirected(edges[:, same | (torch.rand(len(same), generator=draws) < 0.1)]), y)
    place = torch.randperm(nodes, generator=draws) * 4 // nodes  # a random quarter for every node: 0, 1, 2 or 3
    masks = (place == 0, place == 1, place >= 2)
    train, valid, test = ((dataclasses.replace(whole, mask=mask),) for mask in masks)
    return Dataset("random communities", train, test, valid, classes=tuple(f"class {i}" for i in range(CLASSES)))


def random_labels(graphs: tuple[int, int, int] = (4, 1, 1), *, nodes: int = 40, seed: int = 0) -> Dataset[tuple[Graph, ...]]:
    """Generate graphs like PPI: a node has a label if the mean of a feature over its neighbours is above one half."""
    draws = generator(seed, "random labels")
    train, valid, test = (tuple(_labelled(nodes, draws) for _ in range(count)) for count in graphs)
    return Dataset("random labels", train, test, valid, classes=tuple(f"label {i}" for i in range(LABELS)))


def _random_graph(nodes: int, kind: int, draws: torch.Generator) -> Graph:
    """Return a graph of class `kind`, see `random_graphs`."""
    if kind:
        edges = _preferred(nodes, draws)
    else:
        pairs = torch.combinations(torch.arange(nodes))
        edges = pairs[torch.randperm(len(pairs), generator=draws)[: (2 * nodes - 3)]].t()
    edges = _undirected(edges)
    degree = edges[0].bincount(minlength=nodes).clamp(max=DEGREES - 1)
    return Graph(one_hot(degree, DEGREES).float(), edges, torch.tensor([kind]))


def _preferred(nodes: int, draws: torch.Generator) -> Tensor:
    """Return edges (2, edges) of preferential attachment: a new node joins two others, drawn in proportion to degrees."""
    edges = [(0, 1)]
    degree = torch.zeros(nodes)
    degree[:2] = 1.0
    for new in range(2, nodes):
        chosen = torch.multinomial(degree[:new], 2, generator=draws)
        edges += [(new, old) for old in chosen.tolist()]
        degree[chosen] += 1.0
        degree[new] = 2.0
    return torch.tensor(edges).t()


def _labelled(nodes: int, draws: torch.Generator) -> Graph:
    """Return one graph of `random_labels`."""
    edges = _undirected(torch.randint(nodes, (2, 3 * nodes), generator=draws))
    x = torch.rand(nodes, FEATURES, generator=draws)
    total = torch.zeros(nodes, LABELS).index_add_(0, edges[1], x[edges[0], :LABELS])
    degree = edges[1].bincount(minlength=nodes).clamp(min=1).unsqueeze(1)
    return Graph(x, edges, (total / degree > 0.5).float())


def _undirected(edges: Tensor) -> Tensor:
    """Return edges (2, edges) with every edge once in both directions and without loops."""
    edges = edges[:, edges[0] != edges[1]]
    return torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
