"""Implicit gradients where torch, numbers or samples reach their limits: right, or told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacfwd, jacrev

import equilibria as eq
from tests.problems import TIGHT, TanhCell, inputs

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def test_forward_mode_twice_is_refused() -> None:
    deq, x = eq.DEQ(TanhCell(3), stop=TIGHT), inputs(1, 3)[0]

    def f(x: Tensor) -> Any:
        return deq(x.unsqueeze(0)).pow(3).sum()

    with pytest.raises(RuntimeError, match=r"Forward mode twice.*jacrev of jacfwd"):
        jacfwd(jacfwd(f))(x)
    torch.testing.assert_close(jacfwd(jacrev(f))(x), jacrev(jacfwd(f))(x))


def test_gmres_residuals_are_true_over_many_steps() -> None:
    """With old directions dropped, errors of the images that are kept grow from step to step."""
    torch.manual_seed(0)
    n = 300
    a = torch.randn(n, n, dtype=torch.float64)
    cell = nn.Linear(n, n, bias=False, dtype=torch.float64)
    with torch.no_grad():
        cell.weight.copy_(0.99 * a / torch.linalg.eigvals(a).abs().max())
    inverse = torch.linalg.inv(torch.eye(n, dtype=torch.float64) - cell.weight)
    x = inputs(2, n).requires_grad_()
    gradient = eq.Implicit(stop=eq.Stop(rtol=1e-8, atol=0, max_steps=1000))
    s = eq.fixed_point(lambda z, x: cell(z) + x, x.detach() @ inverse.T, x, gradient=gradient)
    (seen,) = torch.autograd.grad(s.z.sum(), x)
    expected = inverse.sum(dim=0).expand_as(seen)
    assert s.adjoint is not None and bool(s.adjoint.converged.all())
    torch.testing.assert_close(seen, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e20])
def test_cotangents_of_any_size(size: float) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    z = eq.fixed_point(lambda z, x: 0.5 * z + x, x.detach(), x, stop=eq.Stop(rtol=1e-6)).z
    (seen,) = torch.autograd.grad(z, x, torch.full_like(z, size))
    torch.testing.assert_close(seen / size, torch.full_like(z, 2.0), rtol=1e-4, atol=1e-4)


def test_a_cotangent_that_is_not_finite_is_reported() -> None:
    cell, x = TanhCell(6), inputs(4, 6).requires_grad_()
    s = eq.DEQ(cell).solve(x)
    v = torch.ones_like(s.z)
    v[1, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning, match="1 nonfinite"):
        (seen,) = torch.autograd.grad(s.z, x, v)
    assert s.adjoint is not None
    assert [eq.Status(int(code)).name for code in s.adjoint.status] == ["CONVERGED", "NONFINITE", "CONVERGED", "CONVERGED"]
    assert bool((seen[1] == 0).all()) and bool(torch.isfinite(seen).all())


def test_a_mask_of_minus_infinity_is_no_broken_sample() -> None:
    class Masked(nn.Module):
        def prepare(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.softmax(x + mask, dim=1)

        def forward(self, z: Tensor, x: Tensor, weights: Tensor) -> Tensor:
            return 0.5 * torch.tanh(z * weights) + x

    x, mask = inputs(3, 4).requires_grad_(), torch.zeros(3, 4, dtype=torch.float64)
    mask[0, 2] = -torch.inf
    s = eq.DEQ(Masked(), stop=TIGHT).solve(x, mask)
    assert bool(s.stats.converged.all())


def test_reverse_mode_inside_an_open_dual_level() -> None:
    deq, x = eq.DEQ(TanhCell(3), stop=TIGHT), inputs(2, 3).requires_grad_()
    expected = torch.autograd.grad(deq(x).square().sum(), x)[0]
    with torch.autograd.forward_ad.dual_level():
        seen = torch.autograd.grad(deq(x).square().sum(), x)[0]
    torch.testing.assert_close(seen, expected, **CLOSE)


def test_inference_mode_has_no_derivatives_and_says_so() -> None:
    deq, x = eq.DEQ(TanhCell(3)), inputs(2, 3)
    with torch.inference_mode():
        s = deq.solve(x)
        for look in (eq.spectral_radius, eq.jacobian_penalty):
            with pytest.raises(RuntimeError, match=r"torch.inference_mode\(\) forbids: take torch.no_grad"):
                look(s)


@pytest.mark.filterwarnings("ignore:Converged samples keep being evaluated")
@pytest.mark.parametrize("factor", [1.0, 1e20])
def test_a_set_aside_sample_that_others_depend_on_does_not_stop_the_backward(factor: float) -> None:
    """Its own residual means nothing; with neighbours of any size it must not be waited for."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + x + 1e-3 * z.mean(dim=0)

    x = torch.ones(4, 2)
    x[0] = float("nan")
    x.requires_grad_()
    stop = eq.Stop(rtol=1e-4, on_failure="ignore", compact=False)
    z = eq.fixed_point(cell, torch.zeros(4, 2), x, solver=eq.Picard(), stop=stop).z
    (grad,) = torch.autograd.grad(z, x, torch.full_like(z, factor))
    assert bool(torch.isfinite(grad).all())


