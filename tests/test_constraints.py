"""Constraints: against dense singular values, against bisection, and on maps whose ratio is known."""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrizations import weight_norm

import equilibria as eq
from equilibria.constraints import SpectralNorm, contract_, lipschitz_ratio, project_, project_rows, spectral_norm
from tests.problems import NestedCell, TanhCell, generator, inputs, matrix, orthogonal

EXAMPLES = int(os.environ.get("EQUILIBRIA_EXAMPLES", "25"))

ROUNDING = 1e-12  # a few hundred operations in float64, each good to 1e-16
CONVERGED = 1e-10  # of u and v in the gradient: their rounding is that of W divided by the gap between singular values
MANY = 400  # power iterations: the gap of 0.8 between the singular values below leaves 0.8^800 of the error
BISECTIONS = 200  # halvings of an interval: far more than the 53 bits of float64
STORED_ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-6}  # of entries that add up to the bound


# ---- spectral norm ----


def gapped(rows: int, columns: int, largest: float = 3.0, seed: int = 0) -> Tensor:
    """Return a matrix with singular values largest, 0.8 largest, 0.64 largest, ...: power iteration converges."""
    k = min(rows, columns)
    values = largest * 0.8 ** torch.arange(k, dtype=torch.float64)
    return orthogonal(rows, seed)[:, :k] * values @ orthogonal(columns, seed + 1)[:k]


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def parametrization(module: nn.Module, name: str = "weight") -> SpectralNorm:
    found = module.get_submodule(f"parametrizations.{name}.0")
    assert isinstance(found, SpectralNorm)
    return found


def original(module: nn.Module, name: str = "weight") -> Tensor:
    return module.get_parameter(f"parametrizations.{name}.original")


def sigma(weight: Tensor) -> float:
    return torch.linalg.matrix_norm(weight.detach().flatten(1), ord=2).item()


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("bound", [0.5, 1.0, 2.5])
def test_power_iteration_reaches_the_bound(shape: tuple[int, int], bound: float) -> None:
    layer = spectral_norm(linear(gapped(*shape)), bound=bound, generator=generator(0))
    for _ in range(MANY):
        weight = layer.weight
    assert sigma(weight) == pytest.approx(bound, rel=ROUNDING)
    torch.testing.assert_close(weight, gapped(*shape) * bound / 3, rtol=ROUNDING, atol=ROUNDING)


def test_several_iterations_equal_several_forwards() -> None:
    once = spectral_norm(linear(gapped(4, 5)), generator=generator(0))
    thrice = spectral_norm(linear(gapped(4, 5)), iterations=3, generator=generator(0))
    with torch.no_grad():
        for layer in (once, thrice):
            parametrization(layer)._v.copy_(torch.linspace(1, 2, 5))
    for _ in range(3):
        weight = once.weight
    assert torch.equal(weight, thrice.weight)


def test_power_iteration_estimates_from_below() -> None:
    layer = linear(gapped(6, 6))
    spectral_norm(layer, bound=0.9, generator=generator(0)).eval()
    assert sigma(layer.weight) >= 0.9 * (1 - ROUNDING)


@pytest.mark.parametrize("clip", [False, True])
def test_exact_mode_holds_the_bound_at_once(clip: bool) -> None:
    layer = spectral_norm(linear(matrix("orthogonal", 6, 4.0)), bound=0.9, exact=True, clip=clip)
    assert sigma(layer.weight) == pytest.approx(0.9, rel=ROUNDING)
    assert not list(layer.buffers())


@pytest.mark.parametrize("exact", [False, True])
def test_clipping_leaves_small_weights_alone(exact: bool) -> None:
    small = gapped(4, 6, largest=0.7)
    layer = spectral_norm(linear(small), bound=0.9, clip=True, exact=exact)
    assert torch.equal(layer.weight, small)
    layer.weight.sum().backward()
    torch.testing.assert_close(original(layer).grad, torch.ones_like(small), rtol=0, atol=0)
    layer.weight = gapped(4, 6, largest=20.0)
    for _ in range(MANY):
        weight = layer.weight
    assert sigma(weight) == pytest.approx(0.9, rel=ROUNDING)


