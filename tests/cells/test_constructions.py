"""The representation theorems, run: one DEQ is enough, and weight tying is universal."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria._core.problem import Problem
from equilibria.cells.constructions import TiedLayers, stack, weight_tied_form
from equilibria.explicit import WeightTied
from equilibria.solvers.fallback import AnySolver
from tests.problems import TIGHT, NestedCell, TanhCell, inputs, name

# both sides are solved to 1e-13, which |(I - J)^{-1}| of the joint equation amplifies by up to 1 / (1 - 0.8)^2
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
# the same sums in another order
REORDERED: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = pytree.tree_leaves(tree)
    return found


def gradients(f: Callable[[Tensor], Any], x: Tensor, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the value and the gradients of the input and the parameters, for fixed cotangents."""
    x = x.detach().clone().requires_grad_()
    out = leaves(f(x))
    loss = sum(((1 + i) * leaf.square().sum() + leaf.sin().sum() for i, leaf in enumerate(out)), torch.zeros(()))
    return out, list(torch.autograd.grad(loss, [x, *parameters]))


def assert_close(a: Any, b: Any, close: dict[str, Any] = CLOSE) -> None:
    for left, right in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(left, right, **close)


class ReadsNested(nn.Module):
    """A cell on a tensor whose input is the nested state of a NestedCell."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TanhCell(4, norm=0.6, seed=7)

    def forward(self, z: Tensor, w: dict[str, Any]) -> Tensor:
        first, (second,) = w["b"]
        out: Tensor = self.inner(z, w["a"] + first.sum(dim=(1, 2)).unsqueeze(1) * second.unsqueeze(1))
        return out


class Prepared(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.calls = TanhCell(4, norm=0.7, seed=seed), 0

    def prepare(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.inner.u.T + self.inner.b

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.tanh(z @ self.inner.w.T + injected)


def tanh(seed: int, **settings: Any) -> eq.DEQ:
    return eq.DEQ(TanhCell(4, norm=0.8, seed=seed), stop=TIGHT, **settings)


def parameters(*parts: nn.Module) -> list[Tensor]:
    return list(nn.ModuleList(parts).parameters())


PAIRS: dict[str, Callable[[], tuple[eq.DEQ, eq.DEQ]]] = {
    "tensors": lambda: (tanh(0), tanh(5)),
    "nested to tensor": lambda: (
        eq.DEQ(NestedCell(), NestedCell.zeros, stop=TIGHT),
        eq.DEQ(ReadsNested(), lambda w: torch.zeros_like(w["a"]), stop=TIGHT),
    ),
    "tensor to nested": lambda: (tanh(0), eq.DEQ(NestedCell(), NestedCell.zeros, stop=TIGHT)),
    "prepared": lambda: (eq.DEQ(Prepared(1), stop=TIGHT), eq.DEQ(Prepared(2), stop=TIGHT)),
    "other starts": lambda: (tanh(0, init=eq.FirstStep()), tanh(5, init=eq.Zeros(4))),
}


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS.keys())
def test_two_deqs_in_series_equal_one_stack(make: Callable[[], tuple[eq.DEQ, eq.DEQ]]) -> None:
    first, second = make()
    weights, x = parameters(first, second), inputs(3, 4)
    joined = stack(first, second)
    assert isinstance(joined, eq.DEQ)
    z = joined(x)
    assert isinstance(z, tuple) and len(z) == 2
    assert_close(z[0], first(x))
    assert_close(gradients(lambda x: joined(x)[1], x, weights), gradients(lambda x: second(first(x)), x, weights))

    def both(x: Tensor) -> Any:
        w = first(x)
        return w, second(w)

    assert_close(gradients(joined, x, weights), gradients(both, x, weights))  # losses may depend on either part


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton()], ids=name)
@pytest.mark.parametrize("adjoint", [eq.GMRES(), eq.Picard(), eq.BiCGSTAB()], ids=name)
def test_a_stack_works_with_any_forward_and_adjoint_solver(solver: AnySolver, adjoint: AnySolver) -> None:
    first, second = tanh(0), tanh(5)
    weights, x = parameters(first, second), inputs(3, 4)
    joined = stack(first, second, solver=solver, gradient=eq.Implicit(solver=adjoint))
    assert_close(gradients(lambda x: joined(x)[1], x, weights), gradients(lambda x: second(first(x)), x, weights))


def test_stacks_of_three_flat_or_nested_agree() -> None:
    a, b, c = tanh(0), tanh(5), tanh(9)
    weights, x = parameters(a, b, c), inputs(3, 4)
    series = gradients(lambda x: c(b(a(x))), x, weights)
    assert_close(gradients(lambda x: stack(a, b, c)(x)[2], x, weights), series)
    assert_close(gradients(lambda x: stack(a, stack(b, c))(x)[1][1], x, weights), series)


def test_a_stack_may_contain_the_same_layer_twice() -> None:
    deq, x = tanh(0), inputs(3, 4)
    weights = parameters(deq)
    ours = gradients(lambda x: stack(deq, deq)(x)[1], x, weights)
    assert_close(ours, gradients(lambda x: deq(deq(x)), x, weights))
    assert all(a is b for a, b in zip(deq.parameters(), weights, strict=True))


def test_a_stack_passes_gradcheck_to_second_order() -> None:
    joined = stack(eq.DEQ(TanhCell(2, norm=0.6), stop=TIGHT), eq.DEQ(TanhCell(2, norm=0.5, seed=4), stop=TIGHT))
    names = [key for key, _ in joined.named_parameters()]

    def f(x: Tensor, *values: Tensor) -> Any:
        return functional_call(joined, dict(zip(names, values, strict=True)), (x,))

    args = (inputs(2, 2).requires_grad_(), *[p.detach().clone().requires_grad_() for p in joined.parameters()])
    assert gradcheck(f, args, check_forward_ad=True)
    assert gradgradcheck(f, args)


def test_a_stack_takes_several_inputs_and_an_unbatched_problem() -> None:
    class Scaled(TanhCell):
        def forward(self, z: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return torch.tanh(self.w @ z + (x if scale is None else scale * x))

    first, second = (eq.DEQ(Scaled(4, norm=0.6, seed=seed), stop=TIGHT, batched=False) for seed in (0, 4))
    x, scale = inputs(1, 4)[0], inputs(1, 4, seed=8)[0]
    joined = stack(first, second)
    assert not joined.batched
    assert_close(joined(x, scale)[1], second(first(x, scale)))


def test_weights_are_shared_and_listed_once() -> None:
    predictor = nn.Linear(4, 4).double()
    first, second = tanh(0, init=predictor), tanh(5, init=eq.FirstStep())
    joined = stack(first, second)
    assert {id(p) for p in joined.parameters()} == {id(p) for p in parameters(first, second)}
    assert len(joined.state_dict()) == len(first.state_dict()) + len(second.state_dict())
    x = inputs(3, 4)
    s = joined.solve(x)
    assert torch.equal(s.z0[0], predictor(x))
    torch.testing.assert_close(s.z0[1], second.solve(s.z0[0]).z0)  # the second starts from where the first does
    for twin in (copy.deepcopy(joined), pickle.loads(pickle.dumps(joined))):
        assert_close(twin(x), s.z)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert_close(twin.solve(x).z0, (torch.zeros_like(x), torch.zeros_like(x)))  # its start is its own too
    assert_close(joined(x), s.z)


def test_the_first_prepares_once_the_second_in_every_step() -> None:
    one, two = Prepared(1), Prepared(2)
    s = stack(eq.DEQ(one), eq.DEQ(two)).solve(inputs(3, 4))
    solved = s.result.stats  # `s.stats` measures the answer by one more evaluation, of a copy of the cell
    assert solved is not None and one.calls == 1 and two.calls == solved.evaluations


def test_settings_come_from_the_parts_or_the_arguments() -> None:
    first = eq.DEQ(TanhCell(4), stop=eq.Stop(rtol=1e-5, atol=1e-3, max_steps=30))
    gradient = eq.Implicit(solver=eq.BiCGSTAB())
    second = eq.DEQ(
        TanhCell(4), solver=eq.Broyden(), stop=eq.Stop(rtol=1e-4, atol=1e-8, max_steps=50, patience=9), gradient=gradient
    )
    joined = stack(first, second)
    assert joined.solver == second.solver and joined.gradient == gradient and joined.eval_stop is None
    assert joined.stop == dataclasses.replace(second.stop, rtol=1e-5, atol=1e-8, max_steps=80)
    second.eval_stop = eq.Stop(rtol=1e-7, max_steps=100)
    assert stack(first, second).eval_stop == eq.Stop(rtol=1e-7, max_steps=130)
    own = stack(first, second, solver=eq.Picard(), stop=TIGHT, gradient=eq.Implicit(solver=eq.GMRES()))
    assert own.solver == eq.Picard() and own.stop == TIGHT and own.eval_stop is None
    assert own.gradient == eq.Implicit(solver=eq.GMRES())
    assert stack(first, second, eval_stop=TIGHT).eval_stop == TIGHT
    assert stack(TanhCell(4), TanhCell(4)).stop == dataclasses.replace(eq.Stop(), max_steps=80)


def test_stack_keeps_the_training_mode_of_its_parts() -> None:
    first, second = tanh(0).eval(), tanh(5).eval()
    assert not stack(first, second).training
    assert not any(module.training for module in stack(first, second).modules() if isinstance(module, TanhCell))
    second.train()
    assert stack(first, second).training and not first.training


class Rough(eq.Gradient):
    """A Gradient that does not differentiate."""

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        return problem.run(z0, args).z

    def __repr__(self) -> str:
        return "Rough()"


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((tanh(0), "deq"), TypeError, "Got 'deq'; make it the forward of an nn.Module"),
        ((eq.DEQ(torch.cos), tanh(0)), TypeError, "takes nn.Module cells.*cos"),
        ((WeightTied(TanhCell(4), 7), tanh(0)), TypeError, "got a WeightTied of depth 7, which has no equilibrium"),
        ((tanh(0), tanh(0, batched=False)), ValueError, "batched=True and batched=False. Build them alike"),
        ((tanh(0, gradient=Rough()), tanh(0)), ValueError, r"if all are Implicit: got Rough\(\).*gradient=eq.Implicit\(\)"),
    ],
)
def test_invalid_parts_of_a_stack_raise(parts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stack(*parts)


def test_an_approximate_gradient_must_be_passed_explicitly() -> None:
    first, second = tanh(0, gradient=Rough()), tanh(5)
    assert stack(first, second, gradient=second.gradient)(inputs(2, 4))[1].requires_grad
    assert stack(first, second, gradient=Rough()).gradient is not None


def networks() -> dict[str, nn.Sequential]:
    torch.manual_seed(0)
    found = {
        "one layer": nn.Sequential(nn.Linear(3, 2)),
        "one activated layer": nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
        "widths and activations": nn.Sequential(
            nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2), nn.Sigmoid(), nn.Linear(2, 5), nn.GELU(), nn.Linear(5, 4)
        ),
        "no bias": nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 4), nn.Softplus()),
        "linear after linear": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)),
        "activations with weights": nn.Sequential(
            nn.Linear(3, 5), nn.LayerNorm(5), nn.PReLU(), nn.Linear(5, 4), nn.Softmax(-1)
        ),
        "deep": nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(3, 3), nn.ELU())]),
    }
    return {key: net.double() for key, net in found.items()}


def read(cell: TiedLayers, net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: cell.readout(net(x))


NETWORKS = networks()
EVERY_NETWORK = pytest.mark.parametrize("net", NETWORKS.values(), ids=NETWORKS.keys())


@EVERY_NETWORK
def test_a_network_equals_its_weight_tied_form(net: nn.Sequential) -> None:
    cell, weights, x = weight_tied_form(net), list(net.parameters()), inputs(5, 3)
    tied = WeightTied(cell, cell.depth, cell.start)
    expected = gradients(net, x, weights)
    assert_close(gradients(read(cell, tied), x, weights), expected, REORDERED)
    further = WeightTied(cell, cell.depth + 3, cell.start)  # further steps change nothing
    assert torch.equal(further(x), tied(x))


@EVERY_NETWORK
def test_a_network_equals_the_equilibrium_of_its_weight_tied_form(net: nn.Sequential) -> None:
    cell, weights, x = weight_tied_form(net), list(net.parameters()), inputs(5, 3)
    expected = gradients(net, x, weights)
    for solver in (eq.Picard(), eq.Anderson(), eq.Newton()):
        deq = eq.DEQ(cell, cell.start, solver=solver, stop=TIGHT)
        assert_close(gradients(read(cell, deq), x, weights), expected, REORDERED)


@EVERY_NETWORK
def test_plain_iteration_takes_as_many_steps_as_there_are_layers(net: nn.Sequential) -> None:
    cell, x = weight_tied_form(net), inputs(5, 3)
    # rows are not dropped: products with another number of rows may round differently, and every bit is compared here
    exactly = eq.Stop(rtol=0, atol=0, max_steps=50, on_failure="raise", compact=False)
    # the residual of the adjoint is measured again by products that may round differently; only rounding is left of it
    rounding = dataclasses.replace(exactly, rtol=1e-14)
    gradient = eq.Implicit(solver=eq.Picard(), stop=rounding)
    s = eq.DEQ(cell, cell.start, solver=eq.Picard(), stop=exactly, gradient=gradient).solve(x)
    assert int(s.stats.steps.max()) == cell.depth and s.stats.residual.tolist() == [0.0] * 5
    if not any(isinstance(part, nn.ReLU) for part in net):  # a sample whose units are all inactive converges earlier
        assert s.stats.steps.tolist() == [cell.depth] * 5
    cell.readout(s.z).sum().backward()
    assert s.adjoint is not None and bool((s.adjoint.steps <= cell.depth).all())  # the adjoint is nilpotent as well


@EVERY_NETWORK
def test_every_block_holds_the_activations_of_its_layer(net: nn.Sequential) -> None:
    cell, x = weight_tied_form(net), inputs(5, 3)
    way = WeightTied(cell, cell.depth, cell.start).trajectory(x)
    ends = [i for i, part in enumerate(net) if i and isinstance(part, nn.Linear)] + [len(net)]
    for i, end in enumerate(ends):
        for z in way.states[i + 1 :]:  # from the step on that reaches it
            torch.testing.assert_close(cell.blocks(z)[i], net[:end](x), **REORDERED)


def test_the_matrices_are_those_of_the_theorem() -> None:
    net = NETWORKS["widths and activations"]
    cell = weight_tied_form(net)
    w, u, b = cell.matrices()
    widths = [7, 2, 5, 4]
    assert cell.widths == tuple(widths) and w.shape == (18, 18) and u.shape == (18, 3) and b.shape == (18,)
    layers = [part for part in net if isinstance(part, nn.Linear)]
    blocks = [row.split(widths, dim=1) for row in w.split(widths)]
    for i, row in enumerate(blocks):
        for j, block in enumerate(row):
            expected = layers[i].weight if j == i - 1 else torch.zeros_like(block)
            assert torch.equal(block, expected)
    assert torch.equal(u[:7], layers[0].weight) and not u[7:].any()
    assert torch.equal(b, torch.cat([layer.bias for layer in layers]))
    power = torch.linalg.matrix_power(w, cell.depth)
    assert torch.equal(power, torch.zeros_like(w)) and bool(torch.linalg.matrix_power(w, cell.depth - 1).any())


def test_nested_layers_and_pairs_share_their_weights() -> None:
    a, b, act = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.Tanh()
    x = inputs(5, 3)
    expected = b(act(a(x)))
    for layers in (
        nn.Sequential(a, act, b),
        [a, act, b],
        [(a, act), (b, None)],
        nn.Sequential(nn.Sequential(a, act), b),
        nn.ModuleList([a, act, b]),
    ):
        cell = weight_tied_form(layers)
        assert {id(p) for p in cell.parameters()} == {id(p) for p in (*a.parameters(), *b.parameters())}
        torch.testing.assert_close(cell.readout(WeightTied(cell, 2, cell.start)(x)), expected, **REORDERED)


def test_a_layer_used_twice_sums_both_gradients() -> None:
    layer = nn.Linear(3, 3).double()
    net, x = nn.Sequential(layer, nn.Tanh(), layer, nn.ReLU()), inputs(5, 3)
    cell, weights = weight_tied_form(net), list(layer.parameters())
    deq = eq.DEQ(cell, cell.start, solver=eq.Picard(), stop=TIGHT)
    assert_close(gradients(read(cell, deq), x, weights), gradients(net, x, weights), REORDERED)


class Fragile(nn.Module):
    """tanh that is nan for large arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() > 100, float("nan"), torch.tanh(x))


