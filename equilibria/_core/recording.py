"""Recording the solutions of all solves inside a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from equilibria.solution import Solution

_active: ContextVar[tuple[tuple[dict[int, str], list[Solution]], ...]] = ContextVar("recordings", default=())


@contextmanager
def record(model: nn.Module) -> Iterator[list[Solution]]:
    """Collect the solutions of every DEQ in `model` that is solved inside the block, in order.

        with eq.record(model) as solutions:
            loss = criterion(model(x), y)
        loss.backward()
        solutions[0].stats, solutions[0].adjoint, solutions[0].layer

    A Solution references its inputs and its equilibrium; delete the list to free them.
    """
    solutions: list[Solution] = []
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    token = _active.set((*_active.get(), (names, solutions)))
    try:
        yield solutions
    finally:
        _active.reset(token)


def note(module: nn.Module, solution: Solution) -> None:
    """Append a solution, with the name of its layer, to every active recording whose model contains this module."""
    named = None  # one object in all recordings, with the name that the outermost one has for its layer
    for names, solutions in _active.get():
        if (name := names.get(id(module))) is not None:
            named = named or dataclasses.replace(solution, layer=name)
            solutions.append(named)
