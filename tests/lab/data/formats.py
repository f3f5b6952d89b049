"""Tiny files in the official formats, written below a data root."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def random_bytes(*shape: int, seed: int = 0, high: int = 256) -> Tensor:
    return torch.randint(high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def idx(values: Tensor) -> bytes:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


def idx_root(root: Path, folder: str = "mnist", zipped: bool = True) -> dict[str, Tensor]:
    """Write four training and three test images."""
    arrays = {}
    for name, n in (("train", 4), ("t10k", 3)):
        arrays[f"{name}-images-idx3-ubyte"] = random_bytes(n, 28, 28, seed=n)
        arrays[f"{name}-labels-idx1-ubyte"] = random_bytes(n, seed=n + 10, high=10)
    for name, values in arrays.items():
        content = gzip.compress(idx(values), mtime=0) if zipped else idx(values)
        write(root / folder / (name + (".gz" if zipped else "")), content)
    return arrays


def cifar_root(root: Path) -> Tensor:
    """Write two images to each of the six files, as rows of label and pixels."""
    rows = random_bytes(12, 3073)
    rows[:, 0] %= 10
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for i, name in enumerate(names):
        write(root / "cifar-10-batches-bin" / name, rows[2 * i : 2 * i + 2].numpy().tobytes())
    return rows


def tu_root(root: Path, name: str, files: Mapping[str, Sequence[str]]) -> None:
    for part, lines in files.items():
        write(root / "TUDataset" / name / "raw" / f"{name}_{part}.txt", "".join(f"{line}\n" for line in lines).encode())


def ppi_root(root: Path, links: Sequence[tuple[int, int]], graph_id: Sequence[int], directed: bool = False) -> Tensor:
    """Write the same graphs for each split, with features that identify the nodes."""
    nodes = len(graph_id)
    x = torch.arange(nodes * 2, dtype=torch.float64).view(nodes, 2)
    for split in ("train", "valid", "test"):
        folder = root / "PPI" / "raw"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{split}_feats.npy", x.numpy())
        np.save(folder / f"{split}_labels.npy", np.eye(nodes, 3, dtype=np.int64))
        np.save(folder / f"{split}_graph_id.npy", np.array(graph_id))
        content = {"directed": directed, "nodes": [{"id": i} for i in range(nodes)]}
        content["links"] = [{"source": a, "target": b} for a, b in links]
        (folder / f"{split}_graph.json").write_text(json.dumps(content))
    return x


# Pickles as Python 2 wrote them: raw numbers stand in strings.


def _text(value: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(value)) + value


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def old_array(values: Tensor, kind: str = "f4", order: str = "<") -> bytes:
    """Return the pickle opcodes that put an old numpy array on the stack."""
    dtype = b"cnumpy\ndtype\n(" + _text(kind.encode()) + _int(0) + _int(1) + b"tR"
    dtype += b"(" + _int(3) + _text(order.encode()) + b"NNN" + _int(-1) * 2 + _int(0) + b"tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + _int(0) + b"t" + _text(b"b") + b"tR"
    shape = b"(" + b"".join(map(_int, values.shape)) + b"t"
    raw = values.numpy().astype(f"{order}{kind}").tobytes()
    return empty + b"(" + _int(1) + shape + dtype + b"I00\n" + _text(raw) + b"tb"


def old_csr(dense: Tensor) -> bytes:
    rows, columns = dense.nonzero().unbind(1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), rows.bincount(minlength=len(dense)).cumsum(0)])
    parts = {"indptr": old_array(indptr, "i4"), "indices": old_array(columns, "i4"), "data": old_array(dense[rows, columns])}
    state = b"".join(_text(key.encode()) + content for key, content in parts.items())
    state += _text(b"_shape") + b"(" + b"".join(map(_int, dense.shape)) + b"t"
    return b"cscipy.sparse.csr\ncsr_matrix\n)\x81}(" + state + b"ub"


def old_neighbours(table: Mapping[int, Sequence[int]]) -> bytes:
    items = b"".join(_int(k) + b"](" + b"".join(map(_int, v)) + b"e" for k, v in table.items())
    return b"ccollections\ndefaultdict\n(c__builtin__\nlist\ntR(" + items + b"u"


def old_pickle(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes + b"."


def planetoid_root(root: Path, name: str = "pubmed") -> tuple[Tensor, Tensor]:
    """Write eight nodes of three classes: 0 to 3 known, 0 and 1 of them for training; 4, 5 and 7 for testing; 6 left out."""
    x = torch.arange(1.0, 17).view(8, 2)
    x[:, 1] *= torch.arange(8) % 2  # zeros, for the sparse form to leave out
    y = torch.eye(3)[torch.arange(8) % 3]
    test = [7, 4, 5]
    parts = {
        "x": old_csr(x[:2]),
        "y": old_array(y[:2], "i4"),
        "allx": old_csr(x[:4]),
        "ally": old_array(y[:4], "i4"),
        "tx": old_csr(x[test]),
        "ty": old_array(y[test], "i4"),
        "graph": old_neighbours({0: [1, 1, 0], 1: [0], 2: [7], 4: [5]}),
    }
    folder = root / "Planetoid" / name / "raw"
    for part, opcodes in parts.items():
        write(folder / f"ind.{name}.{part}", old_pickle(opcodes))
    write(folder / f"ind.{name}.test.index", "".join(f"{node}\n" for node in test).encode())
    return x, y.argmax(dim=1)
