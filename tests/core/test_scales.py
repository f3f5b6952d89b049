"""States so small or large that the squares of their entries leave the dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import generator, name

REAL = {torch.float32: torch.float64, torch.float64: torch.float64, torch.bfloat16: torch.float64}
# beyond these the squares of a float32 leave it (bf16 states are carried in float32); beyond 1e154 those of a float64
SCALES = {
    torch.float32: [1e-30, 1e-25, 1e-22, 1e-18, 1e-13, 1.0, 1e13, 1e18, 1e20, 1e30],
    torch.bfloat16: [1e-30, 1e-22, 1e20, 1e30],
    torch.float64: [1e-300, 1e-200, 1e-160, 1e-100, 1e-35, 1.0, 1e100, 1e160, 1e200, 1e290],
    torch.complex64: [1e-25, 1e-22, 1e20, 1e30],
    torch.complex128: [1e-200, 1e-35, 1e200],
}
CASES = [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]
SOLVERS = [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton(), eq.SteadyState(), eq.Fallback(eq.Picard(), eq.Newton())]


class Scaled(nn.Module):
    """z W + x with |W| = 0.7."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator(0)))[0]
        self.w = nn.Parameter((0.7 * q).to(dtype))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.w + x


def problem(dtype: torch.dtype, scale: float) -> tuple[Scaled, Tensor]:
    x = torch.randn(3, 5, dtype=torch.float64, generator=generator(0)) * scale
    return Scaled(5, dtype), x.to(dtype)


def true_residual(cell: Scaled, z: Tensor, x: Tensor, scale: float) -> Tensor:
    """Relative, of the problem divided by its scale, in double precision."""
    wide = torch.complex128 if z.dtype.is_complex else torch.float64
    z, x, w = z.to(wide) / scale, x.to(wide) / scale, cell.w.detach().to(wide)
    fz = z @ w + x
    residual: Tensor = torch.linalg.vector_norm(fz - z, dim=1) / torch.linalg.vector_norm(fz, dim=1)
    return residual


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize(("dtype", "scale"), CASES, ids=str)
def test_problems_of_any_scale_are_solved(dtype: torch.dtype, scale: float, solver: Any) -> None:
    cell, x = problem(dtype, scale)
    rtol = 5e-2 if dtype == torch.bfloat16 else 1e-3  # SteadyState's stages add up the rounding of bf16
    with torch.no_grad():
        s = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=rtol, atol=0, max_steps=100, on_failure="raise")).solve(x)
    assert s.z.dtype == dtype
    seen = true_residual(cell, s.z, x, scale)
    assert float(seen.max()) <= (2 if dtype == torch.bfloat16 else 1.01) * rtol
    slack = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(s.stats.residual.double(), seen, rtol=1e-2, atol=slack)


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("checkpoint", [None, "sqrt"])
def test_step_sizes_do_not_follow_rounding_errors_of_half_precision(scale: float, checkpoint: Any) -> None:
    """The path's rtol of 1e-3 is below the rounding of bf16: from noise as an error, dt would fall to a few hundredths."""
    cell, x = problem(torch.bfloat16, scale)
    stop = eq.Stop(rtol=5e-2, atol=0, on_failure="raise")
    gradients = [eq.Implicit(), eq.Unrolled(checkpoint=checkpoint)]
    found = [eq.DEQ(cell, solver=eq.SteadyState(), stop=stop, gradient=gradient).solve(x) for gradient in gradients]
    assert int(found[0].stats.steps.max()) <= 30  # 19 at most with 80 seeds; 40 to more than 100 with rtol as it stands
    torch.testing.assert_close(found[1].z, found[0].z, rtol=0.1, atol=0.1 * scale)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e-25), (torch.float32, 1e25), (torch.float64, 1e-35)], ids=str
)
def test_the_scale_of_a_problem_does_not_change_its_path(dtype: torch.dtype, scale: float) -> None:
    """Steps, evaluations and states are those of the same problem of usual size: powers of two are exact."""
    power = 2.0 ** round(torch.tensor(scale, dtype=torch.float64).log2().item())
    cell, x = problem(dtype, 1.0)
    deq = eq.DEQ(cell, solver=eq.Anderson(), stop=eq.Stop(atol=0))
    with torch.no_grad():
        usual, far = deq.solve(x), deq.solve(x * power)
    assert torch.equal(usual.stats.steps, far.stats.steps)
    assert usual.stats.evaluations == far.stats.evaluations
    torch.testing.assert_close(far.z / power, usual.z)


