"""Samples that run away: their status, what is returned for them, and what a Fallback hands over."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import name

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


def expansive(z: Tensor) -> Tensor:
    """Fixed point -2, which plain iteration leaves by a factor of 1.5 a step."""
    return 1.5 * z + 1


def shifted(z: Tensor) -> Tensor:
    """No fixed point."""
    return z + 1


def wood(z: Tensor) -> Tensor:
    """z less the gradient of Wood's function, whose only minimum is (1, 1, 1, 1)."""
    a, b, c, d = z.unbind(1)
    gradient = (
        -400 * a * (b - a * a) - 2 * (1 - a),
        200 * (b - a * a) + 20.2 * (b - 1) + 19.8 * (d - 1),
        -360 * c * (d - c * c) - 2 * (1 - c),
        180 * (d - c * c) + 20.2 * (d - 1) + 19.8 * (b - 1),
    )
    return z - torch.stack(gradient, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_steps", [40, 200, 2000])
def test_an_expansive_map_ends_as_diverged_with_its_start(dtype: torch.dtype, max_steps: int) -> None:
    z0 = torch.zeros(3, 4, dtype=dtype)
    s = eq.fixed_point(expansive, z0, solver=eq.Picard(), stop=eq.Stop(max_steps=max_steps, on_failure="ignore"))
    assert s.stats.status.tolist() == [eq.Status.DIVERGED] * 3
    assert int(s.stats.steps.max()) <= 48  # found out early, not when the numbers end
    torch.testing.assert_close(s.z, z0)
    assert s.stats.best.tolist() == [0] * 3
    torch.testing.assert_close(s.stats.residual, torch.ones_like(s.stats.residual))


def test_divergence_is_reported_per_sample() -> None:
    """Beside samples that converge, in an order in which rows are dropped on the way."""
    gain = torch.tensor([[0.5], [1.5], [0.9], [3.0], [0.1]])
    s = eq.fixed_point(
        lambda z, x, g: g * z + x,
        torch.zeros(5, 3),
        torch.ones(5, 3),
        gain,
        solver=eq.Picard(),
        stop=eq.Stop(max_steps=500, on_failure="ignore"),
    )
    good, bad = eq.Status.CONVERGED, eq.Status.DIVERGED
    assert s.stats.status.tolist() == [good, bad, good, bad, good]
    torch.testing.assert_close(s.z[[1, 3]], torch.zeros(2, 3))
    torch.testing.assert_close(s.z[[0, 2, 4]], (1 / (1 - gain[[0, 2, 4]])).expand(3, 3), rtol=2e-2, atol=0)


@pytest.mark.parametrize("check_every", [1, 3, 20])
def test_checks_do_not_change_when_a_sample_diverged(check_every: int) -> None:
    stop = eq.Stop(max_steps=100, check_every=check_every, on_failure="ignore")
    s = eq.fixed_point(expansive, torch.zeros(2, 3), solver=eq.Picard(), stop=stop)
    once = eq.fixed_point(expansive, torch.zeros(2, 3), solver=eq.Picard(), stop=eq.Stop(max_steps=100, on_failure="ignore"))
    assert torch.equal(s.stats.status, once.stats.status) and torch.equal(s.stats.steps, once.stats.steps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton()], ids=repr)
@pytest.mark.parametrize("f", [expansive, shifted], ids=["1.5 z + 1", "z + 1"])
@pytest.mark.parametrize("max_steps", [40, 1200])
def test_growth_of_the_state_is_no_convergence(f: Any, solver: eq.Solver[Any], dtype: torch.dtype, max_steps: int) -> None:
    """Relative to a state that has grown enough any residual is small."""
    if isinstance(solver, (eq.Newton, eq.Broyden)):
        max_steps = 5
    s = eq.fixed_point(
        f, torch.zeros(2, 3, dtype=dtype), solver=solver, stop=eq.Stop(max_steps=max_steps, on_failure="ignore")
    )
    for sample in range(2):
        if s.stats.converged[sample]:
            assert f is expansive
            torch.testing.assert_close(s.z[sample], torch.full((3,), -2, dtype=dtype), rtol=2e-2, atol=0)
    if f is shifted:
        assert not bool(s.stats.converged.any())


