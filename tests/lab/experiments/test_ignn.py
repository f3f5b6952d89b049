"""Graph experiments: folds, protocols, losses and solvers, and that every table runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning_fabric")
from equilibria._core.plain import to_plain
from equilibria.lab.data.graphs import Graph
from equilibria.lab.experiments.definitions import SCALES, Experiment, Table
from equilibria.lab.experiments.ignn.data import WholeGraphs, random_communities, random_graphs, random_labels
from equilibria.lab.experiments.ignn.node_task import Chains, ChainSettings, Labels, LabelSettings, Nodes, NodeSettings
from equilibria.lab.experiments.ignn.table import experiment, tables
from equilibria.lab.experiments.ignn.task import Folds, FoldSettings, GraphSolverName, LayerOptions
from equilibria.lab.training.listeners import Silent
from equilibria.lab.training.settings import Training
from equilibria.lab.training.trainer import Trainer
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.models.graphs.ignn import IGNNLayer
from tests.lab.data.formats import tu_root

TABLES = {table.name: table for table in tables()}
TIGHT = LayerOptions(kappa=0.98, tolerance=1e-10, max_steps=3000)


def row(table: str, name: str, scale: str = "full") -> Experiment[Any]:
    found: Experiment[Any] = TABLES[table].row(name).experiment(scale)  # type: ignore[arg-type]
    return found


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def fit(e: Experiment[Any], folder: Path, root: Path | None = None) -> list[dict[str, Any]]:
    """Train an experiment and return the records of its epochs."""
    summary = Trainer(e.task(), e.training, folder, config=e.config(), root=root, listener=Silent()).fit()
    assert summary.finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_tables_name_existing_rows_and_survive_their_configs(table: Table) -> None:
    columns, rows = {c.name for c in (*table.columns, *table.hidden)}, {r.name for r in table.rows}
    assert {c.column for c in table.claims} <= columns
    assert {c.left for c in table.claims} | {c.right for c in table.claims if c.right} <= rows
    assert {name for r in table.rows for name in r.published} <= columns
    assert {name for profile in table.profiles for _, name in profile.points} <= columns
    assert set(table.protocol) == set(table.seeds) == set(SCALES)
    for r in table.rows:
        for scale in SCALES:
            e = r.experiment(scale)
            assert (e.name, e.scale) == (f"{table.name}-{r.name}", scale)
            assert len(e.seeds) >= table.seeds[scale]
            config = json.loads(json.dumps(e.config() | {"training": to_plain(e.training)}))
            assert r.experiment(scale).changed(["training.seed=5"]).restored(config) == e


def test_the_protocol_is_the_published_one() -> None:
    for data, count in (("cox2", 37_634), ("proteins", 33_538)):
        e = row(f"ignn-{data}", "upg-0.8")
        assert (e.training.epochs, e.training.batch_size, e.training.optimizer.lr) == (200, 128, 1e-3)
        assert (e.training.schedule.milestones, e.training.schedule.factor) == ((0.25,), 0.5)  # halved at epoch 51
        assert (e.settings.layers.phantom_steps, e.settings.layers.damping, e.settings.layers.kappa) == (5, 0.8, 0.9)
        assert (e.seeds, TABLES[f"ignn-{data}"].seeds["full"], e.settings.hold_out) == (tuple(range(10)), 10, False)
        assert parameters(e.task().model()) == count
        assert row(f"ignn-{data}-validated", "upg-0.8").settings.hold_out
    ppi, chains = row("ignn-ppi", "implicit"), row("ignn-chains", "implicit")
    assert parameters(ppi.task().model()) == 4_656_931
    assert (ppi.training.epochs, ppi.training.optimizer.lr, ppi.settings.layers.kappa) == (1000, 5e-3, 0.98)
    assert parameters(chains.task().model()) == len(chains.settings.lengths) * 3_504
    assert (chains.training.epochs * chains.settings.passes, chains.settings.clip) == (2000, 0.5)
    assert parameters(row("ignn-planetoid", "cora-implicit").task().model()) == 46_247
    assert parameters(row("ignn-planetoid", "cora-gcn").task().model()) == 23_063


# folds


def test_every_graph_is_tested_in_one_fold_and_never_trained_on_there() -> None:
    for hold_out in (False, True):
        task = Folds(FoldSettings(data="random", folds=5, hold_out=hold_out))
        tested: list[tuple[int, ...]] = []
        for seed in range(5):
            train, valid, test = (list(map(_key, split)) for split in task.splits(None, seed))
            assert len(train) + len(valid) + len(test) == len({*train, *valid, *test}) == 60
            assert (len(valid), len(test)) == (12 if hold_out else 0, 12)
            tested += test
        assert len(set(tested)) == 60
    assert list(map(_key, task.splits(None, 8)[2])) == list(map(_key, task.splits(None, 3)[2]))
    with pytest.raises(ValueError, match="folds must be at least 3 with hold_out=True, got 2"):
        FoldSettings(folds=2, hold_out=True)


def test_folds_are_read_from_files_in_the_format_of_the_collection(tmp_path: Path) -> None:
    """The files hold 30 paths of 7 nodes whose labels increase or decrease."""
    graphs, nodes = 30, 7
    starts = range(0, graphs * nodes, nodes)
    edges = [(s + i, s + i + 1) for s in starts for i in range(1, nodes)]
    labels = [i if k % 2 else nodes - 1 - i for k in range(graphs) for i in range(nodes)]
    files = {
        "A": [f"{a}, {b}" for pair in edges for a, b in (pair, pair[::-1])],
        "graph_indicator": [str(k + 1) for k in range(graphs) for _ in range(nodes)],
        "graph_labels": [str(k % 2) for k in range(graphs)],
        "node_labels": list(map(str, labels)),
    }
    tu_root(tmp_path, "MUTAG", files)
    task = Folds(FoldSettings(data="mutag", folds=5, hold_out=True))
    train, valid, test = task.splits(tmp_path, 7)
    assert (len(train), len(valid), len(test)) == (18, 6, 6)
    assert all(float(torch.cat([g.y for g in split]).float().mean()) == 0.5 for split in (train, valid, test))
    loaders = task.batches(tmp_path, Training(batch_size=8), 0, 1)
    batch = next(iter(loaders.train))
    assert task.model()(batch).shape == (8, 2)


def _key(graph: Graph) -> tuple[int, ...]:
    return tuple(graph.edge_index.flatten().tolist())


# data


def test_random_graphs_of_both_kinds_have_equally_many_edges() -> None:
    for i, graph in enumerate(random_graphs(10)):
        n = len(graph.x)
        adjacency = torch.zeros(n, n).index_put_(tuple(graph.edge_index), torch.tensor(1.0), accumulate=True)
        assert graph.y.tolist() == [i % 2]
        assert graph.edge_index.shape[1] == 2 * (2 * n - 3)
        assert torch.equal(adjacency, adjacency.T) and adjacency.max() == 1 and adjacency.diagonal().sum() == 0
        assert torch.equal(graph.x.argmax(dim=1), adjacency.sum(dim=1).clamp(max=9).long())


def test_random_nodes_are_split_without_overlap() -> None:
    found = random_communities()
    assert found.valid is not None
    masks = [split[0].mask for split in (found.train, found.valid, found.test)]
    total = sum(mask.long() for mask in masks if mask is not None)
    assert isinstance(total, Tensor) and bool((total == 1).all())
    graph = random_labels().train[0]
    near = torch.zeros(40, 40).index_put_(tuple(graph.edge_index), torch.tensor(1.0))
    mean = near.T @ graph.x[:, :5] / near.sum(dim=0).clamp(min=1).unsqueeze(1)
    assert torch.equal(graph.y, (mean > 0.5).float())


def test_whole_graphs_are_batches_that_can_be_resumed() -> None:
    graphs = random_graphs(3)
    loader = WholeGraphs(graphs, passes=2, shuffle=True)
    seen = list(loader)
    assert len(seen) == 6 and all(sum(graph is other for other in seen) == 2 for graph in graphs)
    steps = iter(loader)
    next(steps)
    state, then = loader.state(), list(steps)
    again = WholeGraphs(graphs, passes=2, shuffle=True)
    again.resume(state)
    assert [id(graph) for graph in again] == [id(graph) for graph in then]
    with pytest.raises(ValueError, match="passes must be at least 1, got 0"):
        WholeGraphs(graphs, passes=0)


def test_several_processes_are_refused_for_one_graph() -> None:
    task = Nodes(NodeSettings(data="random"))
    with pytest.raises(ValueError, match=r"training\.batch_size=32 and 2 processes\. Set training\.batch_size=1"):
        task.batches(None, Training(batch_size=32), 0, 2)


# losses


class Given(nn.Module):
    """A model that returns given scores."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, graph: Graph) -> Tensor:
        return self.scores


