"""Failures that users of another library reported; each is a passing test here.

Some are tested in other files: second derivatives, transforms and loss scale in
gradients/test_implicit.py, closures in gradients/test_closures.py, FSDP and DDP in test_distributed.py, half precision and
compilation in test_numerics.py, pickling in test_deq.py, empty batches and single steps in solvers/test_conformance.py.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import TIGHT, TanhCell, inputs, matrix, unrolled


@pytest.mark.parametrize("rho", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=repr)
def test_default_gradients_are_accurate_or_the_adjoint_is_reported_as_failed(rho: float, solver: eq.Solver[Any]) -> None:
    """For a symmetric tanh cell with n = 16 and rho = 0.99, TorchDEQ did not report errors of up to 26 %."""
    cell, x = TanhCell(16, norm=rho, kind="symmetric"), inputs(3, 16) / 10
    deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(max_steps=500))
    s = deq.solve(x)
    (ours,) = torch.autograd.grad(s.z.square().sum(), cell.w)
    (exact,) = torch.autograd.grad(unrolled(cell, torch.zeros_like(x), x, steps=4000).square().sum(), cell.w)
    assert float((ours - exact).norm() / exact.norm()) < 0.03
    assert s.adjoint is not None and bool((s.adjoint.residual <= 1e-3).all())


def test_gradients_are_implicit_however_early_the_solve_converges() -> None:
    """A solve that starts at the equilibrium and takes no step still gets the adjoint solve."""
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    s = eq.fixed_point(lambda z, w: w * z + 1, torch.full((1, 1), 2.0).double(), w, stop=TIGHT)
    s.z.sum().backward()
    assert s.stats.steps.tolist() == [0]
    assert s.adjoint is not None and s.adjoint.evaluations > 0
    assert w.grad is not None
    torch.testing.assert_close(w.grad, torch.tensor(4.0).double())


@pytest.mark.parametrize("adjoint", [eq.Picard(), eq.Picard(damping=0.5)], ids=repr)
def test_every_documented_adjoint_solver_runs(adjoint: eq.Solver[Any]) -> None:
    cell, x = TanhCell(4), inputs(2, 4)
    eq.DEQ(cell, stop=TIGHT, gradient=eq.Implicit(solver=adjoint))(x).sum().backward()
    assert cell.w.grad is not None


def test_a_module_with_a_deq_inside_can_be_saved_and_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4).double(), eq.DEQ(TanhCell(4)))
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(twin(inputs(2, 4)), model(inputs(2, 4)))


def test_a_weight_normed_cell_is_copied_solved_and_trained_without_resets() -> None:
    cell = TanhCell(4)
    nn.utils.parametrizations.weight_norm(cell, "w")
    deq, x = eq.DEQ(cell, stop=TIGHT), inputs(2, 4)
    for _ in range(2):  # the second backward needs nobody's reset
        deq(x).sum().backward()
    ema = copy.deepcopy(deq)
    torch.testing.assert_close(ema(x), deq(x))
    ours = {name: p.grad for name, p in cell.named_parameters()}
    cell.zero_grad()
    (2 * unrolled(cell, torch.zeros_like(x), x).sum()).backward()
    for name, p in cell.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-8, atol=1e-9)


def test_a_spectral_normed_cell_is_normalised_and_trainable_from_the_first_solve() -> None:
    cell = TanhCell(4, norm=5.0)
    nn.utils.parametrizations.spectral_norm(cell, "w", n_power_iterations=30)
    eq.DEQ(cell, stop=eq.Stop(max_steps=300))(inputs(2, 4)).sum().backward()
    assert float(torch.linalg.matrix_norm(cell.w.detach(), 2)) < 1.01
    assert all(p.grad is not None for p in cell.parameters())


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=repr)
def test_a_sample_that_becomes_nan_keeps_its_best_iterate(solver: eq.Solver[Any]) -> None:
    """The sample keeps its best finite iterate, and the others converge as usual."""
    w, x, calls = matrix("orthogonal", 6, 0.9), inputs(3, 6), [0]

    def f(z: Tensor, x: Tensor) -> Tensor:
        calls[0] += 1
        out = torch.tanh(z @ w.T + x)
        return torch.where(torch.arange(len(out)).unsqueeze(1) == 1, torch.nan, out) if calls[0] > 10 else out

    stop = eq.Stop(rtol=1e-9, atol=0, max_steps=200, on_failure="ignore", compact=False)
    s = eq.fixed_point(f, torch.zeros_like(x), x, solver=solver, stop=stop)
    assert s.stats.status.tolist() == [eq.Status.CONVERGED, eq.Status.NONFINITE, eq.Status.CONVERGED]
    assert bool(torch.isfinite(s.z).all()) and float(s.stats.residual[1]) < 1
    assert s.stats.evaluations < 150


def test_one_overflowing_sample_in_float32() -> None:
    gain = torch.tensor([[0.5], [4.0]])
    s = eq.fixed_point(
        lambda z, g: g * z + 1, torch.zeros(2, 3), gain, solver=eq.Picard(), stop=eq.Stop(max_steps=200, on_failure="ignore")
    )
    assert s.stats.status.tolist() == [eq.Status.CONVERGED, eq.Status.DIVERGED]
    assert bool(torch.isfinite(s.z).all())


def test_a_nan_sample_left_out_of_the_loss_leaves_weights_finite() -> None:
    cell, x = TanhCell(4), inputs(3, 4)
    x[1] = float("nan")
    z = eq.DEQ(cell, stop=eq.Stop(on_failure="ignore"))(x)
    z[[0, 2]].square().sum().backward()
    assert cell.w.grad is not None and bool(torch.isfinite(cell.w.grad).all())


def test_a_divergent_map_is_solved_by_strong_solvers_and_reported_by_weak_ones() -> None:
    f, z0 = lambda z: 2 * z + 1, torch.zeros(1, 1).double()
    for solver in (eq.Broyden(), eq.Anderson(), eq.Newton()):
        torch.testing.assert_close(eq.fixed_point(f, z0, solver=solver).z, -torch.ones(1, 1).double(), rtol=1e-9, atol=1e-9)
    with pytest.warns(eq.ConvergenceWarning, match="did not converge for 1 of 1"):
        assert not bool(eq.fixed_point(f, z0, solver=eq.Picard()).stats.converged)


def test_a_rotation_of_period_four_warns() -> None:
    w = matrix("rotation", 2, 1.0)
    with pytest.warns(eq.ConvergenceWarning, match="1 max_steps"):
        eq.fixed_point(lambda z: z @ w.T + 1, torch.zeros(1, 2).double(), solver=eq.Picard())


def test_easy_samples_do_not_pay_for_hard_ones() -> None:
    gain = torch.tensor([[0.1]] * 9 + [[0.9]])
    s = eq.fixed_point(lambda z, g: g * z + 1, torch.zeros(10, 2), gain, solver=eq.Picard(), stop=eq.Stop(max_steps=200))
    assert s.stats.sample_evaluations < 0.3 * s.stats.evaluations * 10


def test_a_dict_state_and_parts_of_different_dtype() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 1).double()}
    s = eq.fixed_point(lambda z: {"a": 0.5 * z["a"] + 1, "b": 0.5 * z["b"] - 1}, state, solver=eq.Picard())
    assert (s.z["a"].dtype, s.z["b"].dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(s.z["a"], torch.full((2, 3), 2.0), rtol=2e-3, atol=0)


def test_a_tuple_state_under_the_implicit_gradient_in_eval_mode() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.4))

        def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a * z[1] + x, torch.tanh(z[0])

    cell, x = Two().eval(), torch.ones(2, 3)
    z = eq.DEQ(cell, init=lambda x: (torch.zeros_like(x), torch.zeros_like(x)))(x)
    (z[0] + z[1]).sum().backward()
    assert isinstance(z, tuple) and cell.a.grad is not None


def test_a_misspelled_option_raises_and_a_dict_of_options_is_not_changed() -> None:
    with pytest.raises(TypeError, match="f_maxiter"):
        eq.DEQ(TanhCell(3), f_maxiter=3)  # type: ignore[call-arg]
    options: dict[str, Any] = {"solver": eq.Anderson(history=3), "stop": eq.Stop(max_steps=7)}
    before = dict(options)
    eq.DEQ(TanhCell(3), **options)
    assert options == before


def test_inference_mode() -> None:
    deq, x = eq.DEQ(TanhCell(4), solver=eq.Newton()), inputs(2, 4)
    with torch.inference_mode():
        z = deq(x)
    assert not z.requires_grad


def test_a_scalar_input_gets_its_gradient() -> None:
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = eq.fixed_point(lambda z, w: torch.tanh(w * z + 1), torch.tensor(0.0).double(), w, stop=TIGHT, batched=False).z
    z.backward()
    assert w.grad is not None and float(w.grad) > 0.1
