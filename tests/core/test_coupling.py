"""Rows that depend on each other: found out in every solve, solved and differentiated as one system, told truly."""

from __future__ import annotations

import types
import warnings
from typing import Any

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


def dense_gradients(cell: Mixing, z: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """By the Jacobian of the whole batch as one vector."""
    z, x = z.detach(), x.detach().clone().requires_grad_()
    jacobian = torch.func.jacrev(lambda y: cell(y.view_as(z), x.detach()).flatten())(z.flatten())
    u = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - jacobian.T, v.flatten())
    return torch.autograd.grad(cell(z, x), [x, cell.w], u.view_as(z))


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
        for ours, exact in zip(grads, dense_gradients(cell, s.z, x, v), strict=True):
            assert float((ours - exact).norm()) <= 1e-7 * float(exact.norm())


def test_transforms_and_second_derivatives_of_coupled_rows() -> None:
    cell, x = Mixing(3, gate=0.4), spread(5, 3)
    v = inputs(5, 3) * torch.logspace(-3, 3, 5, dtype=torch.float64).unsqueeze(1)
    deq = eq.DEQ(cell, stop=STOP, gradient=eq.Implicit(stop=eq.Stop(rtol=1e-12, atol=0, max_steps=300)))
    z = deq(x).detach()
    exact, _ = dense_gradients(cell, z, x, v)
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
    exact, _ = dense_gradients(cell, s.z, x, v)  # type: ignore[arg-type]
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
    if isinstance(solver, eq.Picard):  # rows of the others, taken for problems of their own, may use up all steps
        assert bool(s.stats.converged.all())
    cell.gate = 0.0
    for _ in range(2):
        s = deq.solve(x)
    check_forward(cell, s, x, STOP.rtol)
    assert len(set(s.stats.steps.tolist())) > 1  # samples on their own again


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
    """Reads its gain from an object that it holds."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.cfg = types.SimpleNamespace(gain=1.0)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.cfg.gain * (z @ self.w.T) + x + GLOBAL_GAIN * z)


@pytest.mark.parametrize("change", ["object", "global", "forward"])
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
    else:
        monkeypatch.setattr(Configured, "forward", lambda self, z, x: 0.1 * z + x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        s = deq.solve(x)
    assert bool(s.stats.converged.all())
    check_forward(cell, s, x, 1e-6, slack=1.5)
