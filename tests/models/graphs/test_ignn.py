"""The implicit graph layer: equilibrium and gradients against dense algebra, projection, and sparsity of its tensors."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.lab.data.graphs import Graph, join
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.models.graphs.ignn import PUBLISHED_GRADIENT, PUBLISHED_STOP, IGNNCell, IGNNLayer

TIGHT = eq.Stop(rtol=0.0, atol=1e-12, max_steps=2000, norm=eq.stop.max_norm)
EXACT = eq.Implicit(solver=eq.Picard(), stop=eq.Stop(rtol=1e-12, atol=0.0, max_steps=2000, norm=eq.stop.max_norm))
CLOSE = 1e-9  # of what is solved to 1e-12, with a contraction of 0.9
N, FEATURES, WIDTH = 9, 4, 5


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def edges(n: int = N, count: int = 25, seed: int = 0) -> Tensor:
    return torch.randint(n, (2, count), generator=rng(seed))


def weights(count: int = 25) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=rng(1))


def features(n: int = N, channels: int = FEATURES, seed: int = 2) -> Tensor:
    return torch.randn(n, channels, dtype=torch.float64, generator=rng(seed))


def dense(edge_index: Tensor, edge_weight: Tensor, n: int = N) -> Tensor:
    matrix = torch.zeros(n, n, dtype=torch.float64)
    return matrix.index_put_((edge_index[0], edge_index[1]), edge_weight, accumulate=True)


def layer(p: int = FEATURES, m: int = WIDTH, **options: Any) -> IGNNLayer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"stop": TIGHT, "gradient": EXACT}
    return IGNNLayer(p, m, **(defaults | options)).double()


def picard(f: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    for _ in range(600):  # 0.9^600 is 1e-28
        start = f(start)
    return start


@pytest.mark.parametrize("start", ["injection", "zeros"])
@pytest.mark.parametrize("omega2", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("p", [3, 8])  # narrower and wider than the state
def test_the_equilibrium_is_that_of_the_published_equation(start: Any, omega2: bool, bias: bool, p: int) -> None:
    model = layer(p, start=start, omega2=omega2, bias=bias)
    e, w, u = edges(), weights(), features(channels=p)
    x = model(u, e, w).detach()
    cell, a = model.cell, dense(e, w)
    b = cell.Omega1 @ u.T @ a + (cell.Omega2 @ u.T if omega2 else 0) + (cell.bias[:, None] if bias else 0)
    exact = picard(lambda z: torch.relu(cell.W @ z @ a + b).detach(), torch.zeros(WIDTH, N, dtype=torch.float64))
    torch.testing.assert_close(x.T, exact, rtol=CLOSE, atol=CLOSE)
    assert exact.abs().max() > 0.1


def test_gradients_are_those_of_the_closed_form_on_a_directed_graph() -> None:
    model = layer(activation=torch.tanh)
    e, w, u, v = edges(), weights(), features(), features(channels=WIDTH, seed=5)
    x = model(u, e, w)
    (x * v).sum().backward()
    cell, a, state = model.cell, dense(e, w), x.detach().T
    omega1, weight = cell.Omega1.detach(), cell.W.detach()
    slope = 1 - torch.tanh(weight @ state @ a + omega1 @ u.T @ a).square()
    g = picard(lambda g: slope * (weight.T @ g @ a.T + v.T), torch.zeros_like(state))
    assert cell.W.grad is not None and cell.Omega1.grad is not None
    torch.testing.assert_close(cell.W.grad, g @ a.T @ state.T, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(cell.Omega1.grad, g @ (u.T @ a).T, rtol=CLOSE, atol=CLOSE)
    assert not torch.allclose(cell.W.grad, g @ a @ state.T)  # as released, which is right for symmetric A alone
    assert cell.Omega2.grad is None and cell.bias.grad is None


@pytest.mark.parametrize("activation", [torch.tanh, torch.relu], ids=["tanh", "relu"])
def test_the_layer_passes_gradcheck_on_a_small_directed_graph(activation: Callable[[Tensor], Tensor]) -> None:
    n, p, m = 3, 2, 2
    cell = IGNNCell(p, m, omega2=True, bias=True, activation=activation).double()
    cell.reset_parameters(rng(3))
    adjacency = Adjacency(edges(n, 6, 4), weights(6), n)
    cell.project_(adjacency)
    with torch.no_grad():
        cell.W.mul_(0.9)  # off the boundary, where the projection has a kink
    solver = _Solved(eq.DEQ(cell, cell.start_at_zeros, eq.Picard(), TIGHT, EXACT, batched=False))
    names = [name for name, _ in solver.named_parameters()]

    def solved(u: Tensor, *values: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(solver, dict(zip(names, values, strict=True)), (u, adjacency))
        return out

    values = [p.detach().clone().requires_grad_() for p in cell.parameters()]
    u = features(n, p).requires_grad_()
    assert torch.autograd.gradcheck(solved, (u, *values))
    if activation is torch.tanh:
        assert torch.autograd.gradgradcheck(lambda u: solved(u, *values), (u,))


class _Solved(nn.Module):
    def __init__(self, deq: eq.DEQ) -> None:
        super().__init__()
        self.deq = deq

    def forward(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        z: Tensor = self.deq(u, adjacency)
        return z


@pytest.mark.parametrize("steps, damping", [(5, 0.5), (5, 0.8), (3, 1.0)])
def test_the_unrolled_phantom_gradient_is_that_of_its_steps(steps: int, damping: float) -> None:
    model = layer(gradient=eq.UnrolledPhantom(steps=steps, damping=damping), solver=eq.Anderson())
    e, w, u, v = edges(), weights(), features(), features(channels=WIDTH, seed=5)
    (model(u, e, w) * v).sum().backward()
    cell, a = model.cell, dense(e, w)
    weight, omega1 = (p.detach().clone().requires_grad_() for p in (cell.W, cell.Omega1))
    h = model(u, e, w).detach()
    for _ in range(steps):
        h = damping * torch.relu(a.T @ h @ weight.T + a.T @ u @ omega1.T) + (1 - damping) * h
    (h * v).sum().backward()
    torch.testing.assert_close(cell.W.grad, weight.grad, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(cell.Omega1.grad, omega1.grad, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    "gradient",
    [eq.JFB(), eq.NeumannPhantom(), eq.Unrolled(), eq.Implicit(stop=TIGHT)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=lambda value: type(value).__name__)
def test_any_solver_works_with_any_gradient(solver: Any, gradient: Any) -> None:
    model = layer(solver=solver, gradient=gradient, activation=torch.tanh)
    u = features()
    out = model(u, edges(), weights())
    torch.testing.assert_close(out, layer(activation=torch.tanh)(u, edges(), weights()), rtol=1e-7, atol=1e-7)
    out.sum().backward()
    assert model.cell.W.grad is not None and model.cell.W.grad.abs().sum() > 0


# ---- projection ----


def test_training_projects_the_weight_and_evaluation_does_not() -> None:
    model, e, u = layer(), edges(), features()
    with torch.no_grad():
        model.cell.W.mul_(10)
    before = model.cell.W.detach().clone()
    bound = 0.9 / Adjacency(e, num_nodes=N).perron
    model.eval()
    evaluated = model(u, e)
    assert torch.equal(model.cell.W, before)
    model.train()
    trained = model(u, e)
    after = model.cell.W.detach().clone()
    torch.testing.assert_close(after, eq.constraints.project_rows(before, bound))
    assert after.abs().sum(dim=1).max() <= bound * (1 + 1e-12)
    torch.testing.assert_close(trained, evaluated, rtol=CLOSE, atol=CLOSE)
    version = model.cell.W._version
    model(u, e)
    assert torch.equal(model.cell.W, after) and model.cell.W._version == version


def test_columns_can_be_bounded_too() -> None:
    model, e = layer(columns=True), edges()
    with torch.no_grad():
        model.cell.W.mul_(10)
    model.eval()
    evaluated = model(features(), e)
    model.train()
    torch.testing.assert_close(model(features(), e), evaluated, rtol=CLOSE, atol=CLOSE)
    bound = model.cell.bound(Adjacency(e, num_nodes=N)) * (1 + 1e-12)
    assert model.cell.W.abs().sum(dim=0).max() <= bound and model.cell.W.abs().sum(dim=1).max() <= bound


def test_two_graphs_are_solved_before_one_backward() -> None:
    u, sparse, crowded = features(), edges(), edges(count=70, seed=3)
    model = layer()
    (model(u, sparse).sum() + model(u, crowded).sum()).backward()  # the second one shortens W after the first was solved
    other = layer()
    other(u, sparse).sum().backward()
    other(u, crowded).sum().backward()
    torch.testing.assert_close(model.cell.W.grad, other.cell.W.grad, rtol=CLOSE, atol=CLOSE)


def test_a_graph_without_cycles_needs_no_bound() -> None:
    path = torch.stack([torch.arange(N - 1), torch.arange(1, N)])
    model = layer()
    with torch.no_grad():
        model.cell.W.mul_(10)
    before = model.cell.W.detach().clone()
    s = model.solve(features(), path)
    assert torch.equal(model.cell.W, before) and model.cell.bound(Adjacency(path)) == math.inf
    assert s.stats.converged.all() and int(s.stats.steps) <= N


def test_a_parametrized_weight_is_projected_as_it_is_used() -> None:
    model, e, u = layer(), edges(), features()
    with torch.no_grad():
        model.cell.W.mul_(10)
    eq.constraints.spectral_norm(model.cell, "W", bound=3.0, exact=True)
    out = model(u, e)
    bound = model.cell.bound(Adjacency(e, num_nodes=N))
    weight = model.cell.weight(Adjacency(e, num_nodes=N, dtype=torch.float64))
    assert model.cell.W.abs().sum(dim=1).max() > bound >= weight.abs().sum(dim=1).max() * (1 - 1e-6)
    out.sum().backward()
    original = model.cell.get_parameter("parametrizations.W.original")
    assert original.grad is not None and original.grad.abs().sum() > 0


# ---- convergence ----


def at_the_bound(kappa: float, solver: Any, stop: eq.Stop) -> eq.Solution:
    """Return a layer and a graph with W at its bound and rotating, so that the contraction factor is kappa."""
    model = layer(8, 8, kappa=kappa, solver=solver, stop=stop, normalize=True)
    with torch.no_grad():
        order = torch.tensor([1, 2, 3, 0, 5, 6, 7, 4])
        model.cell.W.copy_(10 * torch.eye(8, dtype=torch.float64)[order])
        model.cell.Omega1.abs_()
    e = edges(40, 160)
    s = model.solve(features(40, 8).abs(), torch.cat([e, e.flip(0)], dim=1))
    assert float(model.cell.W.detach().abs().sum(dim=1).min()) == pytest.approx(kappa)
    return s


def test_anderson_needs_at_most_half_of_the_evaluations() -> None:
    stop = eq.Stop(rtol=0.0, atol=3e-6, max_steps=2000, norm=eq.stop.max_norm)
    plain, mixed = (at_the_bound(0.98, solver, stop) for solver in (eq.Picard(), eq.Anderson()))
    assert plain.stats.converged.all() and mixed.stats.converged.all()
    assert mixed.stats.evaluations <= plain.stats.evaluations / 2
    torch.testing.assert_close(mixed.z, plain.z, rtol=0, atol=1e-3)


def test_plain_iteration_takes_no_more_steps_than_kappa_allows() -> None:
    s = at_the_bound(0.9, eq.Picard(), PUBLISHED_STOP)
    first, last = (float((s.f(z) - z).detach().abs().max()) for z in (s.z0, s.z))
    assert s.stats.converged.all() and last <= 3e-6
    assert int(s.stats.steps) <= math.ceil(math.log(first / 3e-6) / -math.log(0.9))


def test_the_defaults_are_the_published_ones() -> None:
    model = IGNNLayer(3, 4)
    assert model.deq.stop == PUBLISHED_STOP and model.deq.gradient == PUBLISHED_GRADIENT
    assert model.deq.solver == eq.Picard()
    assert (PUBLISHED_STOP.atol, PUBLISHED_STOP.max_steps) == (3e-6, 300)
    for parameter in model.parameters():
        assert parameter.abs().max() <= 1 / 2
    assert sum(p.numel() for p in model.parameters()) == 16 + 2 * 12 + 4


# ---- graphs ----


def test_permuting_the_nodes_permutes_the_equilibrium() -> None:
    model, e, w, u = layer(), edges(), weights(), features()
    order = torch.randperm(N, generator=rng())
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(N))
    torch.testing.assert_close(model(u[order], place[e], w), model(u, e, w)[order], rtol=CLOSE, atol=CLOSE)


def test_a_batch_of_graphs_is_each_graph_alone() -> None:
    graphs = [Graph(features(n, FEATURES, n), edges(n, 3 * n, n), torch.zeros(1)) for n in (4, 7, 5)]
    both = join(graphs)
    model = layer()
    out = model(both)  # projects to the bound of the worst of them
    torch.testing.assert_close(out, torch.cat([model(graph) for graph in graphs]), rtol=CLOSE, atol=CLOSE)


def test_every_form_of_a_graph_gives_the_same_equilibrium() -> None:
    model, e, w, u = layer(), edges(), weights(), features()
    expected = model(u, e, w)
    data = SimpleNamespace(x=u, edge_index=e, edge_weight=w, batch=torch.zeros(N, dtype=torch.int64))
    for out in (model(data), model(u, Adjacency(e, w, N)), model(u, edge_index=e, edge_weight=w)):
        assert torch.equal(out, expected)
    normalized = layer(normalize=True)(u, e, w)
    torch.testing.assert_close(normalized, layer()(u, Adjacency(e, w, N).normalized()), rtol=CLOSE, atol=CLOSE)


def test_the_layer_works_inside_a_stack_with_torch_geometric() -> None:
    data: Any = pytest.importorskip("torch_geometric.data")
    geometric: Any = pytest.importorskip("torch_geometric.nn")
    graphs = [data.Data(x=features(n, 4, n).float(), edge_index=edges(n, 3 * n, n)) for n in (5, 6)]
    batch = data.Batch.from_data_list(graphs)
    ignn = IGNNLayer(8, 5, normalize=True)
    stack = geometric.Sequential(
        "x, edge_index", [(geometric.GCNConv(4, 8), "x, edge_index -> x"), (ignn, "x, edge_index -> x"), nn.Linear(5, 2)]
    )
    out = stack(batch.x, batch.edge_index)
    torch.testing.assert_close(out[:5], stack(graphs[0].x, graphs[0].edge_index), rtol=1e-3, atol=1e-4)
    out.sum().backward()
    wide = IGNNLayer(4, 5)
    torch.testing.assert_close(wide(batch), wide(batch.x, batch.edge_index))


def test_a_new_solve_starts_where_an_earlier_one_ended() -> None:
    model, e, u = layer(), edges(), features()
    first = model.solve(u, e)
    assert model.solve(u, e, init=first).stats.evaluations < first.stats.evaluations
    with eq.record(model) as solutions:
        model(u, e)
    assert len(solutions) == 1


def test_copies_and_state_dicts_keep_the_layer() -> None:
    model, e, u = layer(), edges(), features()
    expected = model(u, e)
    other = layer()
    other.reset_parameters()
    assert not torch.allclose(other(u, e), expected)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(u, e), expected)
    assert sorted(model.state_dict()) == [f"deq.cell.{name}" for name in ("Omega1", "Omega2", "W", "bias")]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.cell.Omega1.zero_()
    assert torch.equal(model(u, e), expected) and twin(u, e).abs().max() == 0


class _Sizes(TorchDispatchMode):
    """Records the size of the largest tensor that is created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return out


