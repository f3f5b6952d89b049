"""Networks on graphs: sizes, formulas, fitting, and independence of the graphs in a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import equilibria as eq
from equilibria.lab.data.batches import GraphBatches
from equilibria.lab.data.graphs import Graph, join
from equilibria.lab.data.synthetic import chains
from equilibria.models.entries import parameters
from equilibria.models.graphs.gcn import GCNLayer, GraphGCN, GraphGCNConfig, NodeGCN, NodeGCNConfig, row_normalized, sum_pool
from equilibria.models.graphs.graph_nets import (
    ChainNet,
    ChainNetConfig,
    GraphClassifier,
    GraphClassifierConfig,
    PlanetoidNet,
    PlanetoidNetConfig,
    PPINet,
    PPINetConfig,
)
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.models.graphs.ignn import IGNNLayer

FEATURES = 3
LOOSE = eq.Stop(rtol=1e-3, atol=1e-5, max_steps=100)
TIGHT = eq.Stop(rtol=1e-10, atol=1e-10, max_steps=1000)

GRAPH_MODELS: dict[str, Callable[..., nn.Module]] = {
    "implicit": lambda **o: GraphClassifier(GraphClassifierConfig(features=FEATURES, width=8, layers=2, dropout=0.0), **o),
    "gcn": lambda **_: GraphGCN(GraphGCNConfig(features=FEATURES, width=8, layers=2, dropout=0.0)),
}
NODE_MODELS: dict[str, Callable[..., nn.Module]] = {
    "chain": lambda **o: ChainNet(ChainNetConfig(features=FEATURES, width=8, dropout=0.0), **o),
    "planetoid": lambda **o: PlanetoidNet(PlanetoidNetConfig(features=FEATURES, classes=2, dropout=0.0), **o),
    "gcn": lambda **_: NodeGCN(NodeGCNConfig(features=FEATURES, classes=2, width=8, dropout=0.0)),
}
LABEL_MODELS: dict[str, Callable[..., nn.Module]] = {
    "ppi": lambda **o: PPINet(PPINetConfig(features=FEATURES, labels=4, widths=(16, 8)), **o)
}
MODELS = {**{f"graphs {k}": v for k, v in GRAPH_MODELS.items()}, **NODE_MODELS, **LABEL_MODELS}


def made(build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(**options)


def graph(n: int, y: Tensor, seed: int) -> Graph:
    draws = torch.Generator().manual_seed(seed)
    e = torch.randint(n, (2, 2 * n), generator=draws)
    return Graph(torch.rand(n, FEATURES, generator=draws), torch.cat([e, e.flip(0)], dim=1), y)


def graphs(count: int = 8) -> list[Graph]:
    return [graph(4 + k % 3, torch.tensor([k % 2]), k) for k in range(count)]


def fit(model: nn.Module, batch: Graph, loss: Callable[[Tensor, Tensor], Tensor], enough: float = 0.0) -> float:
    """Train until the loss is below `enough`, for at most 300 steps; without `enough` train for 60 steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(300 if enough else 60):
        value = loss(model(batch), batch.y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if value < enough:
            break
    return value.item()


def largest_row(model: nn.Module) -> float:
    cells = [layer.cell for layer in model.modules() if isinstance(layer, IGNNLayer)]
    return max(float(cell.W.detach().abs().sum(dim=1).max()) for cell in cells)


# ---- sizes ----


def test_models_have_the_published_numbers_of_parameters() -> None:
    assert parameters(GraphClassifier(GraphClassifierConfig(features=35))) == 37_634  # COX2
    assert parameters(GraphClassifier(GraphClassifierConfig(features=3))) == 33_538  # PROTEINS
    assert parameters(ChainNet()) == 3_504
    with torch.device("meta"):
        assert parameters(PPINet()) == 4_656_931
    assert PPINetConfig.of_size(256) == PPINetConfig()
    assert parameters(NodeGCN()) == 1433 * 16 + 16 + 16 * 7 + 7


def test_parameters_that_are_not_used_are_known() -> None:
    def unused(model: nn.Module) -> int:
        cells = [layer.cell for layer in model.modules() if isinstance(layer, IGNNLayer)]
        return sum(p.numel() for cell in cells for p in cell.unused_parameters())

    assert unused(GraphClassifier(GraphClassifierConfig(features=35))) == 10_624
    assert unused(GraphClassifier(GraphClassifierConfig(features=3))) == 8_576
    assert unused(ChainNet()) == 1_616
    assert parameters(PlanetoidNet()) - unused(PlanetoidNet()) == 23_303
    with torch.device("meta"):
        assert unused(PPINet()) == 1_002_105


# ---- what they compute ----


def test_the_graph_classifier_is_its_formula() -> None:
    model = made(GRAPH_MODELS["implicit"], stop=TIGHT).double()
    batch = join(graphs(3))
    x, adjacency = batch.x.double(), Adjacency(batch.edge_index, num_nodes=len(batch.x), dtype=torch.float64).normalized()
    out = model(x, batch.edge_index, batch=batch.batch)
    for layer in (model.get_submodule("layers.0"), model.get_submodule("layers.1")):
        x = layer(x, adjacency)
    assert batch.batch is not None
    pooled = torch.stack([x[batch.batch == k].sum(dim=0) for k in range(3)])
    torch.testing.assert_close(out, model.get_submodule("head")(pooled))


def test_the_ppi_network_is_its_formula_on_the_raw_adjacency() -> None:
    model = made(LABEL_MODELS["ppi"], stop=TIGHT).double()
    g = graph(7, torch.zeros(7, 4), 0)
    x, adjacency = g.x.double(), Adjacency(g.edge_index, num_nodes=7, dtype=torch.float64)
    out = model(x, g.edge_index)
    for k in range(3):
        x = model.get_submodule(f"layers.{k}")(x, adjacency) + model.get_submodule(f"skips.{k}")(x)
        x = nn.functional.elu(x) if k < 2 else x
    torch.testing.assert_close(out, x)
    assert largest_row(model) <= 0.98 / adjacency.perron * (1 + 1e-9)


def test_chain_embeddings_have_length_one() -> None:
    model = made(NODE_MODELS["chain"])
    g = graph(6, torch.zeros(6), 0)
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear) and head.bias is None
    seen: list[Tensor] = []
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(g)
    torch.testing.assert_close(seen[0].norm(dim=1), torch.ones(6))


