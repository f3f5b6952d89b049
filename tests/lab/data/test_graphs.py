"""Graphs: joining them, the TU collection and PPI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from equilibria.lab import data
from equilibria.lab.data.graphs import read_table
from tests.lab.data.formats import ppi_root, tu_root, write

# Two triangles and a path of two, whose edges stand there out of order.
TRIANGLES = ["1, 2", "2, 1", "7, 8", "2, 3", "3, 2", "1, 3", "3, 1", "8, 7", "4, 5", "5, 4", "5, 6", "6, 5", "4, 6", "6, 4"]
MUTAG = {
    "A": TRIANGLES,
    "graph_indicator": ["1"] * 3 + ["2"] * 3 + ["3"] * 2,
    "graph_labels": ["1", "-1", "1"],
    "node_labels": ["3", "5", "3", "4", "4", "4", "7", "3"],
}


def graphs_of(found: data.Dataset[tuple[data.Graph, ...]]) -> list[data.Graph]:
    return sorted([*found.train, *found.test], key=lambda graph: len(graph.x), reverse=True)


def edges_of(graph: data.Graph) -> set[tuple[int, ...]]:
    return {tuple(edge) for edge in graph.edge_index.t().tolist()}


def test_tu_sets_are_read_with_labels_and_features(tmp_path: Path) -> None:
    tu_root(tmp_path, "MUTAG", MUTAG)
    found = data.load("mutag", tmp_path, folds=3)
    path = graphs_of(found)[-1]
    assert len(found.train) == 2 and len(found.test) == 1 and found.classes == ("-1", "1")
    assert edges_of(path) == {(0, 1), (1, 0)} and path.y.tolist() == [1]
    assert path.x.argmax(dim=1).tolist() == [4, 0] and path.x.shape[1] == 5  # 3 to 7, also those that do not occur
    assert edges_of(graphs_of(found)[0]) == {(a, b) for a in range(3) for b in range(3) if a != b}


def test_every_graph_is_tested_in_one_fold(tmp_path: Path) -> None:
    tu_root(tmp_path, "MUTAG", MUTAG)
    tested = [len(graph.x) for fold in range(3) for graph in data.load("mutag", tmp_path, fold=fold, folds=3).test]
    assert sorted(tested) == [2, 3, 3]
    with pytest.raises(ValueError, match="fold must lie between 0 and folds - 1 = 9, got 10"):
        data.load("mutag", tmp_path, fold=10)


def test_tu_features_are_attributes_or_degrees(tmp_path: Path) -> None:
    attributes = [f"{i}.5, -{i}" for i in range(8)]
    tu_root(tmp_path, "COX2", {**MUTAG, "node_attributes": attributes})
    path = graphs_of(data.load("cox2", tmp_path, folds=3, attributes=True))[-1]
    assert path.x.shape == (2, 7) and path.x[1, :2].tolist() == [7.5, -7]
    with pytest.raises(ValueError, match="MUTAG has no node attributes"):
        tu_root(tmp_path, "MUTAG", MUTAG)
        data.load("mutag", tmp_path, attributes=True)
    tu_root(tmp_path, "IMDB-BINARY", {k: v for k, v in MUTAG.items() if k != "node_labels"})
    assert graphs_of(data.load("IMDB-BINARY", tmp_path, folds=3))[0].x.tolist() == [[2], [2], [2]]


@pytest.mark.parametrize(
    ("part", "lines", "complaint"),
    [
        ("A", ["1, 9"], "nodes outside of the 8"),
        ("A", ["0, 1"], "nodes outside"),
        ("A", ["1, 2, 3"], "nodes outside"),
        ("A", ["3, 4"], "from one graph to another"),
        ("A", ["1, 2", "3"], "differ in length"),
        ("A", [], "empty"),
        ("A", ["1, x"], "not a table of numbers.*' x'"),
        ("graph_indicator", ["1", "2", "1", "2", "2", "2", "3", "3"], "does not count the 3 graphs"),
        ("graph_labels", ["1", "1"], "does not count the 2 graphs"),
        ("node_labels", ["1"], "1 lines for 8 nodes"),
    ],
)
def test_tu_files_must_fit_together(tmp_path: Path, part: str, lines: list[str], complaint: str) -> None:
    tu_root(tmp_path, "MUTAG", {**MUTAG, part: lines})
    with pytest.raises(data.DataError, match=complaint):
        data.load("mutag", tmp_path, folds=3)


def test_tables_of_integers_refuse_other_numbers(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"1\.5"):
        read_table(write(tmp_path / "t", b"1.5\n"))


def test_ppi_is_read_with_three_splits(tmp_path: Path) -> None:
    x = ppi_root(tmp_path, [(0, 1), (1, 0), (1, 1), (2, 4), (4, 3)], [1, 1, 2, 2, 2])
    found = data.load("ppi", tmp_path)
    first, second = found.train
    assert edges_of(first) == {(0, 1), (1, 0)}
    assert edges_of(second) == {(0, 2), (2, 0), (2, 1), (1, 2)}
    assert torch.equal(second.x, x[2:].float()) and second.y.shape == (3, 3)
    assert found.valid is not None and len(found.valid) == len(found.test) == 2


def test_directed_links_of_ppi_stay_directed(tmp_path: Path) -> None:
    ppi_root(tmp_path, [(0, 1)], [5, 5], directed=True)
    assert edges_of(data.load("ppi", tmp_path).test[0]) == {(0, 1)}


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("valid_graph.json", b"{", "no graph in node-link form"),
        ("valid_graph.json", b"[1]", "no graph in node-link form"),
        ("valid_graph.json", b'{"links": [{"source": 0, "target": 7}]}', "nodes outside of the 2"),
        ("valid_feats.npy", b"\x93NUMPY rubbish", "damaged or no .npy"),
        ("valid_feats.npy", b"", "damaged or no .npy"),
    ],
)
def test_damaged_ppi_files_are_named(tmp_path: Path, file: str, content: bytes, complaint: str) -> None:
    ppi_root(tmp_path, [(0, 1)], [0, 0])
    write(tmp_path / "PPI" / "raw" / file, content)
    with pytest.raises(data.DataError, match=complaint) as caught:
        data.load("ppi", tmp_path)
    assert file in str(caught.value)


def graph(nodes: int, edges: list[tuple[int, int]]) -> data.Graph:
    index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    return data.Graph(torch.randn(nodes, 3, generator=torch.Generator().manual_seed(nodes)), index, torch.tensor([nodes]))


def test_a_joined_graph_is_block_diagonal() -> None:
    parts = [graph(3, [(0, 1), (2, 0)]), graph(1, []), graph(2, [(1, 0)])]
    joined = data.join(parts)
    assert edges_of(joined) == {(0, 1), (2, 0), (5, 4)}
    assert joined.y.tolist() == [3, 1, 2] and joined.mask is None
    assert joined.batch is not None and joined.batch.tolist() == [0, 0, 0, 1, 2, 2]
    assert torch.equal(joined.x[joined.batch == 2], parts[2].x)
    with pytest.raises(ValueError, match="all have a mask"):
        data.join([parts[0], data.load("chains").train[0]])


def test_a_graph_converts_to_torch_geometric_data() -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    found = data.load("chains").train[0]
    converted = found.to_geometric()
    assert isinstance(converted, geometric.Data) and converted.num_nodes == 400
    assert torch.equal(converted.mask, found.mask)


def test_without_torch_geometric_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ImportError, match=r"pip install 'equilibria\[graph\]'"):
        graph(2, []).to_geometric()
