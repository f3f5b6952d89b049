"""Graphs, joined graphs, and the readers of the TU collection and of PPI."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equilibria._core.files import optional
from equilibria.lab.data.files import DataError, Paths
from equilibria.lab.data.sets import Dataset, stratified_folds


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A graph, or several graphs joined to one.

    x           features of the nodes, (n, features)
    edge_index  (2, edges), from row 0 to row 1; an undirected edge appears in both directions
    y           a class per graph (graphs,) or per node (n,), or several labels per node (n, labels)
    mask        True for nodes that belong to the split, (n,); None: all do
    batch       graph index of each node, (n,); None: there is one graph
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    mask: Tensor | None = None
    batch: Tensor | None = None

    def __repr__(self) -> str:
        return f"Graph(nodes={len(self.x)}, edges={self.edge_index.shape[1]}, features={self.x.shape[1]})"

    def to(self, device: torch.device | str) -> Graph:
        moved = {f.name: value.to(device) for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}
        return Graph(**moved)

    def to_geometric(self) -> Any:
        """Return the graph as torch_geometric's Data, with the same names."""
        fields = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}
        return optional("torch_geometric.data", "graph").Data(**fields)


def join(graphs: Sequence[Graph]) -> Graph:
    """Join several graphs to one without edges between them; the adjacency matrix is block-diagonal."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    offsets = sizes.cumsum(0) - sizes
    edges = [graph.edge_index + offset for graph, offset in zip(graphs, offsets.tolist(), strict=True)]
    masks = [graph.mask for graph in graphs if graph.mask is not None]
    if len(masks) not in (0, len(graphs)):
        raise ValueError("join takes graphs that all have a mask, or graphs that all have none; got both.")
    x = torch.cat([graph.x for graph in graphs])
    return Graph(
        x=x,
        edge_index=torch.cat(edges, dim=1),
        y=torch.cat([graph.y for graph in graphs]),
        mask=torch.cat(masks) if masks else None,
        batch=torch.arange(len(graphs)).repeat_interleave(sizes).to(x.device),
    )


def tu(
    name: str, paths: Paths, *, fold: int = 0, folds: int = 10, seed: int = 0, attributes: bool = False
) -> Dataset[tuple[Graph, ...]]:
    """Read a set of the TU collection for graph classification.

    The sets have no official split: `fold` of `folds` is for testing, the others are for training. Features are the
    attributes of the nodes if `attributes` is set, followed by one-hot node labels, counted from the smallest to the largest
    as torch-geometric does; nodes with neither have their degree. Labels of edges are ignored.
    """
    if not 0 <= fold < folds:
        raise ValueError(f"fold must lie between 0 and folds - 1 = {folds - 1}, got {fold}.")
    graphs, labels = _tu_graphs(name, paths, attributes)
    part = stratified_folds(torch.cat([graph.y for graph in graphs]), folds, seed).tolist()
    train = tuple(graph for graph, k in zip(graphs, part, strict=True) if k != fold)
    test = tuple(graph for graph, k in zip(graphs, part, strict=True) if k == fold)
    return Dataset(name.lower().replace("_", "-"), train, test, classes=tuple(map(str, labels)))


def ppi(paths: Paths) -> Dataset[tuple[Graph, ...]]:
    """Read PPI: 20 training, 2 validation and 2 test graphs of proteins, with 121 labels of 0 or 1 per node."""
    train, valid, test = (_ppi_split(paths, split) for split in ("train", "valid", "test"))
    classes = tuple(f"label {i}" for i in range(train[0].y.shape[1]))
    return Dataset("ppi", train, test, valid, classes=classes)


def read_table(path: Path, number: type[int] | type[float] = int) -> Tensor:
    """Read a file of numbers separated by commas, with equally many in every line: (lines, numbers)."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = [line for line in lines if line.strip()]
    widths = {line.count(",") for line in lines}
    try:
        values = [number(value) for line in lines for value in line.split(",")]
    except ValueError as error:
        raise DataError(f"{path} is not a table of numbers: {error}. Fetch it again.") from error
    if len(widths) != 1:
        raise DataError(f"{path} is empty or its lines differ in length. Fetch it again.")
    return torch.tensor(values).view(len(lines), -1)