def test_a_large_graph_stays_sparse() -> None:
    n, count, m = 100_000, 300_000, 4
    torch.manual_seed(0)
    model = IGNNLayer(3, m, normalize=True, stop=eq.Stop(rtol=1e-2), gradient=eq.Implicit(stop=eq.Stop(rtol=1e-1)))
    with _Sizes() as sizes:
        out = model(torch.rand(n, 3), edges(n, count))
        out.sum().backward()
    assert out.shape == (n, m)
    assert sizes.largest <= max(40 * n * m, 2 * (n + count))  # the histories of the adjoint solver, and edges with loops


def test_raw_adjacency_and_its_value_stay_sparse() -> None:
    n, count = 20_000, 60_000
    e = edges(n, count)
    with _Sizes() as sizes:
        directed, undirected = Adjacency(e, num_nodes=n), Adjacency(torch.cat([e, e.flip(0)], dim=1), num_nodes=n)
        assert 2 < directed.perron < 4 and 6 < undirected.perron < 9
    assert sizes.largest <= 4 * count


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"kappa must lie in \(0, 1\)"):
        IGNNLayer(3, 4, kappa=1.0)
    with pytest.raises(ValueError, match="start must be one of injection, zeros"):
        IGNNLayer(3, 4, start="ones")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="features and width must be at least 1"):
        IGNNLayer(0, 4)
    with pytest.raises(ValueError, match=r"Expected features of shape \(9, 4\)"):
        layer()(features(channels=3), edges())
    assert "kappa=0.9" in repr(layer()) and "normalize=False" in repr(layer())