class Outer(nn.Module):
    """z -> x + W z / 2 with the state squared into the gradient of W by the loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(0.5 * torch.eye(4, dtype=dtype))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.w.T + x


GRADIENTS = [
    eq.Implicit(),
    eq.Implicit(solver=eq.Anderson()),
    eq.NeumannPhantom(),
    eq.Escalate(),
    eq.Shine(),
    eq.Reversible(),
]


@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e4), (torch.float32, 1e15), (torch.float32, 1e30)])
def test_a_sample_whose_gradient_leaves_the_dtype_is_quarantined(gradient: Any, dtype: torch.dtype, size: float) -> None:
    """Its product with J is finite, its share in the gradient of the weight is not."""
    cell, x = Outer(dtype), torch.ones(5, 4, dtype=dtype)
    x[2] *= size
    factor = torch.ones(5, 1, dtype=dtype)
    factor[2] = 6e4 if dtype == torch.float16 else 1e30
    solvers: dict[Any, Any] = {eq.Shine: eq.Broyden(), eq.Reversible: eq.Picard()}
    solver = solvers.get(type(gradient), eq.Anderson())
    deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=5e-3, on_failure="ignore"), gradient=gradient)

    def solve(rows: Tensor) -> eq.Solution:
        cell.zero_grad()
        s = deq.solve(x[rows])
        s.z.backward(factor[rows] * torch.ones_like(s.z))
        return s

    s = solve(torch.arange(5))
    assert s.adjoint is not None and cell.w.grad is not None
    seen = cell.w.grad
    assert s.adjoint.status[2] == eq.Status.NONFINITE
    if isinstance(gradient, eq.Reversible):  # which adds gradients up step by step: told, as a whole
        return
    assert bool((s.adjoint.status[[0, 1, 3, 4]] != eq.Status.NONFINITE).all())
    solve(torch.tensor([0, 1, 3, 4]))
    torch.testing.assert_close(seen, cell.w.grad)


@pytest.mark.parametrize("gradient", [eq.Implicit(), eq.Reversible()], ids=repr)
def test_a_sum_of_gradients_that_overflows_is_reported(gradient: Any) -> None:
    cell, x = Outer(torch.float16), torch.full((8, 4), 1e4, dtype=torch.float16)
    solver = eq.Picard() if isinstance(gradient, eq.Reversible) else eq.Anderson()
    s = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=5e-3), gradient=gradient).solve(x)
    with pytest.warns(eq.ConvergenceWarning, match="8 nonfinite"):
        s.z.backward(torch.ones_like(s.z))
    assert s.adjoint is not None and s.adjoint.count(eq.Status.NONFINITE) == 8
    assert cell.w.grad is not None and not bool(
        torch.isfinite(cell.w.grad).all()
    )  # as torch's own sums: loss scaling sees it


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**16])
def test_gradients_in_half_precision_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    cell, x = TanhCell(8, dtype=torch.float32), 30 * inputs(4, 8, dtype=torch.float32)

    def gradient(factor: float) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            z = eq.DEQ(cell, stop=eq.Stop(rtol=1e-2)).solve(x).z
            (found,) = torch.autograd.grad(factor * z.square().sum(), cell.w)
        return found / factor

    expected = gradient(1.0)
    torch.testing.assert_close(gradient(scale), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "gradient",
    [eq.Implicit(), eq.JFB(), eq.UnrolledPhantom(), eq.Unrolled(), eq.Unrolled(depth=3), eq.Reversible()],
    ids=repr,
)
def test_without_a_single_finite_sample_all_gradients_are_zero(gradient: Any) -> None:
    cell, x = TanhCell(3, dtype=torch.float32), torch.full((2, 3), float("nan"), requires_grad=True)
    solver = eq.Picard() if isinstance(gradient, eq.Reversible) else eq.Anderson()
    s = eq.DEQ(cell, solver=solver, stop=eq.Stop(on_failure="ignore"), gradient=gradient).solve(x)
    s.z.sum().backward()
    for tensor in (x, *cell.parameters()):
        assert tensor.grad is not None and bool((tensor.grad == 0).all())


def test_reversible_has_a_derivative_that_is_not_finite_quarantined() -> None:
    x = torch.tensor([[0.5], [0.0]], dtype=torch.float64, requires_grad=True)
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    stop = eq.Stop(rtol=1e-4, max_steps=30, on_failure="ignore")
    start = torch.tensor([[0.5], [1e-300]], dtype=torch.float64)
    s = eq.fixed_point(
        lambda z, x, w: w * x * z.sqrt(), start, x, w, solver=eq.Picard(), stop=stop, gradient=eq.Reversible()
    )
    s.z.sum().backward()
    assert x.grad is not None and w.grad is not None
    assert bool(torch.isfinite(x.grad).all()) and bool(torch.isfinite(w.grad).all())


BATCHED: list[Any] = [
    eq.Implicit(),
    eq.Implicit(solver=eq.Anderson()),
    eq.JFB(),
    eq.NeumannPhantom(),
    eq.Escalate(),
    eq.Unrolled(depth=5),
    eq.Shine(),
    eq.Reversible(),
]


@pytest.mark.parametrize("gradient", BATCHED, ids=repr)
def test_many_cotangents_at_once(gradient: Any) -> None:
    """torch.autograd.grad(is_grads_batched=True), as torch.autograd.functional.jacobian(vectorize=True) calls it."""
    solvers: dict[Any, Any] = {eq.Shine: eq.Broyden(), eq.Reversible: eq.Picard()}
    solver = solvers.get(type(gradient), eq.Anderson())
    deq = eq.DEQ(TanhCell(3, norm=0.5), solver=solver, stop=eq.Stop(on_failure="ignore"), gradient=gradient)
    x = inputs(4, 3).requires_grad_()
    z, tensors = deq(x), [x, *deq.parameters()]
    many = torch.randn(5, 4, 3, dtype=torch.float64)
    one_by_one = [torch.autograd.grad(z, tensors, v, retain_graph=True) for v in many]
    seen = torch.autograd.grad(z, tensors, many, is_grads_batched=True)
    for found, expected in zip(seen, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), **CLOSE)


def test_many_cotangents_at_once_for_a_closure_and_to_second_order() -> None:
    x = inputs(4, 3)
    w = TanhCell(3).w.detach().requires_grad_()
    many = torch.randn(5, 4, 3, dtype=torch.float64)
    z = eq.fixed_point(lambda z: torch.tanh(z @ w.T + x), torch.zeros_like(x), stop=TIGHT).z
    z_explicit = eq.fixed_point(lambda z, x, w: torch.tanh(z @ w.T + x), torch.zeros_like(x), x, w, stop=TIGHT).z
    (seen,) = torch.autograd.grad(z, w, many, is_grads_batched=True)
    (expected,) = torch.autograd.grad(z_explicit, w, many, is_grads_batched=True, create_graph=True)
    torch.testing.assert_close(seen, expected, **CLOSE)
    (second,) = torch.autograd.grad(expected.square().sum(), w, retain_graph=True)
    single = [torch.autograd.grad(z_explicit, w, v, create_graph=True)[0] for v in many]
    torch.testing.assert_close(second, torch.autograd.grad(torch.stack(single).square().sum(), w)[0], **CLOSE)


@pytest.mark.parametrize("gradient", [eq.Unrolled(), eq.Unrolled(depth=4), eq.Unrolled(checkpoint="sqrt")], ids=repr)
def test_vmap_over_unrolled_is_refused_and_jacrev_is_not(gradient: Any) -> None:
    deq, x = eq.DEQ(TanhCell(3), gradient=gradient), inputs(2, 3)
    with pytest.raises(RuntimeError, match=r"vmap does not pass through Unrolled.*eq.Implicit\(\)"):
        torch.func.vmap(deq)(x.unsqueeze(1))
    with pytest.raises(RuntimeError, match="vmap does not pass through Unrolled"):
        torch.func.vmap(torch.func.grad(lambda row: deq(row.unsqueeze(0)).sum()))(x)
    assert jacrev(deq)(x).shape == (2, 3, 2, 3)


def test_linearize_and_functionalize_say_why_not() -> None:
    deq, x = eq.DEQ(TanhCell(3)), inputs(2, 3)
    with pytest.raises(RuntimeError, match=r"record operations once.*torch.func.jvp"):
        torch.func.linearize(deq, x)
    for transform in (torch.func.functionalize(deq), torch.func.grad(lambda x: torch.func.functionalize(deq)(x).sum())):
        with pytest.raises(RuntimeError, match="functionalize cannot pass through an equilibrium"):
            transform(x)


def test_a_weight_of_as_many_rows_as_the_batch_beside_a_bad_sample_under_transforms() -> None:
    """Its rows look like the samples', and must not be exchanged with them."""
    x, w = inputs(3, 3), TanhCell(3).w.detach()
    x[0] = float("nan")
    stop = eq.Stop(rtol=1e-12, atol=0, max_steps=200, on_failure="ignore", compact=False)

    def solve(w: Tensor, x: Tensor) -> Any:
        return eq.fixed_point(lambda z, x, w: torch.tanh(z @ w.T + x), torch.zeros_like(x), x, w, stop=stop).z

    good = x[1:]
    seen = torch.func.grad(lambda w: solve(w, x)[1:].square().sum())(w)
    torch.testing.assert_close(seen, torch.func.grad(lambda w: solve(w, good).square().sum())(w), **CLOSE)
    seen = torch.func.jvp(lambda w: solve(w, x)[1:], (w,), (w.T,))[1]
    torch.testing.assert_close(seen, torch.func.jvp(lambda w: solve(w, good), (w,), (w.T,))[1], **CLOSE)
    torch.testing.assert_close(jacrev(lambda w: solve(w, x)[1:])(w), jacrev(lambda w: solve(w, good))(w), **CLOSE)


