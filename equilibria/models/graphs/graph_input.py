"""What models take for a graph: features and edges as they are, a `data.Graph`, or torch_geometric's Data and Batch."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from equilibria.models.graphs.graph_ops import Adjacency


class GraphLike(Protocol):
    """What models take for a graph: a `data.Graph`, or torch_geometric's Data and Batch.

    Its `edge_weight` and `batch` are used as well, where it has them.
    """

    @property
    def x(self) -> Any: ...

    @property
    def edge_index(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class GraphInput:
    """What a model works on, in whatever form it came."""

    x: Tensor  # (n, features)
    adjacency: Adjacency
    batch: Tensor | None  # (n,), the graph that each node belongs to; None: there is one


def read_graph(
    x: Tensor | GraphLike,
    edge_index: Tensor | Adjacency | None = None,
    edge_weight: Tensor | None = None,
    batch: Tensor | None = None,
    *,
    normalize: bool,
) -> GraphInput:
    """A graph as torch_geometric gives it: features and edges, or one object that has them.

    `edge_index` may also be an `Adjacency`, which is taken as it is, or a sparse tensor, the transposed adjacency matrix.
    The adjacency is found once for the same tensors, and again only after these have changed.
    """
    if not isinstance(x, Tensor):
        return _read_object(x, edge_index, edge_weight, batch, normalize)
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"Features were expected as real numbers (nodes, features): got {x.dtype} of {tuple(x.shape)}.")
    if isinstance(edge_index, Adjacency):
        return GraphInput(x, edge_index, batch)
    if edge_index is None:
        raise TypeError("There are features but no edges: call it with (x, edge_index), or with a graph that has both.")
    dtype = torch.promote_types(x.dtype, torch.float32)
    return GraphInput(x, _known(edge_index, edge_weight, len(x), dtype, normalize), batch)


def _read_object(graph: GraphLike, edge_index: Any, edge_weight: Any, batch: Any, normalize: bool) -> GraphInput:
    parts = {name: getattr(graph, name, None) for name in ("x", "edge_index", "edge_weight", "batch")}
    if not isinstance(parts["x"], Tensor) or not isinstance(parts["edge_index"], (Tensor, Adjacency)):
        raise TypeError(
            f"Expected features and edges, or a graph that has them as x and edge_index: got {type(graph).__name__}. Where "
            "nodes have no features, take their degrees."
        )
    if edge_index is not None:
        raise TypeError("The edges were given twice: in the graph and beside it.")
    weight = parts["edge_weight"] if edge_weight is None else edge_weight
    chosen = parts["batch"] if batch is None else batch
    return read_graph(parts["x"], parts["edge_index"], weight, chosen, normalize=normalize)


@dataclass(frozen=True)
class _Entry:
    """An adjacency with what it was made of: the tensors as they were then."""

    weight: weakref.ref[Tensor] | None
    versions: tuple[int, ...]
    adjacency: Adjacency

    def fits(self, weight: Tensor | None, versions: tuple[int, ...]) -> bool:
        same = weight is None if self.weight is None else weight is not None and self.weight() is weight
        return same and self.versions == versions


_ENTRIES = WeakTensorKeyDictionary()  # by edge_index, and gone with it: what is made of it are copies


def _known(edge_index: Tensor, weight: Tensor | None, nodes: int, dtype: torch.dtype, normalize: bool) -> Adjacency:
    tensors = [edge_index] if weight is None else [edge_index, weight]
    if edge_index.layout != torch.strided or any(tensor.is_inference() for tensor in tensors):
        return _make(edge_index, weight, nodes, dtype, normalize)  # whether these were changed cannot be known
    versions = tuple(tensor._version for tensor in tensors)
    entries: dict[Any, _Entry] = _ENTRIES.setdefault(edge_index, {})
    key = (nodes, dtype, normalize)
    if key not in entries or not entries[key].fits(weight, versions):
        made = _make(edge_index, weight, nodes, dtype, normalize)
        entries[key] = _Entry(None if weight is None else weakref.ref(weight), versions, made)
    return entries[key].adjacency


def _make(edge_index: Tensor, weight: Tensor | None, nodes: int, dtype: torch.dtype, normalize: bool) -> Adjacency:
    if edge_index.layout != torch.strided:
        if weight is not None:
            raise TypeError("A sparse adjacency has its weights in it, and edge_weight was given beside it: leave it out.")
        matrix = edge_index.to_sparse_coo().coalesce()
        edge_index, weight = matrix.indices().flip(0), matrix.values()
    made = Adjacency(edge_index, weight, nodes, dtype=dtype)
    return made.normalized() if normalize else made
