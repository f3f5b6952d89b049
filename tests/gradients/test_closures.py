"""Plain callables: what they close over gets first-order gradients, and a clear error beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

import equilibria as eq
from tests.problems import TIGHT, BatchNormCell, inputs, matrix, name, unrolled


def setting() -> tuple[Tensor, Tensor]:
    return matrix("orthogonal", 4, 0.7).requires_grad_(), inputs(3, 4).requires_grad_()


@pytest.mark.parametrize("adjoint", [eq.GMRES(), eq.NormalCG(), eq.Anderson()], ids=repr)
def test_everything_a_closure_touches_gets_its_gradient(adjoint: eq.Solver[Any]) -> None:
    w, x = setting()

    def run(solve: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> tuple[Tensor, ...]:
        hidden = x * 2  # not a leaf: its own gradient can be asked for
        loss = solve(lambda z: torch.tanh(z @ w.T + hidden)).square().sum()
        return torch.autograd.grad(loss, [w, x, hidden])

    zero = torch.zeros(3, 4).double()
    ours = run(lambda f: eq.fixed_point(f, zero, stop=TIGHT, gradient=eq.Implicit(solver=adjoint)).z)
    reference = run(lambda f: unrolled(f, zero))
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_inputs_and_captured_tensors_together() -> None:
    w, x = setting()
    zero = torch.zeros(3, 4).double()
    f = lambda z, x: torch.tanh(z @ w.T + x)  # noqa: E731
    ours = torch.autograd.grad(eq.fixed_point(f, zero, x, stop=TIGHT).z.square().sum(), [w, x])
    reference = torch.autograd.grad(unrolled(f, zero, x).square().sum(), [w, x])
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_looking_for_captures_costs_no_evaluation() -> None:
    calls = [0]

    def f(z: Tensor) -> Tensor:
        calls[0] += 1
        return 0.1 * z + 1

    s = eq.fixed_point(f, torch.zeros(2, 3), solver=eq.Picard())  # done before rows would be run alone
    assert calls[0] == s.stats.evaluations == int(s.stats.steps.max()) + 1


def test_adjoint_statistics_of_a_closure() -> None:
    w, x = setting()
    s = eq.fixed_point(lambda z: torch.tanh(z @ w.T + x), torch.zeros(3, 4).double(), stop=TIGHT)
    s.z.sum().backward()
    assert s.adjoint is not None and bool(s.adjoint.converged.all())


def test_backward_twice_with_retained_graph() -> None:
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = eq.fixed_point(lambda z: w * z + 1, torch.zeros(1, 1).double(), stop=TIGHT).z
    z.sum().backward(retain_graph=True)
    z.sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, torch.tensor(8.0).double())


BEYOND: dict[str, Callable[[Tensor, Tensor], object]] = {
    "second order": lambda w, x: torch.autograd.grad(solve(w.requires_grad_(), x).sum(), w, create_graph=True),
    "torch.func.grad": lambda w, x: grad(lambda w: solve(w, x).sum())(w),
    "torch.func.jvp": lambda w, x: jvp(lambda w: solve(w, x), (w,), (w,)),
    "torch.func.jacfwd": lambda w, x: jacfwd(lambda w: solve(w, x))(w),
    "torch.func.vmap": lambda w, x: vmap(lambda w: solve(w, x))(torch.stack([w, w])),
}


def solve(w: Tensor, x: Tensor) -> Tensor:
    z = eq.fixed_point(lambda z: torch.tanh(z @ w.T + x), torch.zeros(3, 4).double()).z
    assert isinstance(z, Tensor)
    return z


@pytest.mark.parametrize("beyond", BEYOND.values(), ids=BEYOND.keys())
def test_more_than_first_order_says_to_pass_them_as_inputs(beyond: Callable[[Tensor, Tensor], object]) -> None:
    w, x = (t.detach() for t in setting())
    with pytest.raises(RuntimeError, match="need them as inputs"):
        beyond(w, x)


def test_forward_mode_through_a_closure_is_refused_not_silently_zero() -> None:
    w, x = (t.detach() for t in setting())
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="need them as inputs"):
        solve(forward_ad.make_dual(w, w), x)


def test_the_same_things_work_when_passed_as_inputs() -> None:
    w, x = (t.detach() for t in setting())
    f = lambda w: eq.fixed_point(lambda z, w: torch.tanh(z @ w.T + x), torch.zeros(3, 4).double(), w, stop=TIGHT).z  # noqa: E731
    reference = lambda w: unrolled(lambda z: torch.tanh(z @ w.T + x), torch.zeros(3, 4).double())  # noqa: E731
    torch.testing.assert_close(jacfwd(f)(w), jacfwd(reference)(w), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(vmap(f)(torch.stack([w, w / 2])), vmap(reference)(torch.stack([w, w / 2])))


def test_a_closure_that_moves_statistics_is_refused_where_derivatives_are_needed() -> None:
    cell, x = BatchNormCell(3), inputs(4, 3)
    with pytest.raises(RuntimeError, match=r"changes a tensor it closes over.*Make the cell an nn\.Module"):
        eq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), solver=eq.Newton())
    assert bool(eq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x)).stats.converged.all())


@pytest.mark.parametrize("gradient", [eq.Unrolled(), eq.JFB(), eq.UnrolledPhantom()], ids=repr)
def test_a_cotangent_of_a_closure_that_is_not_finite_is_left_out(gradient: Any) -> None:
    """The gradients of what a closure captured come from the cotangents of its evaluations."""
    w, x = setting()
    stop = eq.Stop(on_failure="ignore")
    s = eq.fixed_point(
        lambda z: torch.tanh(z @ w.T + x), torch.zeros(3, 4).double(), solver=eq.Picard(), stop=stop, gradient=gradient
    )
    v = torch.ones(3, 4).double()
    v[1] = float("nan")
    of_w, of_x = torch.autograd.grad(s.z, [w, x], v)
    assert bool(torch.isfinite(of_w).all()) and bool((of_x[1] == 0).all()) and bool((of_x[0] != 0).all())
    assert s.adjoint is not None
    assert (s.adjoint.status == eq.Status.NONFINITE).tolist() == [False, True, False]


@pytest.mark.parametrize("gradient", [eq.Implicit(), eq.NeumannPhantom()], ids=name)
def test_a_derivative_of_a_closure_that_is_not_finite_is_reported_for_every_sample(gradient: Any) -> None:
    """One row of what the closure captured has no derivative: zero times it is nan in the sum over the batch."""
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    gain = torch.full((4, 2), 0.01, dtype=torch.float64)
    gain[0] = 0.0

    def cell(z: Tensor) -> Tensor:
        return 0.3 * z + 0.5 + torch.sqrt(gain * w * z)

    stop = eq.Stop(rtol=1e-8, max_steps=100, on_failure="ignore")
    s = eq.fixed_point(cell, torch.ones(4, 2, dtype=torch.float64), gradient=gradient, stop=stop)
    assert bool(s.stats.converged.all())
    (grad,) = torch.autograd.grad(s.z.sum(), w)
    assert s.adjoint is not None
    assert not bool(torch.isfinite(grad)) and bool((s.adjoint.status == eq.Status.NONFINITE).all())