@pytest.mark.parametrize("exact", [False, True])
def test_a_learnable_bound_is_a_positive_parameter(exact: bool) -> None:
    layer = spectral_norm(linear(gapped(4, 6)), bound=0.7, learnable=True, exact=exact)
    norm = parametrization(layer)
    assert norm.log_bound is not None and sorted(dict(norm.named_parameters())) == ["log_bound"]
    weight = layer.weight
    weight.sum().backward()
    # d (g W / sigma) / d log g is the weight itself
    torch.testing.assert_close(norm.log_bound.grad, weight.detach().sum(), rtol=ROUNDING, atol=ROUNDING)
    with torch.no_grad():
        norm.log_bound.sub_(50.0)
    assert isinstance(norm.bound, Tensor) and float(norm.bound.detach()) > 0


def test_a_learnable_ceiling_has_a_gradient_only_where_it_is_touched() -> None:
    slopes = []
    for largest in (0.5, 3.0):
        layer = spectral_norm(linear(gapped(4, 6, largest)), bound=0.7, learnable=True, clip=True, exact=True)
        layer.weight.square().sum().backward()
        slope = parametrization(layer).get_parameter("log_bound").grad
        assert slope is not None
        slopes.append(float(slope))
    assert slopes[0] == 0 and slopes[1] > 0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("learnable", [False, True])
def test_the_exact_mode_passes_gradcheck(clip: bool, learnable: bool) -> None:
    weight = gapped(3, 4).requires_grad_()
    norm = SpectralNorm(weight, 0.8, exact=True, clip=clip, learnable=learnable)
    assert torch.autograd.gradcheck(norm, (weight,))


def test_gradients_of_the_converged_power_iteration() -> None:
    """d<G, b W / s> = b / s <G - (<G, W> / s) u v', dW> for constant G, and ds = u' dW v."""
    weight, bound = gapped(5, 4).requires_grad_(), 0.8
    norm = SpectralNorm(weight, bound, generator=generator(0))
    for _ in range(MANY):
        norm(weight)
    probe = inputs(5, 4)
    (ours,) = torch.autograd.grad(norm(weight), weight, probe)
    U, S, Vh = torch.linalg.svd(weight.detach(), full_matrices=False)
    tilt = (probe * weight.detach()).sum() / S[0] * torch.outer(U[:, 0], Vh[0])
    torch.testing.assert_close(ours, bound / S[0] * (probe - tilt), rtol=CONVERGED, atol=CONVERGED)
    (exact,) = torch.autograd.grad(SpectralNorm(weight, bound, exact=True)(weight), weight, probe)
    torch.testing.assert_close(ours, exact, rtol=CONVERGED, atol=CONVERGED)


def test_forward_mode_takes_the_vectors_for_constants_too() -> None:
    """This is checked in training mode, where the vectors are computed from a weight with a tangent."""
    weight, direction, probe = gapped(5, 4), inputs(5, 4, seed=7), inputs(5, 4)
    reverse, forward = (SpectralNorm(weight, 0.8, generator=generator(0)) for _ in range(2))
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(forward(forward_ad.make_dual(weight, direction))).tangent
        assert slope is not None and forward_ad.unpack_dual(forward._u).tangent is None
    (gradient,) = torch.autograd.grad(reverse(weight.requires_grad_()), weight, probe)
    assert float((slope * probe).sum()) == pytest.approx(float((gradient * direction).sum()), rel=ROUNDING)


def test_eval_mode_moves_nothing() -> None:
    layer = spectral_norm(linear(gapped(5, 4)), generator=generator(0)).eval()
    with torch.no_grad():
        original(layer).add_(inputs(5, 4))
    before = [buffer.clone() for buffer in layer.buffers()]
    first = layer.weight
    assert torch.equal(first, layer.weight)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    layer.train()
    assert not torch.equal(first, layer.weight)
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))


def test_two_forwards_before_one_backward() -> None:
    layer, x = spectral_norm(linear(gapped(5, 4))), inputs(3, 4)
    (layer(x).sum() - layer(2 * x).square().sum()).backward()
    layer.eval()
    loss = layer(x).sum()
    layer.train()
    layer(x)
    loss.backward()


