"""Spectra against dense algebra."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

import equilibria as eq
from equilibria.analysis import (
    LargestSingularValue,
    SpectralRadius,
    dense_jacobian,
    jacobian_spectrum,
    largest_singular_value,
    spectral_radius,
)
from equilibria.analysis.spectrum import _power_iteration
from tests.problems import TIGHT, AffineCell, BatchNormCell, NestedCell, TanhCell, generator, inputs, matrix, orthogonal

# what a power iteration is asked for here, and how far the eigenvalue may be: residual times its condition, below 1e3
FINE: dict[str, Any] = {"steps": 3000, "tolerance": 1e-9}
FOUND: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
# the same sums in another order
REORDERED: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
LOOSE = eq.Stop(rtol=1e-3, atol=0.0, on_failure="ignore")
SEED = 11


def similar(blocks: list[Tensor], seed: int = 0) -> Tensor:
    """Return a non-normal matrix with the spectrum of the blocks."""
    n = sum(len(block) for block in blocks)
    basis = orthogonal(n, seed) @ torch.diag(torch.linspace(1, 3, n, dtype=torch.float64)) @ orthogonal(n, seed + 1)
    return basis @ torch.block_diag(*blocks) @ torch.linalg.inv(basis)


def number(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def turn(angle: float, radius: float) -> Tensor:
    c, s = radius * math.cos(angle), radius * math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


MATRICES = {
    "symmetric": matrix("symmetric", 6, 0.8),  # its spectrum lies symmetric to 0: the largest is a ± pair
    "rotation": matrix("rotation", 6, 0.7),
    "one positive": similar([number(0.9), number(0.6), turn(1.0, 0.5)]),
    "one negative": similar([number(-0.9), number(0.6), turn(1.0, 0.5)]),
    "± pair": similar([number(0.9), number(-0.9), number(0.4), number(0.3)]),
    "complex pair": similar([turn(0.7, 0.9), number(0.6), number(-0.5)]),
    "nearly real pair": similar([turn(0.01, 0.9), number(0.3), number(-0.2)]),
    "defective": similar([torch.tensor([[0.8, 0.5], [0.0, 0.8]], dtype=torch.float64), number(0.3)]),
    "triangular": torch.diag(torch.tensor([0.9, 0.5, -0.4, 0.1], dtype=torch.float64))
    + torch.ones(4, 4, dtype=torch.float64).triu(1),
    "above 1": similar([turn(2.0, 3.0), number(1.0)]),
}


def affine_solution(w: Tensor, batch: int = 2) -> eq.Solution:
    """Solve from the equilibrium itself, since not every solver finds it if the radius exceeds 1."""
    x = inputs(batch, len(w))
    z = torch.linalg.solve(torch.eye(len(w), dtype=torch.float64) - w, x.T).T
    return eq.fixed_point(AffineCell(w), z, x, stop=eq.Stop(rtol=1e-9))


def tanh_solution(batch: int = 3, n: int = 6, **parts: Any) -> eq.Solution:
    return eq.DEQ(TanhCell(n, **parts), stop=TIGHT).solve(inputs(batch, n))


def nested_solution() -> eq.Solution:
    return eq.DEQ(NestedCell(), NestedCell.zeros, stop=TIGHT).solve(inputs(3, 4))


def batch_norm_solution(training: bool) -> eq.Solution:
    cell = BatchNormCell(3).train(training)
    return eq.DEQ(cell, stop=TIGHT).solve(inputs(5, 3))


def packed_map(s: eq.Solution) -> Callable[[Tensor], Tensor]:
    return lambda z: s.layout.pack(s.f(s.layout.unpack(z)))


def reference_jacobian(s: eq.Solution) -> Tensor:
    """Return the Jacobian of the nested map by torch.func, (batch, n, batch, n)."""
    found: Tensor = jacrev(packed_map(s))(s.layout.pack(s.z).detach())
    return found.detach()


def largest(eigenvalues: Tensor) -> Tensor:
    return eigenvalues.abs().amax(dim=-1)


# ---- spectral radius


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
@pytest.mark.parametrize("name", [name for name in MATRICES if name != "defective"])
def test_radius_matches_dense_eigenvalues(name: str, seed: int) -> None:
    w = MATRICES[name]
    found = spectral_radius(affine_solution(w, batch=8), **FINE, generator=generator(seed))
    assert found.converged.all() and (found.residual <= FINE["tolerance"]).all()
    torch.testing.assert_close(found.radius, largest(torch.linalg.eigvals(w)).expand(8), **FOUND)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_radius_of_a_defective_matrix_is_exact_for_one_within_the_tolerance(tolerance: float, seed: int) -> None:
    """The tolerance bounds the distance to a matrix; eigenvalues of a defective matrix move by its root."""
    w = MATRICES["defective"]
    found = spectral_radius(affine_solution(w, batch=8), steps=3000, tolerance=tolerance, generator=generator(seed))
    assert found.converged.all() and (found.residual <= tolerance).all()
    # the distance of w to the nearest matrix with this eigenvalue
    distance = torch.linalg.svdvals(w - found.radius.view(-1, 1, 1) * torch.eye(len(w), dtype=torch.float64))[:, -1]
    assert (distance <= tolerance * torch.linalg.matrix_norm(w, 2)).all()


def test_a_converged_estimate_is_kept_while_others_continue() -> None:
    """A converged row keeps its estimate while others continue."""
    slow = similar([number(0.9), number(0.88), number(0.86), number(0.3)])
    fast = MATRICES["complex pair"]
    rows = torch.randn(2, 4, dtype=torch.float64, generator=generator(SEED))
    both = torch.stack((slow, fast))
    together = _power_iteration(lambda v: torch.einsum("bn,bnm->bm", v, both), rows, 3000, 1e-9)
    alone = _power_iteration(lambda v: v @ fast, rows[1:], 3000, 1e-9)
    assert together.converged.all() and together.steps > alone.steps
    torch.testing.assert_close(together.radius[1:], alone.radius, **REORDERED)


@pytest.mark.parametrize("name", ["one positive", "one negative"])
def test_rayleigh_quotient_has_the_sign_of_the_eigenvalue(name: str) -> None:
    found = spectral_radius(affine_solution(MATRICES[name]), **FINE)
    torch.testing.assert_close(found.rayleigh, torch.full_like(found.radius, 0.9 if "positive" in name else -0.9), **FOUND)


def test_an_orthogonal_jacobian_is_unconverged_with_the_right_radius() -> None:
    """Six eigenvalues of one modulus: the vectors do not converge, but their growth is the radius."""
    found = spectral_radius(affine_solution(matrix("orthogonal", 6, 0.8)), generator=generator(SEED))
    assert not found.converged.any() and found.steps == 100
    torch.testing.assert_close(found.radius, torch.full_like(found.radius, 0.8), **REORDERED)


def test_zero_jacobian_has_radius_zero() -> None:
    found = spectral_radius(eq.fixed_point(lambda z, x: x + 0 * z, inputs(2, 3), inputs(2, 3)))
    assert found.converged.all() and found.steps <= 2
    assert found.radius.tolist() == found.residual.tolist() == [0.0, 0.0]


def test_cell_without_its_state_has_radius_zero() -> None:
    assert spectral_radius(eq.fixed_point(lambda z, x: x.cos(), inputs(2, 3), inputs(2, 3))).radius.tolist() == [0.0, 0.0]


def test_nilpotent_jacobian_has_radius_zero() -> None:
    found = spectral_radius(affine_solution(torch.ones(4, 4, dtype=torch.float64).triu(1)))
    assert found.converged.all() and found.radius.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["symmetric", "orthogonal"])
def test_every_sample_has_its_own_radius(kind: str) -> None:
    s = tanh_solution(kind=kind)
    exact = largest(jacobian_spectrum(s))
    assert exact.max() > 1.05 * exact.min()
    found = spectral_radius(s, **FINE, generator=generator(SEED))
    assert found.converged.all()
    torch.testing.assert_close(found.radius, exact, **FOUND)


def test_radius_of_a_nested_state_matches_the_dense_one() -> None:
    s = nested_solution()
    found = spectral_radius(s, **FINE, generator=generator(SEED))
    torch.testing.assert_close(found.radius, largest(jacobian_spectrum(s)), **FOUND)


def test_radius_of_a_state_without_batch_matches_the_dense_one() -> None:
    w = MATRICES["complex pair"]
    s = eq.fixed_point(lambda z: w @ z + 1, torch.zeros(4, dtype=torch.float64), batched=False)
    torch.testing.assert_close(spectral_radius(s, **FINE).radius, torch.tensor([0.9], dtype=torch.float64), **FOUND)


def test_defaults_are_accurate_to_one_percent() -> None:
    s = tanh_solution(kind="symmetric", batch=8)
    found = spectral_radius(s, generator=generator(SEED))
    torch.testing.assert_close(found.radius, largest(jacobian_spectrum(s)), rtol=1e-2, atol=0)


def test_single_precision_converges_to_its_tolerance() -> None:
    cell = TanhCell(6, kind="symmetric", dtype=torch.float32)
    s = eq.DEQ(cell).solve(inputs(3, 6, dtype=torch.float32))
    found = spectral_radius(s, steps=1000, generator=generator(SEED))
    assert found.converged.all() and found.radius.dtype == torch.float32
    torch.testing.assert_close(found.radius.double(), largest(jacobian_spectrum(s)), rtol=1e-2, atol=0)


def test_iteration_stops_when_converged_and_after_few_steps() -> None:
    assert spectral_radius(affine_solution(MATRICES["rotation"])).steps <= 3
    s = tanh_solution()
    found = spectral_radius(s, steps=3, generator=generator(SEED))
    assert not found.converged.any() and found.steps == 3
    assert (found.residual > 1e-3).all() and torch.isfinite(found.radius).all()
    assert not spectral_radius(affine_solution(MATRICES["rotation"]), steps=1).converged.any()


def test_generator_decides_the_start() -> None:
    s = tanh_solution()
    radii = [spectral_radius(s, steps=5, generator=generator(seed)).radius for seed in (1, 1, 2)]
    assert torch.equal(radii[0], radii[1]) and not torch.equal(radii[0], radii[2])


def test_nan_sample_is_isolated() -> None:
    x = inputs(4, 6)
    cell = TanhCell(6, kind="symmetric")
    clean = eq.DEQ(cell, stop=TIGHT).solve(x)
    x = x.clone()
    x[1] = float("nan")
    s = eq.DEQ(cell, stop=eq.Stop(rtol=1e-13, max_steps=1000, on_failure="ignore")).solve(x)
    found, kept = spectral_radius(s, **FINE), torch.tensor([0, 2, 3])
    assert found.converged.tolist() == [True, False, True, True]
    for values in (found.radius, found.residual, found.rayleigh, jacobian_spectrum(s).abs(), dense_jacobian(s)):
        assert values[1].isnan().all() and not values[kept].isnan().any()
    torch.testing.assert_close(found.radius[kept], largest(jacobian_spectrum(clean))[kept], **FOUND)
    assert largest_singular_value(s, **FINE).converged.tolist() == [True, False, True, True]


def test_sample_whose_jacobian_is_not_finite_is_isolated() -> None:
    x = torch.tensor([[0.5], [0.0]], dtype=torch.float64)
    s = eq.fixed_point(lambda z, x: x * z.sqrt(), x, x, solver=eq.Picard(), stop=TIGHT)
    found = spectral_radius(s)
    assert found.converged.tolist() == [True, False] and found.steps < 10
    torch.testing.assert_close(found.radius, torch.tensor([0.5, float("nan")]).double(), **FOUND, equal_nan=True)
    assert jacobian_spectrum(s).isnan().tolist() == [[False], [True]]


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-12, 1e12, 1e25])
def test_jacobians_of_any_magnitude_have_the_right_radius(size: float) -> None:
    """The magnitudes are such that most squares are 0 or inf in float32."""
    diagonal = torch.tensor([[1.0, -0.5, 0.2], [0.3, -1.0, 0.1]])
    s = eq.fixed_point(lambda z, x: size * (z * x), torch.zeros(2, 3), diagonal, stop=LOOSE)
    found = spectral_radius(s, generator=generator(SEED))
    assert bool(found.converged.all())
    torch.testing.assert_close(found.radius.double() / size, torch.ones(2).double(), rtol=1e-2, atol=0.0)
    turning = eq.fixed_point(lambda z: size * torch.stack((-z[:, 1], z[:, 0]), dim=1), torch.zeros(2, 2), stop=LOOSE)
    found = spectral_radius(turning, generator=generator(SEED))
    assert bool(found.converged.all())
    torch.testing.assert_close(found.radius.double() / size, torch.ones(2).double(), rtol=1e-2, atol=0.0)


def test_an_overflowing_product_gives_nan() -> None:
    s = eq.fixed_point(lambda z: 1e25 * z, torch.zeros(2, 3), stop=LOOSE)
    found = largest_singular_value(s, generator=generator(SEED))  # J'J v is of size 1e50
    assert not found.converged.any() and not torch.isfinite(found.value).any()


def test_a_batch_without_finite_samples_has_nan() -> None:
    x = torch.full((2, 3), float("nan"), dtype=torch.float64)
    s = eq.DEQ(TanhCell(3), stop=LOOSE).solve(x)
    found = spectral_radius(s)
    assert found.radius.isnan().all() and not found.converged.any()
    assert "no sample of 2 is finite" in str(found)


def test_samples_coupled_by_batch_norm_share_one_radius() -> None:
    s = batch_norm_solution(training=True)
    whole = reference_jacobian(s).reshape(15, 15)
    found = spectral_radius(s, **FINE, generator=generator(SEED))
    assert found.converged.all()
    torch.testing.assert_close(found.radius, largest(torch.linalg.eigvals(whole)).expand(5), **FOUND)
    largest_of_all = largest_singular_value(s, **FINE).value
    torch.testing.assert_close(largest_of_all, torch.linalg.matrix_norm(whole, ord=2).expand(5), **FOUND)
    for dense in (dense_jacobian, jacobian_spectrum):
        with pytest.raises(ValueError, match=r"5 samples are coupled by batch statistics.*eval mode"):
            dense(s)


def test_batch_norm_in_eval_mode_is_per_sample() -> None:
    s = batch_norm_solution(training=False)
    torch.testing.assert_close(spectral_radius(s, **FINE).radius, largest(jacobian_spectrum(s)), **FOUND)


def test_running_statistics_do_not_change() -> None:
    cell = BatchNormCell(3)
    s = eq.DEQ(cell, stop=TIGHT).solve(inputs(5, 3))
    before = [buffer.clone() for buffer in cell.buffers()]
    spectral_radius(s)
    assert all(torch.equal(a, b) for a, b in zip(before, cell.buffers(), strict=True))


def test_results_are_detached_with_and_without_gradients_around() -> None:
    w = (0.5 * matrix("orthogonal", 3, 1.0)).requires_grad_()
    s = eq.fixed_point(lambda z, x: torch.tanh(z @ w.T + x), inputs(2, 3), inputs(2, 3).requires_grad_(), stop=TIGHT)
    with torch.no_grad():
        quiet = spectral_radius(s, generator=generator(SEED))
    found = spectral_radius(s, generator=generator(SEED))
    assert torch.equal(found.radius, quiet.radius)
    tensors = [found.radius, largest_singular_value(s).value, dense_jacobian(s), jacobian_spectrum(s)]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert w.grad is None


def test_invalid_settings_raise() -> None:
    s = tanh_solution()
    with pytest.raises(ValueError, match="at least 1 step, got steps=0"):
        spectral_radius(s, steps=0)
    with pytest.raises(ValueError, match="tolerance must not be negative, got -1"):
        largest_singular_value(s, tolerance=-1)


def test_results_print_their_numbers() -> None:
    numbers = torch.tensor([0.5, 0.25, float("nan")])
    converged = torch.tensor([True, False, False])
    line = "0.375 on average, 0.5 at worst; 1 of 3 estimates converged in 7 steps"
    assert str(SpectralRadius(numbers, converged, numbers, numbers, 7)) == f"spectral radius {line}"
    assert str(LargestSingularValue(numbers, converged, numbers, numbers, 7)) == f"largest singular value {line}"


# ---- singular values and dense Jacobians


@pytest.mark.parametrize("name", MATRICES)
def test_singular_value_matches_dense_norm(name: str) -> None:
    w = MATRICES[name]
    found = largest_singular_value(affine_solution(w), **FINE, generator=generator(SEED))
    assert found.converged.all()
    torch.testing.assert_close(found.value, torch.linalg.matrix_norm(w, ord=2).expand(2), **FOUND)
    assert (found.rayleigh.sqrt() <= found.value * (1 + FOUND["rtol"])).all()


@pytest.mark.parametrize("solution", [tanh_solution, nested_solution])
def test_every_sample_has_its_own_singular_value(solution: Callable[[], eq.Solution]) -> None:
    s = solution()
    exact = torch.linalg.matrix_norm(dense_jacobian(s), ord=2)
    torch.testing.assert_close(largest_singular_value(s, **FINE).value, exact, **FOUND)


@pytest.mark.parametrize("solution", [tanh_solution, nested_solution])
def test_dense_jacobian_matches_torch_func(solution: Callable[[], eq.Solution]) -> None:
    s = solution()
    reference = reference_jacobian(s)
    expected = torch.stack([reference[b, :, b] for b in range(len(reference))])
    torch.testing.assert_close(dense_jacobian(s), expected, **REORDERED)


def test_spectrum_is_sorted_by_descending_modulus() -> None:
    w = MATRICES["one negative"]
    found = jacobian_spectrum(affine_solution(w))
    assert found.shape == (2, 4) and found.dtype == torch.complex128
    torch.testing.assert_close(
        found.abs(), torch.tensor([0.9, 0.6, 0.5, 0.5], dtype=torch.float64).expand(2, 4), **REORDERED
    )
    torch.testing.assert_close(found.prod(dim=1).real, torch.linalg.det(w).expand(2), **REORDERED)
    torch.testing.assert_close(found[:, 0].real, torch.full((2,), -0.9, dtype=torch.float64), **REORDERED)


@pytest.mark.parametrize("dense", [dense_jacobian, jacobian_spectrum])
def test_large_states_raise(dense: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"got n = 6, the limit is 5.*spectral_radius"):
        dense(tanh_solution(), limit=5)
    assert dense(tanh_solution(), limit=6).shape[1] == 6
