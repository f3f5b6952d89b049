"""Measurements on one DEQ with the inputs that it gets in a model; the results are plain numbers and lists, for JSON."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from equilibria._core.equation import uses_batch_statistics
from equilibria.analysis.agreement import Agreement, CellMeter, OutOfTime, gradient_agreement
from equilibria.analysis.diagnosis.attractors import Attractors
from equilibria.analysis.measuring import LayerCall, brief, untouched
from equilibria.analysis.spectrum import spectral_radius
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom
from equilibria.solution import ConvergenceWarning, Solution, Stats, Status
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.newton import Newton
from equilibria.solvers.picard import Picard

SOLVERS: tuple[AnySolver, ...] = (Picard(), Anderson(), Broyden(), Newton())
GRADIENTS: tuple[Gradient, ...] = (JFB(), NeumannPhantom(steps=5, damping=1.0), Implicit())
QUANTILES = (0.1, 0.5, 0.9, 1.0)  # of the residuals over the samples, per step
RANDOM = 100.0  # two runs of a deterministic cell differ by less than this many spacings of its numbers, also on a GPU
ROUNDS = 3  # each solver is timed this often and its shortest time reported: other load only adds time
SEED = 0  # of the random numbers an examination draws
MORE_STEPS = 100  # max_steps of other solvers, if the layer's own is smaller
SECONDS = 10.0  # time limit of any other solver, and of the same one with more steps
GRADIENT_SECONDS = 30.0  # time limit of the comparison of gradients: its reference solves both equations to rounding
NEWTON_STEPS = 20  # near an answer Newton doubles its digits with every step; more steps do not help


@dataclass(frozen=True)
class SolveNumbers:
    """The result of one solve."""

    status: dict[str, int]  # number of samples by status
    steps: list[int]  # per sample
    residual: list[float]  # per sample, relative
    evaluations: int
    sample_evaluations: int
    curve: list[list[float]]  # per step the 10 %, 50 %, 90 % and 100 % quantiles of the residual over the samples

    @property
    def failed(self) -> int:
        return sum(count for name, count in self.status.items() if name != "converged")

    @property
    def worst(self) -> float:
        return max(self.residual, default=0.0)


@dataclass(frozen=True)
class SolverResult:
    """The result of another solver on the same inputs."""

    solver: str
    present: bool  # True for the layer's own solver
    seconds: float  # smallest time of a few solves; processor time on a CPU
    solve: SolveNumbers
    out_of_time: bool = False  # it was stopped, and `solve` holds no result


@dataclass(frozen=True)
class Radius:
    """Spectral radius of the cell's Jacobian at the equilibrium, per sample; nan where a sample is not finite."""

    radius: list[float]
    converged: list[bool]  # per sample, of the power iteration


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes."""

    state: int  # one state of the full batch
    inputs: int  # other arguments of the cell
    kept_for_backward: int  # kept between forward and backward, without weights


@dataclass(frozen=True)
class CellTrial:
    """The result of running the cell again at one point."""

    random: float  # largest difference between two runs, relative
    coupled: float | None  # largest relative difference of rows run without the others; None: cannot be measured
    dropouts: list[str]  # modules in the cell that draw a new dropout mask at every call
    batch_statistics: list[str]  # modules in the cell that normalise over the batch


@dataclass(frozen=True)
class Examination:
    """All measurements on one layer."""

    name: str
    solver: str
    stop: str
    gradient: str
    rtol: float
    max_steps: int
    training: bool
    samples: int
    size: int  # numbers in the state of a sample
    dtype: str
    precision: float  # spacing of the numbers in which the cell computes
    forward: SolveNumbers
    adjoint: SolveNumbers | None
    adjoint_error: str | None
    radius: Radius
    solvers: list[SolverResult]
    agreements: list[Agreement]
    memory: MemoryUse
    trial: CellTrial
    more_steps: SolveNumbers | None  # the same solve with ten times the steps, if samples ran out of steps
    reference_problem: str | None  # why the exact gradient, the reference, is not exact
    out_of_time: list[str]  # measurements that were stopped because they took too long
    attractors: Attractors | None = None  # results of restarts, if there were any


def examine(name: str, call: LayerCall) -> Examination:
    """Examine the layer in its current mode, with its solver, stop and gradient, and leave it unchanged.

    Cotangents and starts are drawn from a fixed seed: another examination of the same layer gives the same findings.
    """
    deq, inputs = call.deq, call.inputs
    with untouched(deq, inputs, seed=SEED), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the findings contain what the warnings would say
        return _Examiner(name, deq, inputs).examination()


class _Examiner:
    """A layer with its inputs and its own solve, on which the measurements are made."""

    def __init__(self, name: str, deq: DEQ, inputs: tuple[Any, ...]) -> None:
        self.name, self.deq, self.inputs = name, deq, inputs
        self.reference_problem: str | None = None
        self.out_of_time: list[str] = []
        own = deq.stop if deq.training or deq.eval_stop is None else deq.eval_stop
        self.stop = dataclasses.replace(own, on_failure="ignore", trace=True)
        began = time.perf_counter()
        with torch.no_grad():
            self.solution = self.solve(deq.solver)
        _wait(self.solution)
        self.seconds = time.perf_counter() - began

    def solve(self, solver: AnySolver, seconds: float = math.inf, **changes: Any) -> Solution:
        """Solve the layer with another solver and changed fields of its Stop; raises OutOfTime after `seconds`."""
        stop = dataclasses.replace(self.stop, **changes)
        with CellMeter(seconds).watch(self.deq.cell) as cell:
            return DEQ(cell, self.deq.init, solver, stop, batched=self.deq.batched).solve(*self.inputs)

    def examination(self) -> Examination:
        """Run all measurements."""
        s, deq = self.solution, self.deq
        adjoint, error, kept = self.backward()
        solvers, more_steps = self.compare_solvers(), self.more_steps()
        agreements = [] if error else self.compare_gradients(more_steps)
        return Examination(
            name=self.name,
            solver=brief(deq.solver),
            stop=brief(deq.stop),
            gradient=brief(deq.gradient),
            rtol=self.stop.rtol,
            max_steps=self.stop.max_steps,
            training=deq.training,
            samples=s.layout.batch,
            size=s.layout.columns,
            dtype=", ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in s.layout.leaves})),
            precision=s.equation.precision,
            forward=summary(s.stats),
            adjoint=None if adjoint is None else summary(adjoint),
            adjoint_error=error,
            radius=Radius([float("nan")] * s.layout.batch, [False] * s.layout.batch) if error else _radius(s),
            solvers=solvers,
            agreements=agreements,
            memory=MemoryUse(_bytes([s.z]), _bytes(self.inputs), kept),
            trial=self.try_again(),
            more_steps=more_steps,
            reference_problem=self.reference_problem,
            out_of_time=self.out_of_time,
        )

    def backward(self) -> tuple[Stats | None, str | None, int]:
        """Return the statistics of the adjoint solve, the error if it failed, and the bytes kept for it."""
        deq, kept = self.deq, _Kept(self.deq)
        twin = DEQ(deq.cell, deq.init, deq.solver, self.stop, deq.gradient, batched=deq.batched)
        try:
            with torch.enable_grad(), kept.watch():
                s = twin.solve(*self.inputs)
            z = [leaf for leaf in pytree.tree_leaves(s.z) if leaf.requires_grad]
            wanted = [t for t in (*deq.parameters(), *pytree.tree_leaves(self.inputs)) if _wants_gradient(t)]
            torch.autograd.grad(z, wanted, [torch.randn_like(leaf) for leaf in z], allow_unused=True)
        except (RuntimeError, TypeError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}", kept.bytes
        return s.adjoint, None, kept.bytes

    def compare_solvers(self) -> list[SolverResult]:
        """Run the layer's own solver and the others to the same tolerance; timed rounds are interleaved."""
        solvers = [self.deq.solver, *[solver for solver in SOLVERS if solver != self.deq.solver]]
        with torch.no_grad():
            first = {i: found for i, solver in enumerate(solvers) if (found := self.first_run(solver)) is not None}
            seconds = {i: [found.seconds] for i, found in first.items()}
            for _ in range(ROUNDS - 1):
                for i, found in first.items():
                    # the time of a failure does not matter, and all rounds together stay below the limit
                    if found.solve.failed == 0 and ROUNDS * found.seconds < SECONDS:
                        seconds[i].append(self.timed(solvers[i], math.inf)[0])
        return [dataclasses.replace(found, seconds=min(seconds[i])) for i, found in first.items()]

    def first_run(self, solver: AnySolver) -> SolverResult | None:
        """Run this solver once; None if it cannot run on this cell: Newton needs a forward-mode derivative."""
        own = solver == self.deq.solver
        try:
            seconds, s = self.timed(solver, SECONDS)
        except (RuntimeError, TypeError, NotImplementedError):
            if own:
                raise
            return None
        except OutOfTime:
            if own:  # the layer's own solver runs as configured, without more steps
                return SolverResult(brief(solver), own, self.seconds, summary(self.solution.stats))
            self.out_of_time.append(brief(solver))
            # the tables still list a solver that was stopped; `out_of_time` marks that these numbers are no results
            batch = self.solution.layout.batch
            nothing = SolveNumbers({"out of time": batch}, [0] * batch, [math.inf] * batch, 0, 0, [])
            return SolverResult(brief(solver), own, SECONDS, nothing, out_of_time=True)
        return SolverResult(brief(solver), own, seconds, summary(s.stats))

    def timed(self, solver: AnySolver, limit: float) -> tuple[float, Solution]:
        """Return the seconds of a solve of at most `limit` seconds, and its solution."""
        steps = NEWTON_STEPS if isinstance(solver, Newton) else max(self.stop.max_steps, MORE_STEPS)
        # processor time on a CPU, since other programs do not affect it; a GPU works while the processor waits
        clock = time.process_time if self.solution.layout.device.type == "cpu" else time.perf_counter
        began = clock()
        s = self.solve(solver, limit, max_steps=steps)
        _wait(s)
        return clock() - began, s

    def compare_gradients(self, more_steps: SolveNumbers | None) -> list[Agreement]:
        """Compare the layer's own gradient and others with the exact one.

        Returns an empty list if no sample has an equilibrium, nothing requires a gradient, or the time is up.
        """
        gradients = [self.deq.gradient, *[gradient for gradient in GRADIENTS if gradient != self.deq.gradient]]
        wants = any(map(_wants_gradient, (*self.deq.parameters(), *pytree.tree_leaves(self.inputs))))
        failed = int(self.solution.stats.failed.sum()) if more_steps is None else more_steps.failed
        if not wants or failed == self.solution.layout.batch:
            return []
        named = {brief(gradient): gradient for gradient in gradients}
        twin = copy.copy(self.deq)
        # copy.copy shares this dict, so that a new cell of the twin would become the layer's own
        twin.__dict__["_modules"] = dict(self.deq._modules)
        try:
            with CellMeter(GRADIENT_SECONDS).watch(self.deq.cell) as cell, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ConvergenceWarning)
                if cell is not self.deq.cell:
                    twin.cell = cell
                agreements = gradient_agreement(twin, self.inputs, named)
        except OutOfTime:
            self.out_of_time.append("the comparison of gradients")
            return []
        self.reference_problem = next((str(each.message) for each in caught if "exact gradient" in str(each.message)), None)
        return agreements

    def try_again(self) -> CellTrial:
        """Run the cell twice at the equilibrium, which shows randomness, and on every second row, which shows coupling."""
        s, cell = self.solution, self.deq.cell
        z, args = s.layout.pack(s.z), s.equation.args
        named = list(cell.named_modules()) if isinstance(cell, nn.Module) else []
        with torch.no_grad():
            first, second = s.equation(z, *args), s.equation(z, *args)
            return CellTrial(
                random=_difference(first, second),
                coupled=_coupling(s, z, first),
                dropouts=[
                    name or "the cell itself" for name, m in named if (isinstance(m, _DropoutNd) and m.training and m.p > 0)
                ],
                batch_statistics=[name or "the cell itself" for name, m in named if uses_batch_statistics(m)],
            )

    def more_steps(self) -> SolveNumbers | None:
        """Solve again with ten times the steps; None if no sample ran out of steps, or it takes too long."""
        if self.solution.stats.count(Status.MAX_STEPS) == 0:
            return None
        try:
            with torch.no_grad():
                return summary(self.solve(self.deq.solver, SECONDS, max_steps=10 * self.stop.max_steps).stats)
        except OutOfTime:
            self.out_of_time.append("ten times the steps")
            return None


