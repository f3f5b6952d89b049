"""What the solvers promise, on the cases of the benchmark: counts, which are exact."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria.lab.bench.cases import CASES, Case, make
from equilibria.lab.bench.methods import Ours

case_of = functools.cache(make)


def layer(case: Case, solver: Any = None, **changes: Any) -> eq.DEQ:
    deq = Ours(solver=solver).deq(case, case.rtol)
    for name, value in changes.items():
        setattr(deq, name, value)
    return deq


@dataclass(frozen=True)
class Solved:
    evaluations: int
    rows: int
    converged: bool


@functools.cache
def solved(name: str, solver: Any = None, compact: bool = True) -> Solved:
    case = case_of(name)
    deq = layer(case, solver)
    deq.stop = eq.Stop(rtol=case.rtol, atol=0, max_steps=400, on_failure="ignore", compact=compact)
    with torch.no_grad():
        stats = deq.solve(*case.inputs).stats
    return Solved(stats.evaluations, stats.sample_evaluations, bool(stats.converged.all()))


@pytest.mark.parametrize("name", CASES)
def test_the_default_solves_every_case_in_no_more_evaluations_than_picard(name: str) -> None:
    picard, default = solved(name, eq.Picard()), solved(name)
    assert default.converged
    assert not picard.converged or default.evaluations <= picard.evaluations + 2


def test_the_default_keeps_up_with_broyden_on_the_hard_case() -> None:
    assert solved("mlp-hard").evaluations <= 1.2 * solved("mlp-hard", eq.Broyden()).evaluations


CHECKS = 516  # rows of the runs that show whether rows depend on each other, in every count


@pytest.mark.recorded  # the cases of the benchmark are given
def test_going_on_without_what_is_done_saves_two_thirds_of_the_work() -> None:
    # nine tenths take 5 of 16 evaluations, so that 2.6 is the most there could be
    assert 2.6 * (solved("mixed").rows - CHECKS) <= solved("mixed", compact=False).rows - CHECKS
    picard = eq.Picard()
    assert 7 * (solved("mixed", picard).rows - CHECKS) <= solved("mixed", picard, compact=False).rows - CHECKS


def moved(case: Case, by: float) -> Case:
    """The case after a step of training: every weight changed by this share of its size."""
    generator, double = torch.Generator().manual_seed(3), case.double()
    cell = double.cell.float()
    for parameter in cell.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += by * parameter.norm() * noise / noise.norm()
    return double


# A change of 1 % leaves a residual of about 1 %: from there to 1e-5 are three fifths of the way from 1, in whole steps,
# since the first evaluation and the runs that show whether rows depend on each other are the same for both.
@pytest.mark.parametrize(("by", "share"), [(0.001, 0.5), (0.01, 0.6)])
@pytest.mark.parametrize("name", CASES)
def test_a_warm_start_halves_the_evaluations(name: str, by: float, share: float) -> None:
    case = case_of(name)
    other = moved(case, by).cell
    assert isinstance(other, nn.Module)
    with torch.no_grad():
        before = layer(case).solve(*case.inputs)
        deq = layer(case, cell=other)
        cold = deq.solve(*case.inputs)
        warm = deq.solve(*case.inputs, init=before)
    assert bool(warm.stats.converged.all())
    assert int(warm.stats.steps.max()) <= share * int(cold.stats.steps.max()) + 1
    a, b = (torch.cat([part.flatten(1) for part in pytree.tree_leaves(s.z)], dim=1) for s in (warm, cold))
    assert _distance(a, b) < 200 * case.rtol


def _distance(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())
