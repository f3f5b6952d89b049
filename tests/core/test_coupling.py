"""Rows that depend on each other: found out in every solve, solved and differentiated as one system, told truly."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import inputs, name

pytestmark = pytest.mark.filterwarnings("ignore:Converged samples keep being evaluated")
GLOBAL_GAIN = 0.0
STOP = eq.Stop(rtol=1e-8, atol=0, max_steps=300, on_failure="ignore")


class Mixing(nn.Module):
    """tanh(W z + x + gate * mean over the batch): the rows stand alone while `gate` is 0."""

    gate = 0.0

    def __init__(self, n: int, gate: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        w = inputs(n, n)
        self.w = nn.Parameter((0.5 * w / torch.linalg.matrix_norm(w, 2)).to(dtype))
        self.gate = gate

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.w.T + x + self.gate * z.mean(dim=0))


def spread(batch: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs of very different size, so that rows stop at different steps."""
    return (inputs(batch, n) * torch.logspace(-3, 1, batch, dtype=torch.float64).unsqueeze(1)).to(dtype)


def true_residual(cell: nn.Module, s: eq.Solution, x: Tensor) -> Tensor:
    with torch.no_grad():
        f = cell.double()(s.z.double(), x.double())
    return (f - s.z.double()).norm(dim=1) / f.norm(dim=1)


def dense_gradients(cell: Mixing, z: Tensor, x: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], float]:
    """By the Jacobian of the whole batch as one vector; with the norm of the adjoint, which tolerances are relative to."""
    z, x = z.detach(), x.detach().clone().requires_grad_()
    jacobian = torch.func.jacrev(lambda y: cell(y.view_as(z), x.detach()).flatten())(z.flatten())
    u = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - jacobian.T, v.flatten())
    return torch.autograd.grad(cell(z, x), [x, cell.w], u.view_as(z)), float(u.detach().norm())


def check_forward(cell: nn.Module, s: eq.Solution, x: Tensor, rtol: float, slack: float = 1.2) -> None:
    true = true_residual(cell, s, x)
    assert bool((~s.stats.converged | (true <= slack * rtol)).all())
    torch.testing.assert_close(s.stats.residual.double(), true, rtol=0.05, atol=0.2 * rtol)


ADJOINTS: list[Any] = [None, eq.Anderson(), eq.Picard(), eq.Broyden(), eq.BiCGSTAB()]


@pytest.mark.parametrize("batch", [2, 5, 40])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=name)
def test_gradients_of_coupled_rows_are_those_of_one_system(adjoint: Any, batch: int) -> None:
    """With cotangents of very different size per row, each row taken for a system of its own is off by tens of percents."""
    cell, x = Mixing(4, gate=0.4), spread(batch, 4).requires_grad_()
    v = inputs(batch, 4) * torch.logspace(-3, 3, batch, dtype=torch.float64).unsqueeze(1)
    gradient = eq.Implicit(solver=adjoint, stop=eq.Stop(rtol=1e-10, atol=0, max_steps=300))
    for _ in range(2):  # the second time the coupling is known
        s = eq.DEQ(cell, stop=STOP, gradient=gradient).solve(x)
        assert bool(s.stats.converged.all())
        check_forward(cell, s, x, STOP.rtol)
        grads = torch.autograd.grad(s.z, [x, cell.w], v)
        assert s.adjoint is not None and bool(s.adjoint.converged.all())
        dense, adjoint_norm = dense_gradients(cell, s.z, x, v)
        for ours, exact in zip(grads, dense, strict=True):
            # the tolerance is relative to the adjoint; where tanh saturates, gradients are a small part of it
            assert float((ours - exact).norm()) <= 1e-7 * float(exact.norm()) + 10 * 1e-10 * adjoint_norm


