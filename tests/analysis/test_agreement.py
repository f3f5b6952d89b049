"""Comparison of gradients with the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.analysis import Agreement, dense_jacobian, gradient_agreement
from tests.problems import TIGHT, BatchNormCell, NestedCell, TanhCell, generator, inputs, matrix

# both solves to 1e-13 or better, amplified by |(I - J)^{-1}| <= 5 once for the equilibrium and once for the adjoint
SOLVED = 1e-10
LOOSE = eq.Stop(rtol=1e-3, atol=0.0, on_failure="ignore")
SEED = 11


class NoisyCell(TanhCell):
    """Draws one mask from torch's random state and one from its own generator for every solve."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = generator(5)

    def prepare(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        return x * mask + torch.randn(x.shape, dtype=x.dtype, generator=self.generator)


def layer(cell: nn.Module | None = None, stop: eq.Stop = TIGHT, **parts: Any) -> tuple[eq.DEQ, Tensor]:
    return eq.DEQ(cell or TanhCell(5), stop=stop, **parts), inputs(3, 5).requires_grad_()


def weights() -> Tensor:
    """Return the gradients of a loss that is linear in the equilibrium, so that its cotangent is constant."""
    return inputs(3, 5, seed=9)


def linear_loss(z: Tensor) -> Tensor:
    return (weights() * z).sum()


def pulled(deq: eq.DEQ, x: Tensor, cotangent: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the gradient that follows from a formula (J', v) -> u, (batch, n, n) and (batch, n, 1), by dense algebra."""
    s = deq.solve(x)
    u = cotangent(dense_jacobian(s).mT, weights().unsqueeze(2)).squeeze(2)
    targets = [*deq.parameters(), x]
    return torch.cat([g.flatten() for g in torch.autograd.grad(deq.cell(s.z.detach(), x), targets, u)])


def exact_cotangent(jt: Tensor, v: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve(torch.eye(jt.shape[1], dtype=jt.dtype) - jt, v)
    return found


def neumann_cotangent(steps: int, damping: float) -> Callable[[Tensor, Tensor], Tensor]:
    def formula(jt: Tensor, v: Tensor) -> Tensor:
        b = damping * jt + (1 - damping) * torch.eye(jt.shape[1], dtype=jt.dtype)
        return damping * sum((torch.linalg.matrix_power(b, k) @ v for k in range(steps)), torch.zeros_like(v))

    return formula


@pytest.mark.parametrize(
    ("gradient", "cotangent"),
    [
        (eq.Implicit(), exact_cotangent),
        (eq.JFB(), lambda jt, v: v),
        (eq.NeumannPhantom(steps=3, damping=0.7), neumann_cotangent(3, 0.7)),
        (eq.UnrolledPhantom(steps=3, damping=0.7), neumann_cotangent(3, 0.7)),
        (eq.NeumannPhantom(steps=40, damping=1.0), neumann_cotangent(40, 1.0)),
    ],
    ids=lambda part: repr(part) if isinstance(part, eq.Gradient) else "",  # a function's address differs between workers
)
def test_agreement_matches_the_formulas(gradient: eq.Gradient, cotangent: Callable[[Tensor, Tensor], Tensor]) -> None:
    deq, x = layer()
    (found,) = gradient_agreement(deq, x, [gradient], linear_loss)
    g, exact = pulled(deq, x, cotangent), pulled(deq, x, exact_cotangent)
    assert found.error is None and found.gradient is gradient and found.name == repr(gradient)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(g, exact, dim=0)), abs=SOLVED)
    assert found.norm_ratio == pytest.approx(float(g.norm() / exact.norm()), abs=SOLVED)
    assert found.relative_error == pytest.approx(float((g - exact).norm() / exact.norm()), abs=SOLVED)


def test_every_gradient_is_run_at_the_tolerance_of_the_layer() -> None:
    deq, x = layer(stop=LOOSE)
    (found,) = gradient_agreement(deq, (x,), [eq.Implicit()], generator=generator(SEED))
    assert 1e-8 < found.relative_error < 1e-2


def test_random_functional_is_drawn_from_the_generator_once() -> None:
    deq, x = layer()
    first, again, other = (gradient_agreement(deq, x, [eq.JFB()] * 2, generator=generator(seed)) for seed in (1, 1, 2))
    assert first[0].cosine == first[1].cosine == again[0].cosine != other[0].cosine


def test_nested_states_and_frozen_parameters_are_compared() -> None:
    deq = eq.DEQ(NestedCell(), NestedCell.zeros, stop=TIGHT)
    deq.cell.a.requires_grad_(False)  # type: ignore[attr-defined]
    found = gradient_agreement(deq, inputs(3, 4), {"exact": eq.Implicit(), "cheap": eq.JFB()})
    assert [agreement.name for agreement in found] == ["exact", "cheap"]
    assert found[0].relative_error < SOLVED < found[1].relative_error


def test_every_gradient_sees_the_same_random_numbers() -> None:
    deq, x = layer(NoisyCell(5))
    found = gradient_agreement(deq, x, [eq.Implicit(), eq.Unrolled()])
    assert all(agreement.relative_error < 1e-6 for agreement in found)  # Unrolled: of steps that end at 1e-13


def test_batch_norm_is_compared_as_one_problem() -> None:
    cell = BatchNormCell(5)
    deq, x = layer(cell)
    found = gradient_agreement(deq, x, [eq.Implicit(), eq.JFB()], linear_loss)
    assert found[0].relative_error < SOLVED and found[1].relative_error > 1e-3


def test_the_layer_is_not_modified() -> None:
    class Everything(BatchNormCell):
        def __init__(self) -> None:
            super().__init__(5)
            self.generator = generator(4)

        def prepare(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x) + torch.randn(x.shape, dtype=x.dtype, generator=self.generator)

    cell = Everything()
    warmup = eq.Warmup(first=eq.Unrolled(depth=3), then=eq.Implicit(), until=5)
    deq, x = layer(cell, stop=LOOSE, gradient=warmup)
    assert deq.solves is not None
    deq.solves += 4
    cell.inner.b.grad = torch.ones_like(cell.inner.b)
    cell.norm.eval()
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in deq.named_buffers()}
    parameters = {name: parameter.clone() for name, parameter in deq.named_parameters()}
    state, own, modes = torch.get_rng_state(), cell.generator.get_state(), [m.training for m in deq.modules()]
    gradient_agreement(deq, x, [eq.JFB(), warmup, eq.Unrolled()])
    cell.norm.train()
    gradient_agreement(deq, x, [eq.JFB(), warmup, eq.Unrolled()])
    cell.norm.eval()

    assert torch.equal(state, torch.get_rng_state()) and torch.equal(own, cell.generator.get_state())
    assert modes == [m.training for m in deq.modules()] and deq.gradient is warmup
    for name, (buffer, value, version) in buffers.items():
        assert dict(deq.named_buffers())[name] is buffer and torch.equal(buffer, value) and buffer._version == version
    for name, parameter in deq.named_parameters():
        assert torch.equal(parameter, parameters[name])
        assert (parameter.grad is None) == (parameter is not cell.inner.b)
    assert torch.equal(cell.inner.b.grad, torch.ones_like(cell.inner.b)) and x.grad is None
    assert not cell._forward_hooks and not cell._forward_pre_hooks and not x._backward_hooks


def test_warmup_uses_the_solve_count_of_the_layer() -> None:
    warmup = eq.Warmup(first=eq.JFB(), then=eq.Implicit(), until=5)
    deq, x = layer(gradient=warmup)
    assert gradient_agreement(deq, x, [warmup])[0].relative_error > 1e-3
    assert deq.solves is not None
    deq.solves += 5
    assert gradient_agreement(deq, x, [warmup])[0].relative_error < SOLVED


def test_layer_in_eval_mode_is_run_as_in_training() -> None:
    deq, x = layer(eval_stop=eq.Stop(max_steps=0, on_failure="ignore"))
    with torch.no_grad():
        (found,) = gradient_agreement(deq.eval(), x, [eq.Implicit()])
    assert found.relative_error < SOLVED and not deq.training


def test_evaluations_and_products_are_counted() -> None:
    deq, _ = layer(stop=LOOSE)
    x = inputs(1, 5).requires_grad_()  # rows that stop apart would be measured together by one evaluation more
    deq.solve(x)  # the first solve may test whether rows can be dropped
    steps = deq.solve(x).stats.evaluations
    exact, free, series = gradient_agreement(deq, x, [eq.Implicit(), eq.JFB(), eq.NeumannPhantom(steps=5)], linear_loss)
    s = deq.solve(x)
    torch.autograd.grad(linear_loss(s.z), [x])
    assert s.adjoint is not None
    assert exact.products == s.adjoint.evaluations + 1  # the last one continues to the parameters
    assert (free.evaluations, free.products) == (steps + 1, 1)
    assert (series.evaluations, series.products) == (steps + 1, 5)
    assert exact.evaluations > steps and all(agreement.seconds > 0 for agreement in (exact, free, series))


def test_recomputed_runs_are_counted() -> None:
    deq, x = layer(stop=LOOSE)
    kept, again = gradient_agreement(deq, x, [eq.UnrolledPhantom(steps=4, checkpoint=c) for c in (False, True)])
    assert kept.products == again.products == 4 and again.evaluations == kept.evaluations + 4


def test_plain_functions_are_compared_and_counted() -> None:
    w = matrix("orthogonal", 5, 0.7).requires_grad_()
    x = inputs(3, 5).requires_grad_()
    deq = eq.DEQ(lambda z, x: torch.tanh(z @ w.T + x), stop=TIGHT)
    exact, free = gradient_agreement(deq, x, [eq.Implicit(), eq.JFB()])
    assert exact.relative_error < SOLVED < free.relative_error
    assert free.evaluations > 5 and free.products == 1 and w.grad is None


def test_a_gradient_that_raises_stores_its_error() -> None:
    deq, x = layer()
    shine, reversible, exact = gradient_agreement(deq, x, [eq.Shine(), eq.Reversible(), eq.Implicit()])
    assert shine.error is not None and "take solver=eq.Broyden()" in shine.error
    assert reversible.error is not None and "take solver=eq.Picard()" in reversible.error
    assert math.isnan(shine.cosine) and math.isnan(shine.norm_ratio) and math.isnan(shine.relative_error)
    assert exact.error is None and exact.relative_error < SOLVED
    assert not deq.cell._forward_hooks  # type: ignore[attr-defined]


def test_a_solve_that_raises_stores_its_error() -> None:
    deq, x = layer(stop=eq.Stop(rtol=1e-13, max_steps=2, on_failure="raise"))
    (found,) = gradient_agreement(deq, x, [eq.JFB()])
    assert found.error is not None and "did not converge" in found.error


def test_an_unsolvable_reference_warns() -> None:
    deq = eq.DEQ(lambda z, x: 2 * z + x, solver=eq.Picard(), stop=LOOSE)
    with pytest.warns(eq.ConvergenceWarning, match=r"exact gradient.*not exact.*eq\.Newton"):
        gradient_agreement(deq, inputs(2, 3).requires_grad_(), [eq.JFB()])


def test_a_difficult_adjoint_gets_more_directions() -> None:
    """I - 3 P with a cyclic permutation P of 40 numbers has eigenvalues all around zero: GMRES(20) fails."""
    ring = torch.arange(4000).view(-1, 40).roll(1, 1).flatten()
    tight = eq.Stop(rtol=1e-12, atol=0, max_steps=300, on_failure="ignore")
    deq = eq.DEQ(lambda z, x: 3 * z[:, ring] + x, solver=eq.GMRES(restart=60), stop=tight)
    stuck, solved = eq.Implicit(stop=tight), eq.Implicit(solver=eq.GMRES(restart=60), stop=tight)
    few, many = gradient_agreement(deq, inputs(2, 4000).requires_grad_(), [stuck, solved])
    # the reference is accepted at a residual of sqrt(eps), and |(I - J)^{-1}| is 1/2 here
    assert few.relative_error > 1e-3 and many.relative_error < torch.finfo(torch.float64).eps ** 0.5


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="Neither a parameter of the DEQ nor an input requires a gradient"):
        gradient_agreement(eq.DEQ(lambda z, x: torch.cos(z)), inputs(2, 3), [eq.JFB()])
    deq, x = layer()
    with pytest.raises(TypeError, match=r"objects such as eq\.JFB\(\), got <class"):
        gradient_agreement(deq, x, [eq.JFB])  # type: ignore[list-item]


def test_agreements_print_their_numbers() -> None:
    good = Agreement(eq.JFB(), "JFB", 0.98765, 0.5, 0.25, 12, 1, 0.0321)
    assert str(good) == ("JFB: cosine 0.9877, norm ratio 0.5, relative error 0.25; 12 evaluations, 1 products, 0.032 s")
    assert str(Agreement(eq.JFB(), "JFB", math.nan, math.nan, math.nan, 0, 0, math.nan, error="why")) == "JFB: why"
