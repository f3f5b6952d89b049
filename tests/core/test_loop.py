"""The loop: status, steps, residuals, counts, freezing, compaction, checks, traces."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria._core.loop import solve
from equilibria.solvers import anderson
from tests.problems import TanhCell, affine, generator, inputs, matrix


class Gain(nn.Module):
    """z -> gain z + x: the gain of a sample sets how many steps plain iteration needs."""

    def forward(self, z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return gain * z + x


def mixed(batch: int = 40) -> tuple[Tensor, Tensor]:
    """Nine samples in ten need 5 steps of plain iteration to 1e-4, one needs 60."""
    gain = torch.full((batch, 1), 0.125, dtype=torch.float64)
    gain[::10] = 0.888
    return torch.ones(batch, 3, dtype=torch.float64), gain


def test_statistics_are_per_sample() -> None:
    x, gain = mixed()
    gain[3], gain[4] = 2.0, float("nan")
    s = eq.DEQ(Gain(), solver=eq.Picard(), stop=eq.Stop(rtol=1e-4, max_steps=80, on_failure="ignore")).solve(x, gain)
    assert s.stats.status[3] == eq.Status.DIVERGED
    assert s.stats.status[4] == eq.Status.NONFINITE
    assert int(s.stats.converged.sum()) == 38
    assert bool((s.stats.steps[gain.squeeze(1) == 0.125] == 5).all() | (s.stats.steps[gain.squeeze(1) == 0.125] == 4).all())
    fz = gain * s.z + x
    true = (fz - s.z).norm(dim=1) / fz.norm(dim=1)
    finite = torch.isfinite(true)
    torch.testing.assert_close(s.stats.residual[finite], true[finite])


def test_diverging_samples_report_their_status_and_stay_finite() -> None:
    """z -> 2z + 1 overflows float32 after 128 steps: it is found out long before."""

    def f(z: Tensor) -> Tensor:
        return 2 * z + 1

    z0 = torch.zeros(1, 1)
    short = solve(f, z0, eq.Picard(), eq.Stop(max_steps=30))
    long = solve(f, z0, eq.Picard(), eq.Stop(max_steps=300))
    assert short.stats.status.tolist() == long.stats.status.tolist() == [eq.Status.DIVERGED]
    assert int(long.stats.steps) < 30
    for flat in (short, long):
        assert bool(torch.isfinite(flat.z).all())
        torch.testing.assert_close(flat.stats.residual, ((f(flat.z) - flat.z) / f(flat.z)).abs().squeeze(1))


def test_best_finite_iterate_survives_a_late_nan() -> None:
    calls = [0]

    def f(z: Tensor) -> Tensor:
        calls[0] += 1
        out = torch.tanh(0.5 * z + 1)
        if calls[0] > 4:
            out[1] = float("nan")
        return out

    flat = solve(f, torch.zeros(2, 3), eq.Picard(), eq.Stop(rtol=1e-6, max_steps=50))
    assert flat.stats.status.tolist() == [eq.Status.CONVERGED, eq.Status.NONFINITE]
    reference = torch.zeros(3)
    for _ in range(3):
        reference = torch.tanh(0.5 * reference + 1)
    torch.testing.assert_close(flat.z[1], reference)  # the last iterate whose value was finite
    assert flat.stats.evaluations < 30  # the bad sample does not keep the others running


def test_a_start_that_is_not_finite() -> None:
    z0 = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]])
    flat = solve(lambda z: 0.5 * z, z0, eq.Picard(), eq.Stop())
    assert flat.stats.status.tolist() == [eq.Status.NONFINITE, eq.Status.CONVERGED]
    assert bool(torch.isfinite(flat.z).all())


def test_equilibrium_zero_is_found_by_the_absolute_tolerance() -> None:
    """Relative to |f(z)| = |z| / 2 the residual stays 1: only atol can tell, and the later iterates are better."""
    z0 = torch.ones(2, 3)
    done = solve(lambda z: 0.5 * z, z0, eq.Picard(), eq.Stop(atol=1e-6))
    assert bool(done.stats.converged.all()) and float(done.z.abs().max()) < 3e-6
    cut = solve(lambda z: 0.5 * z, z0, eq.Picard(), eq.Stop(atol=1e-6, max_steps=5))
    torch.testing.assert_close(cut.z, z0 / 32)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(history=3), eq.Broyden(history=3)], ids=repr)
def test_converged_samples_stop_costing(solver: eq.Solver[Any]) -> None:
    x, gain = mixed()
    deq = eq.DEQ(Gain(), solver=solver, stop=eq.Stop(rtol=1e-4, atol=0, max_steps=200))
    together = deq.solve(x, gain).stats
    alone = [deq.solve(x[i : i + 1], gain[i : i + 1]).stats.sample_evaluations for i in range(len(x))]
    assert together.sample_evaluations <= 1.3 * sum(alone)


def test_five_and_sixty_steps() -> None:
    x, gain = mixed(200)
    deq = eq.DEQ(Gain(), solver=eq.Picard(), stop=eq.Stop(rtol=1e-4, atol=0, max_steps=200))
    stats = deq.solve(x, gain).stats
    assert sorted(set(stats.steps.tolist())) == [5, 60]
    needed = int((stats.steps + 1).sum())
    assert stats.sample_evaluations <= 1.3 * needed


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton(), eq.GMRES()], ids=repr)
def test_compaction_changes_nothing_but_the_cost(solver: eq.Solver[Any]) -> None:
    _, gain = mixed()
    x, w = inputs(40, 30), matrix("orthogonal", 30, 1.0)
    cell = lambda z, x, g: g * (z @ w.T) + x  # noqa: E731
    stop = eq.Stop(rtol=1e-9, atol=0, max_steps=300)
    on, off = (
        eq.fixed_point(cell, torch.zeros_like(x), x, gain, solver=solver, stop=dataclasses.replace(stop, compact=compact))
        for compact in (True, False)
    )
    torch.testing.assert_close(on.z, off.z, rtol=1e-13, atol=1e-13)
    assert torch.equal(on.stats.steps, off.stats.steps)
    assert torch.equal(on.stats.status, off.stats.status)
    assert on.stats.sample_evaluations <= off.stats.sample_evaluations


class BatchMean(nn.Module):
    """Couples the samples in a way no inspection of modules finds."""

    def forward(self, z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return gain * z + x + 0.05 * z.mean(dim=0, keepdim=True)


def test_coupled_samples_are_found_out_and_warned_about_once() -> None:
    x, gain = mixed()
    deq = eq.DEQ(BatchMean(), solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=300))
    with pytest.warns(UserWarning, match="if the other rows are left out"):
        s = deq.solve(x, gain)
    assert s.stats.sample_evaluations >= 40 * int(s.stats.steps.max())
    # a sample that stopped early is moved by its neighbours afterwards: what is reported was looked at again
    fz = deq.cell(s.z, x, gain)
    residual = (fz - s.z).norm(dim=1) / fz.norm(dim=1)
    torch.testing.assert_close(s.stats.residual, residual, rtol=1e-6, atol=1e-12)
    assert bool(s.stats.converged.all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deq.solve(x, gain)


def test_a_closure_over_the_batch_is_not_compacted_and_gives_no_warning() -> None:
    x, gain = mixed()
    s = eq.fixed_point(
        lambda z: gain * z + x, torch.zeros_like(x), solver=eq.Picard(), stop=eq.Stop(rtol=1e-4, max_steps=200)
    )
    assert bool(s.stats.converged.all())
    torch.testing.assert_close(s.z, (x / (1 - gain)), rtol=2e-3, atol=2e-3)


def test_an_input_that_only_looks_batch_leading() -> None:
    """As many samples as features: the weight matrix passed as an input must not lose rows to compaction."""
    n = 6
    w, x = matrix("symmetric", n, 0.9), inputs(n, n)
    x[3:] *= 1e-9  # done at once in absolute terms
    with pytest.warns(UserWarning, match="if the other rows are left out"):
        s = eq.fixed_point(
            lambda z, w, x: z @ w.T + x,
            torch.zeros_like(x),
            w,
            x,
            solver=eq.Picard(),
            stop=eq.Stop(rtol=1e-9, atol=1e-7, max_steps=500),
        )
    torch.testing.assert_close(s.z, torch.linalg.solve(torch.eye(n).double() - w, x.T).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_checking_less_often_gives_the_same_result(every: int) -> None:
    x, gain = mixed()
    stop = eq.Stop(rtol=1e-6, atol=0, max_steps=300, check_every=every)
    s = eq.DEQ(Gain(), solver=eq.Anderson(history=2), stop=stop).solve(x, gain)
    reference = eq.DEQ(Gain(), solver=eq.Anderson(history=2), stop=dataclasses.replace(stop, check_every=1)).solve(x, gain)
    torch.testing.assert_close(s.z, reference.z, rtol=1e-13, atol=1e-13)
    assert torch.equal(s.stats.steps, reference.stats.steps)
    assert torch.equal(s.stats.status, reference.stats.status)
    assert s.stats.evaluations <= reference.stats.evaluations + every


def test_the_loop_reads_back_at_most_once_per_check(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = affine("orthogonal", 70, 0.9, batch=4)
    reads = [0]
    for method in ("item", "__bool__", "__int__", "__float__", "tolist"):
        original = getattr(Tensor, method)

        def counted(self: Tensor, *args: Any, original: Any = original) -> Any:
            reads[0] += 1
            return original(self, *args)

        monkeypatch.setattr(Tensor, method, counted)
    # as on a device that must be waited for: on the CPU Anderson may look how long its history must be
    monkeypatch.setattr(anderson, "_reads_at_once", lambda x: False)
    steps = 20
    solve(problem.f, problem.z0, eq.Anderson(), eq.Stop(rtol=1e-15, atol=0, max_steps=steps, check_every=5))
    assert reads[0] <= steps / 5 + 2  # the first check, and whether a sample has failed at the end


def test_a_trace_has_its_true_length() -> None:
    x, gain = mixed(20)
    s = eq.DEQ(Gain(), solver=eq.Picard(), stop=eq.Stop(rtol=1e-4, atol=0, max_steps=200, trace=True)).solve(x, gain)
    assert s.stats.trace is not None and len(s.stats.trace) == 20
    for i, trace in enumerate(s.stats.trace):
        assert trace.shape == (int(s.stats.steps[i]) + 1,)
        assert bool(torch.isfinite(trace).all())
        assert trace[-1] == s.stats.residual[i] == trace.min()
    assert eq.DEQ(Gain()).solve(x, gain).stats.trace is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=repr)
def test_a_tolerance_below_the_dtypes_reach_is_reported_not_looped_on(dtype: torch.dtype, solver: eq.Solver[Any]) -> None:
    cell, x = TanhCell(8, dtype=dtype), inputs(4, 8, dtype=dtype)
    with torch.no_grad():
        s = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=0, atol=0, max_steps=1000, on_failure="ignore")).solve(x)
    assert s.z.dtype == dtype
    ended = s.stats.converged | (s.stats.status == eq.Status.STALLED)  # iterates may also repeat exactly
    assert bool(ended.all())
    assert int(s.stats.steps.max()) < 300
    assert float(s.stats.residual.max()) < 8 * torch.finfo(dtype).eps


def test_patience_gives_up_what_makes_no_progress() -> None:
    problem = affine("rotation", 4, 1.0)
    stats = solve(problem.f, problem.z0, eq.Picard(), eq.Stop(max_steps=500, patience=6)).stats
    assert stats.status.tolist() == [eq.Status.STALLED] * 3
    assert int(stats.steps.max()) <= 8


def test_norms_are_per_sample_and_of_the_users_choice() -> None:
    x = torch.randn(4, 9, generator=generator(0))
    torch.testing.assert_close(eq.stop.rms_norm(x), x.square().mean(dim=1).sqrt())
    torch.testing.assert_close(eq.stop.euclidean_norm(x), x.norm(dim=1))
    torch.testing.assert_close(eq.stop.max_norm(x), x.abs().amax(dim=1))
    problem = affine("symmetric", 8, 0.9)
    flat = solve(problem.f, problem.z0, eq.Picard(), eq.Stop(rtol=0, atol=1e-5, max_steps=500, norm=eq.stop.max_norm))
    assert float((problem.f(flat.z) - flat.z).abs().max()) <= 1e-5


def test_sums_of_an_empty_batch() -> None:
    s = eq.DEQ(TanhCell(3)).solve(torch.zeros(0, 3, dtype=torch.float64))
    assert s.z.shape == (0, 3)
    assert str(s.stats) == "no samples"
    s.z.sum().backward()