def test_samples_of_all_scales_in_one_batch() -> None:
    cell, x = problem(torch.float32, 1.0)
    scales = torch.tensor([[1e-30], [1e-15], [1.0], [1e25]])
    x = x[:1] * scales
    with torch.no_grad():
        s = eq.DEQ(cell, stop=eq.Stop(atol=0, on_failure="raise")).solve(x)
    seen = true_residual(cell, s.z / scales, x / scales, 1.0)
    torch.testing.assert_close(s.stats.residual.double(), seen, rtol=1e-2, atol=1e-5)
    assert bool(s.stats.converged.all()) and float(seen.max()) <= 1.01e-3


def test_gradients_of_small_problems_are_those_of_usual_ones() -> None:
    cell, x = problem(torch.float64, 1.0)
    deq, grads = eq.DEQ(cell, stop=eq.Stop(rtol=1e-10, atol=0)), []
    for scale in (1.0, 2.0**-120):
        small = (x * scale).requires_grad_()
        deq(small).sum().backward()
        assert small.grad is not None
        grads.append(small.grad)
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


def test_below_an_absolute_tolerance_nothing_is_asked() -> None:
    cell, x = problem(torch.float32, 1e-25)
    s = eq.DEQ(cell).solve(x)
    assert bool(s.stats.converged.all()) and s.stats.evaluations == 1


def test_zero_is_an_equilibrium_of_any_tolerance() -> None:
    s = eq.fixed_point(lambda z: 0.5 * z, torch.zeros(2, 3), stop=eq.Stop(atol=0, on_failure="raise"))
    assert s.stats.residual.tolist() == [0.0, 0.0] and s.stats.evaluations == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_state_that_fades_is_not_converged_before_it_is_zero(dtype: torch.dtype) -> None:
    """0.5 z has the relative residual 1 wherever it is not zero; without atol only zero itself will do."""
    stop = eq.Stop(atol=0, max_steps=900, on_failure="ignore")
    s = eq.fixed_point(lambda z: 0.5 * z, torch.ones(2, 3, dtype=dtype), solver=eq.Picard(), stop=stop)
    assert torch.equal(s.stats.converged, (s.z == 0).all(dim=1))
    cut = eq.fixed_point(
        lambda z: 0.5 * z,
        torch.ones(2, 3, dtype=dtype),
        solver=eq.Picard(),
        stop=eq.Stop(atol=0, max_steps=100, on_failure="ignore"),
    )
    assert not bool(cut.stats.converged.any())
    torch.testing.assert_close(cut.stats.residual, torch.ones(2, dtype=dtype))


def rosenbrock(z: Tensor) -> Tensor:
    """z less the residuals (10 (y - x^2), 1 - x), whose root is (1, 1)."""
    x, y = z.unbind(1)
    return z - torch.stack((10 * (y - x * x), 1 - x), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["tsit5", "dopri5", "bs3", "heun"])
def test_steady_states_at_the_end_of_the_numbers_are_none(method: Any, dtype: torch.dtype) -> None:
    start = torch.tensor([[-1.2, 1.0]], dtype=dtype)
    stop = eq.Stop(rtol=1e-6, max_steps=500, on_failure="ignore")
    s = eq.fixed_point(rosenbrock, start, solver=eq.SteadyState(method=method), stop=stop)
    if bool(s.stats.converged):
        torch.testing.assert_close(s.z, torch.ones_like(start), rtol=1e-3, atol=1e-3)
    assert float(s.z.abs().max()) < 1e3


