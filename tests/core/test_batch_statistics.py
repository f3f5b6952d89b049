"""Cells with norms: which of them make samples depend on each other, and what is refused because of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq

GRADIENTS = [eq.Implicit(), eq.Shine(), eq.Reversible(), eq.Unrolled(), eq.JFB(), eq.NeumannPhantom()]


class NormCell(nn.Module):
    """tanh(norm(z W') + x), contractive; states of shape (batch, 6)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        w = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.w, self.norm = nn.Parameter(0.4 * w / torch.linalg.matrix_norm(w, 2)), norm.double()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = z @ self.w.T
        if isinstance(self.norm, nn.InstanceNorm1d):
            y = 0.1 * self.norm(y.reshape(-1, 2, 3)).reshape(-1, 6)
        else:
            y = self.norm(y)
        return torch.tanh(y + x)


def layer(norm: nn.Module, gradient: eq.gradients.Gradient, rtol: float = 1e-3) -> eq.DEQ:
    solver: eq.Solver[Any] = eq.Anderson()
    if isinstance(gradient, (eq.Shine, eq.Reversible)):
        solver = eq.Broyden() if isinstance(gradient, eq.Shine) else eq.Picard()
    return eq.DEQ(NormCell(norm), solver=solver, gradient=gradient, stop=eq.Stop(rtol=rtol, max_steps=100))


def samples(batch: int) -> Tensor:
    """Of different difficulty, so that some stop before others."""
    x = torch.randn(batch, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x * torch.logspace(-4, 0.5, batch, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("gradient", GRADIENTS, ids=repr)
def test_batch_norm_in_eval_mode_couples_nothing(gradient: eq.gradients.Gradient, batch: int) -> None:
    deq = layer(nn.BatchNorm1d(6), gradient).eval()
    x = samples(batch).requires_grad_()
    solution = deq.solve(x)
    assert bool(solution.stats.converged.all())
    (grad,) = torch.autograd.grad(solution.z.sum(), x)
    for i in range(batch):
        alone = x[i : i + 1].detach().requires_grad_()
        z = deq(alone)
        torch.testing.assert_close(z[0], solution.z[i], rtol=5e-3, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(z.sum(), alone)[0][0], grad[i], rtol=5e-2, atol=1e-3)


def test_shine_with_batch_norm_in_eval_mode_comes_near_the_exact_gradient() -> None:
    norm = nn.BatchNorm1d(6)
    x = samples(4).requires_grad_()
    exact = torch.autograd.grad(layer(norm, eq.Implicit(), rtol=1e-10).eval()(x).sum(), x)[0]
    shine = torch.autograd.grad(layer(norm, eq.Shine(refine=6), rtol=1e-10).eval()(x).sum(), x)[0]
    torch.testing.assert_close(shine, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradient", [eq.Shine(), eq.Reversible()], ids=repr)
def test_instance_norm_couples_nothing_in_any_mode(gradient: eq.gradients.Gradient, training: bool) -> None:
    deq = layer(nn.InstanceNorm1d(2, eps=1.0), gradient).train(training)
    solution = deq.solve(samples(5).requires_grad_())
    solution.z.sum().backward()
    assert bool(solution.stats.converged.all())


@pytest.mark.parametrize("gradient", [eq.Shine(), eq.Reversible()], ids=repr)
@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_are_refused_in_any_mode(gradient: eq.gradients.Gradient, training: bool) -> None:
    deq = layer(nn.BatchNorm1d(6, track_running_stats=training), gradient).train(training)
    with pytest.raises(TypeError, match=r"no batch statistics.*Take\s+eq\.Implicit"):
        deq(samples(4))