WITHOUT_FIXED_POINT: list[Any] = [
    eq.Picard(),
    eq.Anderson(),
    eq.Broyden(),
    eq.SteadyState(),
    eq.solvers.DFSane(),
    eq.solvers.PseudoTransient(),
    eq.Fallback(eq.Picard(), eq.Anderson()),
    eq.Fallback(eq.Picard(), eq.SteadyState(), patience=1000),
    eq.Fallback(eq.Anderson(), eq.solvers.PseudoTransient()),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("coupling", [0.0, 0.4])
@pytest.mark.parametrize("solver", WITHOUT_FIXED_POINT, ids=name)
def test_no_solver_and_no_chain_converges_by_growth_alone(solver: Any, coupling: float, batch: int) -> None:
    """The answer is measured after a solve of several rows, and a chain begins again: neither forgets that a row grew."""

    def f(z: Tensor) -> Tensor:
        return z + 1 + coupling * (z.mean(dim=0) - z)

    for max_steps in (60, 120):  # the tolerance is met at a state of 99
        z0 = torch.zeros(batch, 4, dtype=torch.float64)
        s = eq.fixed_point(f, z0, solver=solver, stop=eq.Stop(rtol=1e-2, max_steps=max_steps, on_failure="ignore"))
        assert not bool(s.stats.converged.any()), (s.stats, s.z)


def test_a_state_that_grows_from_nearly_nothing_and_settles_has_converged() -> None:
    """Zero is an unstable equilibrium of tanh(2 z): the residual grows for long before it falls."""
    s = eq.fixed_point(
        lambda z: torch.tanh(2 * z + 1e-9), torch.zeros(2, 3), solver=eq.Picard(), stop=eq.Stop(atol=0, max_steps=100)
    )
    assert bool(s.stats.converged.all())
    torch.testing.assert_close(s.z, torch.full((2, 3), 0.9575), rtol=2e-3, atol=0)
    cut = eq.fixed_point(
        lambda z: torch.tanh(2 * z + 1e-9),
        torch.zeros(2, 3),
        solver=eq.Picard(),
        stop=eq.Stop(rtol=1e-6, atol=0, max_steps=int(s.stats.steps.max()), on_failure="ignore"),
    )
    assert cut.stats.status.tolist() == [eq.Status.MAX_STEPS] * 2  # on its way, with the residual falling
    torch.testing.assert_close(cut.z, torch.full((2, 3), 0.9575), rtol=2e-3, atol=0)


def test_a_slow_contraction_converges_where_it_did() -> None:
    s = eq.fixed_point(lambda z: 0.999 * z + 1, torch.zeros(1, 1), solver=eq.Picard(), stop=eq.Stop(max_steps=1000))
    assert s.stats.steps.tolist() == [694] or s.stats.steps.tolist() == [693]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", [eq.Picard(), eq.Anderson(), eq.SteadyState()], ids=repr)
def test_a_fallback_solves_what_its_last_solver_solves(first: eq.Solver[Any], dtype: torch.dtype) -> None:
    start = torch.tensor([[-3.0, -1.0, -3.0, -1.0]], dtype=dtype)
    stop = eq.Stop(rtol=1e-5, atol=1e-5, max_steps=200, on_failure="ignore")
    alone = eq.fixed_point(wood, start, solver=eq.Newton(), stop=stop)
    assert bool(alone.stats.converged.all())
    chain = eq.fixed_point(wood, start, solver=eq.Fallback(first, eq.Newton()), stop=stop)
    assert bool(chain.stats.converged.all())
    torch.testing.assert_close(chain.z, alone.z, rtol=1e-3, atol=1e-3)


def test_a_handover_says_that_a_sample_diverged_and_starts_anew() -> None:
    seen: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        seen.append(z.detach().clone())
        return expansive(z)

    chain = eq.Fallback(eq.Picard(), eq.Newton(), patience=100)
    s = eq.fixed_point(f, torch.zeros(2, 3), solver=chain, stop=eq.Stop(max_steps=200))
    assert bool(s.stats.converged.all())
    torch.testing.assert_close(s.z, torch.full((2, 3), -2.0))
    (handover,) = s.stats.handovers
    assert handover.status.tolist() == [eq.Status.DIVERGED] * 2
    assert sum(bool((z == 0).all()) for z in seen) >= 2  # the start of either


def test_divergence_is_warned_about_with_advice_and_printed() -> None:
    with pytest.warns(eq.ConvergenceWarning, match=r"2 diverged.*Advice for diverged: .*Newton"):
        s = eq.fixed_point(expansive, torch.zeros(2, 3), solver=eq.Picard(), stop=eq.Stop(max_steps=100))
    assert "2 diverged" in str(s.stats)
    with pytest.raises(eq.ConvergenceError, match="2 diverged"):
        eq.fixed_point(expansive, torch.zeros(2, 3), solver=eq.Picard(), stop=eq.Stop(max_steps=100, on_failure="raise"))


class Expansive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.5 * torch.eye(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.weight + x


def test_a_diverged_sample_keeps_finite_gradients() -> None:
    deq = eq.DEQ(Expansive(), solver=eq.Picard(), stop=eq.Stop(max_steps=100, on_failure="ignore"))
    s = deq.solve(torch.ones(2, 3))
    assert s.stats.status.tolist() == [eq.Status.DIVERGED] * 2
    s.z.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in deq.parameters() if p.grad is not None)


def test_an_adjoint_that_diverges_says_so() -> None:
    """The forward solve by Newton converges; plain iteration on the adjoint cannot."""
    deq = eq.DEQ(
        Expansive(),
        solver=eq.Newton(),
        stop=eq.Stop(max_steps=100),
        gradient=eq.Implicit(solver=eq.Picard(), stop=eq.Stop(atol=0, max_steps=100, on_failure="ignore")),
    )
    s = deq.solve(torch.ones(2, 3))
    s.z.sum().backward()
    assert s.adjoint is not None and s.adjoint.status.tolist() == [eq.Status.DIVERGED] * 2


def test_statistics_of_batches_that_converge_stay_as_they_were() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = eq.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(4, 3), solver=eq.Picard(), stop=eq.Stop())
    assert s.stats.converged.all()


@pytest.mark.parametrize(("dtype", "slowness"), [(torch.float64, 1e-5), (torch.float64, 1e-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_a_very_slow_contraction_has_not_diverged(dtype: torch.dtype, slowness: float, damping: float) -> None:
    """Its residual falls by less than a hundredth on the way to the tolerance, while the state grows a thousandfold."""
    z0, stop = torch.zeros(2, 3, dtype=dtype), eq.Stop(rtol=1e-3, max_steps=3000)
    s = eq.fixed_point(lambda z: (1 - slowness) * z + 1, z0, solver=eq.Picard(damping=damping), stop=stop)
    assert bool(s.stats.converged.all())
    residual = (1 - slowness * s.z).abs() / ((1 - slowness) * s.z + 1)
    assert float(residual.max()) <= 1.01e-3
    lost = eq.fixed_point(
        lambda z: z + 0.1, z0, solver=eq.Picard(damping=damping), stop=dataclasses.replace(stop, on_failure="ignore")
    )
    assert lost.stats.status.tolist() == [eq.Status.DIVERGED] * 2