def test_only_nodes_of_the_split_count() -> None:
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    graph = Graph(torch.zeros(3, 1), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0, 1]), mask)
    outcome = Nodes(NodeSettings(data="random")).loss(Given(scores), graph, 0)
    assert outcome.size == 2 and float(outcome.metrics["accuracy"]) == 0.5
    expected = -(scores[0, 0] - scores[0].logsumexp(0) + scores[1, 0] - scores[1].logsumexp(0)) / 2
    torch.testing.assert_close(outcome.loss, expected)


def test_micro_f1_is_that_of_the_whole_split_for_any_batches() -> None:
    draws = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 5, generator=draws, dtype=torch.float64)
    y = (torch.rand(30, 5, generator=draws) < 0.3).double()
    task = Labels(LabelSettings(data="random"))
    none = torch.zeros(2, 0, dtype=torch.int64)
    sums, weight = dict.fromkeys(("hits", "false_alarms", "misses"), 0.0), 0
    for part in (slice(0, 7), slice(7, 30)):
        outcome = task.loss(Given(scores[part]), Graph(torch.zeros(1, 1), none, y[part]), 0)
        sums = {name: sums[name] + outcome.size * float(outcome.metrics[name]) for name in sums}
        weight += outcome.size
    found = task.summarise({"loss": 1.0} | {name: value / weight for name, value in sums.items()})
    given, true = scores > 0, y > 0
    precision, recall = (given & true).sum() / given.sum(), (given & true).sum() / true.sum()
    assert set(found) == {"loss", "micro_f1"}
    assert found["micro_f1"] == pytest.approx(float(2 * precision * recall / (precision + recall)))
    assert task.summarise({"hits": 0.0, "false_alarms": 0.0, "misses": 0.0}) == {"micro_f1": 1.0}