def test_a_generator_makes_it_repeatable() -> None:
    torch.manual_seed(0)
    a, b, other = (SpectralNorm(gapped(5, 4), generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(a._u, b._u) and torch.equal(a._v, b._v)
    assert not torch.equal(a._u, other._u)
    assert torch.equal(torch.randn(3), torch.randn(3, generator=generator(0)))  # the global one was left alone


CONVOLUTIONS = [(nn.Conv2d(3, 4, 3, dtype=torch.float64), 0), (nn.ConvTranspose2d(3, 4, 3, dtype=torch.float64), 1)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("layer", "dimension"), CONVOLUTIONS, ids=["plain", "transposed"])
def test_convolutions_are_matrices_of_out_times_rest(layer: nn.Conv2d, dimension: int, exact: bool) -> None:
    layer = copy.deepcopy(layer)
    layer.weight = nn.Parameter(gapped(4, 27).reshape(4, 3, 3, 3).movedim(0, dimension).contiguous())
    spectral_norm(layer, bound=0.6, exact=exact)
    for _ in range(1 if exact else MANY):
        weight = layer.weight
    assert sigma(weight.movedim(dimension, 0)) == pytest.approx(0.6, rel=ROUNDING)
    assert sum(buffer.numel() for buffer in layer.buffers()) == (0 if exact else 4 + 27)


def test_a_convolution_is_up_to_the_root_of_its_taps_above() -> None:
    """The operator norm satisfies sigma <= |conv| <= sqrt(taps) sigma."""
    layer = nn.Conv1d(2, 2, 3, padding=1, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(inputs(2, 6).reshape(2, 2, 3))
    spectral_norm(layer, exact=True)
    operator = torch.func.jacrev(lambda x: layer(x[None])[0])(inputs(2, 12))
    assert 1 <= sigma(operator.reshape(24, 24)) <= math.sqrt(3)


def test_complex_weights_are_bounded() -> None:
    weight = torch.complex(inputs(5, 4), inputs(5, 4, seed=4))
    for exact in (False, True):
        norm = SpectralNorm(weight, 0.8, exact=exact, learnable=True, generator=generator(0))
        for _ in range(MANY):
            scaled = norm(weight)
        assert sigma(scaled) == pytest.approx(0.8, rel=ROUNDING)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", STORED_ROUNDING)
def test_low_precision_is_computed_in_float32(dtype: torch.dtype, exact: bool) -> None:
    layer = spectral_norm(linear(gapped(6, 6).to(dtype)), bound=0.9, exact=exact, iterations=MANY)
    weight = layer.weight
    assert weight.dtype == dtype
    assert sigma(weight.double()) == pytest.approx(0.9, rel=STORED_ROUNDING[dtype] * 6)
    layer.double().weight.sum().backward()


def test_autocast_does_not_reach_sigma() -> None:
    layer = spectral_norm(linear(gapped(6, 6).float()), bound=0.9, generator=generator(0)).eval()
    plain = layer.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.weight, plain)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"learnable": True, "clip": True}], ids=str)
def test_state_dict_and_copies_keep_the_constraint(options: dict[str, bool]) -> None:
    def build(seed: int) -> nn.Linear:
        layer = linear(gapped(4, 6, seed=seed))
        return spectral_norm(layer, "weight", 0.7, generator=generator(seed), **options).eval()

    layer, twin = build(0), build(5)
    assert not torch.equal(layer.weight, twin.weight)
    twin.load_state_dict(layer.state_dict())
    copied = copy.deepcopy(layer)
    assert torch.equal(layer.weight, twin.weight) and torch.equal(layer.weight, copied.weight)
    with torch.no_grad():
        original(copied).mul_(-1)
        copied.train()(inputs(2, 6))
    assert torch.equal(layer.weight, twin.weight) and not torch.equal(layer.weight, copied.weight)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))


