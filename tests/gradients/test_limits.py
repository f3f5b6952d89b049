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


def test_gmres_keeps_its_word_over_many_steps() -> None:
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


def test_a_cotangent_that_is_not_finite_is_told() -> None:
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