def test_a_graph_convolution_equals_the_dense_one() -> None:
    layer, g = GCNLayer(FEATURES, 5), graph(6, torch.zeros(6), 0)
    a = torch.zeros(6, 6).index_put_((g.edge_index[0], g.edge_index[1]), torch.tensor(1.0), accumulate=True) + torch.eye(6)
    scale = a.sum(dim=1).rsqrt()
    with torch.no_grad():
        layer.bias.uniform_()
        expected = (scale[:, None] * a * scale).T @ g.x @ layer.linear.weight.T + layer.bias
    torch.testing.assert_close(layer(g.x, g.edge_index), expected)
    torch.testing.assert_close(layer(g), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_graphs_is_each_graph_alone(name: str) -> None:
    options = {} if "gcn" in name else {"stop": TIGHT}
    model = made(MODELS[name], **options).double()
    several = [Graph(g.x.double(), g.edge_index, g.y) for g in graphs(4)]
    batch = join(several)
    model(batch)  # W is now within the bound of all of them
    model.eval()
    alone = torch.cat([model(g) for g in several])
    torch.testing.assert_close(model(batch), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_permuting_the_nodes_permutes_what_belongs_to_them(name: str) -> None:
    options = {} if "gcn" in name else {"stop": TIGHT}
    model = made(MODELS[name], **options).double().eval()
    g = graph(8, torch.zeros(8), 0)
    x, order = g.x.double(), torch.randperm(8, generator=torch.Generator().manual_seed(0))
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(8))
    out, permuted = model(x, g.edge_index), model(x[order], place[g.edge_index])
    torch.testing.assert_close(permuted, out if name.startswith("graphs") else out[order], rtol=1e-6, atol=1e-6)


# ---- what they learn ----


@pytest.mark.parametrize("name", GRAPH_MODELS)
def test_graph_classifiers_learn_one_batch(name: str) -> None:
    model = made(GRAPH_MODELS[name], **({} if name == "gcn" else {"stop": LOOSE, "gradient": eq.UnrolledPhantom()}))
    batch = next(iter(GraphBatches(graphs(), 8)))
    assert fit(model, batch, cross_entropy, 0.2) < 0.2


@pytest.mark.parametrize("name", NODE_MODELS)
def test_node_classifiers_learn_one_graph(name: str) -> None:
    model = made(NODE_MODELS[name], **({} if name == "gcn" else {"stop": LOOSE}))
    g = graph(6, torch.tensor([0, 1, 0, 1, 1, 0]), 3)
    g = Graph(torch.eye(6)[:, :FEATURES] + torch.eye(6)[:, FEATURES:], g.edge_index[:, :6], g.y)
    assert fit(model, g, cross_entropy) < 0.3
    if name != "gcn":
        assert largest_row(model) < 2.0  # a step of the optimizer away from kappa


def test_the_ppi_network_learns_the_labels_of_one_graph() -> None:
    g = graph(8, torch.zeros(8), 1)
    labels = torch.rand(8, 4, generator=torch.Generator().manual_seed(5)).round()
    model = made(LABEL_MODELS["ppi"], stop=LOOSE)
    assert fit(model, Graph(g.x, g.edge_index, labels), binary_cross_entropy_with_logits, 0.2) < 0.2


def test_an_equilibrium_depends_on_the_whole_chain_and_convolutions_do_not() -> None:
    length = 8
    g = chains(length=length, chains=3, features=4, train=2, valid=2, test=2).train[0]
    start = torch.arange(len(g.x)) % length == 0
    implicit = ChainNet(
        ChainNetConfig(features=4, dropout=0.0), stop=eq.Stop(rtol=1e-6, max_steps=200, norm=eq.stop.max_norm)
    )
    explicit = NodeGCN(NodeGCNConfig(features=4, classes=2, layers=2, dropout=0.0))
    far = torch.arange(len(g.x)) % length >= 3
    for model, sees in ((implicit, True), (explicit, False)):
        model.eval()
        x = g.x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x, g.edge_index)[far].abs().sum(), x)
        assert bool((gradient[start].abs().sum(dim=1) > 0).all()) == sees


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_round_trips(name: str) -> None:
    model, batch = made(MODELS[name]), join(graphs(3))
    torch.manual_seed(1)
    other = MODELS[name]()
    model.eval(), other.eval()
    assert not torch.equal(other(batch), model(batch))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch), model(batch))


