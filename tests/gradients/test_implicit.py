"""Implicit gradients against dense algebra, finite differences and unrolling; in every mode and order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria._core.maps import Map
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.krylov import GMRESState
from tests.problems import (
    LINEAR_SOLVERS,
    NONLINEAR_SOLVERS,
    TIGHT,
    NestedCell,
    TanhCell,
    inputs,
    name,
    stored_bytes,
    unrolled,
)

# solves to 1e-13, amplified by |(I - J)^{-1}| <= 5: what is left are digits of the reference itself
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
FORWARD_SOLVERS = [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton(), eq.Fallback(eq.Picard(), eq.Newton())]
ADJOINT_SOLVERS = [*NONLINEAR_SOLVERS, *LINEAR_SOLVERS]


def as_function(deq: eq.DEQ) -> tuple[Callable[..., Any], list[Tensor]]:
    """The module as a function of its input and its parameters, and the parameters."""
    names = [key for key, _ in deq.named_parameters()]

    def f(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(deq, dict(zip(names, parameters, strict=True)), (x,))

    return f, [p.detach().clone().requires_grad_() for p in deq.parameters()]


def tanh_reference(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    return unrolled(lambda z: torch.tanh(z @ w.T + x @ u.T + b), torch.zeros_like(x))


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = pytree.tree_leaves(tree)
    return found


def assert_all_close(a: Any, b: Any) -> None:
    for left, right in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(left, right, **CLOSE)


@pytest.mark.parametrize("adjoint", ADJOINT_SOLVERS, ids=name)
def test_every_adjoint_solver_matches_the_dense_solve(adjoint: AnySolver) -> None:
    cell, x = TanhCell(6, norm=0.8), inputs(3, 6).requires_grad_()
    s = eq.DEQ(cell, stop=TIGHT, gradient=eq.Implicit(solver=adjoint)).solve(x)
    v = inputs(3, 6, seed=11)
    grads = torch.autograd.grad(s.z, [x, *cell.parameters()], v)
    z = s.z.detach()
    expected_x, expected = torch.zeros_like(x), [torch.zeros_like(p) for p in cell.parameters()]
    for i in range(3):
        jacobian = jacrev(lambda y: cell(y, x[i]))(z[i])  # noqa: B023
        g = torch.linalg.solve(torch.eye(6).double() - jacobian.T, v[i])
        pulled = torch.autograd.grad(cell(z[i], x[i]), [x, *cell.parameters()], g)
        expected_x += pulled[0]
        expected = [a + b for a, b in zip(expected, pulled[1:], strict=True)]
    assert_all_close(grads, (expected_x, *expected))
    assert s.adjoint is not None and bool(s.adjoint.converged.all())


@pytest.mark.parametrize("solver", FORWARD_SOLVERS, ids=name)
@pytest.mark.parametrize("adjoint", [eq.GMRES(), eq.Anderson(), eq.NormalCG()], ids=name)
def test_gradcheck_in_both_modes_and_orders(solver: AnySolver, adjoint: AnySolver) -> None:
    deq = eq.DEQ(TanhCell(2, norm=0.7), solver=solver, stop=TIGHT, gradient=eq.Implicit(solver=adjoint))
    f, parameters = as_function(deq)
    args = (inputs(2, 2).requires_grad_(), *parameters)
    assert gradcheck(f, args, check_forward_ad=True)
    assert gradgradcheck(f, args)


def test_gradcheck_of_a_nested_state() -> None:
    deq = eq.DEQ(NestedCell(), init=NestedCell.zeros, stop=TIGHT)
    f, parameters = as_function(deq)
    args = (inputs(2, 4).requires_grad_(), *parameters)

    def flat(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaves(f(*args)))

    assert gradcheck(flat, args, check_forward_ad=True)
    assert gradgradcheck(flat, args, check_fwd_over_rev=True, fast_mode=True)  # entry by entry, 58 x 36 products take 20 s


def test_gradcheck_of_a_whole_problem() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(TanhCell(4, norm=0.6).w.detach())

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.w @ z + x)

    f, parameters = as_function(eq.DEQ(Whole(), stop=TIGHT, batched=False))
    args = (inputs(1, 4)[0].requires_grad_(), *parameters)
    assert gradcheck(f, args, check_forward_ad=True)
    assert gradgradcheck(f, args)


def scalar(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: f(*args).square().sum()


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: grad(scalar(f), argnums=(0, 1, 2, 3)),
    "vjp": lambda f: lambda *args: vjp(f, *args)[1](torch.ones_like(args[0])),
    "jvp": lambda f: lambda *args: jvp(f, args, args)[1],
    "jacrev": lambda f: jacrev(f, argnums=(0, 1, 2, 3)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2, 3)),
    "hessian": lambda f: hessian(scalar(f), argnums=(0, 1)),
    "reverse over reverse": lambda f: jacrev(jacrev(scalar(f), argnums=1), argnums=1),
    "reverse over forward": lambda f: jacrev(jacfwd(scalar(f), argnums=1), argnums=1),
    "vmap over inputs": lambda f: lambda x, *p: vmap(f, in_dims=(0, None, None, None))(torch.stack([x, 2 * x]), *p),
    "vmap over weights": lambda f: lambda x, w, *p: vmap(f, in_dims=(None, 0, None, None))(x, torch.stack([w, w / 2]), *p),
    "gradients per sample": lambda f: (
        lambda x, *p: vmap(grad(scalar(f), argnums=(0, 1)), in_dims=(0, None, None, None))(x.unsqueeze(1), *p)
    ),
    "vmap of vmap": lambda f: (
        lambda x, w, *p: vmap(vmap(f, in_dims=(0, None, None, None)), in_dims=(None, 0, None, None))(
            torch.stack([x, 2 * x]), torch.stack([w, w / 2]), *p
        )
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Newton()], ids=name)
def test_torch_func_transforms_agree_with_the_reference(transform: Any, solver: AnySolver) -> None:
    f, parameters = as_function(eq.DEQ(TanhCell(3, norm=0.6), solver=solver, stop=TIGHT))
    args = (inputs(2, 3), *[p.detach() for p in parameters])
    assert_all_close(transform(f)(*args), transform(tanh_reference)(*args))


@pytest.mark.parametrize("adjoint", LINEAR_SOLVERS, ids=name)
def test_hessian_with_every_linear_solver(adjoint: AnySolver) -> None:
    f, parameters = as_function(eq.DEQ(TanhCell(3, norm=0.6), stop=TIGHT, gradient=eq.Implicit(solver=adjoint)))
    args = (inputs(2, 3), *[p.detach() for p in parameters])
    assert_all_close(hessian(scalar(f))(*args), hessian(scalar(tanh_reference))(*args))


def test_third_derivatives() -> None:
    f, parameters = as_function(eq.DEQ(TanhCell(2, norm=0.6), stop=TIGHT))
    x, (w, *rest) = inputs(2, 2), [p.detach() for p in parameters]

    def third(f: Callable[..., Tensor]) -> Tensor:
        loss = lambda w: scalar(f)(x, w, *rest)  # noqa: E731
        first = lambda w: grad(loss)(w).square().sum()  # noqa: E731
        out: Tensor = grad(lambda w: grad(first)(w).square().sum())(w)
        return out

    torch.testing.assert_close(third(f), third(tanh_reference), rtol=1e-8, atol=1e-8)


def test_second_derivative_of_the_scalar_where_peers_are_silently_wrong() -> None:
    """z = tanh(w z + 1) at w = 1/2: the second derivative of z in w, by plain autograd."""
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    s = eq.fixed_point(lambda z, w: torch.tanh(w * z + 1), torch.zeros(1, 1).double(), w, stop=TIGHT)
    (first,) = torch.autograd.grad(s.z.sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first, w)
    reference = unrolled(lambda z, w: torch.tanh(w * z + 1), torch.zeros(1, 1).double(), w)
    (first_reference,) = torch.autograd.grad(reference.sum(), w, create_graph=True)
    (second_reference,) = torch.autograd.grad(first_reference, w)
    torch.testing.assert_close(second, second_reference, **CLOSE)
    assert abs(float(second) + 0.3029) < 1e-4


def test_double_backward_of_a_linear_cell() -> None:
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = eq.fixed_point(lambda z, w: w * z + 1, torch.zeros(1, 1).double(), w, stop=TIGHT).z  # 1 / (1 - w)
    (first,) = torch.autograd.grad(z.sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first, w)
    torch.testing.assert_close((first, second), (torch.tensor(4.0).double(), torch.tensor(16.0).double()), **CLOSE)


def test_a_gradient_penalty_trains_the_weights() -> None:
    cell, x = TanhCell(5, norm=0.8), inputs(3, 5).requires_grad_()

    def penalty(z: Tensor) -> list[Tensor]:
        (gx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gx.square().sum(), list(cell.parameters())))

    ours = penalty(eq.DEQ(cell, stop=TIGHT)(x))
    assert_all_close(ours, penalty(unrolled(cell, torch.zeros_like(x), x)))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8, 1e-20, 1e12])
def test_gradients_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    cell, x = TanhCell(6, norm=0.95), inputs(3, 6)
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5, max_steps=200))

    def gradient(scale: float) -> tuple[Tensor, Tensor]:
        s = deq.solve(x)
        (g,) = torch.autograd.grad(scale * s.z.square().sum(), cell.w)
        assert s.adjoint is not None
        return g / scale, s.adjoint.steps

    (g, steps), (reference, reference_steps) = gradient(scale), gradient(1.0)
    torch.testing.assert_close(g, reference, rtol=1e-12, atol=0)
    assert torch.equal(steps, reference_steps)


def test_no_gradient_reaches_the_start() -> None:
    cell, x = TanhCell(4), inputs(2, 4)
    z0 = torch.zeros_like(x, requires_grad=True)
    s = eq.fixed_point(cell, z0, x, stop=TIGHT)
    s.z.sum().backward()
    assert z0.grad is None


def test_called_twice_chained_shared_and_retained() -> None:
    cell, x = TanhCell(4), inputs(2, 4)
    deq = eq.DEQ(cell, stop=TIGHT)

    def reference(loss: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        return torch.autograd.grad(loss(lambda x: unrolled(cell, torch.zeros_like(x), x)), cell.w)[0]

    losses: list[Callable[[Callable[[Tensor], Tensor]], Tensor]] = [
        lambda f: f(x).sum() + f(2 * x).square().sum(),  # twice before one backward
        lambda f: f(f(x)).square().sum(),  # chained
        lambda f: (lambda z: z.sum() + z.square().sum())(f(x)),  # one solve, two losses
    ]
    for loss in losses:
        torch.testing.assert_close(torch.autograd.grad(loss(deq), cell.w)[0], reference(loss), **CLOSE)
    z = deq(x)
    z.square().sum().backward(retain_graph=True)
    z.square().sum().backward()
    assert cell.w.grad is not None
    torch.testing.assert_close(cell.w.grad, 2 * reference(lambda f: f(x).square().sum()), **CLOSE)


def test_gradients_follow_grad_mode_not_training_mode() -> None:
    deq, x = eq.DEQ(TanhCell(4)).eval(), inputs(2, 4)
    assert deq(x).requires_grad
    with torch.no_grad():
        assert not deq(x).requires_grad
    with torch.inference_mode():
        assert not deq(x).requires_grad
    deq.requires_grad_(False)
    assert not deq(x).requires_grad
    assert deq(x.clone().requires_grad_()).requires_grad


def test_a_cell_that_ignores_its_state_or_needs_no_parameters() -> None:
    x = inputs(3, 4).requires_grad_()
    z = eq.fixed_point(lambda z, x: 2 * x, torch.zeros(3, 4).double(), x, stop=TIGHT).z
    z.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


class Prepared(nn.Module):
    """U x is the same in every step: computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TanhCell(4)
        self.prepared = 0

    def prepare(self, x: Tensor) -> Tensor:
        self.prepared += 1
        return x @ self.inner.u.T + self.inner.b

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.tanh(z @ self.inner.w.T + injected)


