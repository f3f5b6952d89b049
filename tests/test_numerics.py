"""Autocast and torch.compile: the same mathematics on other roads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import TanhCell, inputs


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton()], ids=repr)
def test_a_layer_trains_under_bf16_autocast(solver: eq.Solver[Any]) -> None:
    cell, x = TanhCell(16, dtype=torch.float32), inputs(8, 16, dtype=torch.float32)
    deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=2e-2, max_steps=60, on_failure="raise"))

    def gradient() -> Tensor:
        cell.zero_grad()
        z = deq(x)
        assert z.dtype == torch.float32
        z.square().sum().backward()
        assert cell.w.grad is not None and cell.w.grad.dtype == torch.float32
        return cell.w.grad.clone()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = gradient()
    full = gradient()
    # bf16 has 8 bits: 4e-3 per product, a few of them in a row
    assert float((low - full).norm() / full.norm()) < 5e-2


def test_autocast_may_end_before_backward() -> None:
    cell, x = TanhCell(16, dtype=torch.float32), inputs(8, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = eq.DEQ(cell, stop=eq.Stop(rtol=2e-2)).solve(x)
    s.z.square().sum().backward()
    assert s.adjoint is not None and bool(s.adjoint.converged.all())


def test_autocast_weights_keep_their_gradient_after_a_solve() -> None:
    """A weight cast without a graph during the solve must not be reused where its gradient is wanted."""
    cell, x = TanhCell(16, dtype=torch.float32), inputs(8, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = eq.DEQ(cell, stop=eq.Stop(rtol=2e-2)).solve(x).z.detach()
        cell(z, x).sum().backward()
    assert cell.w.grad is not None and float(cell.w.grad.norm()) > 0


def test_a_half_precision_module_is_solved() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        cell, x = TanhCell(16, dtype=dtype), inputs(8, 16, dtype=dtype)
        s = eq.DEQ(cell, stop=eq.Stop(rtol=3e-2)).solve(x)
        assert s.z.dtype == dtype and s.stats.residual.dtype == torch.float32
        s.z.float().square().sum().backward()
        assert cell.w.grad is not None and cell.w.grad.dtype == dtype and bool(torch.isfinite(cell.w.grad).all())


def test_float64_stays_float64() -> None:
    s = eq.DEQ(TanhCell(4)).solve(inputs(2, 4))
    assert s.z.dtype == s.stats.residual.dtype == torch.float64


class Net(nn.Module):
    def __init__(self, cell: nn.Module, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5), **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.deq(self.encode(x))))
        return out


def outputs_and_gradients(model: Any, net: Net, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about itself
@pytest.mark.parametrize("what", ["model", "solves", "cell by the user"])
def test_compiling_gives_the_same_numbers(what: str) -> None:
    torch._dynamo.reset()
    cell, x = TanhCell(8, dtype=torch.float32), inputs(6, 8, dtype=torch.float32)
    net = Net(cell)
    expected = outputs_and_gradients(net, net, x)
    if what == "model":
        seen = outputs_and_gradients(torch.compile(net), net, x)
    elif what == "solves":
        other = Net(cell, compile=True)
        seen = outputs_and_gradients(other, other, x)
        assert [k for k, _ in other.named_parameters()] == [k for k, _ in net.named_parameters()]
    else:
        other = Net(torch.compile(cell))  # type: ignore[arg-type]
        seen = outputs_and_gradients(other, other, x)
    for a, b in zip(seen, expected, strict=True):
        # both solves stop at a residual of 1e-5, but not at the same point: code generation reorders float32 sums
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # dynamo warns about itself
def test_a_model_with_a_deq_compiles_around_it() -> None:
    """The eager backend runs dynamo without generating code; graph breaks must not change the numbers."""
    torch._dynamo.reset()
    net, x = Net(TanhCell(8, dtype=torch.float32)), inputs(6, 8, dtype=torch.float32)
    expected = outputs_and_gradients(net, net, x)
    for a, b in zip(outputs_and_gradients(torch.compile(net, backend="eager"), net, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


LINEAR: list[eq.Solver[Any]] = [eq.GMRES(), eq.GMRES(restart=3), eq.BiCGSTAB(), eq.NormalCG()]


def autocast_adjoint(cell: nn.Module, rtol: float | None, gradient: eq.Implicit) -> eq.Solution:
    x = inputs(16, 32, dtype=torch.float32)
    stop = eq.Stop(on_failure="ignore") if rtol is None else eq.Stop(rtol=rtol, on_failure="ignore")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = eq.DEQ(cell, stop=stop, gradient=gradient).solve(x)
        s.z.square().sum().backward()
    assert s.adjoint is not None
    return s


@pytest.mark.parametrize("norm", [0.9, 2.0])
@pytest.mark.parametrize("solver", LINEAR, ids=repr)
def test_the_status_of_an_adjoint_under_autocast_is_that_of_its_residual(solver: eq.Solver[Any], norm: float) -> None:
    """Krylov methods carry their residual; in bfloat16 the measured one is larger."""
    stop = eq.Stop(rtol=1e-3, atol=0, max_steps=16, on_failure="ignore")
    adjoint = autocast_adjoint(TanhCell(32, norm, dtype=torch.float32), 1e-2, eq.Implicit(solver=solver, stop=stop)).adjoint
    assert adjoint is not None
    assert float(torch.where(adjoint.converged, adjoint.residual, 0.0).max()) <= 1.1e-3
    assert int(adjoint.steps.max()) <= 16


def test_a_forward_solve_by_recurrence_under_autocast_has_the_status_of_its_residual() -> None:
    torch.manual_seed(0)
    weight, x = 0.9 * torch.linalg.qr(torch.randn(32, 32))[0], torch.randn(8, 32)
    for solver in LINEAR:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stop = eq.Stop(rtol=1e-3, on_failure="ignore", compact=False)
            s = eq.fixed_point(lambda z, x: z @ weight + x, torch.zeros_like(x), x, solver=solver, stop=stop)
        assert float(torch.where(s.stats.converged, s.stats.residual, 0.0).max()) <= 1.1e-3, solver


def test_the_default_tolerance_is_one_that_autocast_can_reach() -> None:
    cell, spacing = TanhCell(32, norm=0.95, dtype=torch.float32), torch.finfo(torch.bfloat16).eps
    default, same = autocast_adjoint(cell, None, eq.Implicit()), autocast_adjoint(cell, spacing, eq.Implicit())
    chosen = autocast_adjoint(cell, 1e-3, eq.Implicit())
    for now, then in ((default.stats, same.stats), (default.adjoint, same.adjoint)):
        assert now is not None and then is not None
        assert bool(now.converged.all()) and torch.equal(now.steps, then.steps)
        assert float(now.residual.max()) <= 1.1 * spacing
    assert chosen.stats.count(eq.Status.STALLED) and int(chosen.stats.steps.sum()) > 1.3 * int(default.stats.steps.sum())
    # an adjoint with a stop of its own likewise
    own = autocast_adjoint(cell, None, eq.Implicit(stop=eq.Stop(on_failure="raise"))).adjoint
    assert own is not None and bool(own.converged.all())


def test_the_default_tolerance_is_that_of_the_numbers_alone() -> None:
    x = inputs(8, 16, dtype=torch.float32)
    residual = eq.DEQ(TanhCell(16, dtype=torch.float32)).solve(x).stats.residual
    assert eq.Stop().rtol == 1e-3 and float(residual.max()) <= 1e-3
    half = eq.DEQ(TanhCell(16, dtype=torch.bfloat16)).solve(x.bfloat16()).stats
    assert bool(half.converged.all()) and float(half.residual.max()) > 1e-3


@pytest.mark.parametrize("on_failure", ["warn", "raise", "fall_back"])
def test_an_adjoint_that_turns_out_short_of_its_tolerance_meets_the_failure_policy(on_failure: Any) -> None:
    cell, x = TanhCell(32, dtype=torch.float32), inputs(8, 32, dtype=torch.float32).requires_grad_()
    gradient = eq.Implicit(stop=eq.Stop(rtol=1e-4, atol=0), on_failure=on_failure)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = eq.DEQ(cell, stop=eq.Stop(rtol=2e-2), gradient=gradient).solve(x)
        jfb = eq.DEQ(cell, stop=eq.Stop(rtol=2e-2), gradient=eq.NeumannPhantom(steps=1, damping=1.0)).solve(x)
    if on_failure == "raise":
        with pytest.raises(eq.ConvergenceError, match="stalled"):
            s.z.sum().backward()
        return
    with pytest.warns(eq.ConvergenceWarning, match="8 stalled"):
        (seen,) = torch.autograd.grad(s.z.sum(), x)
    if on_failure == "fall_back":
        torch.testing.assert_close(seen, torch.autograd.grad(jfb.z.sum(), x)[0])
