"""The forms of a graph that models accept: features and edges, a `data.Graph`, or torch_geometric's Data and Batch."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from equilibria.models.graphs.graph_ops import Adjacency


class GraphLike(Protocol):
    """A graph that models accept: a `data.Graph`, or torch_geometric's Data and Batch.

    Its `edge_weight` and `batch` are used if it has them.
    """

    @property
    def x(self) -> Any: ...

    @property
    def edge_index(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class GraphInput:
    """A graph in the form that models compute with."""

    x: Tensor  # (n, features)
    adjacency: Adjacency
    batch: Tensor | None  # (n,), graph index of each node; None: there is one graph


def read_graph(
    x: Tensor | GraphLike,
    edge_index: Tensor | Adjacency | None = None,
    edge_weight: Tensor | None = None,
    batch: Tensor | None = None,
    *,
    normalize: bool,
) -> GraphInput:
    """Read a graph given as features and edges, or as one object that has both.

    `edge_index` may also be an `Adjacency`, which is used unchanged, or a sparse tensor, which is the transposed adjacency
    matrix. The adjacency is cached per tensor and computed again only after the tensors have changed.
    """
    if not isinstance(x, Tensor):
        parts = {name: getattr(x, name, None) for name in ("x", "edge_index", "edge_weight", "batch")}
        if not isinstance(parts["x"], Tensor) or not isinstance(parts["edge_index"], (Tensor, Adjacency)):
            raise TypeError(
                f"Expected features and edges, or a graph with attributes x and edge_index: got {type(x).__name__}. If "
                "nodes have no features, use their degrees."
            )
        if edge_index is not None:
            raise TypeError("The edges were given twice: in the graph and as edge_index. Leave edge_index out.")
        weight = parts["edge_weight"] if edge_weight is None else edge_weight
        chosen = parts["batch"] if batch is None else batch
        return read_graph(parts["x"], parts["edge_index"], weight, chosen, normalize=normalize)
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"Features must be real numbers of shape (nodes, features): got {x.dtype} of shape {tuple(x.shape)}."
        )
    if isinstance(edge_index, Adjacency):
        return GraphInput(x, edge_index, batch)
    if edge_index is None:
        raise TypeError(
            "Features were given without edges: call the model with (x, edge_index), or with a graph that has both."
        )
    dtype = torch.promote_types(x.dtype, torch.float32)  # sums over many neighbours need more than half precision
    return GraphInput(x, _known(edge_index, edge_weight, len(x), dtype, normalize), batch)


@dataclass(frozen=True)
class _CachedAdjacency:
    """A cached adjacency, with the versions of the tensors it was computed from."""

    weight: weakref.ref[Tensor] | None
    versions: tuple[int, ...]
    adjacency: Adjacency

    def fits(self, weight: Tensor | None, versions: tuple[int, ...]) -> bool:
        """Return True if `weight` is the tensor of this entry and no tensor has been changed since."""
        same = weight is None if self.weight is None else weight is not None and self.weight() is weight
        return same and self.versions == versions


# keyed by edge_index; an entry lives as long as that tensor, and holds copies, so that it does not keep the tensor alive
_ENTRIES = WeakTensorKeyDictionary()


def _known(edge_index: Tensor, weight: Tensor | None, nodes: int, dtype: torch.dtype, normalize: bool) -> Adjacency:
    """Return the cached adjacency of these tensors, computing it if they are new or have changed."""
    tensors = [edge_index] if weight is None else [edge_index, weight]
    if edge_index.layout != torch.strided or any(tensor.is_inference() for tensor in tensors):
        return _make(edge_index, weight, nodes, dtype, normalize)  # changes of these tensors cannot be detected
    versions = tuple(tensor._version for tensor in tensors)
    entries: dict[Any, _CachedAdjacency] = _ENTRIES.setdefault(edge_index, {})
    key = (nodes, dtype, normalize)
    if key not in entries or not entries[key].fits(weight, versions):
        made = _make(edge_index, weight, nodes, dtype, normalize)
        entries[key] = _CachedAdjacency(None if weight is None else weakref.ref(weight), versions, made)
    return entries[key].adjacency


def _make(edge_index: Tensor, weight: Tensor | None, nodes: int, dtype: torch.dtype, normalize: bool) -> Adjacency:
    """Compute the adjacency of an edge list or of a sparse matrix."""
    if edge_index.layout != torch.strided:
        if weight is not None:
            raise TypeError("A sparse adjacency contains its weights; leave edge_weight out.")
        matrix = edge_index.to_sparse_coo().coalesce()
        edge_index, weight = matrix.indices().flip(0), matrix.values()
    made = Adjacency(edge_index, weight, nodes, dtype=dtype)
    return made.normalized() if normalize else made