def test_an_assigned_weight_is_scaled_like_any_other() -> None:
    """This also holds in eval mode, where u and v of the old weight would give a wrong sigma."""
    layer = spectral_norm(linear(gapped(6, 6, seed=0)), bound=0.9, iterations=MANY).eval()
    layer.weight = gapped(6, 6, largest=11.0, seed=8)
    for _ in range(MANY // 15):
        layer.weight = layer.weight.detach()
    torch.testing.assert_close(layer.weight, gapped(6, 6, largest=0.9, seed=8), rtol=CONVERGED, atol=CONVERGED)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_weight_that_was_zero_or_not_finite_can_be_mended(value: float) -> None:
    layer = spectral_norm(linear(gapped(4, 4)), bound=0.9, generator=generator(0))
    with torch.no_grad():
        original(layer).fill_(value)
    assert not value == 0 or torch.equal(layer.weight, torch.zeros(4, 4).double())
    layer.weight  # noqa: B018  a forward in training mode: the power iteration runs on it
    with torch.no_grad():
        original(layer).copy_(gapped(4, 4))
    for _ in range(MANY):
        weight = layer.weight
    assert sigma(weight) == pytest.approx(0.9, rel=ROUNDING)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"learnable": True}], ids=str)
def test_a_solve_in_training_mode_converges_and_trains(options: dict[str, bool]) -> None:
    cell, x = TanhCell(5, norm=4.0), inputs(3, 5)
    spectral_norm(cell, "w", 0.8, generator=generator(0), **options)
    s = eq.DEQ(cell, stop=eq.Stop(rtol=1e-10, max_steps=200, on_failure="raise")).solve(x)
    s.z.square().sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in cell.parameters())


def test_spectral_norm_refuses_invalid_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"Linear has no tensor 'wieght' to constrain: its own parameters are \['weight', 'b"
    ):
        spectral_norm(nn.Linear(2, 2), "wieght")
    with pytest.raises(ValueError, match=r"got a weight of shape \(2,\)"):
        spectral_norm(nn.Linear(2, 2), "bias")
    for bad in ({"bound": 0.0}, {"bound": math.nan}, {"iterations": 0}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be positive"):
            spectral_norm(nn.Linear(2, 2), **bad)


def test_the_settings_are_printed() -> None:
    norm = parametrization(spectral_norm(nn.Linear(2, 2), bound=0.7, learnable=True))
    assert "bound=0.7, iterations=1, clip=False, learnable=True" in repr(norm)
    assert "bound=0.7, exact, clip=True, learnable=False" in repr(SpectralNorm(torch.eye(2), 0.7, exact=True, clip=True))


# ---- projection ----


def bisected(weight: Tensor, bound: float) -> Tensor:
    """Return the projection of each row by bisection on its threshold."""
    low, high = torch.zeros(len(weight), 1).double(), weight.abs().amax(dim=1, keepdim=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        outside = (weight.abs() - middle).clamp(min=0).sum(dim=1, keepdim=True) > bound
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    return weight.sign() * (weight.abs() - high).clamp(min=0)


def test_known_rows_are_projected_exactly() -> None:
    weight = torch.tensor([[3.0, 0.0], [1.0, -1.0], [2.0, 1.5], [0.25, -0.5], [0.0, 0.0]]).double()
    expected = torch.tensor([[1.0, 0.0], [0.5, -0.5], [0.75, 0.25], [0.25, -0.5], [0.0, 0.0]]).double()
    assert torch.equal(project_rows(weight, 1.0), expected)


@settings(derandomize=True, deadline=None, max_examples=EXAMPLES)
@given(st.integers(1, 12), st.integers(1, 24), st.floats(0.01, 30.0), st.floats(-4.0, 4.0), st.integers(0, 10_000))
def test_projection_is_the_nearest_point(rows: int, columns: int, bound: float, size: float, seed: int) -> None:
    weight = 10**size * inputs(rows, columns, seed=seed)
    before = weight.clone()
    projected = project_rows(weight, bound)
    assert torch.equal(weight, before)
    near = ROUNDING * max(bound, float(weight.abs().max()))  # what subtracting the threshold from such entries leaves
    assert float(projected.abs().sum(dim=1).max()) <= bound + near * columns
    torch.testing.assert_close(projected, bisected(weight, bound), rtol=0, atol=near)
    torch.testing.assert_close(project_rows(projected, bound), projected, rtol=0, atol=near)
    inside = weight.abs().sum(dim=1) <= bound
    assert torch.equal(projected[inside], weight[inside])


@settings(derandomize=True, deadline=None, max_examples=EXAMPLES)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.1, 3.0), st.integers(0, 10_000))
def test_no_feasible_point_is_nearer(rows: int, columns: int, bound: float, seed: int) -> None:
    """The projection p of w on a convex set is the one point with <w - p, q - p> <= 0 for every q in the set."""
    weight = 3 * inputs(rows, columns, seed=seed)
    projected = project_rows(weight, bound)
    corners = bound * torch.eye(columns).double()
    for corner in (*corners, *-corners):
        assert float(((weight - projected) * (corner - projected)).sum(dim=1).max()) <= 100 * ROUNDING