def test_networks_of_all_lengths_train_as_each_would_alone() -> None:
    sizes: dict[str, Any] = {"chains": 3, "train": 0.3, "valid": 4, "test": 4, "clip": 0.05}
    together = Chains(ChainSettings(lengths=(4, 6), **sizes))
    torch.manual_seed(0)
    model = together.model()
    alone = {length: Chains(ChainSettings(lengths=(length,), **sizes)) for length in (4, 6)}
    models = {length: task.model() for length, task in alone.items()}
    for net in models.values():
        net.load_state_dict({name: w for name, w in model.state_dict().items() if name in net.state_dict()})
    _steps(together, model)
    for length, net in models.items():
        _steps(alone[length], net)
        for name, weight in net.state_dict().items():
            assert torch.equal(weight, model.state_dict()[name])
    with pytest.raises(ValueError, match="networks for graphs of 24, 36 nodes, got a graph of 5 nodes"):
        model(Graph(torch.zeros(5, 100), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(5)))


def _steps(task: Chains, model: nn.Module) -> None:
    """Take three steps of each network without dropout, whose masks would be drawn in another order."""
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    loader = task.batches(None, Training(batch_size=1), 0, 1).train
    for _ in range(3):
        for batch in loader:
            task.loss(model, batch, 0).loss.backward()
            task.improve(model, optimizer)
            optimizer.zero_grad()