def test_prepare_is_called_once_per_solve_and_gradients_flow_through_it() -> None:
    cell, x = Prepared(), inputs(3, 4).requires_grad_()
    z = eq.DEQ(cell, stop=TIGHT)(x)
    assert cell.prepared == 1
    parameters = list(cell.inner.parameters())
    ours = torch.autograd.grad(z.square().sum(), [x, *parameters])
    reference = unrolled(cell.inner, torch.zeros_like(x), x)
    assert_all_close(ours, torch.autograd.grad(reference.square().sum(), [x, *parameters]))
    assert cell.prepared == 1


def test_adjoint_statistics_are_readable_after_backward() -> None:
    cell, x = TanhCell(6, norm=0.9), inputs(4, 6)
    s = eq.DEQ(cell, stop=eq.Stop(rtol=1e-6, atol=0, max_steps=100)).solve(x)
    assert s.adjoint is None
    v = inputs(4, 6, seed=5)
    v[2] = 0  # nothing arrives for this sample: nothing to solve
    s.z.backward(v)
    adjoint = s.adjoint
    assert adjoint is not None
    assert adjoint.status.shape == adjoint.steps.shape == adjoint.residual.shape == (4,)
    assert bool((adjoint.residual <= 1e-6).all()) and adjoint.steps[2] == 0
    assert adjoint.evaluations > 0


