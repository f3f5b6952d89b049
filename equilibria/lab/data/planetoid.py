"""The citation graphs of Planetoid. Their pickles are read without executing code from them."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.lab.data.files import DataError, Paths
from equilibria.lab.data.graphs import Graph, read_table
from equilibria.lab.data.sets import IGNORE, Dataset

CLASSES = {
    "cora": (
        "theory",
        "reinforcement learning",
        "genetic algorithms",
        "neural networks",
        "probabilistic methods",
        "case based",
        "rule learning",
    ),
    "citeseer": ("AI", "machine learning", "information retrieval", "databases", "agents", "human-computer interaction"),
    "pubmed": ("diabetes, experimental", "diabetes type 1", "diabetes type 2"),
}
VALIDATION = 500  # number of validation nodes, which follow the training nodes


def planetoid(name: str, paths: Paths) -> Dataset[tuple[Graph, ...]]:
    """Read a citation graph with the public split of Yang, Cohen and Salakhutdinov (2016), given by `mask`.

    Every edge appears once in both directions; there are no loops. Nodes that the files leave out (15 of citeseer's) have
    zero features and the label `IGNORE`.

    The raw files are pickles. Only the arrays, sparse matrices and lists that they should hold are rebuilt, by stand-ins
    of this module; a file that names anything else is refused.
    """
    parts = {part: paths[f"ind.{name}.{part}"] for part in ("y", "tx", "ty", "allx", "ally", "graph", "test.index")}
    test = read_table(parts["test.index"])[:, 0]
    x, y = _rows(parts, "allx", "tx", test), _rows(parts, "ally", "ty", test)
    if len(x) != len(y) or y.shape[1] != len(CLASSES[name]):
        raise DataError(f"The files beside {parts['y']} do not belong together: {len(x)} nodes, labels {tuple(y.shape)}.")
    labels = torch.where(y.sum(dim=1) > 0, y.argmax(dim=1), IGNORE)
    whole = Graph(x, _edges(parts["graph"], len(x)), labels)
    trained = len(_tensor(parts["y"]))
    nodes = (torch.arange(trained), torch.arange(trained, min(trained + VALIDATION, len(x))), test)
    train, valid, tested = ((dataclasses.replace(whole, mask=_mask(index, len(x))),) for index in nodes)
    return Dataset(name, train, tested, valid, classes=CLASSES[name])


def _rows(parts: Mapping[str, Path], known: str, tested: str, test: Tensor) -> Tensor:
    """Return the rows of all nodes: those of file `known`, then those of file `tested` at the positions `test`."""
    first, last = _tensor(parts[known]), _tensor(parts[tested])
    if first.shape[1:] != last.shape[1:] or len(last) != len(test) or int(test.min()) < len(first):
        raise DataError(
            f"{parts[tested]} has shape {tuple(last.shape)}, which fits neither {known} nor the {len(test)} test nodes."
        )
    rows = first.new_zeros(int(test.max()) + 1, first.shape[1])
    rows[: len(first)] = first
    rows[test] = last
    return rows


def _edges(path: Path, nodes: int) -> Tensor:
    """Read the edges, (2, edges), each once in both directions and without loops."""
    neighbours = _unpickle(path)
    try:
        pairs = torch.tensor([(node, other) for node, others in neighbours.items() for other in others])
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is not a table of neighbours: {error}. Fetch it again.") from error
    if pairs.dtype != torch.int64 or not 0 <= int(pairs.min()) <= int(pairs.max()) < nodes:
        raise DataError(f"{path} names nodes outside of the {nodes:,} that have features.")
    pairs = torch.cat([pairs, pairs.flip(1)])
    return pairs[pairs[:, 0] != pairs[:, 1]].unique(dim=0).t().contiguous()


def _mask(index: Tensor, nodes: int) -> Tensor:
    """Return a mask (nodes,) that is True at `index`."""
    return torch.zeros(nodes, dtype=torch.bool).index_fill_(0, index, True)


class _Dtype:
    """Replaces numpy.dtype: a name such as "f4", and a byte order that comes with the state."""

    order = "<"

    def __init__(self, name: str, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def torch(self) -> torch.dtype:
        types = {"i4": torch.int32, "i8": torch.int64, "f4": torch.float32, "f8": torch.float64}
        if self.order not in "<=|" or self.name not in types:
            raise ValueError(f"an array of type {self.order}{self.name}")
        return types[self.name]


class _NdArray:
    """Replaces numpy.ndarray."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran, self.raw = state

    def tensor(self) -> Tensor:
        raw = self.raw.encode("latin-1") if isinstance(self.raw, str) else self.raw
        flat = torch.frombuffer(bytearray(raw), dtype=self.dtype.torch())
        if flat.numel() != math.prod(self.shape):
            raise ValueError(f"{flat.numel()} numbers for an array of shape {self.shape}")
        return flat.view(self.shape[::-1]).permute(*range(len(self.shape))[::-1]) if self.fortran else flat.view(self.shape)


class _Csr:
    """Replaces scipy's csr_matrix, whose state is its attributes."""

    def tensor(self) -> Tensor:
        state = vars(self)
        indptr, indices, data = (state[key].tensor() for key in ("indptr", "indices", "data"))
        rows, columns = state["_shape"] if "_shape" in state else state["shape"]
        dense = data.new_zeros(rows, columns)
        dense[torch.arange(rows).repeat_interleave(indptr.diff()), indices.long()] = data
        return dense


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _NdArray,
    ("numpy.core.multiarray", "_reconstruct"): _NdArray,
    ("numpy._core.multiarray", "_reconstruct"): _NdArray,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("scipy.sparse._csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): lambda *_: {},
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """Rebuilds the classes in STAND_INS and refuses all others, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no Planetoid file needs")
        return STAND_INS[module, name]


def _unpickle(path: Path) -> Any:
    """Return the content of a pickle, built from stand-ins; raises DataError if it is refused or damaged."""
    with open(path, "rb") as file:
        try:
            return _Unpickler(file, encoding="latin-1").load()  # Python 2 wrote the files, with bytes as text
        except Exception as error:  # a damaged pickle may raise any type
            raise DataError(f"{path} was refused: {error}. It is damaged or no file of Planetoid.") from error


def _tensor(path: Path) -> Tensor:
    """Read an array or sparse matrix as a dense tensor, (rows, columns)."""
    content = _unpickle(path)
    try:
        found: Tensor = content.tensor()
    except Exception as error:  # the file determines the state of a stand-in, which may be anything
        raise DataError(f"{path} holds no array of numbers: {error}.") from error
    if found.dim() != 2:
        raise DataError(f"{path} holds an array of shape {tuple(found.shape)}, expected (rows, columns).")
    return found.float()
