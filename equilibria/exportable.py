"""Checks of layers for export, and their conversion into one loop of the exported graph.

The loop is that of a compiled solve: the same solver steps and the same record per row. The result and the number of steps
of a sample are fixed once it has stopped, while the loop continues for the others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equilibria._core import autodiff_modes
from equilibria._core.bookkeeping import SolveRecord
from equilibria._core.checks import require
from equilibria._core.equation import uses_batch_statistics
from equilibria._core.loop import finished
from equilibria._core.maps import Counter, Equation
from equilibria._core.problem import Problem
from equilibria._core.program import Parts, Program
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.escalate import Escalate
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom, UnrolledPhantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.gradients.warmup import Warmup
from equilibria.solution import SolveResult, Status
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Solver
from equilibria.solvers.picard import Picard
from equilibria.starts import memory_of
from equilibria.stop import Stop, usual_range


def exportable(model: nn.Module, *, dynamic_batch: bool) -> nn.Module:
    """Return a copy of `model` whose DEQ layers can be traced; raises if a layer cannot be exported."""
    _check_mode(model)
    for name, layer in _layers(model).items():
        _check_layer(name, layer)
        if dynamic_batch:
            require(
                layer.batched,
                f"{name} has batched=False, so its inputs have no batch dimension. Set dynamic_batch=False; the graph then "
                "takes problems of the example's size.",
            )
            require(
                not isinstance(layer.solver, Anderson) or layer.solver.budget is None,
                f"{name} has solver={layer.solver!r}, whose history depends on the size of the batch. Set `history` instead "
                "of `budget`, or export with dynamic_batch=False.",
            )
    model = copy.deepcopy(model)
    for name, layer in _layers(model).items():
        layer.gradient, layer.solves = _traced(name, layer.gradient, layer.solves), None
    return model


@dataclass(frozen=True)
class ExportedSolve(Gradient):
    """Traces the forward solve into the exported graph; the result has no gradient.

    steps, damping  steps from the equilibrium to the value that the layer returns: 1 with JFB, 0 with most gradients
    """

    steps: int = 0
    damping: float = 1.0
    exports_loop: ClassVar[bool] = True

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        cause = problem.equation.untraceable()
        if cause is None and problem.known is not None:
            cause = "its cell draws dropout masks"
        if cause is not None:
            raise TypeError(f"A layer cannot be exported: {cause}.")
        assert isinstance(problem.solver, Solver)
        result = Loop(problem.solver, problem.stop, problem.equation.precision).solve(problem.equation, z0, args)
        problem.result.stats = result.stats
        if self.steps:
            h = result.z
            for _ in range(self.steps):
                fh = problem.equation(h, *args)
                h = fh if self.damping == 1 else torch.lerp(h, fh, self.damping)
            return torch.where((result.stats.status != Status.NONFINITE).unsqueeze(1), h, result.z)
        return result.z


class Loop(Program):
    """The loop of a compiled solve, traced into the graph that torch.export builds."""

    def __init__(self, solver: Solver[Any], stop: Stop, precision: float) -> None:
        self.solver, self.precision, self.extra = solver, precision, [False, False]
        # an exported graph returns no trace and no iterates, and has no ranks
        self.stop = dataclasses.replace(stop, trace=False, keep_every=None, process_group=None)

    def solve(self, equation: Equation, z0: Tensor, args: Sequence[Tensor]) -> SolveResult:
        with autodiff_modes.tracing():
            record = SolveRecord(self.stop, z0, None, self.precision)
            if self.stop.max_steps == 0:
                record.record_rows(self.solver.init(equation.bind(args), z0), 0)
            else:
                _, *tensors = self._loop(Parts(lambda *args: args, equation), z0, *args)
                record.load(tensors)
            closed = record.close()
            z, stats, _ = closed.settle(finished(closed, Counter(), settle=False).stats)
            least = usual_range(z0.dtype)[0]
            if self.stop.atol < least:  # otherwise these samples are within atol, even if their squares underflowed
                unknown = stats.converged & (closed.size < least)
                status = stats.status.masked_fill(unknown, int(Status.STALLED))
                stats = dataclasses.replace(stats, status=status)
            return SolveResult(z, stats, taken=0)  # the number of steps is known only when the graph runs


def _layers(model: nn.Module) -> dict[str, DEQ]:
    """Return the equilibrium layers of a model by the name that errors use."""
    modules = model.named_modules()
    return {f"The layer {name!r}" if name else "The layer": part for name, part in modules if isinstance(part, DEQ)}


def _check_mode(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module.training:
            where = f"its part {name!r}" if name else "the model"
            raise ValueError(
                f"Only a model in eval mode can be exported, but {where} is in training mode, with dropout and batch "
                "statistics. Call model.eval() first."
            )


def _check_layer(name: str, layer: DEQ) -> None:
    if not isinstance(layer.solver, (Picard, Anderson)):
        raise TypeError(
            f"{name} has solver={layer.solver!r}, but only eq.Picard and eq.Anderson can be exported. All solvers find the "
            "same equilibrium: set layer.solver = eq.Anderson() before the export."
        )
    if memory_of(layer.init) is not None:
        raise TypeError(
            f"{name} has init={layer.init!r}, which starts from stored equilibria, but a graph stores none. Set layer.init "
            "to its start, such as None, before the export."
        )
    if not isinstance(layer.cell, nn.Module):
        raise TypeError(
            f"{name} has the function {layer.cell!r} as its cell, so its weights cannot be found. Make the cell an "
            "nn.Module, whose weights are copied into the graph."
        )
    for part in layer.cell.modules():
        if isinstance(part, DEQ):
            raise TypeError(f"{name} has another DEQ inside its cell, and a loop in a loop cannot be exported. Unroll one.")
        require(
            not uses_batch_statistics(part),
            f"{name} has {part} in its cell, which normalizes over the batch, but samples of an exported solve must not "
            "depend on each other. Use track_running_stats=True, or a norm per sample such as nn.GroupNorm.",
        )
    _traced(name, layer.gradient, layer.solves)


def _traced(name: str, gradient: Gradient, solves: Tensor | None) -> ExportedSolve:
    """Return the gradient that traces a layer's value: the equilibrium, or a few steps from it for phantom gradients."""
    if isinstance(gradient, Warmup):
        return _traced(name, gradient.first if solves is not None and int(solves) < gradient.until else gradient.then, None)
    if isinstance(gradient, JFB):
        return ExportedSolve(steps=1)
    if isinstance(gradient, UnrolledPhantom):
        return ExportedSolve(gradient.steps, gradient.damping)
    if isinstance(gradient, (Implicit, NeumannPhantom, Escalate)) or (
        isinstance(gradient, Unrolled) and gradient.depth is None
    ):
        return ExportedSolve()
    raise TypeError(
        f"{name} has gradient={gradient!r}, which takes its own steps instead of the solver's, so its value differs from "
        "the equilibrium. To export the equilibrium, set layer.gradient = eq.Implicit() before the export."
    )