def test_training_nodes_are_a_share_of_each_length_in_float64() -> None:
    task = Chains(ChainSettings(lengths=(10, 20)))
    batches = list(task.batches(None, Training(batch_size=1), 0, 1).train)
    assert [int(batch.mask.sum()) for batch in batches if batch.mask is not None] == [20, 40]
    assert {batch.x.dtype for batch in batches} | {w.dtype for w in task.model().parameters()} == {torch.float64}


def test_the_gradient_of_each_parameter_is_clipped_separately() -> None:
    task = Chains(ChainSettings(lengths=(4,), chains=3, train=0.3, valid=4, test=4, clip=0.5))
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([0.1])
    before = model.weight.detach().clone()
    task.improve(model, torch.optim.SGD(model.parameters(), 1.0))
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.3, 0.4]]))
    torch.testing.assert_close(model.bias.grad, torch.tensor([0.1]))
    with pytest.raises(ValueError, match=r"lengths must be different numbers, at least one, got \(4, 4\)"):
        ChainSettings(lengths=(4, 4))


# solvers


def _slow_layer(solver: GraphSolverName) -> tuple[IGNNLayer, Adjacency, Tensor]:
    """Return X = A'X W' + b on a ring of 24 nodes with positive features: W contracts by 0.98, and A does not contract."""
    layer = IGNNLayer(2, 2, kappa=0.98, **LayerOptions(**{**to_plain(TIGHT), "solver": solver}).parts()).double()
    with torch.no_grad():
        layer.cell.W.copy_(torch.tensor([[0.58, 0.4], [0.4, 0.58]]))
        layer.cell.Omega1.copy_(torch.tensor([[1.0, 0.2], [0.3, 1.0]]))
    nodes = torch.arange(24)
    ring = torch.stack([nodes, (nodes + 1) % 24])
    adjacency = Adjacency(torch.cat([ring, ring.flip(0)], dim=1), dtype=torch.float64).normalized()
    x = torch.rand(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return layer, adjacency, x


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_solvers_match_dense_algebra_in_value_and_gradient(solver: GraphSolverName) -> None:
    layer, adjacency, x = _slow_layer(solver)
    x.requires_grad_()
    solution = layer.solve(x, adjacency)
    dense = adjacency.propagate(torch.eye(24, dtype=torch.float64))
    W, Omega1 = layer.cell.W.detach(), layer.cell.Omega1.detach()
    b = dense @ x @ Omega1.T
    system = torch.eye(48, dtype=torch.float64) - torch.kron(dense, W)
    exact = torch.linalg.solve(system, b.flatten()).view(24, 2)
    torch.testing.assert_close(solution.z, exact, rtol=1e-7, atol=1e-7)
    weights = torch.linspace(-1, 1, 48, dtype=torch.float64).view(24, 2)
    (found,) = torch.autograd.grad((solution.z * weights).sum(), x)
    (expected,) = torch.autograd.grad((exact * weights).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_anderson_needs_at_most_half_of_picards_evaluations() -> None:
    counts = {}
    for solver in ("picard", "anderson", "broyden"):
        layer, adjacency, x = _slow_layer(solver)
        counts[solver] = layer.solve(x, adjacency).stats.evaluations
    assert counts["picard"] > 500  # 0.98^k = 1e-10 / 50 takes 1,300 steps from far away
    assert counts["anderson"] <= counts["picard"] / 2
    assert counts["broyden"] <= counts["picard"] / 2


# training


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("ignn-cox2", "implicit"),
        ("ignn-proteins-validated", "upg-0.5"),
        ("ignn-proteins-validated", "gcn"),
        ("ignn-ppi", "upg-1.0"),
        ("ignn-chains", "implicit"),
        ("ignn-chains", "gcn"),
        ("ignn-planetoid", "cora-gcn"),
        ("ignn-solvers", "broyden"),
    ],
)
def test_debug_runs_have_the_figures_of_all_columns(table: str, name: str, tmp_path: Path) -> None:
    from equilibria.lab.reports.measured import value
    from equilibria.lab.training.folder import Run

    fit(row(table, name, "debug"), tmp_path)
    run = Run.open(tmp_path)
    explicit = {"speed", "evaluations", "products", "failed"} if name.endswith("gcn") else set()
    phantom = {"products"} if name.startswith("upg") else set()
    lengths = {c.name for c in TABLES[table].columns if c.name.startswith("at_")}  # debug has other lengths
    for column in TABLES[table].columns:
        known = value(run, column) is not None
        assert known or column.name in explicit | phantom | lengths, column.name


