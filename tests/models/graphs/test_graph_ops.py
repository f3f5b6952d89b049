"""Sparse adjacencies against dense algebra."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria.constraints import project_, project_rows
from equilibria.lab.data.graphs import Graph, join
from equilibria.models.graphs.graph_input import read_graph
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.models.graphs.graph_spectrum import connected_components, perron_value, strong_components

ROUNDING = 1e-12  # of sums of some ten numbers in float64
BRACKET = 1e-6  # of a Perron-Frobenius value: its bounds are brought within 1e-7 of each other


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def edges(n: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(n, (2, count), generator=rng(seed))


def weights(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=rng(seed))


def features(n: int, channels: int, seed: int = 2) -> Tensor:
    return torch.randn(n, channels, dtype=torch.float64, generator=rng(seed))


def dense(edge_index: Tensor, edge_weight: Tensor | None, n: int) -> Tensor:
    weight = torch.ones(edge_index.shape[1], dtype=torch.float64) if edge_weight is None else edge_weight
    return torch.zeros(n, n, dtype=torch.float64).index_put_((edge_index[0], edge_index[1]), weight, accumulate=True)


def radius(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix.abs()).abs().max())


def both_ways(edge_index: Tensor) -> Tensor:
    return torch.cat([edge_index, edge_index.flip(0)], dim=1)


def path(n: int) -> Tensor:
    return torch.stack([torch.arange(n - 1), torch.arange(1, n)])


# ---- products ----


@pytest.mark.parametrize("count", [0, 5, 60])  # with isolated nodes, with repeated edges and loops
@pytest.mark.parametrize("weighted", [False, True])
def test_products_are_those_of_the_dense_matrix(count: int, weighted: bool) -> None:
    n = 7
    e, w, x = edges(n, count), weights(count) if weighted else None, features(n, 3)
    adjacency = Adjacency(e, w, n, dtype=torch.float64)
    matrix = dense(e, w, n)
    torch.testing.assert_close(adjacency.propagate(x), matrix.T @ x, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(adjacency.transposed.propagate(x), matrix @ x, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(dense(adjacency.edge_index, adjacency.edge_weight, n), matrix, rtol=ROUNDING, atol=ROUNDING)
    assert len(set(map(tuple, adjacency.edge_index.t().tolist()))) == adjacency.edges


def test_propagation_has_derivatives_of_any_order_and_transforms() -> None:
    n = 5
    adjacency = Adjacency(edges(n, 12), weights(12), n)
    x = features(n, 2).requires_grad_()
    assert torch.autograd.gradcheck(adjacency.propagate, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(adjacency.propagate, (x,))
    stacked = torch.stack([x.detach(), 2 * x.detach()], dim=1)
    mapped = torch.func.vmap(adjacency.propagate, in_dims=1)(stacked)
    torch.testing.assert_close(mapped[1], 2 * mapped[0], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(mapped[0], adjacency.propagate(x.detach()), rtol=ROUNDING, atol=ROUNDING)


def test_graphs_side_by_side_are_a_block_diagonal_matrix() -> None:
    graphs = [Graph(features(n, 3, n), edges(n, 2 * n, n), torch.zeros(1)) for n in (3, 5, 4)]
    both = join(graphs)
    out = Adjacency(both.edge_index, num_nodes=12, dtype=torch.float64).propagate(both.x)
    alone = [Adjacency(g.edge_index, num_nodes=len(g.x), dtype=torch.float64).propagate(g.x) for g in graphs]
    torch.testing.assert_close(out, torch.cat(alone), rtol=ROUNDING, atol=ROUNDING)


def test_an_adjacency_moves_to_another_dtype_and_device() -> None:
    adjacency = Adjacency(edges(6, 20), weights(20), 6)
    value = adjacency.perron
    single = adjacency.to(dtype=torch.float32)
    assert single.dtype == torch.float32 and single.perron == value
    assert adjacency.to("cpu") is adjacency
    x = features(6, 2)
    low = single.propagate(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), adjacency.propagate(x), rtol=0.05, atol=0.05)
    assert single.transposed.transposed.propagate(x).equal(single.propagate(x))


@pytest.mark.parametrize("signed", [False, True])
def test_normalised_adjacency_has_the_value_one(signed: bool) -> None:
    n = 8
    e, w = edges(n, 20), weights(20) if signed else weights(20).abs()
    looped = dense(e, w, n) + torch.eye(n, dtype=torch.float64)
    scale = looped.abs().sum(dim=1).rsqrt()
    expected = scale[:, None] * looped * scale
    adjacency = Adjacency(e, w, n).normalized()
    torch.testing.assert_close(adjacency.propagate(torch.eye(n, dtype=torch.float64)), expected.T)
    assert adjacency.perron == 1.0
    assert radius(expected) == pytest.approx(1.0, abs=ROUNDING * 100)


def test_a_node_whose_loop_cancels_stays_finite() -> None:
    adjacency = Adjacency(torch.tensor([[0], [0]]), torch.tensor([-1.0]), 2).normalized()
    assert adjacency.propagate(torch.ones(2, 1)).tolist() == [[0.0], [1.0]]


# ---- Perron-Frobenius value ----


def cycle(n: int) -> Tensor:
    return torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])


KNOWN = {
    "a path leads nowhere": (path(50), 50, 0.0),
    "a directed cycle": (cycle(7), 7, 1.0),
    "two cycles, one leading to the other": (torch.cat([cycle(5), cycle(4) + 5, torch.tensor([[0], [5]])], dim=1), 9, 1.0),
    "a star, bipartite": (both_ways(torch.stack([torch.zeros(16, dtype=torch.int64), torch.arange(1, 17)])), 17, 4.0),
    "one edge both ways, bipartite": (both_ways(path(2)), 2, 1.0),
    "all to all": (torch.cartesian_prod(torch.arange(6), torch.arange(6)).T, 6, 6.0),
    "a loop": (torch.tensor([[1], [1]]), 3, 1.0),
    "no edges": (torch.zeros(2, 0, dtype=torch.int64), 3, 0.0),
    "no nodes": (torch.zeros(2, 0, dtype=torch.int64), 0, 0.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_perron_values_of_known_graphs_are_exact(name: str) -> None:
    e, n, value = KNOWN[name]
    assert Adjacency(e, num_nodes=n).perron == pytest.approx(value, rel=BRACKET, abs=0.0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("density", [1, 3])
def test_perron_values_of_random_graphs_match_dense_eigenvalues(seed: int, undirected: bool, density: int) -> None:
    n = 20
    e = edges(n, density * n, seed)
    w = weights(density * n, seed + 100) * 10.0 ** (seed - 4)
    e, w = (both_ways(e), torch.cat([w, w])) if undirected else (e, w)
    value = Adjacency(e, w, n).perron
    exact = radius(dense(e, w, n))
    # the dense eigenvalues of nilpotent parts are only good to a root of the rounding
    assert value == pytest.approx(exact, rel=BRACKET, abs=1e-3 * float(w.abs().max()) if exact < 1e-2 * w.abs().max() else 0)


def test_the_value_of_a_batch_is_the_largest_of_its_graphs() -> None:
    graphs = [Graph(features(n, 1), edges(n, k, n), torch.zeros(1)) for n, k in ((5, 9), (8, 30), (6, 5))]
    both = join(graphs)
    alone = [Adjacency(g.edge_index, num_nodes=len(g.x)).perron for g in graphs]
    assert Adjacency(both.edge_index, num_nodes=19).perron == pytest.approx(max(alone), rel=BRACKET)


def test_slow_graphs_give_a_bound_from_above() -> None:
    e = both_ways(path(300))  # the second eigenvalue is 1e-4 below the first, relative
    exact = radius(dense(e, None, 300))
    assert exact <= Adjacency(e, num_nodes=300).perron * (1 + ROUNDING) <= exact * (1 + 1e-3)


def test_connected_components_are_found() -> None:
    e = torch.tensor([[0, 1, 2, 2, 3, 4, 5, 7], [1, 2, 0, 3, 4, 3, 5, 6]])  # 0 1 2 | 3 4 | 5 | 6 | 7
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), e[0].bincount(minlength=8).cumsum(0)])
    found = strong_components(offsets, e[1]).tolist()
    assert found[0] == found[1] == found[2] and found[3] == found[4]
    assert len(set(found)) == 5
    order = torch.randperm(200, generator=rng())
    both = order[both_ways(torch.cat([path(120), path(80) + 120], dim=1))]
    connected = connected_components(both[0], both[1], 200)
    assert len(connected[order[:120]].unique()) == len(connected[order[120:]].unique()) == 1
    assert len(connected.unique()) == 2


def test_strong_components_are_mutual_reachability() -> None:
    for seed in range(20):
        n = 12
        e = edges(n, 16, seed)
        adjacency = Adjacency(e, num_nodes=n).transposed  # by sources
        rows = adjacency._into
        found = strong_components(rows.offsets, rows.columns)
        reach = torch.linalg.matrix_power(torch.eye(n, dtype=torch.float64) + dense(e, None, n), n) > 0
        assert torch.equal(found[:, None] == found, reach & reach.T)


def test_a_long_path_does_not_exceed_the_recursion_limit() -> None:
    assert Adjacency(path(20_000)).perron == 0.0


# ---- projection ----


def test_projection_respects_the_bound_of_a_graph() -> None:
    bound = 0.9 / Adjacency(edges(9, 40), num_nodes=9).perron
    w = torch.randn(6, 6, generator=rng()) * torch.tensor([1e-3, 0.1, 1.0, 10.0, 0.05, 3.0]).unsqueeze(1)
    w[4] *= bound / w[4].abs().sum() * 0.999
    parameter = torch.nn.Parameter(w.clone())
    project_(parameter, bound)
    once = parameter.detach().clone()
    length = once.abs().sum(dim=1)
    assert (length <= bound + 1e-6).all()
    inside = w.abs().sum(dim=1) <= bound
    assert inside.any() and not inside.all()
    assert torch.equal(once[inside], w[inside])
    project_(parameter, bound)
    torch.testing.assert_close(parameter.detach(), once, rtol=0, atol=1e-6 * bound)
    torch.testing.assert_close(once.double(), bisected(w.double(), bound), rtol=0, atol=1e-5)
    project_(parameter, bound, columns=True)
    assert (parameter.detach().abs().sum(dim=0) <= bound + 1e-6).all()
    assert (parameter.detach().abs().sum(dim=1) <= bound + 1e-6).all()
    assert project_rows(parameter, bound).requires_grad


def bisected(w: Tensor, bound: float) -> Tensor:
    low, high = torch.zeros(len(w), 1, dtype=w.dtype), w.abs().amax(dim=1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        long = (w.abs() - middle).clamp(min=0).sum(dim=1, keepdim=True) > bound
        low, high = torch.where(long, middle, low), torch.where(long, high, middle)
    return torch.where(w.abs().sum(dim=1, keepdim=True) > bound, w.sign() * (w.abs() - high).clamp(min=0), w)


# ---- input ----


def test_a_graph_is_read_in_every_form() -> None:
    n = 6
    e, x, batch = edges(n, 14), features(n, 2), torch.tensor([0, 0, 0, 1, 1, 1])
    w = weights(14)
    expected = dense(e, w, n).T @ x
    sparse = dense(e, w, n).T.to_sparse()
    forms: list[tuple[Any, ...]] = [
        (x, e, w),
        (x, e.int(), w.unsqueeze(1)),
        (x, sparse),
        (x, Adjacency(e, w, n)),
        (SimpleNamespace(x=x, edge_index=e, edge_weight=w, batch=batch),),
        (SimpleNamespace(x=x, edge_index=e), None, w),
    ]
    for form in forms:
        graph = read_graph(*form, normalize=False)
        torch.testing.assert_close(graph.adjacency.propagate(graph.x), expected, rtol=ROUNDING, atol=ROUNDING)
    assert read_graph(forms[4][0], normalize=False).batch is batch
    assert read_graph(Graph(x, e, torch.zeros(n)), normalize=True).adjacency.perron == 1.0


def test_an_adjacency_is_cached_until_its_tensors_change_or_are_freed() -> None:
    e, x, w = edges(6, 14), features(6, 2), weights(14)
    first = read_graph(x, e, w, normalize=False).adjacency
    assert read_graph(2 * x, e, w, normalize=False).adjacency is first
    assert read_graph(x, e, w, normalize=True).adjacency is not first
    assert read_graph(x, e, None, normalize=False).adjacency is not first
    w *= 2
    changed = read_graph(x, e, w, normalize=False).adjacency
    torch.testing.assert_close(changed.edge_weight, 2 * first.edge_weight)
    e[0, 0] = (e[0, 0] + 1) % 6
    assert read_graph(x, e, w, normalize=False).adjacency is not changed
    alive = weakref.ref(read_graph(x, e, w, normalize=False).adjacency)
    assert alive() is not None
    del e
    gc.collect()
    assert alive() is None


def test_features_of_inference_mode_are_accepted() -> None:
    with torch.inference_mode():
        e, x = edges(4, 6), features(4, 2)
        first = read_graph(x, e, normalize=False).adjacency
        assert read_graph(x, e, normalize=False).adjacency is not first


def test_invalid_input_is_named() -> None:
    e, x = edges(4, 6), features(4, 2)
    with pytest.raises(ValueError, match=r"integers of shape \(2, edges\): got torch.int64 of shape \(6, 2\)"):
        Adjacency(e.t())
    with pytest.raises(ValueError, match="has nodes from 0 to 9, but the 4 nodes"):
        Adjacency(torch.tensor([[0], [9]]), num_nodes=4)
    with pytest.raises(ValueError, match="one number for each of 6 edges"):
        Adjacency(e, weights(5))
    with pytest.raises(ValueError, match=r"pass edge_weight\.detach"):
        Adjacency(e, weights(6).requires_grad_())
    with pytest.raises(ValueError, match=r"Expected features of shape \(4, channels\)"):
        Adjacency(e, num_nodes=4).propagate(features(5, 2))
    with pytest.raises(ValueError, match="not all finite"):
        perron_value(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([float("nan")]))
    with pytest.raises(TypeError, match="Features were given without edges"):
        read_graph(x, normalize=False)
    with pytest.raises(TypeError, match="got SimpleNamespace"):
        read_graph(SimpleNamespace(x=None, edge_index=e), normalize=False)
    with pytest.raises(TypeError, match="given twice"):
        read_graph(SimpleNamespace(x=x, edge_index=e), e, normalize=False)
    with pytest.raises(TypeError, match="contains its weights"):
        read_graph(x, torch.eye(4).to_sparse(), weights(4), normalize=False)
    with pytest.raises(ValueError, match="real numbers"):
        read_graph(e, e, normalize=False)