@pytest.mark.parametrize("batch", [2, 9])
def test_a_nan_sample_does_not_change_the_others(batch: int) -> None:
    """With batch 9, the width of the state, the block matrix must not be taken for one row per sample."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), Fragile(), nn.Linear(7, 2)).double()
    cell, x, weights = weight_tied_form(net), inputs(batch, 3), list(net.parameters())
    x[0] = 1e6
    deq = eq.DEQ(cell, cell.start, solver=eq.Picard(), stop=dataclasses.replace(TIGHT, on_failure="ignore"))
    s = deq.solve(x)
    assert s.stats.status.tolist() == [eq.Status.NONFINITE] + [eq.Status.CONVERGED] * (batch - 1)
    ours = torch.autograd.grad(cell.readout(s.z)[1:].square().sum(), weights)
    assert_close(ours, torch.autograd.grad(net(x[1:]).square().sum(), weights), REORDERED)


@pytest.mark.parametrize("batch", [0, 1, 18])
def test_a_network_equals_its_form_for_any_batch_size_and_dimensions(batch: int) -> None:
    net = NETWORKS["widths and activations"]
    cell, x = weight_tied_form(net), inputs(batch * 6, 3).view(batch, 6, 3)
    weights = list(net.parameters())
    deq = eq.DEQ(cell, cell.start, solver=eq.Picard(), stop=TIGHT)
    for data in (x[:, 0], x):
        expected = gradients(net, data, weights)
        assert_close(gradients(read(cell, deq), data, weights), expected, REORDERED)


class Adapted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([], ValueError, "no nn.Linear; at least one is needed"),
        ([nn.ReLU(), nn.Linear(3, 3)], ValueError, r"begin with an nn.Linear, got ReLU\(\) first"),
        ([nn.Linear(3, 4), nn.Linear(3, 4)], ValueError, "layer 2 takes 3 inputs, layer 1 has 4 outputs"),
        ([nn.Linear(3, 4), torch.tanh], TypeError, r"must be modules such as nn.Linear\(3, 3\) or nn.Tanh\(\), got .*tanh"),
        ([nn.Linear(3, 4), nn.Dropout(0.1)], ValueError, "dropout is not allowed: got Dropout.*or set p=0"),
        ([Adapted(3, 4)], TypeError, "Adapted.*overrides forward"),
        (3, TypeError, "must be modules.*got 3"),
    ],
)
def test_invalid_networks_raise(layers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        weight_tied_form(layers)