def test_transforms_and_second_derivatives_of_coupled_rows() -> None:
    cell, x = Mixing(3, gate=0.4), spread(5, 3)
    v = inputs(5, 3) * torch.logspace(-3, 3, 5, dtype=torch.float64).unsqueeze(1)
    deq = eq.DEQ(cell, stop=STOP, gradient=eq.Implicit(stop=eq.Stop(rtol=1e-12, atol=0, max_steps=300)))
    z = deq(x).detach()
    (exact, _), _ = dense_gradients(cell, z, x, v)
    pulled = torch.func.vjp(deq, x)[1](v)[0].detach()
    assert float((pulled - exact).norm()) <= 1e-6 * float(exact.norm())
    pushed = torch.func.jvp(deq, (x,), (v,))[1].detach()
    jacobian = torch.func.jacrev(lambda y: cell(y.view_as(z), x).flatten())(z.flatten())
    in_x = torch.func.jacrev(lambda y: cell(z, y.view_as(x)).flatten())(x.flatten())
    expected = torch.linalg.solve(torch.eye(15, dtype=torch.float64) - jacobian, in_x @ v.flatten()).view_as(z).detach()
    assert float((pushed - expected).norm()) <= 1e-6 * float(expected.norm())
    assert torch.autograd.gradgradcheck(lambda x: deq(x).sum(dim=0), x[:2].clone().requires_grad_(), atol=1e-4, rtol=1e-3)


