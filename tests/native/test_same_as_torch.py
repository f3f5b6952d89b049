"""Native solves compared with the same solves in torch: equal statuses and steps, answers equal up to rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria import native
from equilibria._core.loop import solve
from equilibria.solution import SolveResult
from tests.native.choice import can_run
from tests.problems import FlatMap, TanhCell, affine, cosine, generator, inputs, matrix, name

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason() or "native")

ITERATIONS = [
    eq.Picard(),
    eq.Picard(damping=0.3),
    eq.Anderson(),
    eq.Anderson(history=3, damping=0.8, ridge=1e-8),
    eq.Anderson(history=1),
    eq.Anderson(budget=1),
    eq.Broyden(),
    eq.Broyden(history=3),
]
SOLVERS: list[Any] = [*ITERATIONS, eq.GMRES(), eq.GMRES(restart=3), eq.GMRES(budget=1)]
STOP = eq.Stop(rtol=1e-7, atol=1e-9, max_steps=60, on_failure="ignore")
# Broyden and restarted GMRES amplify rounding where they stagnate: by 20 steps to 6e-13, by 60 to 6e-9, over 20 seeds
SHORT = dataclasses.replace(STOP, max_steps=20)
# rounding, as the steps amplify it; far below the residuals of 1e-7 that answers have
AGREEMENT = {torch.float64: 1e-10, torch.float32: 1e-3}


def both(f: FlatMap, z0: Tensor, solver: Any, stop: eq.Stop, **options: Any) -> tuple[SolveResult, SolveResult]:
    """Return the results of native steps and of torch steps."""
    assert can_run(z0, solver, stop)
    with torch.no_grad():
        found = solve(f, z0, solver, stop, **options)
        with native.disabled():
            assert not can_run(z0, solver, stop)
            expected = solve(f, z0, solver, stop, **options)
    return found, expected


def assert_same(found: SolveResult, expected: SolveResult) -> None:
    a, b = found.stats, expected.stats
    assert a.status.tolist() == b.status.tolist()
    assert a.steps.tolist() == b.steps.tolist()
    assert a.best.tolist() == b.best.tolist() and a.rejected.tolist() == b.rejected.tolist()
    assert (a.evaluations, a.sample_evaluations, a.products) == (b.evaluations, b.sample_evaluations, b.products)
    tolerance = AGREEMENT[found.z.dtype]
    torch.testing.assert_close(found.z, expected.z, rtol=tolerance, atol=tolerance)
    assert a.status.dtype == b.status.dtype and a.steps.dtype == b.steps.dtype


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@pytest.mark.parametrize("kind", ["symmetric", "orthogonal"])
@pytest.mark.parametrize("n", [1, 3, 16, 65, 130])
def test_contractions_match_torch(solver: Any, kind: str, n: int) -> None:
    problem = affine(kind, n, norm=0.9)
    assert_same(*both(problem.f, problem.z0, solver, STOP if isinstance(solver, (eq.Picard, eq.Anderson)) else SHORT))


# GMRES with few directions is left out: it stagnates here, and rounding decides which iterate is the best
@pytest.mark.parametrize("solver", [*ITERATIONS, eq.GMRES()], ids=name)
@pytest.mark.parametrize("kind", ["symmetric", "orthogonal", "rotation"])
def test_expanding_maps_match_torch(solver: Any, kind: str) -> None:
    problem = affine(kind, 8, norm=1.5, seed=4)
    assert_same(*both(problem.f, problem.z0, solver, dataclasses.replace(STOP, max_steps=25)))


@pytest.mark.parametrize("solver", ITERATIONS, ids=name)
def test_cosine_matches_torch(solver: Any) -> None:
    problem = cosine()
    assert_same(*both(problem.f, problem.z0, solver, STOP))


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_a_given_scale_matches_torch(solver: Any) -> None:
    problem = affine("orthogonal", 100, norm=0.7, batch=5)
    scale = torch.linspace(0.1, 3.0, 5, dtype=torch.float64)
    assert_same(*both(problem.f, problem.z0, solver, dataclasses.replace(STOP, atol=0.0), scale=scale, verify=False))


@pytest.mark.parametrize("norm", [eq.stop.rms_norm, eq.stop.euclidean_norm])
@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize("rtol", [1e-4, 0.0])
def test_every_kind_of_stop_matches_torch(norm: Any, patience: int | None, rtol: float) -> None:
    cell, x = TanhCell(12, norm=1.3, kind="orthogonal"), inputs(6, 12)
    # after 25 steps no row is as near as rounding, which decides whether a residual is exactly 0 and what is an improvement
    stop = eq.Stop(rtol=rtol, atol=0.0, norm=norm, patience=patience, max_steps=25, on_failure="ignore", compact=False)
    with torch.no_grad():
        for solver in (eq.Picard(damping=0.5), eq.Broyden(history=2)):
            assert_same(*both(lambda z: cell(z, x), torch.zeros_like(x), solver, stop))


@pytest.mark.parametrize("solver", ITERATIONS, ids=name)
@pytest.mark.parametrize("compact", [True, False])
def test_nonfinite_and_divergent_samples_match_torch(solver: Any, compact: bool) -> None:
    cell, x = TanhCell(8, norm=0.8), inputs(7, 8)
    x[2], x[5, 3] = float("nan"), float("nan")
    gain = torch.ones(7, 1, dtype=torch.float64)
    gain[4] = 40.0

    def f(z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return torch.where(gain > 1, gain * z + 1 + 0 * x, cell(z, x))

    stop = dataclasses.replace(STOP, compact=compact)
    with torch.no_grad():
        found = eq.fixed_point(f, torch.zeros_like(x), x, gain, solver=solver, stop=stop)
        with native.disabled():
            expected = eq.fixed_point(f, torch.zeros_like(x), x, gain, solver=solver, stop=stop)
    a, b = found.stats, expected.stats
    assert a.status.tolist() == b.status.tolist() and a.steps.tolist() == b.steps.tolist()
    assert a.status[2] == a.status[5] == eq.Status.NONFINITE
    torch.testing.assert_close(found.z, expected.z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@pytest.mark.parametrize("max_steps", [0, 1, 2])
def test_few_steps_return_the_best_iterate(solver: Any, max_steps: int) -> None:
    problem = affine("orthogonal", 6, norm=0.5)
    assert_same(*both(problem.f, problem.z0, solver, dataclasses.replace(STOP, max_steps=max_steps)))


def test_a_nonfinite_start_matches_torch() -> None:
    z0 = torch.zeros(3, 4, dtype=torch.float64)
    z0[1, 2] = float("nan")
    found, expected = both(lambda z: 0.5 * z + 1, z0, eq.Anderson(), STOP)
    assert_same(found, expected)
    assert torch.equal(found.z[1], torch.zeros(4, dtype=torch.float64))


def test_gmres_beyond_its_residual_refresh_matches_torch() -> None:
    w = matrix("symmetric", 300, norm=0.9999)
    x = torch.randn(2, 300, dtype=torch.float64, generator=generator(3))
    stop = eq.Stop(rtol=1e-9, atol=0.0, max_steps=150, on_failure="ignore")
    found, expected = both(lambda z: z @ w.T + x[: len(z)], torch.zeros_like(x), eq.GMRES(restart=5), stop)
    assert found.stats.steps.tolist() == expected.stats.steps.tolist() and int(found.stats.steps.max()) > 100


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    n=st.integers(1, 90) | st.integers(505, 520) | st.integers(1030, 1100),
    batch=st.integers(1, 9),
    solver=st.sampled_from(ITERATIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    gain=st.floats(0.1, 0.9),
    seed=st.integers(0, 999),
    transposed=st.booleans(),
)
def test_any_shape_matches_torch(
    n: int, batch: int, solver: Any, dtype: torch.dtype, gain: float, seed: int, transposed: bool
) -> None:
    """The map is elementwise, so its values do not depend on the shape or order of the batch."""
    draw = generator(seed)
    slope = (gain * (2 * torch.rand(n, generator=draw, dtype=torch.float64) - 1)).to(dtype)
    x = torch.randn(batch, n, generator=draw, dtype=torch.float64).to(dtype)
    z0 = torch.randn(n, batch, generator=draw, dtype=torch.float64).to(dtype).T if transposed else torch.zeros_like(x)

    def f(z: Tensor) -> Tensor:
        out = slope * torch.sin(z) + x[: len(z)]
        return out.T.contiguous().T if transposed else out

    stop = eq.Stop(rtol=1e-3, atol=1e-6, max_steps=40, on_failure="ignore", compact=False)
    found, expected = both(f, z0, solver, stop)
    assert found.stats.status.tolist() == expected.stats.status.tolist()
    assert bool(((found.stats.steps - expected.stats.steps).abs() <= (dtype == torch.float32)).all())
    torch.testing.assert_close(found.z, expected.z, rtol=1e-2 if dtype == torch.float32 else 1e-10, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_match_torch(dtype: torch.dtype) -> None:
    cell, x = TanhCell(20, norm=0.9, dtype=dtype), inputs(6, 20).to(dtype)
    layer = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5, max_steps=100))

    def gradients() -> list[Tensor]:
        with eq.record(layer) as solutions:
            found = torch.autograd.grad(layer(x).square().sum(), list(cell.parameters()))
        assert solutions[0].adjoint is not None and bool(solutions[0].adjoint.converged.all())
        return list(found)

    found = gradients()
    with native.disabled():
        expected = gradients()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
