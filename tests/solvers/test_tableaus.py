"""The Runge-Kutta pairs: their order by rooted trees and by measurement, their nodes, their stability."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria._core.maps import Map
from equilibria.solvers.steady_state import trial
from equilibria.solvers.tableaus import TABLEAUS, Method, Tableau
from tests.problems import affine

NODES = {  # as published
    "tsit5": (0, 0.161, 0.327, 0.9, 0.9800255409045097, 1, 1),
    "dopri5": (0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1, 1),
    "bs3": (0, 1 / 2, 3 / 4, 1),
    "heun": (0, 1, 1),
}
ROUNDING = 3e-14  # the coefficients are given to 16 digits, the largest is 13
EULER = Tableau(order=1, rows=((1,),), error=(-1, 1), stable=2, edge=2)

by_method = pytest.mark.parametrize("method", get_args(Method))

Tree = tuple[Any, ...]  # a rooted tree: its subtrees


def forests(order: int, largest: int) -> Iterator[Tree]:
    """Multisets of trees with `order` nodes in all, none with more than `largest`."""
    if order == 0:
        yield ()
    for size in range(1, min(order, largest) + 1):
        for count in range(1, order // size + 1):
            for some in combinations_with_replacement(list(trees(size)), count):
                for others in forests(order - size * count, size - 1):
                    yield some + others


def trees(order: int) -> Iterator[Tree]:
    return forests(order - 1, order - 1)


def size(tree: Tree) -> int:
    return 1 + sum(map(size, tree))


def density(tree: Tree) -> int:
    return size(tree) * math.prod(map(density, tree))


def stage_weights(a: Tensor, tree: Tree) -> Tensor:
    out = torch.ones(a.shape[0], dtype=a.dtype)
    for subtree in tree:
        out = out * (a @ stage_weights(a, subtree))
    return out


def coefficients(tableau: Tableau) -> tuple[Tensor, Tensor, Tensor]:
    """The matrix, the weights and the embedded weights."""
    stages = len(tableau.rows) + 1
    a = torch.zeros(stages, stages, dtype=torch.float64)
    for i, row in enumerate(tableau.rows, start=1):
        a[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return a, a[-1], a[-1] + torch.tensor(tableau.error, dtype=torch.float64)


def defect(a: Tensor, b: Tensor, order: int) -> float:
    """How far the weights are from satisfying every condition of this order."""
    return max(abs(float(b @ stage_weights(a, tree)) - 1 / density(tree)) for tree in trees(order))


def test_rooted_trees_are_all_there() -> None:
    assert [len(set(trees(order))) for order in range(1, 7)] == [1, 1, 2, 4, 9, 20]


@by_method
def test_order_conditions(method: Method) -> None:
    tableau = TABLEAUS[method]
    a, b, embedded = coefficients(tableau)
    assert all(defect(a, b, order) < ROUNDING for order in range(1, tableau.order + 1))
    assert all(defect(a, embedded, order) < ROUNDING for order in range(1, tableau.order))
    # one order more would make the estimate blind, or the method another one
    assert defect(a, b, tableau.order + 1) > 1e-5
    assert defect(a, embedded, tableau.order) > 1e-5


@by_method
def test_row_sums_are_the_published_nodes(method: Method) -> None:
    a, _, _ = coefficients(TABLEAUS[method])
    torch.testing.assert_close(a.sum(dim=1), torch.tensor(NODES[method], dtype=torch.float64), rtol=0, atol=ROUNDING)
    assert len(TABLEAUS[method].error) == len(TABLEAUS[method].rows) + 1


@by_method
def test_the_edge_is_that_of_stability(method: Method) -> None:
    """On dz/dt = -z the longest step that does not grow shows an error of `edge` times its slope."""
    z = torch.ones(1, 1, dtype=torch.float64)

    def growth(dt: float) -> tuple[float, float]:
        new, _, slopes = trial(TABLEAUS[method], Map(torch.zeros_like), z, torch.zeros_like(z), dt)
        error = sum(weight * slope for weight, slope in zip(TABLEAUS[method].error, slopes, strict=True))
        return float(new.abs()), abs(float(error))

    stable = next(dt for dt in (k / 1000 for k in range(1900, 5000)) if growth(dt)[0] > 1)
    assert stable == pytest.approx(TABLEAUS[method].stable, abs=2e-3)
    assert growth(stable)[1] == pytest.approx(TABLEAUS[method].edge, rel=5e-3)


@by_method
def test_measured_order(method: Method) -> None:
    """At t = 1 of logistic growth dz/dt = z (3 - z), whose path is known."""
    start, f = torch.tensor([[1.0, 2.0]], dtype=torch.float64), Map(lambda z: z + z * (3 - z))
    exact = 3 / (1 + (3 / start - 1) * math.exp(-3))

    def error(steps: int) -> float:
        z, fz = start, f(start)
        for _ in range(steps):
            z, fz, _ = trial(TABLEAUS[method], f, z, fz, 1 / steps)
        return float((z - exact).norm())

    assert math.log2(error(32) / error(64)) == pytest.approx(TABLEAUS[method].order, abs=0.15)


@pytest.mark.parametrize("damping", [1.0, 0.5, 0.1])
def test_eulers_step_is_damped_iteration(damping: float) -> None:
    problem = affine("orthogonal", 6, 0.9)
    f, picard = Map(problem.f), eq.Picard(damping=damping)
    state = picard.init(f, problem.z0)
    for _ in range(5):
        z, fz, _ = trial(EULER, f, state.z, state.fz, damping)
        state = picard.step(f, state)
        torch.testing.assert_close(z, state.z, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(fz, state.fz, rtol=1e-14, atol=1e-14)
