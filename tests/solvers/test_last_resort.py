"""TrustRegion, PseudoTransient, DFSane and Robust: what each of them promises beyond the conformance of all solvers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria._core.loop import solve
from equilibria._core.maps import Map
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.trust_region import _Model
from tests import classical
from tests.problems import TanhCell, affine, generator, inputs, name

TIGHT = eq.Stop(rtol=0.0, atol=1e-10, max_steps=300, on_failure="ignore")
NEW = [eq.solvers.TrustRegion(), eq.solvers.PseudoTransient(), eq.solvers.DFSane(), eq.Robust()]


def rosenbrock(z: Tensor) -> Tensor:
    return z - classical.extended_rosenbrock(z)


def cubic(z: Tensor) -> Tensor:
    """z - F(z), F = z³ - 2 z + 2: one root, at -1.769, and a local minimum of |F| at 0.816."""
    return z - (z**3 - 2 * z + 2)


def starts(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_a_trust_region_never_lets_the_residual_rise() -> None:
    z0 = starts([-1.2, 1.0], [5.0, -3.0])
    stats = solve(rosenbrock, z0, eq.solvers.TrustRegion(), eq.Stop(rtol=0.0, atol=1e-10, max_steps=300, keep_every=1)).stats
    lengths = torch.stack([classical.extended_rosenbrock(z).norm(dim=1) for z in (z0, *stats.iterates)])
    assert bool(stats.converged.all())
    assert len(lengths) > 5
    assert bool((lengths[1:] <= lengths[:-1]).all())


@pytest.mark.parametrize("radius", [1e-3, 0.3, 0.6, 1.0, 3.0, 1e6])
def test_the_dogleg_matches_dense_algebra(radius: float) -> None:
    g = generator(1)
    a, residual = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((5, 5), (5,)))
    gradient = a.T @ residual
    newton = torch.linalg.solve(a, residual)
    unit = gradient / gradient.norm()
    best = (unit @ a.T @ residual) / (a @ unit).square().sum()
    cauchy = best * unit
    model = _Model(*(x[None] for x in (residual, unit, a @ unit, best[None], newton, torch.zeros(5).double())))
    p, predicted, slope = (x[0] for x in model.step(torch.tensor([[radius]], dtype=torch.float64)))
    assert p.norm() <= radius * (1 + 1e-12)
    torch.testing.assert_close(predicted, (residual - a @ p).norm()[None])
    torch.testing.assert_close(slope, -2 * (residual @ a @ p / residual.square().sum())[None])
    if radius >= newton.norm():
        torch.testing.assert_close(p, newton)
    else:
        torch.testing.assert_close(p.norm(), torch.tensor(radius, dtype=torch.float64))
        clipped = cauchy * min(1.0, radius / float(cauchy.norm()))
        assert (residual - a @ p).norm() <= (residual - a @ clipped).norm() * (1 + 1e-12)


def test_a_trust_region_leaves_a_singular_start() -> None:
    def f(z: Tensor) -> Tensor:  # F = (a b, a + 2 b - 1), whose Jacobian at 0 has rank 1
        a, b = z.unbind(1)
        return z - torch.stack((a * b, a + 2 * b - 1), dim=1)

    flat = solve(f, starts([0.0, 0.0]), eq.solvers.TrustRegion(), TIGHT)
    assert bool(flat.stats.converged.all())


def test_a_trust_region_stays_where_its_model_sees_no_way_down() -> None:
    # F = z² + 1 has no root, |F| a minimum at 0
    flat = solve(
        lambda z: z - (z.square() + 1), starts([0.0]), eq.solvers.TrustRegion(), eq.Stop(max_steps=5, on_failure="ignore")
    )
    assert flat.stats.status.tolist() == [eq.Status.MAX_STEPS]
    assert flat.stats.rejected.tolist() == [5]
    assert flat.z.tolist() == [[0.0]]


@pytest.mark.parametrize("solver", NEW, ids=name)
def test_rows_of_different_difficulty_are_solved_as_alone(solver: AnySolver) -> None:
    z0 = starts([0.9, 0.8], [1.3, 1.5], [0.2, 0.1], [1.0, 1.0])

    def f(z: Tensor) -> Tensor:  # milder than Rosenbrock's
        a, b = z.unbind(1)
        return z - torch.stack((2 * (b - a.square()) + 0.5 * (a - 1), a - 1 + 0.5 * (b - 1)), dim=1)

    stop = eq.Stop(rtol=0.0, atol=1e-8, max_steps=300, on_failure="ignore")
    together = solve(f, z0, solver, stop)
    assert bool(together.stats.converged.all())
    for row in range(len(z0)):
        alone = solve(f, z0[row : row + 1], solver, stop)
        torch.testing.assert_close(together.z[row : row + 1], alone.z, rtol=1e-12, atol=1e-12)
        assert int(together.stats.steps[row]) == int(alone.stats.steps)


@pytest.mark.parametrize("solver", NEW, ids=name)
def test_a_row_that_overflows_leaves_the_others_bit_identical(solver: AnySolver) -> None:
    """Not only at the start: a neighbour whose trials are not finite has its own radius, time step and line search."""

    def f(z: Tensor) -> Tensor:  # F = log z, nan where a trial is negative
        return z - torch.log(z)

    z0 = starts([0.5, 2.0], [60.0, 1e-3], [1.5, 0.7])
    stop = eq.Stop(rtol=0.0, atol=1e-9, max_steps=60, on_failure="ignore", compact=False)
    mixed, clean = solve(f, z0, solver, stop), solve(f, z0[[0, 2]], solver, stop)
    assert torch.equal(mixed.z[[0, 2]], clean.z)
    assert torch.equal(mixed.stats.steps[[0, 2]], clean.stats.steps)


def test_a_time_step_whose_value_is_not_finite_is_tried_again() -> None:
    def f(z: Tensor) -> Tensor:
        return z - torch.log(z)

    flat = solve(f, starts([10.0]), eq.solvers.PseudoTransient(first_step=1e6), TIGHT)
    assert bool(flat.stats.converged.all())
    assert int(flat.stats.rejected) > 0
    torch.testing.assert_close(flat.z, torch.ones_like(flat.z))


def test_pseudo_transients_end_where_the_differential_equation_does() -> None:
    # dz/dt = z - z³: 0 is unstable, ±1 are stable. Newton from 0.4 goes to 0
    def f(z: Tensor) -> Tensor:
        return 2 * z - z**3

    z0 = starts([0.4], [-0.4])
    assert solve(f, z0, eq.Newton(), TIGHT).z.abs().max() < 1e-6
    torch.testing.assert_close(solve(f, z0, eq.solvers.PseudoTransient(), TIGHT).z, starts([1.0], [-1.0]))


def test_df_sane_needs_no_products_and_no_growing_memory() -> None:
    problem = affine("symmetric", 16, norm=0.95)
    solver = eq.solvers.DFSane(memory=4)
    with torch.inference_mode():
        assert solve(problem.f, problem.z0, solver, TIGHT).stats.products == 0
    f = Map(problem.f)
    state = solver.init(f, problem.z0)
    sizes = {key: value.shape for key, value in vars(state).items() if isinstance(value, Tensor)}
    for _ in range(12):
        state = solver.step(f, state)
    assert {key: vars(state)[key].shape for key in sizes} == sizes


@pytest.mark.parametrize("solver", NEW, ids=name)
def test_complex_states(solver: AnySolver) -> None:
    w = torch.randn(6, 6, dtype=torch.complex128, generator=generator(2))
    w = 0.7 * w / torch.linalg.matrix_norm(w, 2)
    x = torch.randn(3, 6, dtype=torch.complex128, generator=generator(3))
    stop = eq.Stop(rtol=1e-11, atol=0.0, max_steps=300)
    found = eq.fixed_point(lambda z, x: z @ w.T + x, torch.zeros_like(x), x, solver=solver, stop=stop).z
    exact = torch.linalg.solve(torch.eye(6, dtype=w.dtype) - w, x.T).T
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", NEW, ids=name)
def test_gradients_of_the_equilibrium(solver: AnySolver) -> None:
    cell, x = TanhCell(5, norm=0.8), inputs(2, 5).requires_grad_()
    deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=1e-12, atol=0.0, max_steps=300))
    assert torch.autograd.gradcheck(deq, (x,), rtol=1e-6, atol=1e-8)


def test_a_trust_region_in_inference_mode_is_a_clear_error() -> None:
    problem = affine("symmetric", 4, norm=0.5)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"TrustRegion.*no_grad"):
        solve(problem.f, problem.z0, eq.solvers.TrustRegion(), TIGHT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eq.solvers.TrustRegion(linear_steps=0), "TrustRegion's linear_steps must be at least 1"),
        (lambda: eq.solvers.PseudoTransient(first_step=0.0), "first_step must be positive and finite, got 0.0"),
        (lambda: eq.solvers.PseudoTransient(linear_steps=0), "PseudoTransient's linear_steps must be at least 1"),
        (lambda: eq.solvers.DFSane(memory=0), "memory must be at least 1, got 0"),
        (lambda: eq.Robust(patience=0), "patience must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
    with pytest.raises(TypeError, match="TrustRegion's linear must be a solver such as GMRES"):
        eq.solvers.TrustRegion(linear="gmres")  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", [eq.NormalCG(), eq.solvers.TrustRegion()], ids=name)
def test_a_map_that_does_not_depend_on_its_state(solver: AnySolver) -> None:
    b = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(solve(lambda z: b.clone(), torch.zeros_like(b), solver, eq.Stop()).z, b)


@dataclass(frozen=True)
class Jump(eq.Solver[eq.Iterate]):
    """Moves every sample to one place and stays there."""

    place: float

    def init(self, f: Map, z0: Tensor) -> eq.Iterate:
        return eq.Iterate(z0, f(z0))

    def step(self, f: Map, state: eq.Iterate) -> eq.Iterate:
        z = torch.full_like(state.z, self.place)
        return eq.Iterate(z, f(z), active=state.active)


def test_a_chain_solves_what_a_link_of_it_solves_from_the_start() -> None:
    # the first link lowers the residual from 19 to 0.9, in the local minimum that no trust region leaves
    start, strong, stop = (
        starts([-3.0], [0.9]),
        eq.solvers.TrustRegion(),
        eq.Stop(rtol=0.0, max_steps=15, on_failure="ignore"),
    )
    assert solve(cubic, start, strong, stop).stats.converged.tolist() == [True, False]
    assert solve(cubic, starts([0.8]), strong, stop).stats.converged.tolist() == [False]
    for chain in (eq.Fallback(Jump(0.8), strong), eq.Fallback(strong, Jump(0.8)), eq.Fallback(Jump(0.8), strong, Jump(0.8))):
        flat = solve(cubic, start, chain, stop)
        assert flat.stats.converged.tolist() == [True, False], chain
        torch.testing.assert_close(flat.z[0], torch.tensor([-1.7692923542386314], dtype=torch.float64), atol=1e-6, rtol=0.0)


def test_a_link_that_the_patience_of_its_chain_cut_short_gets_all_its_steps() -> None:
    # plain iteration at rate 0.99 makes no tenth of progress in 10 steps
    problem = affine("symmetric", 2, norm=0.99)
    stop = eq.Stop(rtol=1e-6, max_steps=3000, on_failure="ignore")
    assert bool(solve(problem.f, problem.z0, eq.Picard(), stop).stats.converged.all())
    flat = solve(problem.f, problem.z0, eq.Fallback(eq.Picard(), Jump(5.0), patience=5), stop)
    assert bool(flat.stats.converged.all())
    assert flat.stats.handovers[-1].to_solver == repr(eq.Picard())


def test_robust_costs_what_anderson_costs_where_anderson_arrives() -> None:
    x = inputs(8, 32)
    with torch.no_grad():  # each has a cell of its own: that rows stand alone is asked once per cell
        first, robust = (eq.DEQ(TanhCell(32, norm=0.95), solver=solver).solve(x) for solver in (eq.Anderson(), eq.Robust()))
    assert first.stats.evaluations == robust.stats.evaluations
    assert torch.equal(first.z, robust.z)
    assert robust.stats.handovers == ()


def test_a_root_is_found_to_its_own_tolerance_and_differentiated() -> None:
    a = torch.tensor([[4.0], [9.0]], dtype=torch.float64, requires_grad=True)
    solution = eq.root(lambda z, a: z.square() - a, torch.full_like(a, 100.0).detach(), a)
    assert bool(solution.stats.converged.all())
    assert bool(((solution.z.detach().square() - a.detach()).abs() <= 1e-6).all())
    solution.z.sum().backward()
    torch.testing.assert_close(a.grad, 0.5 / solution.z.detach(), rtol=1e-5, atol=0.0)


def test_roots_of_modules_and_of_nested_states() -> None:
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.add_(2 * torch.eye(3))
    z = eq.root(linear, torch.zeros(2, 3, dtype=torch.float64)).z
    z.sum().backward()
    torch.testing.assert_close(linear(z.detach()), torch.zeros_like(z.detach()), rtol=0, atol=1e-6)
    expected = -torch.linalg.solve(linear.weight.detach().T, torch.full((3,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(linear.bias.grad, expected, rtol=1e-4, atol=1e-6)

    def pair(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": z["a"] - 2 * z["b"], "b": z["a"] * z["b"] - 8}

    found = eq.root(pair, {"a": torch.ones(1, 2).double(), "b": torch.ones(1, 2).double()}).z
    torch.testing.assert_close(found["a"].abs(), torch.full((1, 2), 4.0).double())