def test_torch_geometric_batches_are_accepted() -> None:
    data: Any = pytest.importorskip("torch_geometric.data")
    several = graphs(3)
    batch = data.Batch.from_data_list([g.to_geometric() for g in several])
    for build in MODELS.values():
        model = made(build).eval()
        torch.testing.assert_close(model(batch), model(join(several)))


# ---- parts ----


def test_pooling_and_row_sums_match_their_formulas() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert sum_pool(x, None).tolist() == [[6.0, 9.0]]
    assert sum_pool(x, torch.tensor([1, 0, 1])).tolist() == [[2.0, 3.0], [4.0, 6.0]]
    assert row_normalized(torch.tensor([[1.0, 3.0], [0.0, 0.0], [1.0, -1.0]])).tolist() == [[0.25, 0.75], [0, 0], [1, -1]]
    with pytest.raises(ValueError, match="one graph index for each of 3 nodes"):
        sum_pool(x, torch.tensor([0, 1]))


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="layers must be at least 1"):
        GraphClassifierConfig(features=3, layers=0)
    with pytest.raises(ValueError, match="layers must be at least 1"):
        GraphGCNConfig(features=3, layers=0)
    with pytest.raises(ValueError, match="layers must be at least 1"):
        NodeGCNConfig(layers=0)
    with pytest.raises(ValueError, match="widths must be at least 1"):
        PPINetConfig(widths=(8, 0))
    with pytest.raises(TypeError, match="use their degrees"):
        made(GRAPH_MODELS["gcn"])(SimpleNamespace(x=None, edge_index=None))