def summary(stats: Stats) -> SolveNumbers:
    """Return the statistics of a solve as plain numbers and lists, detached from tensors and devices."""
    counts = {status.name.lower(): stats.count(status) for status in Status if stats.count(status)}
    return SolveNumbers(
        status=counts,
        steps=stats.steps.tolist(),
        residual=stats.residual.tolist(),
        evaluations=stats.evaluations,
        sample_evaluations=stats.sample_evaluations,
        curve=_curve(stats.trace) if stats.trace else [],
    )


def _curve(traces: Sequence[Tensor]) -> list[list[float]]:
    """Return quantiles per step; a sample that has stopped counts with its last residual."""
    length = max(len(trace) for trace in traces)
    filled = [torch.cat([t, t[-1:].expand(length - len(t))]) for t in traces]
    residuals = torch.stack(filled).double().nan_to_num(nan=float("inf"))  # (batch, steps); nan counts as the worst
    order = residuals.sort(dim=0).values
    places = [round(q * (len(traces) - 1)) for q in QUANTILES]
    return order[places].T.tolist()


def _radius(s: Solution) -> Radius:
    found = spectral_radius(s)
    return Radius(found.radius.tolist(), found.converged.tolist())


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of finite entries, relative to the largest entry of `a`."""
    both = torch.isfinite(a) & torch.isfinite(b)
    if not bool(both.any()):
        return 0.0
    a, b = a[both], b[both]
    return float((a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(a.dtype).tiny))


def _coupling(s: Solution, z: Tensor, fz: Tensor) -> float | None:
    """Return how much fz = f(z), (batch, n), changes if every second row runs without the others; None if it cannot."""
    batch = s.layout.batch
    if batch < 2 or not s.layout.batched:
        return None
    index = torch.arange(0, batch, 2, device=z.device)
    args = [arg[index] if rows else arg for arg, rows in zip(s.equation.args, s.equation.rowwise, strict=True)]
    try:
        alone = s.equation(z[index], *args)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # the cell holds data of the full batch
    return _difference(fz[index], alone)


def _wants_gradient(leaf: Any) -> bool:
    """Return True for tensors that require a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _bytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


def _wait(s: Solution) -> None:
    if s.layout.device.type == "cuda":
        torch.cuda.synchronize(s.layout.device)


class _Kept:
    """Measures the bytes that autograd keeps between forward and backward, each storage once, without weights."""

    def __init__(self, deq: DEQ) -> None:
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in deq.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def watch(self) -> Any:
        """Return a context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.storages[storage.data_ptr()] = storage  # held, or a later tensor could get the same address
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())