def test_projecting_columns_leaves_the_rows_feasible() -> None:
    parameter = nn.Parameter(3 * inputs(5, 7))
    project_(parameter, 0.9, columns=True)
    assert float(parameter.detach().abs().sum(dim=0).max()) <= 0.9 + ROUNDING
    assert float(parameter.detach().abs().sum(dim=1).max()) <= 0.9 + ROUNDING
    rows = project_rows(3 * inputs(5, 7), 0.9)
    assert torch.equal(parameter.detach(), project_rows(rows.T, 0.9).T)


def test_projection_in_place_keeps_the_parameter() -> None:
    parameter = nn.Parameter(3 * inputs(5, 7))
    address, expected = parameter.data_ptr(), project_rows(parameter, 0.9)
    project_(parameter, 0.9)
    assert parameter.data_ptr() == address and parameter.requires_grad and parameter.grad_fn is None
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize("dtype", STORED_ROUNDING)
def test_projection_keeps_the_dtype(dtype: torch.dtype) -> None:
    weight = inputs(4, 300).to(dtype)
    projected = project_rows(weight, 2.0)
    assert projected.dtype == dtype
    torch.testing.assert_close(projected.double(), bisected(weight.double(), 2.0), rtol=0, atol=2 * STORED_ROUNDING[dtype])
    assert float(projected.double().abs().sum(dim=1).max()) <= 2.0 * (1 + STORED_ROUNDING[dtype])


def test_projection_refuses_invalid_arguments() -> None:
    for bound in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="bound must be positive"):
            project_rows(torch.eye(2), bound)
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 3\)"):
        project_rows(torch.zeros(2, 3, 3), 1.0)
    with pytest.raises(ValueError, match=r"shape \(2, 2\) is computed from others"):
        project_(weight_norm(nn.Linear(2, 2)).weight, 1.0)


# ---- contraction control ----

LOOSE = eq.Stop(rtol=1e-6, max_steps=100, on_failure="ignore")  # a ratio can be taken anywhere, equilibrium or not


class Chain(nn.Module):
    """Linear layers in series, plus the input."""

    def __init__(self, depth: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias, dtype=torch.float64) for _ in range(depth))
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * inputs(width, parameter.numel() // width, seed=seed).view_as(parameter))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            z = layer(z)
        return z + x


def solved(cell: nn.Module, x: Tensor) -> eq.Solution:
    with torch.no_grad():
        return eq.DEQ(cell, stop=LOOSE).solve(x)


def parameters(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 3, 2)])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_the_ratio_of_a_rotation_is_its_norm(shape: tuple[int, ...], scale: float) -> None:
    """An orthogonal matrix on the channels stretches every step by its norm."""
    w = matrix("orthogonal", 4, 0.6)
    x = torch.randn(shape, dtype=torch.float64, generator=generator(2))
    s = eq.fixed_point(lambda z, x: torch.einsum("ij,bj...->bi...", w, z) + x, torch.zeros_like(x), x)
    ratio = lipschitz_ratio(s, scale, generator(1))
    assert ratio.dim() == 0 and not ratio.requires_grad
    # f(w) - f(u) loses digits as the step gets smaller than u
    assert float(ratio) == pytest.approx(0.6, rel=ROUNDING / scale)


