"""Steps that are taken in training only, and steps of Newton's method that are unrolled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import equilibria as eq
from equilibria.analysis.memory import peak_memory
from tests.problems import TIGHT, TanhCell, inputs


@pytest.mark.parametrize(
    ("gradient", "steps"), [(eq.JFB(training_only=True), 1), (eq.UnrolledPhantom(steps=5, training_only=True), 5)]
)
def test_steps_of_training_alone_are_not_taken_in_evaluation(gradient: eq.Gradient, steps: int) -> None:
    # one sample: several that stop at different steps are evaluated once more together, in training by the gradient itself
    cell, x = TanhCell(6, norm=0.8), inputs(1, 6)
    loose = eq.Stop(rtol=1e-2, atol=0.0)
    deq = eq.DEQ(cell, gradient=gradient, stop=loose)
    plain = eq.DEQ(cell, gradient=eq.Implicit(), stop=loose)
    with torch.no_grad():
        s, reference = deq.solve(x), plain.solve(x)
    torch.testing.assert_close(s.z, reference.z, rtol=0.0, atol=0.0)
    assert s.stats.evaluations == reference.stats.evaluations and s.stats.extra_steps == 0
    trained = deq.solve(x)
    assert trained.stats.evaluations == reference.stats.evaluations + steps and trained.stats.extra_steps == steps
    assert not torch.equal(trained.z, reference.z)


@pytest.mark.parametrize("gradient", [eq.JFB, eq.UnrolledPhantom])
def test_gradients_do_not_depend_on_where_else_the_steps_are_taken(
    gradient: Callable[..., eq.Gradient],
) -> None:
    cell, x = TanhCell(6, norm=0.8), inputs(3, 6)
    found = [
        torch.autograd.grad(eq.DEQ(cell, gradient=g, stop=TIGHT)(x).square().sum(), list(cell.parameters()))
        for g in (gradient(), gradient(training_only=True))
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)


def test_unrolled_newton_gives_the_gradient_to_its_last_residual_but_one() -> None:
    """The derivative of a step contains that of the Jacobian's inverse, multiplied by the residual before the step."""
    cell, x = TanhCell(4, norm=0.9), inputs(1, 4)
    exact = torch.autograd.grad(eq.DEQ(cell, stop=TIGHT)(x).square().sum(), list(cell.parameters()))

    def unrolled(steps: int) -> eq.Solution:
        stop = replace(TIGHT, max_steps=steps, on_failure="ignore")
        return eq.DEQ(cell, solver=eq.Newton(linear="dense"), gradient=eq.Unrolled(), stop=stop).solve(x)

    needed = int(unrolled(100).stats.steps.max())
    for steps in range(3, needed + 1):
        z, before = unrolled(steps).z, unrolled(steps - 1).z
        residual = float((cell(before, x) - before).detach().norm())
        for a, b in zip(torch.autograd.grad(z.square().sum(), list(cell.parameters())), exact, strict=True):
            # |d(I - J)^-1| <= 100 |tanh''| and |2 z| <= 4; 27 was the largest ratio with 40 seeds
            assert float((a - b).abs().max()) <= 400 * residual + 1e-10
    assert residual < 1e-4  # convergence was quadratic: so the gradient of the last step is close


def test_unrolled_newton_keeps_every_step() -> None:
    cell, x = TanhCell(4, norm=0.9), inputs(2, 4)
    newton = eq.Newton(linear="dense")
    deq = eq.DEQ(cell, solver=newton, gradient=eq.Unrolled(), stop=TIGHT)
    implicit = eq.DEQ(cell, solver=newton, gradient=eq.Implicit(stop=TIGHT), stop=TIGHT)

    def step(layer: eq.DEQ) -> int:
        return peak_memory(lambda: layer(x).square().sum().backward(), x.device)

    assert step(deq) > 2 * step(implicit)  # the drawback: n runs of the cell are kept for every step


def test_dense_newton_solves_what_newton_krylov_solves() -> None:
    cell, x = TanhCell(5, norm=0.95), inputs(4, 5)
    found = [eq.DEQ(cell, solver=solver, stop=TIGHT).solve(x) for solver in (eq.Newton(linear="dense"), eq.Newton())]
    assert all(bool(s.stats.converged.all()) for s in found)
    for s in found:
        torch.testing.assert_close(cell(s.z, x), s.z, rtol=1e-10, atol=1e-10)
    with pytest.raises(TypeError, match='such as GMRES\\(\\) or "dense"'):
        eq.Newton(linear="exact")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='Newton\\(linear="dense"\\)'):
        eq.DEQ(cell, solver=eq.Newton(), gradient=eq.Unrolled())(x)


def test_recursive_checkpoints_of_small_states_grow_with_the_logarithm() -> None:
    x = inputs(2, 4)

    def peak(depth: int, checkpoint: str) -> int:
        network = eq.WeightTied(TanhCell(4), depth, checkpoint=checkpoint)  # type: ignore[arg-type]
        network(x).sum().backward()
        return peak_memory(lambda: network(x).sum().backward(), x.device)

    small, large = peak(16, "recursive"), peak(256, "recursive")
    assert large < 2.5 * small  # 4 and 8 levels


def test_broyden_takes_the_memory_it_says() -> None:
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))

    def f(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(z, 1, dims=1) * 0.99 + x

    for history in (12, 20):
        stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=60, on_failure="ignore")
        deq = eq.DEQ(f, solver=eq.Broyden(history=history), stop=stop)
        with torch.no_grad():
            states = peak_memory(lambda deq=deq: deq(x), x.device) / (x.numel() * x.element_size())  # type: ignore[misc]
        assert states < 3.5 * history + 12
