"""Backward solves that start from the stored adjoint solution of the same sample: the gradients of a cold start, sooner."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

import equilibria as eq
from equilibria import native
from equilibria._core.compile import Compiler
from tests.problems import BatchNormCell, TanhCell, generator, inputs, name

WIDTH = 12
STOP = eq.Stop(rtol=1e-10, atol=0, max_steps=400)
TOLERANCE = 1e-7  # of gradients: the tolerance of both solves times their condition, with room
ADJOINT_SOLVERS = [
    eq.GMRES(),
    eq.GMRES(restart=3),
    eq.BiCGSTAB(),
    eq.NormalCG(),
    eq.Anderson(),
    eq.Broyden(),
    eq.Picard(),
    eq.Fallback(eq.Picard(), eq.GMRES()),
]


def layer(cell: Any = None, **settings: Any) -> eq.DEQ:
    return eq.DEQ(TanhCell(WIDTH) if cell is None else cell, init=eq.Remember(adjoint=True), stop=STOP, **settings)


def cotangents(batch: int, seed: int = 5) -> Tensor:
    return torch.randn(batch, WIDTH, dtype=torch.float64, generator=generator(seed))


def visit(deq: eq.DEQ, keys: Any, x: Tensor, v: Tensor) -> tuple[eq.Solution, list[Tensor]]:
    """Solve and differentiate <v, z> in the weights; backward runs after the keys are gone."""
    with eq.sample_keys(deq, keys):
        s = deq.solve(x)
    return s, list(torch.autograd.grad(s.z, list(deq.parameters()), v))


def move(deq: eq.DEQ, by: float, seed: int = 7) -> None:
    with torch.no_grad():
        for parameter in deq.parameters():
            noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator(seed))
            parameter.add_(by * parameter.norm() * noise / noise.norm())


def dense(deq: eq.DEQ, s: eq.Solution, x: Tensor, v: Tensor) -> list[Tensor]:
    """The gradients of <v, z> by a dense solve of every sample's adjoint system."""
    z, cell = s.z.detach(), deq.cell
    solved = []
    for i in range(len(z)):
        jacobian = jacrev(lambda y: cell(y, x[i : i + 1])[0])(z[i : i + 1])[:, 0]  # noqa: B023
        solved.append(torch.linalg.solve(torch.eye(WIDTH).to(z) - jacobian.T, v[i]))
    return list(torch.autograd.grad(cell(z, x), list(deq.parameters()), torch.stack(solved)))


def products(s: eq.Solution) -> int:
    """Products with J' that the adjoint solve took; a solver that is not a linear one evaluates J'u + v instead."""
    assert s.adjoint is not None and bool(s.adjoint.converged.all())
    assert bool((s.adjoint.residual <= 2 * STOP.rtol).all())
    return s.adjoint.evaluations