IN_PLACE: list[Any] = [
    eq.Newton(),
    eq.Newton(linear=eq.BiCGSTAB()),
    eq.GMRES(),
    eq.BiCGSTAB(),
    eq.Fallback(eq.Picard(), eq.Newton()),
]


@pytest.mark.parametrize("solver", IN_PLACE, ids=repr)
def test_cells_that_write_in_place_under_inference_mode(solver: Any) -> None:
    x = inputs(4, 3)
    stop = eq.Stop(rtol=1e-10, atol=0, max_steps=100, on_failure="raise")
    for cell in (lambda z, x: z.mul_(0.5).add_(x), lambda z, x: z.mul(0.5).add_(x)):
        with torch.inference_mode():
            z = eq.fixed_point(cell, torch.zeros_like(x), x, solver=solver, stop=stop).z
        torch.testing.assert_close(z.clone(), 2 * x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", [eq.NormalCG(), eq.Newton(linear=eq.NormalCG())], ids=repr)
def test_transposed_products_under_inference_mode_are_refused(solver: Any) -> None:
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"A transposed product.*needs derivatives.*torch.no_grad\(\)"),
    ):
        eq.fixed_point(lambda z, x: z.mul_(0.5).add_(x), torch.zeros(2, 3), torch.ones(2, 3), solver=solver)