@pytest.mark.parametrize("policy", ["ignore", "warn", "raise", "fall_back"])
def test_a_policy_for_adjoints_that_fail(policy: Any) -> None:
    cell, x = TanhCell(8, norm=0.99), inputs(3, 8) / 100
    hopeless = eq.Stop(rtol=1e-9, max_steps=2)
    deq = eq.DEQ(cell, stop=TIGHT, gradient=eq.Implicit(solver=eq.Picard(), stop=hopeless, on_failure=policy))
    s = deq.solve(x)
    loss = s.z.square().sum()
    if policy == "raise":
        with pytest.raises(eq.ConvergenceError, match="adjoint solve did not converge for 3 of 3") as caught:
            loss.backward()
        assert caught.value.stats.steps.tolist() == [2, 2, 2]
        return
    if policy == "ignore":
        loss.backward()
    else:
        with pytest.warns(eq.ConvergenceWarning, match="adjoint solve did not converge"):
            loss.backward()
    assert s.adjoint is not None and s.adjoint.status.tolist() == [eq.Status.MAX_STEPS] * 3
    assert cell.w.grad is not None
    if policy == "fall_back":  # the Jacobian-free gradient: one step of the cell at the equilibrium
        one_step = cell(s.z.detach(), x)
        (expected,) = torch.autograd.grad(one_step, cell.w, 2 * s.z.detach())
        torch.testing.assert_close(cell.w.grad, expected, **CLOSE)


