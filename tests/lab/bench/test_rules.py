"""The rules of the benchmark: tolerances are tightened, work is counted, gradients are compared with the exact one."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core.packing import State
from equilibria.lab.bench.cases import contraction, make, mixed, two_scales
from equilibria.lab.bench.cells import AffineTanhCell
from equilibria.lab.bench.methods import Method, Ours, TorchDEQ, torchdeq
from equilibria.lab.bench.rules import FACTORS, Judge, Sample, count, counting, race, tighten
from equilibria.solvers.picard import Picard

CASE = contraction(4, 0.9, max_steps=200)
NEEDS_TORCHDEQ = pytest.mark.skipif(importlib.util.find_spec("torchdeq") is None, reason="torchdeq is not installed")


class Iterating(Method):
    """Plain iteration that stops when `enough(residual, tol)` is True."""

    library, name = "fake", "iterating"

    def __init__(self, enough: Callable[[float, float], bool]) -> None:
        self.enough, self.asked = enough, list[float]()

    def solve(self, case: Any, tol: float) -> State:
        self.asked.append(tol)
        z = case.start
        with torch.no_grad():
            for _ in range(case.max_steps):
                image = case.cell(z, *case.inputs)
                residual = float(((image - z).norm(dim=1) / image.norm(dim=1)).max())
                if self.enough(residual, tol):
                    break
                z = image
        return z

    def step(self, case: Any, tol: float) -> tuple[State, Sequence[Tensor]]:
        raise NotImplementedError


def test_a_method_that_meets_its_tolerance_keeps_it() -> None:
    found = tighten(CASE, Iterating(lambda residual, tol: residual <= 0.99 * tol), Judge(CASE))
    assert found.reached and found.tol == CASE.rtol
    assert found.residual <= CASE.rtol


def test_an_inaccurate_method_is_tightened_until_its_residual_is_small_enough() -> None:
    method = Iterating(lambda residual, tol: residual <= 2.5 * tol)
    found = tighten(CASE, method, Judge(CASE))
    assert found.reached and found.residual <= CASE.rtol
    assert found.tol == pytest.approx(0.35 * CASE.rtol)


def test_a_method_that_never_reaches_the_residual_keeps_its_first_attempt() -> None:
    method = Iterating(lambda residual, tol: True)
    found = tighten(CASE, method, Judge(CASE))
    assert not found.reached and found.tol == CASE.rtol and found.residual == pytest.approx(1.0, rel=1e-5)
    assert sorted(set(method.asked), reverse=True) == [factor * CASE.rtol for factor in FACTORS]


def test_a_method_that_used_all_steps_is_not_run_again() -> None:
    case = dataclasses.replace(CASE, max_steps=5)
    method = Iterating(lambda residual, tol: False)
    assert not tighten(case, method, Judge(case)).reached
    assert set(method.asked) == {case.rtol}


def test_a_state_that_is_not_finite_never_reaches_the_residual() -> None:
    assert Judge(CASE).residual(torch.full_like(CASE.start, math.nan)) == math.inf
    assert Judge(CASE).residual(torch.full_like(CASE.start, math.inf)) == math.inf


class Backward(Function):
    """The identity, which records backward passes and their numbers of rows."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, noted: list[int]) -> Tensor:
        ctx.noted = noted
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.noted.append(len(gradient))
        return gradient, None


class NotingCell(AffineTanhCell):
    """A cell that counts its calls independently."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.rows: list[int] = []
        self.product_rows: list[int] = []

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        self.rows.append(len(z))
        return Backward.apply(super().forward(z, u), self.product_rows)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("method", [Ours(), Ours("Picard", Picard())], ids=lambda method: method.name)
def test_counts_are_the_real_calls(method: Method) -> None:
    cell = NotingCell(make("mlp-b32").cell.weight)  # type: ignore[arg-type]
    case = dataclasses.replace(CASE, cell=cell)
    method.step(case, case.rtol)
    cell.rows.clear()
    cell.product_rows.clear()
    with counting(cell) as counter:
        method.step(case, case.rtol)
    assert counter.evaluations + counter.graph_evaluations == len(cell.rows)
    assert counter.products == len(cell.product_rows)
    assert counter.rows == sum(cell.rows) + sum(cell.product_rows)
    assert counter.evaluations > 0 < counter.graph_evaluations


def test_counting_leaves_no_hooks_on_the_cell() -> None:
    with counting(CASE.cell):
        pass
    assert not CASE.cell._forward_pre_hooks


def test_rows_that_were_dropped_are_not_counted() -> None:
    case = mixed(64)
    work = count(case, Ours(), case.rtol)
    assert work.rows < 64 * work.calls


def test_gradients_are_judged_by_the_dense_solution() -> None:
    """For z = tanh(W z + u): du = (1 - z^2) * (I - J')^{-1} v, J = diag(1 - z^2) W."""
    case, judge = CASE.double(), Judge(CASE)
    z = Ours().deq(dataclasses.replace(case, max_steps=1000), 1e-12)(*case.inputs).detach()
    weight = case.cell.weight.detach()  # type: ignore[operator]
    slope = 1 - z.square()
    jacobian = slope.unsqueeze(2) * weight
    adjoint = torch.linalg.solve((torch.eye(len(weight)) - jacobian).mT, case.cotangent) * slope
    torch.testing.assert_close(judge.reference[1], adjoint, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(judge.reference[0], adjoint.T @ z, rtol=1e-6, atol=1e-8)
    exact = judge.gradient(judge.reference)
    assert exact.cosine == pytest.approx(1.0) and exact.error == 0.0
    half = judge.gradient([judge.reference[0], judge.reference[1] / 2])
    assert half.cosine == pytest.approx(1.0) and half.error == pytest.approx(0.5)  # the part that agrees less
    assert judge.gradient([judge.reference[0] * math.nan, judge.reference[1]]).error == math.inf


def test_every_step_is_timed_once_per_round_with_its_own_unit() -> None:
    turns = list[str]()
    steps = {name: (lambda name=name: turns.append(name)) for name in "abc"}
    samples = race(CASE, steps, rounds=2, budget=0.0)
    assert {name: len(some) for name, some in samples.items()} == {"a": 2, "b": 2, "c": 2}
    assert all(sample.unit > 0 for some in samples.values() for sample in some)
    assert Sample(seconds=6.0, unit=2.0).ratio == 3.0


@NEEDS_TORCHDEQ
@pytest.mark.parametrize("method", torchdeq(), ids=lambda method: method.name)
def test_torchdeq_solves_and_differentiates(method: TorchDEQ) -> None:
    judge = Judge(CASE)
    found = tighten(CASE, method, judge)
    assert found.reached
    assert judge.gradient(method.step(CASE, found.tol)[1]).cosine > 0.999


@NEEDS_TORCHDEQ
def test_torchdeq_takes_states_of_several_tensors() -> None:
    case = two_scales(2, channels=16, size=16)
    z, gradients = TorchDEQ("Anderson", "anderson").step(case, 1e-3)
    assert isinstance(z, tuple) and Judge(case).residual(z) < 1e-3
    assert Judge(case).gradient(gradients).cosine > 0.95