def _tu_graphs(name: str, paths: Paths, attributes: bool) -> tuple[list[Graph], list[int]]:
    """Return the graphs of a set and its class labels; raises DataError for files that do not fit together."""
    # the files count nodes and graphs from 1
    edges, owner = read_table(paths[f"{name}_A.txt"]) - 1, read_table(paths[f"{name}_graph_indicator.txt"])[:, 0] - 1
    labels, y = read_table(paths[f"{name}_graph_labels.txt"])[:, 0].unique(return_inverse=True)
    path = paths[f"{name}_A.txt"]
    graphs = len(y)
    if edges.shape[1] != 2 or int(edges.min()) < 0 or int(edges.max()) >= len(owner):
        raise DataError(
            f"{path} names nodes outside of the {len(owner):,} of the graph indicator: the files do not belong together."
        )
    if int(owner.min()) < 0 or int(owner.max()) >= graphs or bool((owner.diff() < 0).any()):
        raise DataError(f"The graph indicator beside {path} does not count the {graphs:,} graphs of the labels in order.")
    if bool((owner[edges[:, 0]] != owner[edges[:, 1]]).any()):
        raise DataError(f"{path} has edges from one graph to another: the files do not belong together.")
    x = _tu_features(name, paths, edges, len(owner), attributes)
    nodes = owner.bincount(minlength=len(y))
    starts = nodes.cumsum(0) - nodes
    of_edge = owner[edges[:, 0]]
    order = of_edge.argsort(stable=True)  # edges of a graph need not be adjacent in the file
    local = (edges - starts[of_edge].unsqueeze(1))[order].t().split(of_edge.bincount(minlength=len(y)).tolist(), dim=1)
    parts = zip(x.split(nodes.tolist()), local, y.split(1), strict=True)
    return [Graph(x_, e.contiguous(), y_) for x_, e, y_ in parts], labels.tolist()


def _tu_features(name: str, paths: Paths, edges: Tensor, nodes: int, attributes: bool) -> Tensor:
    """Return the features of all nodes, (nodes, features)."""
    features = []
    if attributes:
        features.append(_rows(_part(name, paths, "node_attributes"), nodes, float))
    if f"{name}_node_labels.txt" in paths:
        labels = _rows(paths[f"{name}_node_labels.txt"], nodes, int)[:, 0]
        features.append(one_hot(labels - labels.min()).float())
    return torch.cat(features, dim=1) if features else edges[:, 0].bincount(minlength=nodes).float().unsqueeze(1)


def _part(name: str, paths: Paths, part: str) -> Path:
    """Return the file of an optional part of a set; raises ValueError if the set does not have it."""
    if f"{name}_{part}.txt" not in paths:
        raise ValueError(f"{name} has no {part.replace('_', ' ')}: load it without them.")
    return paths[f"{name}_{part}.txt"]


def _rows(path: Path, rows: int, number: type[int] | type[float]) -> Tensor:
    """Read a table with one line per node, (rows, numbers); raises DataError for another number of lines."""
    table = read_table(path, number)
    if len(table) != rows:
        raise DataError(f"{path} has {len(table):,} lines for {rows:,} nodes.")
    return table


def _ppi_split(paths: Paths, split: str) -> tuple[Graph, ...]:
    """Read the graphs of one split of PPI."""
    x, y, owner = (_load_npy(paths[f"{split}_{part}.npy"]) for part in ("feats", "labels", "graph_id"))
    path = paths[f"{split}_graph.json"]
    if x.dim() != 2 or y.dim() != 2 or owner.dim() != 1 or not len(x) == len(y) == len(owner) > 0:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, y, owner))
        raise DataError(f"The arrays beside {path} do not belong together: feats, labels and graph_id have shapes {shapes}.")
    edges = _ppi_edges(path, len(x))
    return tuple(_subgraph(x.float(), edges, y.float(), owner == k) for k in owner.unique().tolist())


def _ppi_edges(path: Path, nodes: int) -> Tensor:
    """Read the edges of a node-link file, (edges, 2), without loops and each once per direction."""
    try:
        content = json.loads(path.read_bytes())
        edges = torch.tensor([(link["source"], link["target"]) for link in content["links"]]).view(-1, 2)
        directed = bool(content.get("directed"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged or no graph in node-link form: {error!r}. Fetch it again.") from error
    if edges.dtype != torch.int64 or (len(edges) and not 0 <= int(edges.min()) <= int(edges.max()) < nodes):
        raise DataError(f"{path} names nodes outside of the {nodes:,} that have features.")
    edges = edges if directed else torch.cat([edges, edges.flip(1)])
    return edges[edges[:, 0] != edges[:, 1]].unique(dim=0)


def _subgraph(x: Tensor, edges: Tensor, y: Tensor, nodes: Tensor) -> Graph:
    """Return the graph of the nodes where the mask `nodes`, (n,), is True, with the edges between them."""
    local = nodes.cumsum(0) - 1
    inside = edges[nodes[edges[:, 0]] & nodes[edges[:, 1]]]
    return Graph(x[nodes], local[inside].t().contiguous(), y[nodes])


def _load_npy(path: Path) -> Tensor:
    """Read an .npy file; raises DataError if it is damaged."""
    np = optional("numpy", "graph")
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except Exception as error:  # numpy raises many types for a damaged file
        raise DataError(f"{path} is damaged or no .npy file of numbers: {error}. Delete it and fetch it again.") from error
