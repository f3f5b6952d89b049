"""Backpropagation through the steps of the solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.autodiff_modes import no_autocast
from equilibria._core.checkpointing import Buffers, Checkpoint, Tensors, check_checkpoint, repeat
from equilibria._core.checks import require
from equilibria._core.maps import Equation, Map
from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria.gradients.base import Gradient, with_zero_gradient
from equilibria.gradients.watched import guarded, watched
from equilibria.solution import Status, empty_stats
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.fallback import Fallback
from equilibria.solvers.rowwise import collect, rebuild
from equilibria.stop import scaled_norm

NOT_REPLAYED = (
    "Unrolled with checkpoint or truncate replays the steps of one solver, sample by sample. It cannot replay those of a "
    "Fallback, or of a cell whose samples depend on each other, as with batch statistics. Leave both options out, or take "
    "depth=..., an explicit network."
)


@dataclass(frozen=True, kw_only=True)
class Unrolled(Gradient):
    """The exact gradient of the computed iterate, by backpropagation through time (BPTT).

    It works with every solver whose steps are differentiable, which excludes those with an inner linear solve. The graph
    of one evaluation of the cell per step is kept. It is the only gradient that reaches the starting point. A sample that
    starts at its equilibrium takes no step and has no gradient: use another gradient with warm starts.

    checkpoint  "sqrt" or "recursive": keep some states and run the cell again in backward, with O(√steps) or O(log steps)
                memory; the solve runs once without a graph first, to determine its length
    truncate    keep the graph of the last `truncate` steps only; None keeps all
    depth       take this number of plain steps of the cell and ignore solver and tolerance: an explicit, weight-tied
                network
    """

    checkpoint: Checkpoint = None
    truncate: int | None = None
    depth: int | None = None
    follows_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        require(self.truncate is None or self.truncate >= 1, f"Unrolled's truncate must be at least 1, got {self.truncate}.")
        require(self.depth is None or self.depth >= 1, f"Unrolled's depth must be at least 1, got {self.depth}.")

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve and record the steps, so that gradients flow through them."""
        if not autodiff_modes.has_values(z0, *args):
            raise RuntimeError(
                "torch.func.vmap does not pass through Unrolled, whose number of steps depends on values: make the mapped "
                "dimension a part of the batch, or take eq.Implicit(), which supports vmap."
            )
        return watched(self._steps, problem, z0, args, replays=self.checkpoint is not None)

    def _steps(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Return the unrolled equilibrium; where no step was recorded, its graph gives zero gradients."""
        # without any step there is no graph, and backward() would raise
        return with_zero_gradient(self._unroll(problem, z0, args), [z0, *args])

    def _unroll(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Take the steps with a graph: a fixed number, those of the solve, or a replay of it; returns z, (batch, n)."""
        problem = problem.changed(known=None)  # F(z0) is known only without its graph
        if self.depth is not None:
            return _spared(_Explicit(self.depth, self.truncate, self.checkpoint), problem, z0, args)
        for solver in problem.solver.solvers if isinstance(problem.solver, Fallback) else (problem.solver,):
            if not solver.differentiable:
                raise TypeError(
                    f"Unrolled cannot differentiate the steps of {solver!r}, which solves linear systems in place: take "
                    'Picard, Anderson, Broyden, SteadyState or Newton(linear="dense"), or eq.Implicit(), which works with '
                    "every solver."
                )
        if self.checkpoint is None and self.truncate is None:
            # the solver's own steps record the graph: `f` is given, so that `run` does not switch gradients off
            return _spared(lambda problem, z0, args: problem.run(z0, f=_bind(problem, args)).z, problem, z0, args)
        return self._replay(problem, z0, args)

    def _replay(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve without a graph to get the number of steps of every sample, then take the same steps with a graph."""
        if isinstance(problem.solver, Fallback) or problem.equation.identity.coupled:
            raise TypeError(NOT_REPLAYED)
        result = problem.run(z0.detach(), [arg.detach() for arg in args])
        if problem.equation.identity.coupled:
            raise TypeError(NOT_REPLAYED)
        if not torch.is_grad_enabled():
            return result.z
        good = result.stats.status != Status.NONFINITE
        chosen = self._steps_again(problem, z0, args, result.stats.best, good)
        sound = torch.isfinite(chosen).all(dim=1) | ~good
        if not bool(sound.all()):  # steps with a graph round differently near underflow and may not stay finite
            good = good & sound
            status = result.stats.status.masked_fill(~sound, Status.NONFINITE)
            problem.result.stats, problem.result.nonfinite = dataclasses.replace(result.stats, status=status), True
            chosen = self._steps_again(problem, z0, args, result.stats.best, good)
        # the value is that of the first solve, which the statistics describe; the gradient is that of the replay
        return torch.where(good.unsqueeze(1), result.z + (chosen - chosen.detach()), result.z)

    def _steps_again(self, problem: Problem, z0: Tensor, args: Sequence[Tensor], best: Tensor, good: Tensor) -> Tensor:
        """Return each sample's iterate at its step `best`, (batch, n), with a graph."""
        assert isinstance(problem.solver, Solver)
        z0, args, _ = quarantine(problem.equation, z0, args, z0, good)
        f = _bind(problem, args)
        start = problem.solver.init(f, z0)
        step = _ReplayedStep(problem.solver, f, start, best, self.truncate)
        _, chosen, *_ = repeat(step, step.first(start), int(best.max()) if best.numel() else 0, self.checkpoint)
        problem.result.add_evaluations(f.counter.evaluations, len(z0))
        return chosen


class _ReplayedStep:
    """A solver's step as a function of tensors: (counters, iterates chosen so far, *tensors of the state).

    The counters are the number of the step and the integers of the state.
    """

    def __init__(self, solver: Solver[Any], f: Map, like: Iterate, best: Tensor, truncate: int | None) -> None:
        self.solver, self.f, self.like, self.best, self.truncate = solver, f, like, best, truncate

    def buffers(self) -> dict[str, Tensor]:
        """Return no buffers, because those of an equation are constant."""
        return {}  # the buffers of an equation are constant

    def first(self, state: Iterate) -> Tensors:
        """Return the tensors before the first step."""
        return (torch.tensor([0, *collect(state, int)]), state.z, *self._cut(collect(state, Tensor), time=0))

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors:
        """Take one step, and choose the iterate of samples whose best step it is."""
        counters, chosen, *tensors = z
        time, *counted = autodiff_modes.numbers(counters)
        with no_autocast(chosen.device):
            state = self.solver.step(self.f, rebuild(self.like, iter(tensors), iter(counted)))
        chosen = torch.where((self.best == time + 1).unsqueeze(1), state.z, chosen)
        return (torch.tensor([time + 1, *collect(state, int)]), chosen, *self._cut(collect(state, Tensor), time + 1))

    def _cut(self, tensors: list[Tensor], time: int) -> list[Tensor]:
        """Return the state, detached for samples that are more than `truncate` steps before their last."""
        if self.truncate is None:
            return tensors
        early = time < self.best - self.truncate
        return [torch.where(early.view(-1, *[1] * (tensor.dim() - 1)), tensor.detach(), tensor) for tensor in tensors]


def _bind(problem: Problem, args: Sequence[Tensor]) -> Map:
    """Return the map of the equation, whose evaluations keep their graph; its rows cannot be taken."""
    f = Map(lambda z: guarded(problem, problem.equation(z, *args)))
    f.precision = problem.equation.precision  # steps are replayed outside of the loop, which would set it
    return f


@dataclass(frozen=True)
class _Explicit:
    """`depth` plain steps; the statistics contain the residual after the last."""

    depth: int
    truncate: int | None
    checkpoint: Checkpoint

    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Take the steps, the last ones with a graph, and store the statistics."""
        step = _PlainStep(problem.equation, args)
        followed = self.depth if self.truncate is None else min(self.truncate, self.depth)
        z: Tensors = (z0,)
        if followed < self.depth:
            with torch.no_grad():
                z = repeat(step, z, self.depth - followed, None)
        z = repeat(step, z, followed, self.checkpoint)
        with torch.no_grad():
            (fz,) = step(z, None)
        _file(problem, z[0], fz, self.depth)
        if not problem.result.nonfinite:
            return z[0]
        # the start replaces rows that are not finite
        start = torch.where(torch.isfinite(z0), z0, torch.zeros_like(z0)).detach()
        return torch.where((problem.result.stats.status != Status.NONFINITE).unsqueeze(1), z[0], start)


@dataclass(frozen=True)
class _PlainStep:
    """z -> F(z, *args) as a `checkpointing.Step`."""

    equation: Equation
    args: Sequence[Tensor]

    def buffers(self) -> dict[str, Tensor]:
        """Return no buffers, because those of an equation are constant."""
        return {}

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors:
        """Evaluate the equation once."""
        return (self.equation(z[0], *self.args),)


def _spared(run: Callable[..., Tensor], problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Return the result of `run`, which is repeated without samples that became non-finite in it.

    Otherwise their steps would stay in the graph with weight zero, and 0 * nan is nan.
    """
    z = run(problem, z0, args)
    stats = problem.result.stats
    if not (torch.is_grad_enabled() and problem.result.nonfinite):
        return z
    good = stats.status != Status.NONFINITE
    if not bool(good.any()):
        return z.detach()
    start, inputs, _ = quarantine(problem.equation, z0, args, z0, good)
    again = run(problem, start, inputs)
    problem.result.stats, problem.result.nonfinite = stats, True
    # the value is that of the first run, which the statistics describe: rows that depend on each other differ in the second
    good, z = good & torch.isfinite(again.detach()).all(dim=1), z.detach()
    return torch.where(good.unsqueeze(1), z + (again - again.detach()), z)


def _file(problem: Problem, z: Tensor, fz: Tensor, depth: int) -> None:
    """Store the statistics of an explicit network that ended at z with fz = F(z), both (batch, n)."""
    stop, stats = problem.stop, empty_stats(len(z), z.device)
    length, size = scaled_norm(stop.norm, (fz - z).detach()), scaled_norm(stop.norm, fz.detach())
    finite = torch.isfinite(length) & torch.isfinite(size)
    converged = finite & (length <= stop.atol + stop.rtol * size)
    problem.result.nonfinite = not bool(finite.all())
    unless = torch.where(finite, Status.MAX_STEPS, Status.NONFINITE)
    problem.result.stats = dataclasses.replace(
        stats,
        status=torch.where(converged, Status.CONVERGED, unless).to(torch.int8),
        steps=stats.steps + depth,
        best=stats.best + depth,
        residual=length / size.clamp_min(torch.finfo(size.dtype).tiny),
    )
    problem.result.add_evaluations(depth + 1, len(z))