def test_quarantined_samples_have_zero_gradient_and_do_not_change_others() -> None:
    cell, x = TanhCell(5), inputs(4, 5)
    bad = x.clone()
    bad[1] = float("nan")
    bad.requires_grad_()
    deq = eq.DEQ(cell, stop=dataclasses.replace(TIGHT, on_failure="ignore"))
    s = deq.solve(bad)
    grads = torch.autograd.grad(s.z.square().sum(), [bad, *cell.parameters()], retain_graph=True)
    assert torch.equal(grads[0][1], torch.zeros(5).double())
    others = [0, 2, 3]
    good = x[others].requires_grad_()
    expected = torch.autograd.grad(deq(good).square().sum(), [good, *cell.parameters()])
    assert_all_close((grads[0][others], *grads[1:]), expected)
    # and in the differentiable path
    again = torch.autograd.grad(s.z.square().sum(), [bad, *cell.parameters()], create_graph=True)
    assert_all_close(again, grads)
    (second,) = torch.autograd.grad(again[1].square().sum(), cell.w)
    assert bool(torch.isfinite(second).all())


def test_quarantine_reaches_what_was_prepared() -> None:
    cell, x = Prepared(), inputs(4, 4)
    x[1] = float("nan")
    deq = eq.DEQ(cell, stop=dataclasses.replace(TIGHT, on_failure="ignore"))
    s = deq.solve(x)
    assert s.stats.status.tolist() == [0, eq.Status.NONFINITE, 0, 0]
    parameters = list(cell.inner.parameters())
    seen = torch.autograd.grad(s.z.square().sum(), parameters)
    expected = torch.autograd.grad(deq(x[[0, 2, 3]]).square().sum(), parameters)
    assert_all_close(seen, expected)


def test_quarantine_does_not_take_a_weight_for_samples() -> None:
    """As many samples as features: a weight matrix passed as an input keeps its rows."""
    n = 4
    w, x = TanhCell(n).w.detach().requires_grad_(), inputs(n, n)
    x[1] = float("nan")
    stop = dataclasses.replace(TIGHT, on_failure="ignore", compact=False)

    def gradient(x: Tensor) -> Tensor:
        z = eq.fixed_point(lambda z, w, x: torch.tanh(z @ w.T + x), torch.zeros_like(x), w, x, stop=stop).z
        return torch.autograd.grad(z[torch.isfinite(x).all(dim=1)].square().sum(), w)[0]

    torch.testing.assert_close(gradient(x), gradient(x[[0, 2, 3]]), **CLOSE)


