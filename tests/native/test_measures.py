"""Quantities of rows in one native call, compared with torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import native
from equilibria.native import measures
from tests.problems import TanhCell, generator

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason() or "native")

DTYPES = [torch.float32, torch.float64]
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}  # relative, of sums in another order


def rows(batch: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(batch, n, generator=generator(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 32, 513, 1200])
def test_rows_are_divided_by_their_root_mean_square(n: int, dtype: torch.dtype) -> None:
    v = rows(5, n, dtype) * torch.tensor([1.0, 1e-3, 1e10, 1e-30, 1e30], dtype=dtype).unsqueeze(1)
    with torch.no_grad():
        found = measures.normalized(v)
    assert found is not None
    scale, rhs, size = found
    exact = v.double().square().mean(dim=1, keepdim=True).sqrt().to(dtype)
    torch.testing.assert_close(scale, exact, rtol=ROUNDING[dtype], atol=0)
    torch.testing.assert_close(rhs, v / scale, rtol=0, atol=0)
    torch.testing.assert_close(size, torch.ones_like(size), rtol=ROUNDING[dtype], atol=0)


def test_rows_beyond_the_squares_of_float64_are_divided_too() -> None:
    v = torch.tensor([[3e200, -4e200], [3e-200, 4e-200]], dtype=torch.float64)
    with torch.no_grad():
        found = measures.normalized(v)
    assert found is not None
    expected = torch.tensor([[5e200], [5e-200]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(found[0], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_rows_that_are_zero_or_not_finite_are_divided_by_one(broken: float, dtype: torch.dtype) -> None:
    v = rows(3, 8, dtype)
    v[1] = 0.0
    v[1, 3] = broken
    with torch.no_grad():
        found = measures.normalized(v)
    assert found is not None and found[0][1] == 1
    torch.testing.assert_close(found[1][1], v[1], rtol=0, atol=0, equal_nan=True)
    assert bool(torch.isfinite(found[1][[0, 2]]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 31, 64, 700])
def test_ratios_are_those_of_norms(n: int, dtype: torch.dtype) -> None:
    a, b, c = (rows(4, n, dtype, seed) for seed in range(3))
    expected = (a - b).norm(dim=1) / c.norm(dim=1)
    with torch.no_grad():
        found, alone = measures.ratios(a, b, c), measures.ratios(a, None, c)
        told = measures.ratios(a, b, c, told=expected + 0.25)
    assert found is not None and alone is not None and told is not None
    torch.testing.assert_close(found[0], expected, rtol=ROUNDING[dtype], atol=0)
    torch.testing.assert_close(alone[0], a.norm(dim=1) / c.norm(dim=1), rtol=ROUNDING[dtype], atol=0)
    assert found[1] == float(found[0].max())
    assert told[1] == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [1, 2, 0]])
def test_the_largest_ratio_is_nan_if_one_is_or_if_a_row_is_to_be_looked_at(order: list[int]) -> None:
    a, c, status = torch.ones(3, 4), torch.ones(3, 4), torch.zeros(3, dtype=torch.int8)

    def worst(a: Tensor, c: Tensor, status: Tensor) -> float:
        with torch.no_grad():
            found = measures.ratios(a[order], None, c[order], status=status[order])
        assert found is not None
        return found[1]

    one = torch.tensor([True, False, False])
    assert worst(a, c, status) == 1
    assert math.isnan(worst(a.masked_fill(one.unsqueeze(1), float("nan")), c, status))
    assert math.isnan(worst(a, c, status + one))
    for size in (1e-25, 1e25, float("inf")):  # squares leave float32
        assert math.isnan(worst(a, c.masked_fill(one.unsqueeze(1), size), status))
    none = one.unsqueeze(1)
    assert worst(a.masked_fill(none, 0.0), c.masked_fill(none, 0.0), status) == 1  # a row of zeros has no residual


def test_a_difference_that_is_nan_is_left_out() -> None:
    a = torch.ones(2, 4)
    with torch.no_grad():
        found = measures.ratios(a, None, torch.ones(2, 4), told=torch.tensor([float("nan"), 0.5]))
    assert found is not None and found[1] == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 31, 32, 70])
def test_every_gradient_is_looked_at(count: int, dtype: torch.dtype) -> None:
    like, sound = torch.zeros(1, dtype=dtype), torch.full((3, count), 1e30, dtype=dtype)
    with torch.no_grad():
        assert measures.seem_finite([None, sound, sound.t()], like) is True
        for broken in (float("nan"), float("inf"), -float("inf")):
            for place in {0, count // 2, count - 1}:
                one = sound.clone()
                one[1, place] = broken
                assert measures.seem_finite([sound, one], like) is False
                assert not bool(measures.seem_finite([one[:, ::2].bfloat16(), one], like))


def test_what_kernels_cannot_read_is_left_to_torch() -> None:
    v = rows(4, 6, torch.float32)
    with torch.no_grad():
        assert measures.normalized(v[:, ::2]) is None
        assert measures.normalized(v.half()) is None
        assert measures.normalized(v[:0]) is None
        assert measures.ratios(v, None, v.double()) is None
        with native.disabled():
            assert measures.normalized(v) is None and measures.ratios(v, v, v) is None
    assert measures.normalized(v) is None  # a graph may be recorded


@pytest.mark.parametrize("cotangent", ["dense", "expanded", "with zero rows"])
def test_gradients_and_adjoint_statistics_match_torch(cotangent: str) -> None:
    x = rows(6, 12, torch.float64).requires_grad_()
    cell = TanhCell(12, norm=0.9, dtype=torch.float64)
    v = {"dense": rows(6, 12, torch.float64, 1), "expanded": torch.ones(()).double().expand(6, 12)}.get(cotangent)
    v = torch.cat((rows(3, 12, torch.float64, 1), torch.zeros(3, 12, dtype=torch.float64))) if v is None else v

    def step() -> tuple[Tensor, eq.Stats]:
        solution = eq.fixed_point(cell, torch.zeros(6, 12, dtype=torch.float64), x, stop=eq.Stop(rtol=1e-9, max_steps=80))
        (grad,) = torch.autograd.grad(solution.z, x, v)
        assert solution.adjoint is not None
        return grad, solution.adjoint

    found, stats = step()
    with native.disabled():
        expected, reference = step()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert stats.status.tolist() == reference.status.tolist() == [0] * 6
    assert stats.steps.tolist() == reference.steps.tolist()


def test_the_same_verification_without_gradients_as_in_torch() -> None:
    x, cell = rows(16, 12, torch.float64), TanhCell(12, norm=0.95, dtype=torch.float64)
    x[:8] *= 1e-3  # rows of different steps, so that the answer is evaluated once more
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-8, atol=0.0, max_steps=200))
    with torch.no_grad():
        found = deq.solve(x).stats
        with native.disabled():
            expected = deq.solve(x).stats
    assert found.status.tolist() == expected.status.tolist() and found.steps.tolist() == expected.steps.tolist()
    assert len(set(found.steps.tolist())) > 1
    assert found.evaluations == expected.evaluations and found.sample_evaluations == expected.sample_evaluations
    assert bool((found.residual <= 1e-8).all())
