"""The continuous DEQ: its equilibria, a step size per sample, and the truth about what it cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call

import equilibria as eq
from equilibria._core.loop import solve
from equilibria._core.maps import Map
from equilibria.solvers.tableaus import Method
from tests.problems import TIGHT, TanhCell, affine, inputs, matrix

METHODS: tuple[Method, ...] = get_args(Method)
EVALUATIONS = {"tsit5": 6, "dopri5": 6, "bs3": 3, "heun": 2}  # a step, because the last slope is the next one's first

by_method = pytest.mark.parametrize("method", METHODS)


@by_method
@pytest.mark.parametrize("kind", ["orthogonal", "symmetric"])
def test_same_equilibrium_as_anderson(method: Method, kind: str) -> None:
    cell, x = TanhCell(12, norm=0.9, kind=kind), inputs(5, 12)
    stop = eq.Stop(rtol=1e-11, atol=0, max_steps=1000, on_failure="raise")
    with torch.no_grad():
        ours = eq.DEQ(cell, solver=eq.SteadyState(method=method), stop=stop).solve(x)
        theirs = eq.DEQ(cell, solver=eq.Anderson(), stop=stop).solve(x)
    # two residuals of 1e-11 |z|, amplified by |(I - J)^{-1}| <= 10
    torch.testing.assert_close(ours.z, theirs.z, rtol=1e-9, atol=1e-9)


@by_method
@pytest.mark.parametrize("gain", [-0.9, 0.9, -5.0, -50.0])
def test_maps_on_which_plain_iteration_oscillates_crawls_or_diverges(method: Method, gain: float) -> None:
    x = inputs(3, 4)

    def f(z: Tensor) -> Tensor:
        return gain * z + x

    stop = eq.Stop(rtol=1e-9, atol=0, max_steps=200)
    flat = solve(f, torch.zeros_like(x), eq.SteadyState(method=method), stop)
    assert bool(flat.stats.converged.all())
    torch.testing.assert_close(flat.z, x / (1 - gain), rtol=1e-7, atol=1e-7)
    plain = solve(f, torch.zeros_like(x), eq.Picard(), stop).stats
    if gain < -1:
        assert not bool(plain.converged.any())
    elif method != "heun":  # whose path, followed to 1e-3, takes its time
        assert int(flat.stats.steps.max()) < int(plain.steps.max()) / 5


@pytest.mark.parametrize("rtol", [1e-6, 1e-3, 0.1, 10.0])
def test_the_tolerance_of_the_path_does_not_limit_the_equilibrium(rtol: float) -> None:
    """By the error of the path alone, dt grows past stability and the residual stays near rtol for ever."""
    one, x = torch.eye(16, dtype=torch.float64), inputs(3, 16)
    w = matrix("symmetric", 16, 2.5) - 2.5 * one  # rates from 1 to 6
    flat = solve(lambda z: z @ w.T + x, torch.zeros_like(x), eq.SteadyState(rtol=rtol), TIGHT)
    torch.testing.assert_close(flat.z, torch.linalg.solve(one - w, x.T).T, rtol=1e-10, atol=1e-10)


def test_a_slower_clock_costs_a_step_per_factor_of_ten() -> None:
    """z + slow (f(z) - z) has the same equilibrium and path; dt grows tenfold per step until it is as much longer."""
    cell, x = TanhCell(12, norm=0.9), inputs(4, 12)

    def steps(slow: float) -> Tensor:
        lazy = lambda z: z + slow * (cell(z, x) - z)  # noqa: E731
        with torch.no_grad():
            stop = eq.Stop(rtol=1e-4 * slow, atol=0, max_steps=1000, on_failure="raise")
            return solve(lazy, torch.zeros_like(x), eq.SteadyState(), stop).stats.steps

    usual, slow, slower, slowest = (steps(10.0**-power) for power in (0, 1, 3, 5))
    for fewer, more in ((slow, slower), (slower, slowest)):
        assert int((more - fewer).max()) <= 4  # two factors of ten; 3 steps at most with 40 seeds
    # dt is bounded by twice the observed rate, or by the rate 2 if that is smaller: here only the usual clock is that fast,
    # so its steps may be almost twice as long
    assert bool((slow <= 2 * usual).all())


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_a_linear_problem_costs_the_same_at_any_scale(scale: float) -> None:
    """As the adjoint of a loss of any size: the step sizes follow the residual, whatever atol says."""
    w, x = matrix("orthogonal", 12, 0.9), inputs(3, 12)
    stop = eq.Stop(rtol=1e-9, atol=0, max_steps=400, on_failure="raise")

    def stats(scale: float) -> eq.Stats:
        return solve(lambda z: z @ w.T + scale * x, torch.zeros_like(x), eq.SteadyState(), stop).stats

    base, scaled = stats(1.0), stats(scale)
    assert bool(scaled.converged.all())
    assert int(scaled.steps.max()) <= int(base.steps.max()) + 5


@by_method
@pytest.mark.parametrize("first_step", [0.5, None])
def test_float32(method: Method, first_step: float | None) -> None:
    cell, x = TanhCell(12, norm=0.8, dtype=torch.float32), inputs(4, 12, dtype=torch.float32)
    solver = eq.SteadyState(method=method, first_step=first_step)
    with torch.no_grad():
        s = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=1e-5, atol=0, max_steps=600, on_failure="raise")).solve(x)
        beyond = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=0, atol=0, max_steps=900, on_failure="ignore")).solve(x)
    assert s.z.dtype == torch.float32
    assert float(beyond.stats.residual.max()) < 8 * torch.finfo(torch.float32).eps
    assert beyond.stats.count(eq.Status.MAX_STEPS) == 0  # out of reach is said, not looped on


def uneven() -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """Samples that need very different step sizes, and the inputs that make them so."""
    w, gain = matrix("orthogonal", 6, 0.5), torch.tensor([[0.1], [0.5], [-4.0], [-60.0]], dtype=torch.float64)
    return (lambda z, x, gain: gain * torch.tanh(z) + z @ w.T + x), inputs(4, 6), gain


@by_method
def test_a_batch_equals_its_samples_alone(method: Method) -> None:
    cell, x, gain = uneven()
    # at 1e-3 heun's error, not the stiffness of a sample, decides what is rejected, and counts can be equal by chance
    solver, stop = eq.SteadyState(method=method, rtol=0.1), eq.Stop(rtol=1e-6, atol=0, max_steps=900, on_failure="raise")
    together = eq.fixed_point(cell, torch.zeros_like(x), x, gain, solver=solver, stop=stop)
    for i in range(4):
        one = slice(i, i + 1)
        alone = eq.fixed_point(cell, torch.zeros_like(x[one]), x[one], gain[one], solver=solver, stop=stop)
        torch.testing.assert_close(together.z[one], alone.z, rtol=1e-9, atol=1e-9)
        assert together.stats.steps[i] == alone.stats.steps[0]
        assert together.stats.rejected[i] == alone.stats.rejected[0]
    # otherwise a step size given to the wrong sample would not be seen
    assert len(set(together.stats.rejected.tolist())) > 1 and len(set(together.stats.steps.tolist())) > 1


def test_a_rejected_sample_stands_still_while_the_others_go_on() -> None:
    gain, x = torch.tensor([[0.5], [-50.0]], dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    f, solver = Map(lambda z: gain * z + x), eq.SteadyState(rtol=1e-2, first_step=0.5)
    start = solver.init(f, torch.zeros_like(x))
    state = solver.step(f, start)
    assert state.rejected is not None and state.rejected.tolist() == [False, True]
    assert not torch.equal(state.z[0], start.z[0]) and float(state.dt[0]) > 0.5
    assert torch.equal(state.z[1], start.z[1]) and torch.equal(state.fz[1], start.fz[1])
    assert 0.2 * 0.5 <= float(state.dt[1]) < 0.5
    assert torch.equal(state.fz, f(state.z))


def test_the_controller_never_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = affine("orthogonal", 8, 0.9)
    for method in ("item", "__bool__", "__int__", "__float__", "tolist", "nonzero"):
        monkeypatch.setattr(Tensor, method, lambda *_: pytest.fail("a read-back"))
    f, solver = Map(problem.f), eq.SteadyState(first_step=None)
    state = solver.init(f, problem.z0)
    for _ in range(10):
        state = solver.step(f, state)


@pytest.mark.parametrize("method", ["tsit5", "bs3", "dopri5"])
def test_a_trial_that_is_not_finite_is_tried_again_shorter(method: Method) -> None:
    """dz/dt = sqrt(2) - sqrt(z): the slope is nan below 0, where the first step from 50 lands."""
    start = torch.tensor([[50.0], [3.0]], dtype=torch.float64)
    solver = eq.SteadyState(method=method, first_step=20.0)
    first = solver.step(f := Map(lambda z: z - (z.sqrt() - 2**0.5)), solver.init(f, start))
    assert first.rejected is not None and bool(first.rejected.all()) and float(first.dt[0]) == pytest.approx(4.0, rel=0.05)
    flat = solve(f.raw, start, solver, eq.Stop(rtol=1e-10, atol=0, max_steps=100, on_failure="raise"))
    torch.testing.assert_close(flat.z, torch.full_like(start, 2.0))
    assert bool((flat.stats.rejected > 0).all())


@by_method
def test_a_sample_without_any_finite_step_ends_alone(method: Method) -> None:
    start = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    edge = torch.tensor([[0.0], [-torch.inf]], dtype=torch.float64)  # the first sample's map lives on (-inf, 0] alone

    def f(z: Tensor) -> Tensor:
        return torch.where((z > edge) & torch.isfinite(edge), torch.nan, 0.5 * z + 1)

    flat = solve(f, start, eq.SteadyState(method=method), eq.Stop(rtol=1e-6, max_steps=400))
    assert flat.stats.status.tolist() == [eq.Status.NONFINITE, eq.Status.CONVERGED]
    assert float(flat.z[0]) == 0 and float(flat.stats.residual[0]) == 1
    assert 20 <= int(flat.stats.steps[0]) <= 30  # a fifth each time, from 0.5 to a rounding error
    torch.testing.assert_close(flat.z[1], torch.tensor([2.0], dtype=torch.float64), rtol=1e-5, atol=1e-5)


@by_method
@pytest.mark.parametrize("first_step", [0.5, None])
def test_evaluations(method: Method, first_step: float | None) -> None:
    cell, x = TanhCell(10, norm=0.9), inputs(3, 10)
    solver = eq.SteadyState(method=method, first_step=first_step)
    with torch.no_grad():
        stats = solve(lambda z: cell(z, x), torch.zeros_like(x), solver, eq.Stop(rtol=1e-4, max_steps=400)).stats
    assert bool(stats.converged.all())
    answer = 1  # is evaluated as a whole: rows of a plain function, which stop at different steps, may be coupled
    assert stats.evaluations == EVALUATIONS[method] * int(stats.steps.max()) + 1 + (first_step is None) + answer
    assert stats.sample_evaluations == 3 * stats.evaluations


def test_depth_counts_the_steps_taken() -> None:
    cell, x = TanhCell(10, norm=0.9), inputs(3, 10)
    f, solver = Map(lambda z: cell(z, x)), eq.SteadyState(first_step=3.0)
    moved = torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        stats = solve(f.raw, torch.zeros_like(x), solver, eq.Stop(rtol=0, atol=0, max_steps=20)).stats
        state = solver.init(f, torch.zeros_like(x))
        for _ in range(20):
            before, state = state.z, solver.step(f, state)
            moved += (state.z != before).any(dim=1)
    assert torch.equal(stats.depth, moved)
    assert torch.equal(stats.depth + stats.rejected, stats.steps)
    assert bool((stats.rejected > 0).all())


def test_depth_of_solvers_that_reject_nothing_is_their_steps() -> None:
    problem = affine("orthogonal", 6, 0.5)
    for solver in (eq.Picard(), eq.Anderson(), eq.GMRES(), eq.Fallback(eq.Picard(), eq.Newton())):
        stats = solve(problem.f, problem.z0, solver, TIGHT).stats
        assert torch.equal(stats.depth, stats.steps)


def test_depth_through_wrappers_and_chains() -> None:
    problem = affine("orthogonal", 8, 0.9)
    solver, stop = eq.SteadyState(first_step=5.0), eq.Stop(rtol=1e-8, atol=0, max_steps=300)
    plain = solve(problem.f, problem.z0, solver, stop).stats
    wrapped = solve(problem.f, problem.z0, eq.Restart(solver, every=1000), stop).stats
    assert torch.equal(plain.rejected, wrapped.rejected) and bool((plain.rejected > 0).all())
    again = solve(problem.f, problem.z0, eq.Restart(solver, every=5), stop).stats
    assert bool((again.rejected > plain.rejected).all())  # every restart begins with too long a step
    hard = affine("rotation", 8, 1.2)  # too much for plain iteration
    chain = solve(hard.f, hard.z0, eq.Fallback(eq.Picard(), solver, patience=2), stop).stats
    assert bool(chain.converged.all()) and len(chain.handovers[0].samples) == 3
    assert bool((chain.rejected > 0).all()) and bool((chain.depth < chain.steps).all())


class Coupled(nn.Module):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z - z.mean(dim=0)) + x


def test_a_whole_problem_has_one_step_size() -> None:
    x = inputs(4, 6)
    s = eq.fixed_point(Coupled(), torch.zeros_like(x), x, solver=eq.SteadyState(), batched=False)
    assert bool(s.stats.converged.all()) and s.stats.depth.shape == s.stats.steps.shape


@by_method
def test_compaction_changes_nothing_but_the_cost(method: Method) -> None:
    gain = torch.full((40, 1), 0.125, dtype=torch.float64)
    gain[::10] = 0.95
    x, w = inputs(40, 30), matrix("orthogonal", 30, 1.0)
    cell = lambda z, x, g: g * (z @ w.T) + x  # noqa: E731
    stop = eq.Stop(rtol=1e-6, atol=0, max_steps=600)
    on, off = (
        eq.fixed_point(
            cell,
            torch.zeros_like(x),
            x,
            gain,
            solver=eq.SteadyState(method=method, rtol=0.1, first_step=3.0),
            stop=dataclasses.replace(stop, compact=compact),
        )
        for compact in (True, False)
    )
    torch.testing.assert_close(on.z, off.z, rtol=1e-9, atol=1e-9)
    for part in ("steps", "rejected", "depth", "status"):
        assert torch.equal(getattr(on.stats, part), getattr(off.stats, part))
    assert on.stats.sample_evaluations < 0.8 * off.stats.sample_evaluations


@by_method
@pytest.mark.parametrize(
    "gradient", [lambda solver: eq.Implicit(solver=solver), lambda _: eq.Unrolled()], ids=["implicit", "unrolled"]
)
def test_gradcheck_of_the_layer(method: Method, gradient: Callable[[eq.SteadyState], eq.Gradient]) -> None:
    """Also through the steps: dt moves on a grid, so that the path is smooth where no step becomes another one."""
    solver, stop = eq.SteadyState(method=method, rtol=0.1), eq.Stop(rtol=1e-10, atol=0, max_steps=300)
    deq = eq.DEQ(TanhCell(2, norm=0.5), solver=solver, stop=stop, gradient=gradient(solver))
    names = [key for key, _ in deq.named_parameters()]

    def f(x: Tensor, *parameters: Tensor) -> Tensor:
        out: Tensor = functional_call(deq, dict(zip(names, parameters, strict=True)), (x,))
        return out

    args = (inputs(2, 2).requires_grad_(), *[p.detach().clone().requires_grad_() for p in deq.parameters()])
    assert gradcheck(f, args)


def test_a_graph_through_the_steps_gives_the_implicit_gradient() -> None:
    """At the end of the path; rejected steps and the choice of dt leave no nan behind."""
    cell, x = TanhCell(4, norm=0.6), inputs(3, 4).requires_grad_()
    solver, f = eq.SteadyState(first_step=4.0), Map(lambda z: cell(z, x))
    state, rejected = solver.init(f, torch.zeros_like(x)), 0
    while float((state.fz - state.z).detach().norm()) > 1e-12:
        state = solver.step(f, state)
        assert state.rejected is not None
        rejected += int(state.rejected.sum())
    assert rejected > 0
    exact = eq.DEQ(cell, stop=TIGHT)(x)
    ours, theirs = (torch.autograd.grad(z.square().sum(), [x, *cell.parameters()]) for z in (state.z, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eq.SteadyState(method="rk4"), r"method must be one of \('tsit5', .*got 'rk4'"),  # type: ignore[arg-type]
        (lambda: eq.SteadyState(rtol=-1.0), "rtol must not be negative, got -1.0"),
        (lambda: eq.SteadyState(atol=0.0), "atol must be positive, got 0.0"),
        (lambda: eq.SteadyState(first_step=0.0), "first_step must be positive and finite, got 0.0; None chooses"),
        (lambda: eq.SteadyState(first_step=math.inf), "got inf"),
        (lambda: eq.SteadyState(first_step=math.nan), "got nan"),
    ],
)
def test_settings_out_of_range_say_what_is_expected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_go_by_name() -> None:
    with pytest.raises(TypeError):
        eq.SteadyState("bs3")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        eq.SteadyState(ode_rtol=1e-3)  # type: ignore[call-arg]
