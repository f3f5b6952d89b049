"""The rules that make a comparison fair.

1. Libraries stop on different quantities: the worst sample or the whole batch, absolute or relative, the last or the best
   iterate. A method's tolerance is therefore tightened until the worst sample's |f(z) - z| / |f(z)|, measured in float64,
   is small enough.
2. Work is counted by hooks on the cell, in separate runs that are not timed.
3. Timed runs are interleaved, in another order in every round. Every time is divided by that of a bare call of the cell
   just before it. The clock is the processor time of the process, which does not include other programs.
4. Gradients are compared with an implicit gradient in float64.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.packing import State
from equilibria.lab.bench.cases import Case
from equilibria.lab.bench.methods import Method, Ours

# factors on the tolerance of a method, tried in turn until its residual is small enough
FACTORS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.1, 0.05, 0.02, 0.01)
EXACT = 1e-9  # tolerance of the reference in float64, far below that of any case
WARM, UNIT, SAMPLE = 0.02, 0.05, 0.03  # approximate seconds of warming up, of measuring a bare call, and of a timed sample


K = TypeVar("K")  # names of timed runs
clock = time.process_time  # not wall-clock time, which varied fourfold for one step on a busy machine


class Judge:
    """Measure residuals and gradients of a case in float64."""

    def __init__(self, case: Case) -> None:
        self.case = case.double()

    def residual(self, z: State) -> float:
        """Return |f(z) - z| / |f(z)| of the worst sample; infinite if z is not finite."""
        z = pytree.tree_map(lambda part: part.detach().double(), z)
        with torch.no_grad():
            image, z = _rows(self.case.cell(z, *self.case.inputs)), _rows(z)
        worst = float(((image - z).norm(dim=1) / image.norm(dim=1)).max())
        return worst if math.isfinite(worst) else math.inf

    def gradient(self, gradients: Sequence[Tensor]) -> GradientError:
        """Return the error of the gradient with respect to the weights or to the inputs, whichever is larger."""
        weights = len(gradients) - len(self.case.inputs)
        parts = [slice(weights), slice(weights, None)]
        found = [_agreement(gradients[part], self.reference[part]) for part in parts if gradients[part]]
        return GradientError(min(part.cosine for part in found), max(part.error for part in found))

    @cached_property
    def reference(self) -> Sequence[Tensor]:
        deq = Ours().deq(self.case, EXACT)
        deq.stop = replace(deq.stop, max_steps=2000, on_failure="raise")
        return torch.autograd.grad(self.case.loss(deq(*self.case.inputs)), self.case.leaves)


@dataclass(frozen=True)
class GradientError:
    """Cosine with the reference gradient, and relative distance from it; -1 and infinity if a gradient is not finite."""

    cosine: float
    error: float


@dataclass(frozen=True)
class Tightened:
    """The tolerance that a method needs, and its residual; both are those of the first attempt if none `reached` it."""

    tol: float
    residual: float
    reached: bool


def tighten(case: Case, method: Method, judge: Judge) -> Tightened:
    """Return the loosest tolerance of a fixed list with which the residual of the method is small enough."""
    first = None
    for factor in FACTORS:
        tol = factor * case.rtol
        residual = judge.residual(method.solve(case, tol))
        if residual <= case.rtol:
            return Tightened(tol, residual, reached=True)
        first = first or Tightened(tol, residual, reached=False)
        # a method that has used all its steps would return the same state with a smaller tolerance
        with counting(case.cell) as counter:
            method.counted().solve(case, tol)
        if counter.work().calls >= case.max_steps:
            break
    assert first is not None
    return first


@dataclass(frozen=True)
class Work:
    """Numbers of calls of a cell without and with a graph, and of products with its transposed Jacobian.

    rows  number of rows in all these calls and products
    """

    evaluations: int
    graph_evaluations: int
    products: int
    rows: int

    @property
    def calls(self) -> int:
        return self.evaluations + self.graph_evaluations + self.products


@dataclass
class WorkCounter:
    """Counters that grow during a run; `work` converts them to `Work`."""

    evaluations: int = 0
    graph_evaluations: int = 0
    products: int = 0
    rows: int = 0

    def work(self) -> Work:
        return Work(**vars(self))


@contextmanager
def counting(cell: nn.Module) -> Iterator[WorkCounter]:
    """Count calls of the cell and products with its Jacobian in z inside the block."""
    counter = WorkCounter()

    def product(gradient: Tensor) -> None:
        counter.products += 1
        counter.rows += gradient.shape[0]

    def before(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        leaves, structure = pytree.tree_flatten(arguments[0])
        counter.rows += leaves[0].shape[0]
        if not torch.is_grad_enabled():
            counter.evaluations += 1
            return arguments
        counter.graph_evaluations += 1
        if leaves[0].requires_grad:
            leaves[0] = leaves[0].view_as(leaves[0])  # a view, because the hook would stay on the caller's tensor
            leaves[0].register_hook(product)
        return (pytree.tree_unflatten(leaves, structure), *arguments[1:])

    handle = cell.register_forward_pre_hook(before)
    try:
        yield counter
    finally:
        handle.remove()


def count(case: Case, method: Method, tol: float) -> Work:
    """Return the work of one training step; a first step, in which properties of the cell are detected, is not counted."""
    method = method.counted()
    method.step(case, tol)
    with counting(case.cell) as counter:
        method.step(case, tol)
    return counter.work()


@dataclass(frozen=True)
class Sample:
    """Seconds of one training step, and of a bare call of the cell just before it."""

    seconds: float
    unit: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.unit


def race(
    case: Case, steps: Mapping[K, Callable[[], object]], rounds: int, budget: float, least: int = 3
) -> dict[K, list[Sample]]:
    """Time every step once per round; stops after `rounds` rounds or `budget` seconds, but not before `least` rounds."""
    bare = bare_call(case)
    repeats = {name: max(1, round(SAMPLE / _seconds(step, 1))) for name, step in steps.items()}
    samples: dict[K, list[Sample]] = {name: [] for name in steps}
    order, begin = random.Random(0), time.perf_counter()
    for done in range(rounds):
        if done >= min(least, rounds) and time.perf_counter() - begin > budget:
            break
        for name in order.sample(list(steps), len(steps)):
            unit = _steady(bare)
            samples[name].append(Sample(_seconds(steps[name], repeats[name]), unit))
    return samples


def bare_call(case: Case) -> Callable[[], object]:
    """Return a function that calls the cell without a graph, at the state after three steps from the start."""
    with torch.no_grad():
        z = case.start
        for _ in range(3):
            z = case.cell(z, *case.inputs)

    def call() -> None:
        with torch.no_grad():
            case.cell(z, *case.inputs)

    return call


def _steady(call: Callable[[], object]) -> float:
    """Return the seconds of a call with warm caches; a cold call would make the unit too large."""
    calls, begin = 0, clock()
    while calls < 2 or clock() - begin < WARM:
        call()
        calls += 1
    each = (clock() - begin) / calls
    return _seconds(call, max(5, int(UNIT / each)))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats


def _rows(state: State) -> Tensor:
    return torch.cat([part.flatten(1) for part in pytree.tree_leaves(state)], dim=1)


def _agreement(found: Sequence[Tensor], exact: Sequence[Tensor]) -> GradientError:
    a, b = (torch.cat([part.flatten().double() for part in parts]) for parts in (found, exact))
    if not bool(torch.isfinite(a).all()):
        return GradientError(-1.0, math.inf)
    return GradientError(float(F.cosine_similarity(a, b, dim=0)), float((a - b).norm() / b.norm()))