def agree(found: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("steps", ["native", "torch"])
@pytest.mark.parametrize("solver", ADJOINT_SOLVERS, ids=name)
def test_gradients_are_those_of_a_dense_solve_after_weights_moved(solver: Any, steps: str) -> None:
    deq, x, v = layer(gradient=eq.Implicit(solver=solver)), inputs(9, WIDTH), cotangents(9)
    x[:3] *= 4  # easy samples: tanh is flat, and their rows are dropped early
    with native.disabled() if steps == "torch" else nullcontext():
        s, found = visit(deq, range(6), x[:6], v[:6])
        cold = products(s)
        agree(found, dense(deq, s, x[:6], v[:6]))
        move(deq, 1e-4)
        order = [8, 2, 5, 0, 7, 4, 1]  # stored samples and new ones
        s, found = visit(deq, order, x[order], v[order])
        products(s)
        agree(found, dense(deq, s, x[order], v[order]))
        s, found = visit(deq, order[::-1], x[order[::-1]], v[order[::-1]])
        assert products(s) <= cold / 2
        agree(found, dense(deq, s, x[order[::-1]], v[order[::-1]]))


def test_a_second_backward_of_the_same_samples_takes_one_product() -> None:
    deq, x, v = layer(), inputs(5, WIDTH), cotangents(5)
    s, first = visit(deq, range(5), x, v)
    assert products(s) > 5
    for factor in (1.0, 1e-6, -1e6):  # a loss of another scale or sign
        s, found = visit(deq, range(5), x, factor * v)
        assert products(s) == 1
        agree(found, [factor * grad for grad in first], max(1.0, abs(factor)) * TOLERANCE)


def test_samples_whose_cotangent_turned_start_no_worse_than_from_zero() -> None:
    deq, x = layer(), inputs(5, WIDTH)
    visit(deq, range(5), x, cotangents(5))
    v = cotangents(5, seed=6)
    s, found = visit(deq, range(5), x, v)
    plain = eq.DEQ(deq.cell, stop=STOP).solve(x)
    expected = torch.autograd.grad(plain.z, list(deq.parameters()), v)
    agree(found, list(expected))
    assert products(s) <= products(plain) + 2  # the product of the start, and one that rounding may decide


@pytest.mark.parametrize("bad", ["noise", "huge", "tiny", "inf", "nan", "zero"])
def test_a_bad_stored_solution_spoils_no_gradient(bad: str) -> None:
    deq, x, v = layer(), inputs(5, WIDTH), cotangents(5)
    visit(deq, range(5), x, v)
    (bank,) = deq.init._adjoint_banks.values()  # type: ignore[union-attr]
    noise = torch.randn(2, WIDTH, dtype=torch.float64, generator=generator(11))
    values = {"noise": noise, "huge": 1e200 * noise, "tiny": 1e-200 * noise, "zero": 0 * noise}
    bank.values[:2] = values.get(bad, torch.full((2, WIDTH), float(bad) if bad in ("inf", "nan") else 0.0))
    s, found = visit(deq, range(5), x, v)
    products(s)
    agree(found, dense(deq, s, x, v))


def test_solves_before_one_backward_keep_their_own_samples() -> None:
    deq, x, v = layer(), inputs(8, WIDTH), cotangents(8)
    with eq.sample_keys(deq, range(4)):
        a = deq.solve(x[:4])
    with eq.sample_keys(deq, range(4, 8)):
        b = deq.solve(x[4:])
    torch.autograd.grad((a.z * v[:4]).sum() + (b.z * v[4:]).sum(), list(deq.parameters()))
    order = [5, 0, 7, 3]
    s, found = visit(deq, order, x[order], v[order])
    assert products(s) == 1
    agree(found, dense(deq, s, x[order], v[order]))


def test_one_solve_may_be_differentiated_several_times() -> None:
    deq, x, v, w = layer(), inputs(4, WIDTH), cotangents(4), cotangents(4, seed=6)
    with eq.sample_keys(deq, range(4)):
        s = deq.solve(x)
    parameters = list(deq.parameters())
    for cotangent in (v, w, v):
        agree(list(torch.autograd.grad(s.z, parameters, cotangent, retain_graph=True)), dense(deq, s, x, cotangent))
    both = torch.autograd.grad(s.z, parameters, torch.stack((v, w)), is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate((v, w)):
        agree([grad[i] for grad in both], dense(deq, s, x, cotangent))


def test_second_derivatives_are_not_affected() -> None:
    x = inputs(3, WIDTH)
    found = []
    for init in (eq.Remember(adjoint=True), None):
        deq = eq.DEQ(TanhCell(WIDTH), init=init, stop=STOP)
        with eq.sample_keys(deq, range(3)):
            first = torch.autograd.grad(deq(x).square().sum(), deq.cell.w, create_graph=True)[0]  # type: ignore[attr-defined]
        found.append(torch.autograd.grad(first.square().sum(), deq.cell.w)[0])  # type: ignore[attr-defined]
    agree(found[:1], found[1:], 1e-6)


def test_rows_that_depend_on_each_other_are_solved_as_one_system() -> None:
    cell, x = BatchNormCell(WIDTH), inputs(6, WIDTH)
    deq, v = layer(cell), cotangents(6)
    for by in (0.0, 1e-3, 0.0):
        move(deq, by)
        _, found = visit(deq, range(6), x, v)
        expected = torch.autograd.grad(eq.DEQ(cell, stop=STOP)(x), list(deq.parameters()), v)
        agree(found, list(expected))


class Hidden(nn.Module):
    """Rows depend on each other a little, which no row comparison is told of beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TanhCell(WIDTH)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.inner(z, x) + 0.2 * torch.tanh(z.mean(dim=0, keepdim=True))


@pytest.mark.filterwarnings("ignore:.*depend on each other")
def test_coupling_that_is_found_on_the_way_spoils_no_gradient() -> None:
    x, v = inputs(4, WIDTH), cotangents(4)
    deq = layer(Hidden())
    for keys in ([0, 1, 2, 3], [0, 1, 2, 3], [9, 1, 8, 3]):
        s, found = visit(deq, keys, x, v)
        z = s.z.detach().requires_grad_()
        jacobian = jacrev(lambda y: deq.cell(y, x))(z).reshape(4 * WIDTH, 4 * WIDTH)
        u = torch.linalg.solve(torch.eye(4 * WIDTH).double() - jacobian.T, v.flatten()).view_as(v)
        agree(found, list(torch.autograd.grad(deq.cell(z, x), list(deq.parameters()), u)))


def test_closures_start_from_stored_solutions_too() -> None:
    w, x, v = TanhCell(WIDTH).w, inputs(4, WIDTH), cotangents(4)
    deq = layer(lambda z, x: torch.tanh(z @ w.T + x))
    counts, found = [], []
    for _ in range(2):
        with eq.sample_keys(deq, range(4)):
            s = deq.solve(x)
        found.append(torch.autograd.grad(s.z, w, v)[0])
        counts.append(products(s))
    assert counts[1] == 1 < counts[0]
    agree(found[:1], found[1:])


def test_compiled_solves_start_from_stored_solutions_too() -> None:
    deq, x, v = layer(TanhCell(WIDTH), compile=True), inputs(4, WIDTH), cotangents(4)
    deq._compiler = Compiler(lambda graph, inputs: graph, trials=0)
    cold, first = visit(deq, range(4), x, v)
    warm, found = visit(deq, range(4), x, v)
    assert products(warm) <= 2 < products(cold)  # a compiled solve takes its first step before it asks whether it has ended
    agree(found, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    cell, x, v = TanhCell(WIDTH, dtype=dtype), inputs(4, WIDTH).to(dtype), cotangents(4).to(dtype)
    deq = eq.DEQ(cell, init=eq.Remember(adjoint=True), stop=eq.Stop(rtol=3e-2, max_steps=60))
    cold, first = visit(deq, range(4), x, v)
    warm, found = visit(deq, range(4), x, v)
    assert cold.adjoint is not None and warm.adjoint is not None
    assert warm.adjoint.products <= 2 < cold.adjoint.products and bool(warm.adjoint.converged.all())
    for a, b in zip(found, first, strict=True):  # two answers within 3 % of their equation
        assert float((a - b).norm() / b.norm()) < 0.5


def test_failed_samples_are_removed_and_fall_back_stays_what_it_is() -> None:
    deq, x, v = layer(), inputs(4, WIDTH), cotangents(4)
    visit(deq, range(4), x, v)
    move(deq, 0.1)
    deq.gradient = eq.Implicit(stop=eq.Stop(rtol=1e-12, max_steps=1), on_failure="fall_back")
    with pytest.warns(eq.ConvergenceWarning):
        s, found = visit(deq, range(4), x, v)
    z = s.z.detach()
    agree(found, list(torch.autograd.grad(deq.cell(z, x), list(deq.parameters()), v)))  # Jacobian-free
    (bank,) = deq.init._adjoint_banks.values()  # type: ignore[union-attr]
    assert not bank.slots


def test_a_sample_that_is_not_finite_spoils_no_other() -> None:
    deq, x, v = layer(), inputs(4, WIDTH), cotangents(4)
    deq.stop = eq.Stop(rtol=1e-10, atol=0, max_steps=400, on_failure="ignore")
    visit(deq, range(4), x, v)
    x[1] = float("nan")
    move(deq, 1e-3)
    s, found = visit(deq, range(4), x, v)
    rest = [0, 2, 3]
    s, expected = visit(layer(deq.cell), range(3), x[rest], v[rest])
    agree(found, expected)
    x[1] = 0.5
    s, found = visit(deq, range(4), x, v)
    agree(found, dense(deq, s, x, v))


def test_age_capacity_and_forgetting_hold_for_adjoint_solutions() -> None:
    deq, x, v = layer(), inputs(6, WIDTH), cotangents(6)
    memory = deq.init = eq.Remember(adjoint=True, capacity=3, max_age=2)

    def counted(*keys: int) -> int:
        return products(visit(deq, keys, x[list(keys)], v[list(keys)])[0])

    cold = counted(0)
    assert cold > 2 and counted(0) == 1
    counted(1), counted(2), counted(1)
    assert counted(0) == cold  # three solves of others came between
    assert counted(0, 1) == 1
    memory.forget([0])
    assert counted(0) == cold and counted(0) == 1
    memory.forget()
    assert counted(0) == cold
    counted(0, 1, 2, 3, 4)  # more than fit
    (bank,) = memory._adjoint_banks.values()
    assert set(bank.slots) == {2, 3, 4} and len(bank.values) == 3
    assert "adjoint=True" in repr(memory)


def test_nothing_is_stored_without_keys_without_backward_and_by_default() -> None:
    x, v = inputs(3, WIDTH), cotangents(3)
    deq = layer()
    assert isinstance(deq.init, eq.Remember)
    torch.autograd.grad(deq(x), list(deq.parameters()), v)
    with torch.no_grad(), eq.sample_keys(deq, range(3)):
        deq(x)
    assert not deq.init._adjoint_banks
    deq.init = eq.Remember()
    s, _ = visit(deq, range(3), x, v)
    assert s.result.adjoint_starts is None and not deq.init._adjoint_banks


def test_gradients_by_formula_do_not_use_the_memory() -> None:
    x, v = inputs(3, WIDTH), cotangents(3)
    deq = layer(gradient=eq.NeumannPhantom(steps=3, damping=1.0))
    first = visit(deq, range(3), x, v)[1]
    agree(visit(deq, range(3), x, v)[1], first, 1e-6)
    assert not deq.init._adjoint_banks  # type: ignore[union-attr]
