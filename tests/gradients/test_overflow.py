"""Samples whose gradients leave the dtype are set aside and flagged; the others keep theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq

GRAPHS = [
    eq.JFB(),
    eq.UnrolledPhantom(),
    eq.UnrolledPhantom(steps=2, checkpoint=True),
    eq.Unrolled(),
    eq.Unrolled(checkpoint="sqrt"),
    eq.Unrolled(truncate=2),
    eq.Unrolled(depth=6),
    eq.Reversible(),
]
STOP = eq.Stop(rtol=1e-3, max_steps=60)


class Affine(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        w = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
        self.w = nn.Parameter((0.5 * w / torch.linalg.matrix_norm(w, 2)).to(dtype))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.w + x


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(4)).to(dtype)


def gradients(
    gradient: eq.gradients.Gradient, x: Tensor, v: Tensor, stop: eq.Stop = STOP
) -> tuple[eq.Solution, Tensor, Tensor]:
    cell, x = Affine(x.dtype), x.clone().requires_grad_()
    solution = eq.DEQ(cell, solver=eq.Picard(), gradient=gradient, stop=stop).solve(x)
    grad_w, grad_x = torch.autograd.grad(solution.z, (cell.w, x), v)
    return solution, grad_w, grad_x


def check_set_aside(gradient: eq.gradients.Gradient, x: Tensor, v: Tensor, lost: int) -> None:
    """Sample `lost` is flagged, and the gradients are those of the others."""
    with pytest.warns(eq.ConvergenceWarning, match="adjoint solve did not converge for 1 of 5 samples"):
        solution, grad_w, grad_x = gradients(gradient, x, v)
    assert solution.adjoint is not None
    rows = torch.arange(len(x)) != lost
    assert (solution.adjoint.status == eq.Status.NONFINITE).tolist() == (~rows).tolist()
    _, alone_w, alone_x = gradients(gradient, x[rows], v[rows])
    tolerance = 0.02 if x.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(grad_w, alone_w, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad_x[rows], alone_x, rtol=tolerance, atol=tolerance)
    assert torch.equal(grad_x[lost], torch.zeros_like(grad_x[lost]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gradient", GRAPHS, ids=repr)
def test_a_sample_whose_weight_gradient_overflows_is_set_aside(gradient: eq.gradients.Gradient, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    x[1] = torch.finfo(dtype).max / 16  # the state stays finite, its product with the cotangent does not
    v = torch.ones_like(x)
    v[1] = 100.0
    check_set_aside(gradient, x, v, lost=1)


@pytest.mark.parametrize("gradient", GRAPHS, ids=repr)
def test_a_sample_whose_cotangent_is_nan_is_set_aside(gradient: eq.gradients.Gradient) -> None:
    x = inputs(torch.float32)
    v = torch.ones_like(x)
    v[3, 2] = float("nan")
    check_set_aside(gradient, x, v, lost=3)


@pytest.mark.parametrize("gradient", GRAPHS, ids=repr)
def test_no_statistics_are_made_up_where_nothing_is_set_aside(gradient: eq.gradients.Gradient) -> None:
    x = inputs(torch.float32)
    adjoint = gradients(gradient, x, torch.ones_like(x))[0].adjoint
    assert adjoint is None if not isinstance(gradient, eq.Reversible) else bool(adjoint and adjoint.converged.all())


@pytest.mark.parametrize("gradient", [eq.JFB(), eq.UnrolledPhantom(), eq.Unrolled(), eq.Unrolled(depth=6)], ids=repr)
def test_checked_gradients_stay_differentiable(gradient: eq.gradients.Gradient) -> None:
    cell, x = Affine(torch.float64), inputs(torch.float64).requires_grad_()
    deq = eq.DEQ(cell, solver=eq.Picard(), gradient=gradient, stop=eq.Stop(rtol=1e-10, max_steps=80))
    (first,) = torch.autograd.grad(deq(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert float(second.abs().min()) > 0


def test_steps_of_a_phantom_gradient_that_overflow_return_the_iterate_before() -> None:
    x = torch.ones(3, 1, dtype=torch.float64)
    x[0] = 1e307
    w = torch.full((1, 1), 4.0, dtype=torch.float64, requires_grad=True)
    stop = eq.Stop(max_steps=0, on_failure="ignore")
    solution = eq.fixed_point(
        lambda z, x, w: z @ w + x, x.clone(), x, w, gradient=eq.UnrolledPhantom(), stop=stop, solver=eq.Picard()
    )
    assert solution.stats.status.tolist() == [eq.Status.NONFINITE, eq.Status.MAX_STEPS, eq.Status.MAX_STEPS]
    assert torch.equal(solution.z[0], x[0]) and bool(torch.isfinite(solution.z).all())
    solution.z.sum().backward()
    assert w.grad is not None and bool(torch.isfinite(w.grad).all()) and float(w.grad.abs()) > 0


@pytest.mark.parametrize("bad", [float("inf"), 1e38])
def test_reversible_beside_a_sample_beyond_the_range_of_squares(bad: float) -> None:
    x = inputs(torch.float32)
    x[1] = bad
    v = torch.ones_like(x)
    stop = eq.Stop(max_steps=12, on_failure="ignore")
    _, grad_w, grad_x = gradients(eq.Reversible(), x, torch.where(torch.arange(5)[:, None] == 1, 0 * v, v), stop)
    rows = torch.arange(5) != 1
    _, alone_w, alone_x = gradients(eq.Reversible(), x[rows], v[rows], stop)
    torch.testing.assert_close(grad_x[rows], alone_x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_w, alone_w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "gradient",
    [
        eq.UnrolledPhantom(checkpoint=True),
        eq.Unrolled(checkpoint="sqrt"),
        eq.Unrolled(checkpoint="recursive"),
        eq.Unrolled(depth=6, checkpoint="recursive"),
    ],
    ids=repr,
)
def test_a_replay_with_changed_weights_is_refused(gradient: eq.gradients.Gradient) -> None:
    cell = Affine(torch.float32)
    z = eq.DEQ(cell, solver=eq.Picard(), gradient=gradient)(inputs(torch.float32))
    with torch.no_grad():
        cell.w.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        z.sum().backward()


def test_a_weight_with_a_row_per_sample_beside_a_state_of_zero() -> None:
    x = torch.full((4, 4), 1e-30, dtype=torch.float64).requires_grad_()  # within atol from the start: z is zero
    w = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2
    solution = eq.fixed_point(lambda z, x, w: z @ w + x, torch.zeros(4, 4, dtype=torch.float64), x, w)
    v = torch.ones(4, 4, dtype=torch.float64)
    v[0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        (grad,) = torch.autograd.grad(solution.z, x, v)
    exact = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - w, v[1:].T).T
    torch.testing.assert_close(grad[1:], exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(grad[0], torch.zeros_like(grad[0]))


@pytest.mark.parametrize("gradient", [eq.Implicit(), eq.NeumannPhantom(steps=60, damping=1.0)], ids=repr)
def test_the_nan_cotangent_of_a_closure_is_set_aside(gradient: eq.gradients.Gradient) -> None:
    cell, x = Affine(torch.float64), inputs(torch.float64).requires_grad_()
    stop = eq.Stop(on_failure="ignore")
    solution = eq.fixed_point(lambda z: cell(z, x), torch.zeros_like(x), gradient=gradient, stop=stop)
    v = torch.ones_like(x)
    v[2, 0] = float("nan")
    (grad,) = torch.autograd.grad(solution.z, x, v)
    assert solution.adjoint is not None
    assert (solution.adjoint.status == eq.Status.NONFINITE).tolist() == [False, False, True, False, False]
    assert bool(torch.isfinite(grad).all())