def test_the_ratio_of_a_known_matrix_and_known_noise_is_exact() -> None:
    w, x = 0.5 * inputs(4, 4), inputs(6, 4)
    s = eq.fixed_point(lambda z, x: z @ w.T + x, x, x, stop=LOOSE)
    noise = torch.randn(6, 4, dtype=torch.float64, generator=generator(1))
    expected = (noise @ w.T).norm(dim=1).mean() / noise.norm(dim=1).mean()
    assert float(lipschitz_ratio(s, generator=generator(1))) == pytest.approx(float(expected), rel=ROUNDING)


def test_ratio_of_a_nested_state_adds_up_its_parts() -> None:
    x = inputs(3, 4)
    cell = NestedCell()
    with torch.no_grad():
        cell.b.zero_()  # then the parts of b stand alone, but for what a does to the last
    s = eq.fixed_point(cell, NestedCell.zeros(x), x)
    ratio = lipschitz_ratio(s, generator=generator(1))
    draw = generator(1)
    u = s.z
    first, (second,) = u["b"]
    noise = [torch.randn(part.shape, dtype=torch.float64, generator=draw) for part in (u["a"], first, second)]
    w = {"a": u["a"] + noise[0], "b": (first + noise[1], [second + noise[2]])}
    fu, fw = cell(u, x), cell(w, x)

    def total(p: dict[str, object], q: dict[str, object]) -> Tensor:
        p1, (p2,) = p["b"]  # type: ignore[misc]
        q1, (q2,) = q["b"]  # type: ignore[misc]
        a: Tensor = p["a"] - q["a"]  # type: ignore[operator]
        return a.norm(dim=1).mean() + (p1 - q1).norm(dim=1).mean() + (p2 - q2).abs().mean()  # type: ignore[has-type]

    assert float(ratio) == pytest.approx(float((total(fw, fu) / total(w, u)).detach()), rel=ROUNDING)


def test_the_ratio_of_a_state_without_a_batch_is_one_number() -> None:
    w, x = matrix("orthogonal", 4, 0.6), inputs(7, 4)
    s = eq.fixed_point(lambda z, x: z @ w.T + x, torch.zeros_like(x), x, batched=False)
    assert float(lipschitz_ratio(s, generator=generator(1))) == pytest.approx(0.6, rel=ROUNDING)


def test_samples_that_are_not_finite_are_left_out() -> None:
    w, x = 0.3 * inputs(4, 4), inputs(5, 4)
    noise = torch.randn(5, 4, dtype=torch.float64, generator=generator(1))
    x[2] = math.nan
    s = eq.fixed_point(lambda z, x: z @ w.T + x, torch.zeros_like(x), x, stop=LOOSE)
    assert s.stats.count(eq.Status.NONFINITE) == 1
    noise = noise[[0, 1, 3, 4]]
    expected = (noise @ w.T).norm(dim=1).mean() / noise.norm(dim=1).mean()
    assert float(lipschitz_ratio(s, generator=generator(1))) == pytest.approx(float(expected), rel=ROUNDING)


def test_a_sample_that_overflowed_is_left_out_though_its_best_iterate_is_finite() -> None:
    x = torch.tensor([[10.0], [0.0], [0.0]]).double()
    s = eq.fixed_point(lambda z, x: 0.5 * z + x * z**3, torch.full_like(x, 2.0), x, solver=eq.Picard(), stop=LOOSE)
    assert s.stats.status.tolist() == [eq.Status.NONFINITE, eq.Status.CONVERGED, eq.Status.CONVERGED]
    assert bool(torch.isfinite(s.f(s.z)).all())
    assert float(lipschitz_ratio(s, generator=generator(1))) == pytest.approx(0.5, rel=ROUNDING)


