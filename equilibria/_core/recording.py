"""Collecting every solve inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from equilibria.solution import Solution

_active: ContextVar[tuple[tuple[frozenset[int], list[Solution]], ...]] = ContextVar("recordings", default=())


@contextmanager
def record(model: nn.Module) -> Iterator[list[Solution]]:
    """The solutions of every DEQ in `model` that is solved inside the block, in order.

        with eq.record(model) as solutions:
            loss = criterion(model(x), y)
        loss.backward()
        solutions[0].stats, solutions[0].adjoint

    A Solution holds its inputs and equilibrium: drop the list when you are done with it.
    """
    solutions: list[Solution] = []
    token = _active.set((*_active.get(), (frozenset(map(id, model.modules())), solutions)))
    try:
        yield solutions
    finally:
        _active.reset(token)


def note(module: nn.Module, solution: Solution) -> None:
    """Hand a solution to the recordings that asked for this module."""
    for modules, solutions in _active.get():
        if id(module) in modules:
            solutions.append(solution)