def test_a_chain_run_reports_every_length(tmp_path: Path) -> None:
    record = fit(row("ignn-chains", "upg", "debug"), tmp_path)[-1]["split"]
    for split, sizes in (("train", (7, 11)), ("valid", (6, 6)), ("test", (8, 8))):
        assert {"accuracy_4", "accuracy_6", "evaluations_4", "evaluations_6"} <= set(record[split])
        right = sizes[0] * record[split]["accuracy_4"] + sizes[1] * record[split]["accuracy_6"]
        assert record[split]["accuracy"] == pytest.approx(right / sum(sizes))


def test_ppi_is_trained_from_files_in_its_format(tmp_path: Path) -> None:
    """The files hold two graphs per split, with 50 features and 121 labels that depend on the features."""
    folder = tmp_path / "data" / "PPI" / "raw"
    folder.mkdir(parents=True)
    draws = torch.Generator().manual_seed(0)
    for split in ("train", "valid", "test"):
        x = torch.randn(24, 50, generator=draws)
        np.save(folder / f"{split}_feats.npy", x.double().numpy())
        np.save(folder / f"{split}_labels.npy", (x.repeat(1, 3)[:, :121] > 0).long().numpy())
        np.save(folder / f"{split}_graph_id.npy", np.repeat([1, 2], 12))
        links = [{"source": 12 * k + i, "target": 12 * k + (i + 1) % 12} for k in range(2) for i in range(12)]
        nodes = [{"id": i} for i in range(24)]
        (folder / f"{split}_graph.json").write_text(json.dumps({"directed": False, "nodes": nodes, "links": links}))
    small = row("ignn-ppi", "implicit", "reduced").changed(["width=8", "training.epochs=6"])
    first, *_, last = (record["split"] for record in fit(small, tmp_path / "run", tmp_path / "data"))
    assert last["train"]["loss"] < first["train"]["loss"]
    assert last["train"]["micro_f1"] > first["train"]["micro_f1"]
    assert last["train"]["failed"] == last["train"]["adjoint_failed"] == 0
    assert 0 < last["valid"]["micro_f1"] < 1 and 0 < last["test"]["micro_f1"] < 1


def test_ignn_reaches_over_chains_where_two_convolutions_do_not(tmp_path: Path) -> None:
    found = {}
    for name in ("implicit", "gcn"):
        e = row("ignn-chains", name, "reduced").changed(["lengths=[20]", "training.epochs=5", "chains=10"])
        found[name] = fit(e, tmp_path / name)[-1]["split"]["test"]["accuracy_20"]
    assert found["implicit"] >= 0.95
    assert found["gcn"] <= 0.65


def test_the_two_protocols_differ_in_the_fold_that_is_held_out() -> None:
    ours = experiment("cox2", "implicit", validated=True)
    assert ours.settings == FoldSettings(data="cox2", hold_out=True)
    assert ours.training == experiment("cox2", "implicit").training
