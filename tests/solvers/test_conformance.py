"""Every solver on every problem it can solve. A new solver joins by one line in problems.ALL_SOLVERS."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria._core.loop import solve
from equilibria.solvers.fallback import AnySolver
from tests.problems import (
    ALL_SOLVERS,
    LINEAR_SOLVERS,
    NONLINEAR_SOLVERS,
    STRONG_SOLVERS,
    TIGHT,
    Problem,
    TanhCell,
    affine,
    cosine,
    inputs,
    name,
)

# residual 1e-13 |z|, amplified by |(I - W)^{-1}| <= 10 at contraction 0.9: 1e-10 leaves two orders to spare
AFFINE_TOLERANCE = 1e-10
QUIET = dataclasses.replace(TIGHT, on_failure="ignore")


def assert_solved(problem: Problem, solver: AnySolver) -> None:
    flat = solve(problem.f, problem.z0, solver, TIGHT)
    assert bool(flat.stats.converged.all())
    torch.testing.assert_close(flat.z, problem.exact, rtol=AFFINE_TOLERANCE, atol=AFFINE_TOLERANCE)


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
@pytest.mark.parametrize("kind", ["symmetric", "orthogonal"])
@pytest.mark.parametrize("n", [2, 16, 64])
def test_contraction_matches_dense_solve(solver: AnySolver, kind: str, n: int) -> None:
    assert_solved(affine(kind, n, norm=0.9), solver)


@pytest.mark.parametrize("solver", [*STRONG_SOLVERS, eq.GMRES(), eq.NormalCG()], ids=name)
@pytest.mark.parametrize("kind", ["symmetric", "orthogonal", "rotation"])
@pytest.mark.parametrize("n", [2, 8, 32])
def test_strong_solvers_where_plain_iteration_diverges(solver: AnySolver, kind: str, n: int) -> None:
    problem = affine(kind, n, norm=1.5, seed=4)
    flat = solve(problem.f, problem.z0, solver, TIGHT)
    # the gap of the spectrum to 1 is down to 1/62 for the symmetric matrix: the answer loses what the residual has not
    torch.testing.assert_close(flat.z, problem.exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", [*STRONG_SOLVERS, eq.GMRES()], ids=name)
def test_a_rotation_of_norm_one_is_solved(solver: AnySolver) -> None:
    assert_solved(affine("rotation", 6, norm=1.0), solver)


def test_plain_iteration_reports_that_it_did_not_converge() -> None:
    problem = affine("rotation", 4, norm=1.0)
    flat = solve(problem.f, problem.z0, eq.Picard(), eq.Stop(max_steps=30, trace=True))
    assert flat.stats.status.tolist() == [eq.Status.MAX_STEPS] * 3
    assert flat.stats.steps.tolist() == [30] * 3
    assert flat.stats.trace is not None
    for sample, trace in enumerate(flat.stats.trace):
        assert flat.stats.residual[sample] == trace.min()


@pytest.mark.parametrize("solver", NONLINEAR_SOLVERS, ids=name)
def test_cosine(solver: AnySolver) -> None:
    assert_solved(cosine(), solver)


@pytest.mark.parametrize("solver", NONLINEAR_SOLVERS, ids=name)
@pytest.mark.parametrize("kind", ["symmetric", "orthogonal"])
def test_tanh_layer(solver: AnySolver, kind: str) -> None:
    cell, x = TanhCell(12, norm=0.9, kind=kind), inputs(5, 12)
    with torch.no_grad():
        flat = solve(lambda z: cell(z, x), torch.zeros_like(x), solver, dataclasses.replace(TIGHT, compact=False))
    residual = (cell(flat.z, x) - flat.z).norm(dim=1) / cell(flat.z, x).norm(dim=1)
    assert bool((residual < 1e-12).all())


@pytest.mark.parametrize("solver", LINEAR_SOLVERS, ids=name)
def test_a_linear_solver_does_not_claim_what_it_has_not_solved(solver: AnySolver) -> None:
    cell, x = TanhCell(12, norm=1.5, kind="symmetric"), inputs(4, 12)
    with torch.no_grad():
        flat = solve(lambda z: cell(z, x), torch.zeros_like(x), solver, dataclasses.replace(QUIET, compact=False))
        residual = (cell(flat.z, x) - flat.z).norm(dim=1) / cell(flat.z, x).norm(dim=1)
    torch.testing.assert_close(flat.stats.residual, residual, rtol=1e-6, atol=1e-15)
    assert bool((flat.stats.converged == (residual <= TIGHT.rtol)).all())


class Counting:
    """A map that counts what really happens to it."""

    def __init__(self, f: object) -> None:
        self.f, self.calls, self.rows = f, 0, 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        self.rows += z.shape[0]
        out = self.f(z)  # type: ignore[operator]
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
def test_counted_calls_equal_real_calls(solver: AnySolver) -> None:
    problem = affine("symmetric", 8, norm=0.9)
    f = Counting(problem.f)
    stats = solve(f, problem.z0, solver, TIGHT).stats
    assert (stats.evaluations, stats.sample_evaluations) == (f.calls, f.rows)


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(solver: AnySolver, dtype: torch.dtype) -> None:
    problem = affine("symmetric", 8, norm=0.5)
    flat = solve(lambda z: problem.f(z.double()).to(dtype), problem.z0.to(dtype), solver, eq.Stop(rtol=1e-5, max_steps=200))
    assert flat.z.dtype == dtype
    torch.testing.assert_close(flat.z.double(), problem.exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
def test_a_batch_equals_its_samples_solved_one_by_one(solver: AnySolver) -> None:
    w, x = TanhCell(8, norm=0.9).w.detach(), inputs(4, 8)
    stop = eq.Stop(rtol=1e-8, atol=0.0, max_steps=500)
    together = eq.fixed_point(lambda z, x: z @ w.T + x, torch.zeros_like(x), x, solver=solver, stop=stop)
    for i in range(4):
        alone = eq.fixed_point(lambda z, x: z @ w.T + x, torch.zeros_like(x[:1]), x[i : i + 1], solver=solver, stop=stop)
        torch.testing.assert_close(together.z[i], alone.z[0], rtol=1e-9, atol=1e-12)
        assert abs(int(together.stats.steps[i] - alone.stats.steps[0])) == 0


@pytest.mark.parametrize("solver", NONLINEAR_SOLVERS, ids=name)
def test_a_nan_in_one_sample_leaves_the_others_bit_identical(solver: AnySolver) -> None:
    cell, x = TanhCell(8, norm=0.8), inputs(5, 8)
    bad = x.clone()
    bad[2] = float("nan")
    stop = eq.Stop(rtol=1e-8, max_steps=200, on_failure="ignore", compact=False)
    others = [0, 1, 3, 4]
    with torch.no_grad():
        spoilt = eq.DEQ(cell, solver=solver, stop=stop).solve(bad)
        # of the same number of rows: which sums a matrix product takes together may depend on their number
        clean = eq.DEQ(cell, solver=solver, stop=stop).solve(x)
    assert spoilt.stats.status[2] == eq.Status.NONFINITE
    assert torch.equal(spoilt.z[2], torch.zeros(8, dtype=x.dtype))  # the start: its best finite iterate
    assert torch.equal(spoilt.z[others], clean.z[others])
    assert torch.equal(spoilt.stats.steps[others], clean.stats.steps[others])


@pytest.mark.parametrize("solver", NONLINEAR_SOLVERS, ids=name)
def test_a_nan_sample_that_is_dropped_leaves_the_others_as_they_are(solver: AnySolver) -> None:
    cell, x = TanhCell(8, norm=0.8), inputs(5, 8)
    bad = x.clone()
    bad[2] = float("nan")
    others = [0, 1, 3, 4]
    with torch.no_grad():
        stop = dataclasses.replace(TIGHT, on_failure="ignore")
        spoilt = eq.DEQ(cell, solver=solver, stop=stop).solve(bad)
        clean = eq.DEQ(cell, solver=solver, stop=TIGHT).solve(x[others])
    assert spoilt.stats.converged.tolist() == [True, True, False, True, True]
    # both solved to 1e-13, which |(I - J)^-1| amplifies by up to 1 / (1 - 0.8)
    torch.testing.assert_close(spoilt.z[others], clean.z, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
def test_a_perfect_start_costs_one_evaluation(solver: AnySolver) -> None:
    problem = affine("orthogonal", 6, norm=0.5)
    stats = solve(problem.f, problem.exact, solver, eq.Stop(rtol=1e-8)).stats
    assert stats.steps.tolist() == [0, 0, 0]
    assert stats.evaluations <= 3  # a Krylov method looks once more before it answers, NormalCG also transposes


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
def test_no_steps_at_all_returns_the_start_with_its_residual(solver: AnySolver) -> None:
    problem = affine("orthogonal", 6, norm=0.5)
    flat = solve(problem.f, problem.z0, solver, eq.Stop(max_steps=0))
    assert torch.equal(flat.z, problem.z0)
    assert flat.stats.status.tolist() == [eq.Status.MAX_STEPS] * 3
    torch.testing.assert_close(flat.stats.residual, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
def test_empty_batch(solver: AnySolver) -> None:
    w = TanhCell(4).w.detach()
    flat = solve(lambda z: z @ w.T, torch.zeros(0, 4, dtype=torch.float64), solver, eq.Stop())
    assert flat.z.shape == (0, 4)
    assert flat.stats.status.shape == (0,)


@pytest.mark.parametrize("solver", ALL_SOLVERS, ids=name)
def test_settings_print_compare_and_hash(solver: AnySolver) -> None:
    namespace = {key: getattr(eq.solvers, key) for key in eq.solvers.__all__}
    assert eval(repr(solver), namespace) == solver
    assert hash(solver) == hash(eval(repr(solver), namespace))