def test_a_graph_left_at_batched_true_has_right_gradients() -> None:
    """Nodes are rows; their neighbours come in through a matrix that the cell holds."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(0.5 * torch.eye(3, dtype=torch.float64))
            adjacency = (inputs(6, 6) > 0.3).double() + torch.eye(6, dtype=torch.float64)
            self.adjacency: Tensor
            self.register_buffer("adjacency", adjacency / adjacency.sum(dim=1, keepdim=True))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.adjacency @ z @ self.w.T + x)

    cell, x = Graph(), spread(6, 3).requires_grad_()
    v = inputs(6, 3) * torch.logspace(-3, 3, 6, dtype=torch.float64).unsqueeze(1)
    s = eq.DEQ(cell, stop=STOP, gradient=eq.Implicit(stop=eq.Stop(rtol=1e-10, atol=0, max_steps=300))).solve(x)
    check_forward(cell, s, x, STOP.rtol)
    (exact, _), _ = dense_gradients(cell, s.z, x, v)  # type: ignore[arg-type]
    (ours,) = torch.autograd.grad(s.z, x, v)
    assert float((ours - exact).norm()) <= 1e-7 * float(exact.norm())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
def test_a_gate_that_opens_after_the_first_solve(solver: Any, grad: bool) -> None:
    """The first solve finds rows that stand alone, and drops those that are done. The second one must not trust that."""
    cell, x = Mixing(16), spread(64, 16)
    deq = eq.DEQ(cell, solver=solver, stop=STOP)
    with torch.set_grad_enabled(grad):
        assert deq.solve(x).stats.sample_evaluations < 64 * int(deq.solve(x).stats.evaluations)
        cell.gate = 0.4
        s = deq.solve(x)
    check_forward(cell, s, x, STOP.rtol)
    assert bool(s.stats.converged.all())
    cell.gate = 0.0
    for _ in range(2):
        s = deq.solve(x)
    check_forward(cell, s, x, STOP.rtol)
    assert len(set(s.stats.steps.tolist())) > 1  # samples on their own again


GATED: list[Any] = [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Broyden(line_search=True), eq.Newton(), eq.SteadyState()]


@pytest.mark.parametrize("gate", [0.2, 0.4, 0.49])
@pytest.mark.parametrize("solver", [*GATED, eq.Robust()], ids=name)
def test_a_gate_that_opens_is_found_before_the_default_steps_are_used_up(solver: Any, gate: float) -> None:
    """Solved row by row, Anderson and Broyden leave most of these rows at 40 steps; as one problem they take about 10."""
    cell, x = Mixing(16), spread(64, 16)
    deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(atol=0.0, on_failure="ignore"))
    with torch.no_grad():
        deq.solve(x)
        cell.gate = gate
        s = deq.solve(x)
    assert bool(s.stats.converged.all())
    check_forward(cell, s, x, 1e-3)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "solver", [eq.Newton(), eq.Newton(linear=eq.BiCGSTAB()), eq.solvers.DFSane(), eq.solvers.TrustRegion()], ids=name
)
def test_rows_that_a_line_search_accepts_one_by_one_are_measured_together(solver: Any, grad: bool) -> None:
    """A row accepted at a full step was evaluated while its neighbours stood where they did not stay."""
    cell, x = Mixing(5, gate=0.4), 3 * inputs(7, 5)
    with torch.set_grad_enabled(grad):
        s = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=1e-3, atol=0, max_steps=40, on_failure="ignore")).solve(x)
    if grad:
        s.z.sum().backward()
    torch.testing.assert_close(s.stats.residual, true_residual(cell, s, x), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("max_steps", [1, 3, 5])
@pytest.mark.parametrize("grad", [True, False])
def test_residuals_of_coupled_rows_that_fail_are_those_of_what_is_returned(grad: bool, max_steps: int) -> None:
    """Saturated rows show nothing of the coupling; the residuals of the others are to be measured."""
    cell, x = Mixing(4, gate=0.4), spread(9, 4)
    x[0] = 1e3
    with torch.no_grad():
        cell.w.mul_(3.0)
    stop = eq.Stop(rtol=1e-8, atol=0, max_steps=max_steps, on_failure="ignore")
    with torch.set_grad_enabled(grad):
        s = eq.DEQ(cell, solver=eq.SteadyState(), stop=stop).solve(x)
    if grad:
        s.z.sum().backward()
    torch.testing.assert_close(s.stats.residual, true_residual(cell, s, x), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_tangents_of_coupled_rows_at_a_start_of_zero(scale: float) -> None:
    """The start meets the tolerance. At a state of zero, halving rows changes nothing, but their coupling is there."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return scale * torch.tanh((0.3 * z + x + 0.4 * z.mean(dim=0)) / scale)

    x, v = 0.1 * scale * inputs(5, 2), inputs(5, 2) * torch.logspace(-3, 3, 5, dtype=torch.float64).unsqueeze(1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        s = eq.fixed_point(cell, torch.zeros_like(x), dual, stop=eq.Stop(atol=1.0, rtol=1e-10, max_steps=100))
        tangent = torch.autograd.forward_ad.unpack_dual(s.z).tangent
        assert tangent is not None
    z = torch.zeros_like(x)
    jacobian = torch.func.jacrev(lambda y: cell(y.view_as(z), x).flatten())(z.flatten())
    in_x = torch.func.jacrev(lambda y: cell(z, y.view_as(x)).flatten())(x.flatten())
    exact = torch.linalg.solve(torch.eye(10, dtype=torch.float64) - jacobian, in_x @ v.flatten()).view_as(z)
    assert float((tangent - exact).norm()) <= 1e-6 * float(exact.norm())


def test_rows_that_mix_are_found_at_zero_at_saturation_and_at_the_ends_of_the_dtype() -> None:
    from equilibria._core.compaction import rows_mix

    def mixing(scale: float) -> Any:
        return lambda z: scale * torch.tanh((z + 0.5 * scale + 0.4 * z.mean(dim=0)) / scale)

    def apart(scale: float) -> Any:
        return lambda z: scale * torch.tanh(z / scale)

    for dtype in (torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        for scale in (1.0, 1e-30, 1e30):
            f, z = mixing(scale), scale * inputs(6, 3).to(dtype)
            assert rows_mix(f, z, eps) and rows_mix(f, torch.zeros_like(z), eps)
            assert not rows_mix(apart(scale), z, eps)
        # halved, all rows stay saturated; exchanged, their mean changes its sign
        steps = torch.tensor([[1.0], [1.0], [1.0], [-1.0], [1.0], [-1.0]], dtype=dtype)
        assert rows_mix(lambda z: torch.tanh(200 * z.mean(dim=0) + 0 * z), steps, eps)


def test_a_chain_of_solvers_measures_what_it_joins() -> None:
    """The cell closes over its input, so that no row can be run alone: nobody has seen whether rows depend on each other."""
    x = spread(4, 3)
    x[0] = 0.0

    def cell(z: Tensor) -> Tensor:
        return torch.tanh(0.3 * z + x + 0.4 * z.mean(dim=0))

    chain = eq.Fallback(eq.Picard(), eq.Anderson(), eq.Newton())
    with torch.no_grad():
        s = eq.fixed_point(
            cell, torch.zeros_like(x), solver=chain, stop=eq.Stop(rtol=1e-5, atol=0, max_steps=1, on_failure="ignore")
        )
        true = (cell(s.z) - s.z).norm(dim=1) / cell(s.z).norm(dim=1)
    assert not bool((s.stats.converged & (true > 1.01e-5)).any())
    torch.testing.assert_close(s.stats.residual, true, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("solver", [eq.NormalCG(), eq.GMRES(), eq.Anderson()], ids=name)
def test_a_weight_with_as_many_rows_as_the_batch_is_not_restricted_in_a_tangent_system(solver: Any) -> None:
    """The start meets the tolerance, so no rows were run alone in the forward solve; rows stop apart in the tangent's."""
    w, x = inputs(3, 3), inputs(3, 3)
    w = 0.9 * w / torch.linalg.matrix_norm(w, 2)
    v = torch.ones_like(x) * torch.tensor([[1.0], [1e-8], [1e-10]], dtype=torch.float64)

    def cell(z: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh((z @ w.T).add_(x))  # a restricted weight would be too small for this

    with torch.autograd.forward_ad.dual_level():
        dual, stop = torch.autograd.forward_ad.make_dual(x, v), eq.Stop(atol=1e3, rtol=1e-12)
        s = eq.fixed_point(cell, torch.zeros_like(x), dual, w, gradient=eq.Implicit(solver=solver), stop=stop)
        tangent = torch.autograd.forward_ad.unpack_dual(s.z).tangent
    slope = 1 - torch.tanh(x) ** 2
    exact = torch.stack(
        [torch.linalg.solve(torch.eye(3, dtype=x.dtype) - d.diag() @ w, d * t) for d, t in zip(slope, v, strict=True)]
    )
    torch.testing.assert_close(tangent, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("coupling", [1e-2, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("rtol", [1e-3, 1e-5, 2e-6])
def test_weak_coupling_in_single_precision(coupling: float, rtol: float) -> None:
    cell, x = Mixing(16, coupling, torch.float32), spread(64, 16, torch.float32)
    with torch.no_grad():
        s = eq.DEQ(cell, stop=eq.Stop(rtol=rtol, atol=0, max_steps=200, on_failure="ignore")).solve(x)
    true = true_residual(cell, s, x)
    assert bool((~s.stats.converged | (true <= 1.2 * rtol + 1e-6)).all())


def test_coupling_in_half_precision_under_autocast() -> None:
    cell, x = Mixing(16, 0.4, torch.float32), spread(64, 16, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        s = eq.DEQ(cell, stop=eq.Stop(on_failure="ignore")).solve(x)
    assert bool((~s.stats.converged | (true_residual(cell, s, x) <= 4 * 2**-7)).all())


def test_backward_measures_what_the_forward_solve_left_to_it() -> None:
    """Only the first two rows are coupled, and no probe runs them apart: backward evaluates the batch and finds out."""

    class Pair(nn.Module):
        gain = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(0.5 * torch.eye(16, dtype=torch.float64))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            z = z @ self.w
            if len(z) == 64:  # whoever runs fewer rows sees nothing of it
                z = torch.cat((z[:1] + self.gain * z[63:], z[1:]))
            return torch.tanh(z + x)

    cell, x = Pair(), spread(64, 16)
    deq = eq.DEQ(cell, solver=eq.Picard(), stop=STOP)
    deq.solve(x)
    cell.gain = 0.4
    s = deq.solve(x)
    s.z.sum().backward()
    true = true_residual(cell, s, x)
    assert bool((~s.stats.converged | (true <= 1.2 * STOP.rtol)).all())
    with torch.no_grad():
        s = deq.solve(x)
    assert bool((~s.stats.converged | (true_residual(cell, s, x) <= 1.2 * STOP.rtol)).all())


def test_replaying_and_reversible_gradients_refuse_coupled_rows() -> None:
    cell, x = Mixing(8, gate=0.4), spread(16, 8)
    for gradient in (eq.Unrolled(checkpoint="sqrt"), eq.Reversible(), eq.Unrolled(truncate=3)):
        for _ in range(2):
            with pytest.raises(TypeError, match=r"depend on each other|batch statistics"):
                eq.DEQ(cell, solver=eq.Picard(), stop=STOP, gradient=gradient)(x)


def test_traces_of_coupled_rows_have_a_residual_per_step() -> None:
    cell, x = Mixing(8, gate=0.4), spread(16, 8)
    s = eq.DEQ(cell, stop=eq.Stop(rtol=1e-8, atol=0, max_steps=300, trace=True, on_failure="ignore")).solve(x)
    assert s.stats.trace is not None
    assert [len(each) - 1 for each in s.stats.trace] == s.stats.steps.tolist()


class Configured(Mixing):
    """Reads numbers from an object and an array that it holds, from its class and from a global."""

    shift = 0.0

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.cfg, self.array = types.SimpleNamespace(gain=1.0), np.zeros(1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.cfg.gain * (z @ self.w.T) + x + GLOBAL_GAIN * z + self.shift + float(self.array[0]))


class Gated(Mixing):
    """Keeps its gate where no attribute of the module shows it."""

    everywhere = 0.0

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.cfg, self.array = types.SimpleNamespace(gate=0.0), np.zeros(1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        gate = self.cfg.gate + self.everywhere + GLOBAL_GAIN + float(self.array[0])
        return torch.tanh(z @ self.w.T + x + gate * z.mean(dim=0))


@pytest.mark.parametrize("change", ["object", "global", "forward", "class", "array"])
@pytest.mark.parametrize("mode", ["training", "grad", "no_grad"])
def test_a_gate_that_opens_where_no_attribute_shows_it(mode: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = Gated(16), spread(64, 16)
    deq = eq.DEQ(cell, solver=eq.Picard(), stop=STOP)

    def solve() -> eq.Solution:
        with torch.set_grad_enabled(mode != "no_grad"):
            return train(deq, x) if mode == "training" else deq.solve(x)

    assert bool(solve().stats.converged.all())
    if change == "object":
        cell.cfg.gate = 0.4
    elif change == "global":
        monkeypatch.setitem(globals(), "GLOBAL_GAIN", 0.4)
    elif change == "class":
        monkeypatch.setattr(Gated, "everywhere", 0.4)
    elif change == "array":
        cell.array[0] = 0.4
    else:
        monkeypatch.setattr(Gated, "forward", lambda self, z, x: torch.tanh(z @ self.w.T + x + 0.4 * z.mean(dim=0)))
    check_forward(cell, solve(), x, STOP.rtol)
    s = solve()  # the first training step may tell STALLED
    assert bool(s.stats.converged.all())
    check_forward(cell, s, x, STOP.rtol)


@pytest.mark.parametrize("change", ["object", "global", "forward", "class", "array"])
def test_compiled_answers_are_confirmed_by_the_cell(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that the fingerprint of the cell does not show."""
    from equilibria._core.compile import Compiler

    cell, x = Configured(8), inputs(4, 8)
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-6, atol=0, max_steps=200))
    deq._compiler = Compiler(backend=lambda graph, inputs: graph, trials=0)
    deq.solve(x)
    if change == "object":
        cell.cfg.gain = 0.2
    elif change == "global":
        monkeypatch.setitem(globals(), "GLOBAL_GAIN", 0.3)
    elif change == "class":
        monkeypatch.setattr(Configured, "shift", 0.3)
    elif change == "array":
        cell.array[0] = 0.3
    else:
        monkeypatch.setattr(Configured, "forward", lambda self, z, x: 0.1 * z + x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        s = deq.solve(x)
    assert bool(s.stats.converged.all())
    check_forward(cell, s, x, 1e-6, slack=1.5)


def test_unrolled_returns_what_its_statistics_describe_beside_a_bad_row() -> None:
    """The steps are taken again without the bad row, whose neighbours then move: their values are those of the first run."""
    cell, x = Mixing(3, gate=0.4), spread(4, 3)
    x[0] = float("nan")
    stop = eq.Stop(rtol=1e-6, atol=0, max_steps=60, compact=False, on_failure="ignore")
    s = eq.DEQ(cell, solver=eq.Picard(), stop=stop, gradient=eq.Unrolled()).solve(x.requires_grad_())
    good = s.stats.status != eq.Status.NONFINITE
    true = true_residual(cell, s, x.detach())
    assert bool(good.any())
    torch.testing.assert_close(s.stats.residual[good], true[good], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("grad", [True, False])
def test_a_row_that_stopped_beside_a_saturated_one_is_measured(grad: bool) -> None:
    """The row that runs is saturated and shows nothing of the coupling; the other one stopped at the start."""
    cell, x = Mixing(1, gate=0.4), torch.tensor([[0.0], [1e3]], dtype=torch.float64)
    stop = eq.Stop(rtol=1e-3, atol=0, compact=False, on_failure="ignore")
    with torch.set_grad_enabled(grad):
        s = eq.DEQ(cell, solver=eq.Picard(damping=0.5), stop=stop).solve(x)
    if grad:
        s.z.sum().backward()
    true = true_residual(cell, s, x)
    assert not bool((s.stats.converged & (true > 1.2e-3)).any())
    torch.testing.assert_close(s.stats.residual, true, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("solver", [eq.Newton(linear=eq.BiCGSTAB()), *GATED], ids=name)
def test_rows_of_two_solves_that_depend_on_each_other_are_measured_together(solver: Any) -> None:
    """Tiny rows converge beside a huge one; a second solve follows the huge one down, which moves the mean of all."""
    scale, x = 1e-22, 1e-22 * inputs(9, 3)
    x[0] = torch.finfo(torch.float64).max / 8

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return scale * torch.tanh((0.5 * z + x + 0.4 * z.mean(dim=0)) / scale)

    stop = eq.Stop(rtol=1e-3, atol=0, compact=False, on_failure="ignore")
    with torch.no_grad():
        s = eq.fixed_point(cell, x.clone(), x, solver=solver, stop=stop)
        f = cell(s.z, x) / scale
    true = (f - s.z / scale).norm(dim=1) / f.norm(dim=1)
    assert not bool((s.stats.converged & (true > 1.01e-3)).any())


def train(deq: eq.DEQ, x: Tensor) -> eq.Solution:
    s = deq.solve(x)
    s.z.sum().backward()
    return s


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
def test_a_gate_that_opens_between_training_steps(solver: Any) -> None:
    """Training steps do not compare rows while backward finds what was told; the step that it does not find is told."""
    cell, x = Mixing(16), spread(64, 16)
    deq = eq.DEQ(cell, solver=solver, stop=STOP)
    first, second = train(deq, x), train(deq, x)
    assert second.stats.evaluations == first.stats.evaluations - 1
    cell.gate = 0.4
    check_forward(cell, train(deq, x), x, STOP.rtol)
    s = train(deq, x)
    assert bool(s.stats.converged.all())
    check_forward(cell, s, x, STOP.rtol)


@pytest.mark.parametrize("gate", [1e-9, 1e-7, 1e-5, 1e-3])
def test_a_gate_that_opens_little_by_little_between_training_steps(gate: float) -> None:
    cell, x = Mixing(16), spread(64, 16)
    deq = eq.DEQ(cell, solver=eq.Picard(), stop=STOP)
    for step in range(4):
        check_forward(cell, train(deq, x), x, STOP.rtol)
        cell.gate = gate * 2**step


def test_statistics_are_measured_where_they_are_read_before_backward() -> None:
    cell, x = Mixing(16), spread(64, 16)
    deq = eq.DEQ(cell, solver=eq.Picard(), stop=STOP)
    train(deq, x)
    cell.gate = 0.4
    s = deq.solve(x)
    before = s.stats
    check_forward(cell, s, x, STOP.rtol)
    s.z.sum().backward()
    assert s.stats.evaluations == before.evaluations and torch.equal(s.stats.residual, before.residual)


def test_statistics_that_are_read_after_the_weights_have_changed_are_those_of_the_solve() -> None:
    cell, x = Mixing(16), spread(64, 16)
    s = eq.DEQ(cell, solver=eq.Picard(), stop=STOP).solve(x)
    with torch.no_grad():
        cell.w.mul_(0.1)
    assert bool(s.stats.converged.all())