@pytest.mark.parametrize("scale", [1e-30, 1e20, 1e30])
def test_residuals_of_explicit_networks_of_any_scale(scale: float) -> None:
    cell, x = problem(torch.float32, scale)
    deq = eq.DEQ(cell, gradient=eq.Unrolled(depth=3), stop=eq.Stop(atol=0, on_failure="ignore"))
    s = deq.solve(x)
    assert s.stats.status.tolist() == [eq.Status.MAX_STEPS] * 3
    seen = true_residual(cell, s.z.detach(), x, scale)
    torch.testing.assert_close(s.stats.residual.double(), seen, rtol=1e-4, atol=0)


@pytest.mark.parametrize("solver", [eq.GMRES(), eq.BiCGSTAB(), eq.NormalCG()], ids=repr)
def test_measured_residuals_of_tiny_states_are_those_of_the_state(solver: eq.Solver[Any]) -> None:
    w, x = torch.tensor([[0.2, 0.1], [0.1, 0.3]]), torch.tensor([[-1.5e-30, 1.5e-32]])
    solution = eq.fixed_point(
        lambda z, x: z @ w + x, torch.full((1, 2), float("nan")), x, solver=solver, stop=eq.Stop(rtol=1e-3, atol=1e-6)
    )
    assert solution.stats.converged.all() and torch.equal(solution.z, torch.zeros(1, 2))  # by atol: |x| is far below it
    torch.testing.assert_close(solution.stats.residual, torch.ones(1))


@pytest.mark.parametrize("max_steps", [0, 40])
def test_residuals_of_samples_that_start_near_the_largest_number_are_reported(max_steps: int) -> None:
    """|f(z)| is 1 beside a start of 2e307: divided by the size of the start, its square underflows."""
    z0 = torch.full((2, 3), 2e307, dtype=torch.float64)
    stop = eq.Stop(max_steps=max_steps, on_failure="ignore")
    s = eq.fixed_point(torch.tanh, z0, solver=eq.Picard(damping=0.5), stop=stop)
    true = ((torch.tanh(s.z) - s.z) / 1e300).norm(dim=1) * 1e300 / torch.tanh(s.z).norm(dim=1)
    assert not bool(s.stats.converged.any())
    torch.testing.assert_close(s.stats.residual, true, rtol=1e-6, atol=0)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.SteadyState(), eq.Anderson()], ids=name)
@pytest.mark.parametrize(("dtype", "large", "small"), [(torch.float32, 1e33, 1e-10), (torch.float64, 1e300, 1e-20)])
def test_a_relative_residual_that_the_dtype_cannot_hold_is_infinite(
    solver: Any, dtype: torch.dtype, large: float, small: float
) -> None:
    z0 = torch.tensor([[large, -large], [1.0, 2.0]], dtype=dtype)
    stop = eq.Stop(max_steps=0, on_failure="ignore")
    s = eq.fixed_point(lambda z: small * torch.tanh(z), z0, solver=solver, stop=stop)
    assert bool(s.stats.failed.all())
    assert float(s.stats.residual[0]) == float("inf") and 0 < float(s.stats.residual[1]) * small < 4


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize(("gradient", "solver"), [(eq.Reversible(), eq.Picard()), (eq.Shine(), eq.Broyden())], ids=name)
def test_states_that_are_kept_for_backward_may_shrink_below_the_range_of_squares(
    gradient: Any, solver: Any, spread: float
) -> None:
    """Squares of the answer underflow: its residual is measured in units of its own, and no second solve follows."""
    x = (1e-14 * torch.tensor([[1.0, 2.0], [spread, -1.0], [1.0, 1.0]])).requires_grad_()
    stop = eq.Stop(rtol=1e-4, atol=0.0, max_steps=200, on_failure="ignore")
    s = eq.fixed_point(lambda z, x: 0.5 * z + x, torch.full((3, 2), 1e-10), x, solver=solver, gradient=gradient, stop=stop)
    assert bool(s.stats.converged.all())
    torch.testing.assert_close(s.z.detach() * 1e14, 2e14 * x.detach(), rtol=1e-3, atol=0.0)
    (grad,) = torch.autograd.grad(s.z.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(grad, 2.0), rtol=1e-2, atol=0.0)