def test_a_batch_of_nothing_but_bad_samples_has_zero_gradients() -> None:
    cell, x = TanhCell(5), torch.full((2, 5), float("nan")).double()
    deq = eq.DEQ(cell, stop=eq.Stop(on_failure="ignore"))
    for create_graph in (False, True):
        grads = torch.autograd.grad(deq(x).sum(), list(cell.parameters()), create_graph=create_graph)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_an_infinite_derivative_is_quarantined_too() -> None:
    """sqrt has a finite value and an infinite slope at 0: the forward solve is fine, the adjoint is not."""
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    stop = eq.Stop(rtol=1e-12, atol=1e-12, on_failure="ignore")
    s = eq.fixed_point(lambda z, w, x: w * torch.sqrt(z.abs()) * x, torch.zeros_like(x), w, x, stop=stop, solver=eq.Picard())
    s.z.sum().backward()
    assert w.grad is not None and bool(torch.isfinite(w.grad))
    assert s.adjoint is not None


def test_forward_mode_quarantines_samples() -> None:
    cell, x = TanhCell(4), inputs(3, 4)
    x[0] = float("nan")
    f, parameters = as_function(eq.DEQ(cell, stop=dataclasses.replace(TIGHT, on_failure="ignore")))
    w, u, b = (p.detach() for p in parameters)
    tangent = jvp(lambda w: f(x, w, u, b), (w,), (w,))[1]
    reference = jvp(lambda w: tanh_reference(x[1:], w, u, b), (w,), (w,))[1]
    assert torch.equal(tangent[0], torch.zeros(4).double())
    torch.testing.assert_close(tangent[1:], reference, **CLOSE)


def test_coupled_batches_are_differentiated_as_one_problem() -> None:
    """Batch statistics: gradients against unrolling, with buffers moved once."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = TanhCell(4, norm=0.4), nn.BatchNorm1d(4).double()

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out: Tensor = torch.tanh(0.3 * self.norm(self.inner(z, x)))
            return out

    cell, x = Normed(), inputs(6, 4)
    s = eq.DEQ(cell, stop=TIGHT).solve(x)
    assert cell.norm.num_batches_tracked == 1
    ours = torch.autograd.grad(s.z.square().sum(), list(cell.parameters()))
    assert cell.norm.num_batches_tracked == 1
    reference = torch.autograd.grad(unrolled(cell, torch.zeros_like(x), x).square().sum(), list(cell.parameters()))
    assert_all_close(ours, reference)
    assert len(set(s.stats.steps.tolist())) == 1
    assert all(t.shape == (6,) for t in (s.stats.status, s.stats.steps, s.stats.best, s.stats.rejected, s.stats.residual))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.counter = TanhCell(6, norm=0.9), [0]

    @property
    def calls(self) -> int:
        return self.counter[0]

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.counter[0] += 1  # in a list: the backward runs a copy of the module, whose attributes are its own
        out: Tensor = self.inner(z, x)
        return out


def test_backward_runs_the_cell_once() -> None:
    cell, x = Counting(), inputs(3, 6)
    s = eq.DEQ(cell, stop=eq.Stop(rtol=1e-6, max_steps=200, compact=False)).solve(x)
    forward = cell.calls  # `s.stats` before backward would measure rows that stopped at different steps
    s.z.sum().backward()
    assert s.stats.evaluations == forward and cell.calls == forward + 1
    assert s.adjoint is not None and s.adjoint.evaluations > 5


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton()], ids=name)
def test_between_forward_and_backward_only_equilibrium_and_inputs_are_kept(solver: AnySolver) -> None:
    x = inputs(16, 32)
    state = x.numel() * x.element_size()
    kept = []
    for steps in (5, 20, 80):
        stop = eq.Stop(rtol=0, atol=0, max_steps=steps, on_failure="ignore")
        kept.append(stored_bytes(eq.DEQ(TanhCell(32, norm=0.99), solver=solver, stop=stop), x))
    assert kept[0] == kept[1] == kept[2]
    assert kept[0] <= 2 * state + 16 * 8  # z, x and a status per sample


class Boasting(eq.GMRES):
    """Believes to be done after a step."""

    def step(self, f: Map, state: GMRESState) -> GMRESState:
        state = super().step(f, state)
        return dataclasses.replace(state, remaining=torch.zeros_like(state.remaining)) if state.count == 1 else state


def test_rejected_gradients_are_freed_before_they_are_recomputed() -> None:
    cell, x = TanhCell(256, norm=0.9), inputs(4, 256)

    def peak(solver: eq.GMRES) -> int:
        deq = eq.DEQ(cell, gradient=eq.Implicit(solver=solver, on_failure="ignore"))

        def step() -> None:
            torch.autograd.grad(deq(x).square().sum(), list(cell.parameters()))

        step()
        return eq.analysis.peak_memory(step)

    assert peak(Boasting()) <= 1.05 * peak(eq.GMRES())
