"""Citation graphs: arrays in the pickles are read, and code in them is not run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from equilibria.lab import data
from tests.lab.data.formats import old_array, old_csr, old_neighbours, old_pickle, planetoid_root, write


def test_nodes_edges_and_splits_are_read(tmp_path: Path) -> None:
    x, y = planetoid_root(tmp_path)
    found = data.load("pubmed", tmp_path)
    graph = found.train[0]
    there = torch.tensor([0, 1, 2, 3, 4, 5, 7])
    assert torch.equal(graph.x[there], x[there]) and torch.equal(graph.y[there], y[there])
    assert graph.x[6].tolist() == [0, 0] and graph.y[6] == data.IGNORE
    assert {tuple(edge) for edge in graph.edge_index.t().tolist()} == {(0, 1), (1, 0), (2, 7), (7, 2), (4, 5), (5, 4)}
    masks = [split[0].mask.nonzero()[:, 0].tolist() for split in (found.train, found.test)]
    assert masks == [[0, 1], [4, 5, 7]]
    assert found.valid is not None and found.valid[0].x is graph.x


def test_pickles_of_current_protocols_are_read_too(tmp_path: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    planetoid_root(tmp_path)
    x = torch.eye(4, 2)
    path = tmp_path / "Planetoid" / "pubmed" / "raw" / "ind.pubmed.allx"
    write(path, pickle.dumps(sparse.csr_matrix(x.numpy()), protocol=3))
    assert torch.equal(data.load("pubmed", tmp_path).train[0].x[:4], x)


class Malicious:
    """Touches a file when it is unpickled, unless that is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("part", ["tx", "ally", "graph"])
def test_malicious_pickles_are_refused(tmp_path: Path, part: str) -> None:
    planetoid_root(tmp_path)
    path = write(tmp_path / "Planetoid" / "pubmed" / "raw" / f"ind.pubmed.{part}", pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(data.DataError, match=r"refers to .*, which no Planetoid file needs") as caught:
        data.load("pubmed", tmp_path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "ran").exists()
    pickle.loads(path.read_bytes())  # as the usual reader does
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n(S'true'\ntR",
        b"cbuiltins\neval\n(S'1'\ntR",
        b"c__builtin__\nlist.__class__\n",
        b"cnumpy\nload\n(S'x'\ntR",
        b"cnumpy\nndarray.tofile\n",
        b"\x82\x01",  # a number of the extension registry
        b"Pid\n",  # a persistent id
    ],
)
def test_only_what_the_files_need_is_rebuilt(tmp_path: Path, opcodes: bytes) -> None:
    planetoid_root(tmp_path)
    write(tmp_path / "Planetoid" / "pubmed" / "raw" / "ind.pubmed.graph", old_pickle(opcodes))
    with pytest.raises(data.DataError, match="refused"):
        data.load("pubmed", tmp_path)


EYE = torch.eye(4, 3)
GOOD = old_pickle(old_array(EYE, "i4"))


@pytest.mark.parametrize(
    ("part", "content", "complaint"),
    [
        ("ally", b"", "refused"),
        ("ally", GOOD[:50], "refused"),
        ("ally", b"<html>", "refused"),
        ("ally", old_pickle(b"]"), "no array of numbers"),
        ("ally", old_pickle(old_array(EYE, "i4", ">")), "an array of type >i4"),
        ("ally", old_pickle(old_array(EYE, "i2")), "an array of type <i2"),
        ("ally", GOOD.replace(b"J\x04\0\0\0J\x03", b"J\x05\0\0\0J\x03"), "12 numbers for an array of shape"),
        ("ally", old_pickle(old_array(EYE[:, 0])), "expected .rows, columns."),
        ("ally", old_pickle(old_array(torch.eye(4, 5))), "fits neither ally"),
        ("tx", old_pickle(old_csr(torch.eye(2, 2))), "fits neither allx nor the 3 test nodes"),
        ("graph", old_pickle(old_neighbours({0: [99]})), "nodes outside of the 8"),
        ("graph", old_pickle(b"N"), "not a table of neighbours"),
        ("test.index", b"7\nx\n", "not a table of numbers"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, part: str, content: bytes, complaint: str) -> None:
    planetoid_root(tmp_path)
    write(tmp_path / "Planetoid" / "pubmed" / "raw" / f"ind.pubmed.{part}", content)
    with pytest.raises(data.DataError, match=complaint):
        data.load("pubmed", tmp_path)