def test_samples_that_the_noise_carries_out_of_range_are_left_out() -> None:
    """The map is finite at the equilibrium of each sample, but a logarithm of a negative number next to one of them."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + torch.where(x > 0, torch.log(1 - z.abs().clamp(max=2)), 0.0)

    x = torch.tensor([[1.0], [0.0], [0.0]]).double()
    s = eq.fixed_point(f, torch.zeros(3, 1).double(), x)
    assert bool(s.stats.converged.all())
    assert float(lipschitz_ratio(s, scale=1e3, generator=generator(1))) == pytest.approx(0.5, rel=ROUNDING)


def test_a_ratio_of_nothing_is_nan_and_scales_nothing() -> None:
    cell = Chain(2)
    before = parameters(cell)
    s = solved(cell, torch.full((3, 4), math.nan).double())
    assert math.isnan(contract_(cell.layers, s, 1e-6))
    assert all(torch.equal(a, b) for a, b in zip(before, cell.parameters(), strict=True))


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("bound", [0.01, 0.2])
def test_a_contracted_chain_has_the_ratio_asked_for(depth: int, bound: float) -> None:
    cell, x = Chain(depth), inputs(8, 4)
    with torch.no_grad():
        for layer in cell.layers:
            layer.get_parameter("weight").copy_(1.3 * matrix("orthogonal", 4, 1.0) + 0.1 * torch.eye(4))
    seen = contract_(cell.layers, solved(cell, x), bound, generator=generator(1))
    assert seen > bound
    assert float(lipschitz_ratio(solved(cell, x), generator=generator(1))) == pytest.approx(bound, rel=ROUNDING)


def test_weights_and_biases_are_scaled_by_the_root() -> None:
    cell, x = Chain(3, bias=True), inputs(8, 4)
    before = parameters(cell)
    ratio = contract_(list(cell.layers), solved(cell, x), 0.01, generator=generator(1))
    factor = (0.01 / ratio) ** (1 / 3)
    for old, new in zip(before, cell.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), factor * old, rtol=ROUNDING, atol=0)
        assert new.requires_grad and new.grad_fn is None


@pytest.mark.parametrize("room", [1.0, 3.0])
def test_up_to_the_bound_nothing_changes(room: float) -> None:
    cell, x = Chain(2, bias=True), inputs(8, 4)
    before = parameters(cell)
    s = solved(cell, x)
    ratio = float(lipschitz_ratio(s, generator=generator(1)))
    assert contract_(cell.layers, s, room * ratio, generator=generator(1)) == ratio
    assert all(torch.equal(a, b) for a, b in zip(before, cell.parameters(), strict=True))


def test_a_shared_layer_is_scaled_once() -> None:
    cell, x = Chain(2), inputs(8, 4)
    cell.layers[1].weight = cell.layers[0].weight
    contract_(cell.layers, solved(cell, x), 0.05, generator=generator(1))
    assert float(lipschitz_ratio(solved(cell, x), generator=generator(1))) == pytest.approx(0.05, rel=ROUNDING)


def test_contracting_refuses_invalid_arguments() -> None:
    s = solved(Chain(1), inputs(2, 4))
    with pytest.raises(ValueError, match=r"The weight of Parametrized\w+ is computed by a parametrization"):
        contract_([nn.Linear(4, 4), spectral_norm(nn.Linear(4, 4))], s, 0.5)
    with pytest.raises(ValueError, match=r"The bias of .* is computed by a parametrization"):
        contract_([weight_norm(nn.Linear(4, 4), "bias")], s, 0.5)
    with pytest.raises(ValueError, match="need a parameter 'weight', and ReLU has"):
        contract_([nn.ReLU()], s, 0.5)
    with pytest.raises(ValueError, match="no layers to scale"):
        contract_([], s, 0.5)
    with pytest.raises(ValueError, match="bound must be positive"):
        contract_([nn.Linear(4, 4)], s, 0.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        lipschitz_ratio(s, 0.0)


def test_contracting_makes_a_diverging_map_converge() -> None:
    cell, x = Chain(2), inputs(8, 4)
    with torch.no_grad():
        for layer in cell.layers:
            layer.get_parameter("weight").copy_(matrix("orthogonal", 4, 1.2))
    picard = eq.DEQ(cell, solver=eq.Picard(), stop=LOOSE)
    s = picard.solve(x)
    assert not bool(s.stats.converged.any())
    assert contract_(cell.layers, s, 0.8) == pytest.approx(
        1.44, rel=1e-6
    )  # a state grown by 1.44^100 hides the step's digits
    assert bool(picard.solve(x).stats.converged.all())
