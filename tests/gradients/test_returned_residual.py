"""Gradients that return a few steps from the equilibrium: which state the statistics describe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import inputs


class Repelling(nn.Module):
    """z -> -3 z + x: plain steps lead away from the equilibrium."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return -3 * z + x


CASES = [
    (eq.JFB(), 1),
    (eq.UnrolledPhantom(steps=4, damping=1.0), 4),
    (eq.Warmup(first=eq.JFB(), then=eq.Implicit(), until=10), 1),
    (eq.Implicit(), 0),
    (eq.NeumannPhantom(), 0),
]


@pytest.mark.parametrize(("gradient", "steps"), CASES, ids=lambda case: repr(case))
@pytest.mark.parametrize("training", [True, False])
def test_the_residual_of_what_is_returned_can_be_measured(gradient: eq.Gradient, steps: int, training: bool) -> None:
    x = inputs(4, 6)
    deq = eq.DEQ(Repelling(), solver=eq.Anderson(), stop=eq.Stop(rtol=1e-4), gradient=gradient).train(training)
    s = deq.solve(x)
    fz = -3 * s.z.detach() + x
    seen = torch.linalg.vector_norm(fz - s.z.detach(), dim=1) / torch.linalg.vector_norm(fz, dim=1)
    torch.testing.assert_close(s.measure_residual(), seen, rtol=1e-6, atol=1e-12)
    assert s.stats.extra_steps == steps
    assert (f"before {steps} extra" in str(s.stats)) == (steps > 0)
    if not steps:
        torch.testing.assert_close(s.stats.residual, seen, rtol=1e-6, atol=1e-12)
        return
    # every step multiplies the residual by 3: the statistics describe the equilibrium before them, and say so
    z = s.z.detach()
    for _ in range(steps):
        z = (x - z) / 3
    fz = -3 * z + x
    before = torch.linalg.vector_norm(fz - z, dim=1) / torch.linalg.vector_norm(fz, dim=1)
    torch.testing.assert_close(s.stats.residual, before, rtol=1e-3, atol=1e-12)


def test_measuring_needs_no_gradient_and_keeps_the_shape_of_nested_states() -> None:
    x = inputs(3, 4)

    def cell(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * z[0] + x, 0.3 * z[1] + z[0]

    start = (torch.zeros_like(x), torch.zeros_like(x))
    s = eq.fixed_point(cell, start, x, gradient=eq.JFB(), stop=eq.Stop(rtol=1e-6))
    residual = s.measure_residual()
    assert residual.shape == (3,) and not residual.requires_grad
    assert float(residual.max()) <= 1e-6
