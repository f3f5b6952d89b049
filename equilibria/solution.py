"""The result of a solve: Status, Stats and Solution, their recording, and the warning and error for failed samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.packing import Layout, State
from equilibria.stop import rms_norm, scaled_norm

__all__ = ["ConvergenceError", "ConvergenceWarning", "Handover", "Solution", "Stats", "Status", "record"]


class Status(IntEnum):
    """The end of a sample's solve: converged, or why not."""

    CONVERGED = 0
    """The residual is within the tolerance."""
    MAX_STEPS = 1
    """The limit of steps was reached; the best iterate is returned."""
    NONFINITE = 2
    """The map returned nan or inf, or the residual overflowed; the best finite iterate is returned and its gradient is
    zero."""
    STALLED = 3
    """The residual stopped falling for `Stop.patience` steps, or the tolerance is below what the dtype can reach."""
    DIVERGED = 4
    """The iterates diverge: the residual is far above that of the start, or the state grew while the residual did not fall.
    The best iterate is returned, which may be the start."""


class ConvergenceWarning(UserWarning):
    """Some samples of a solve did not converge."""


class ConvergenceError(RuntimeError):
    """Some samples of a solve did not converge and `on_failure="raise"`; `stats` holds their statistics."""

    def __init__(self, message: str, stats: Stats) -> None:
        super().__init__(message)
        self.stats = stats


@dataclass(frozen=True)
class Handover:
    """Samples that one solver of a `Fallback` passed to the next one."""

    from_solver: str
    to_solver: str
    samples: Tensor  # (k,) rows of the batch
    status: Tensor  # (k,) their status with the first solver: MAX_STEPS, NONFINITE, STALLED or DIVERGED
    residual: Tensor  # (k,) their residual with the first solver


@dataclass(frozen=True, repr=False)
class Stats:
    """The statistics of one solve, per sample."""

    status: Tensor  # (batch,) of Status
    steps: Tensor  # (batch,) steps until that sample stopped
    rejected: Tensor  # (batch,) number of these steps that were rejected and repeated, by solvers with a step size
    best: Tensor  # (batch,) the step whose iterate is returned; the last one if the sample converged
    residual: Tensor  # (batch,) relative residual |f(z) - z| / |f(z)| of the returned z
    evaluations: int  # number of calls of the map, on any number of rows
    sample_evaluations: int  # number of rows in all these calls, which compaction reduces
    products: int = 0  # Jacobian products among (forward mode) or beside (reverse mode) the evaluations
    trace: tuple[Tensor, ...] | None = None  # per sample (steps + 1,), the residual of every iterate
    iterates: tuple[Tensor, ...] = ()  # (batch, n) each, the iterates kept by `Stop.keep_every`
    handovers: tuple[Handover, ...] = ()
    extra_steps: int = 0
    """Steps of the cell from the iterate that status and residual describe to the state that is returned: 1 with JFB,
    `steps` with UnrolledPhantom, else 0. `Solution.measure_residual()` measures the state that is returned."""

    @property
    def depth(self) -> Tensor:
        """(batch,) accepted steps, the depth of the network that was run."""
        return self.steps - self.rejected

    @property
    def converged(self) -> Tensor:
        """(batch,) bool."""
        return self.status == Status.CONVERGED

    @property
    def failed(self) -> Tensor:
        """(batch,) bool."""
        return self.status != Status.CONVERGED

    def count(self, status: Status) -> int:
        """Return the number of samples with this status."""
        return int((self.status == status).sum())

    def summary(self) -> dict[str, float]:
        """Return the statistics as numbers, for logs: shares of the samples by status, steps, residuals, counts."""
        samples = self.status.numel()
        shares = {status.name.lower(): self.count(status) / max(samples, 1) for status in Status}
        steps, residual = self.steps.double(), self.residual.double()
        return {
            "samples": float(samples),
            **shares,
            "steps_mean": float(steps.mean()) if samples else 0.0,
            "steps_max": float(steps.max()) if samples else 0.0,
            "residual_median": float(residual.median()) if samples else 0.0,
            "residual_max": float(residual.max()) if samples else 0.0,
            "evaluations": float(self.evaluations),
            "sample_evaluations": float(self.sample_evaluations),
            "products": float(self.products),
        }

    def __repr__(self) -> str:
        return f"Stats({self})"

    def _repr_html_(self) -> str:
        return _table({"": self.summary()})

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(status)} {status.name.lower()}" for status in Status if self.count(status))
        if self.status.numel() == 0:
            return "no samples"
        return (
            f"{self.status.numel()} samples: {counts}; steps up to {int(self.steps.max())}, "
            f"worst residual {float(self.residual.max()):.1e}, {self.evaluations} evaluations "
            f"({self.sample_evaluations} rows)"
            + (f", all before {self.extra_steps} extra steps from there" if self.extra_steps else "")
        )


@dataclass(eq=False)
class SolveResult:
    """What a solve found. Every run of the loop returns one, and a `Problem` keeps that of its forward solve.

    Backward adds to the kept one, so that the graph of z refers to it. It has no z for that reason: a graph that referred to
    itself would be freed by the garbage collector only. `Solution` joins it with z again.
    """

    z: Tensor = None  # type: ignore[assignment]  # (batch, n), without a graph; None in the result that a `Problem` keeps
    stats: Stats = None  # type: ignore[assignment]  # None before the solve
    taken: int = 0  # steps of the loop, the same on every rank
    state: Any = None  # state of the solver, with each row as it was when the sample stopped; None unless `keep_state`
    coupled: bool | None = None  # True if rows depend on each other, False if a check found that they do not, else None
    # True if the rows were not evaluated together. The residuals are then measured by one evaluation of the whole batch: in
    # backward, or when the statistics are read before it
    unmeasured: bool = False
    failed: bool = True  # False if no sample has failed, as known on the host
    sound: Tensor | None = None  # (batch,) True for results with a smaller residual than the start; None for all
    faint: Tensor | None = None  # (batch,) True for results whose squares underflow; None if there are none
    nonfinite: bool = False  # True if a sample needs quarantine; on the host, so that backward need not wait for the device
    version: int = 0  # of the args of an unmeasured solve: an optimizer step changes it
    adjoint: Stats | None = None  # of the backward solve
    adjoint_starts: Any = None  # the AdjointStarts of `Remember(adjoint=True)`, which backward recalls and stores

    def add_evaluations(self, evaluations: int, rows: int) -> None:
        """Count evaluations of the cell outside of the solver loop, each on `rows` rows."""
        total, sampled = self.stats.evaluations + evaluations, self.stats.sample_evaluations + evaluations * rows
        self.stats = replace(self.stats, evaluations=total, sample_evaluations=sampled)


@dataclass(frozen=True, repr=False)
class Solution:
    """An equilibrium with the statistics of its solve.

    z      the equilibrium; gradients flow through it
    z0     the start of the solver; differentiable if `init` is, but the solver treats it as a constant
    f      the map with its inputs bound, state -> state; the same function at every call, with the same dropout masks
    stats  statistics of the forward solve; `adjoint` has those of the backward solve after `backward()`
    layer  the name of the DEQ in the model that `eq.record(model)` was given; "" elsewhere
    """

    z: State
    z0: State
    f: Callable[[State], State] = field(repr=False)
    result: SolveResult = field(repr=False)  # what forward and backward found
    layout: Layout = field(repr=False)  # how z is packed to (batch, n)
    problem: Any = field(repr=False)  # the Problem that was solved
    layer: str = ""

    @property
    def equation(self) -> Any:
        """The equation on packed states, z = equation(z, *equation.args)."""
        return self.problem.equation

    @property
    def stats(self) -> Stats:
        """The statistics of the forward solve, per sample.

        If rows stopped at different steps, backward measures the residuals of all rows together. Before `backward()`, the
        first access does so by one evaluation of the cell, which is counted.
        """
        if self.result.unmeasured:
            self.problem.measure_again(self.layout.pack(self.z).detach(), self.equation.args)
        return self.result.stats

    @property
    def finite(self) -> Tensor:
        """(batch,) the samples that are not NONFINITE, which no measurement of the residuals changes."""
        return self.result.stats.status != Status.NONFINITE

    def __repr__(self) -> str:
        shapes = pytree.tree_map(lambda leaf: f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}", self.z)
        name = f"layer {self.layer!r}, " if self.layer else ""
        adjoint = "" if self.adjoint is None else f"; adjoint: {self.adjoint}"
        return f"Solution({name}z of shape {shapes}, {self.stats}{adjoint})"

    def _repr_html_(self) -> str:
        columns = {"forward": self.stats.summary()}
        if self.adjoint is not None:
            columns["adjoint"] = self.adjoint.summary()
        return _table(columns, title=self.layer)

    def measure_residual(self) -> Tensor:
        """Return (batch,), |f(z) - z| / |f(z)| of the state `z` that was returned, by one evaluation of the cell.

        `stats.residual` is the same without an evaluation, unless a gradient takes steps of its own from the equilibrium
        (JFB, UnrolledPhantom, or Warmup with one of them): see `stats.extra_steps`. If the cell is not contractive, those
        steps increase the residual, which can then be many times the tolerance.
        """
        with torch.no_grad():
            z = self.layout.pack(self.z).detach()
            fz = self.equation(z, *[arg.detach() for arg in self.equation.args])
            length, size = scaled_norm(rms_norm, fz - z), scaled_norm(rms_norm, fz)
            return length / size.clamp_min(torch.finfo(size.dtype).tiny)

    @property
    def adjoint(self) -> Stats | None:
        """The statistics of the backward solve; None before `backward()`, and for JFB, UnrolledPhantom and Unrolled.

        These three solve nothing in backward. If they left out samples whose gradients are not finite, the samples are
        NONFINITE here, and the others are MAX_STEPS with a residual of nan.
        """
        return self.result.adjoint

    @property
    def iterates(self) -> tuple[State, ...]:
        """The iterates that `Stop(keep_every=...)` kept, as states without a graph."""
        return tuple(map(self.layout.unpack, self.stats.iterates))


recordings: ContextVar[tuple[tuple[dict[int, str], list[Solution]], ...]] = ContextVar("recordings", default=())


_open = 0  # `record` blocks that are open


def open_recordings() -> int:
    """Return the number of open `record` blocks, in all threads."""
    return _open


@contextmanager
def record(model: nn.Module) -> Iterator[list[Solution]]:
    """Collect the solutions of every DEQ in `model` that is solved inside the block, in order.

        with eq.record(model) as solutions:
            loss = criterion(model(x), y)
        loss.backward()
        solutions[0].stats, solutions[0].adjoint, solutions[0].layer

    A Solution references its inputs and its equilibrium; delete the list to free them.
    """
    global _open
    _open += 1
    try:
        with collecting(model) as solutions:
            yield solutions
    finally:
        _open -= 1


@contextmanager
def collecting(model: nn.Module) -> Iterator[list[Solution]]:
    """Collect solutions for statistics alone: in a model that torch compiles, they have no gradients of the layers below."""
    solutions: list[Solution] = []
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    token = recordings.set((*recordings.get(), (names, solutions)))
    try:
        yield solutions
    finally:
        recordings.reset(token)


def note(module: nn.Module, solution: Solution) -> None:
    """Append a solution, with the name of its layer, to every active recording whose model contains this module."""
    named = None  # one object in all recordings, with the name that the outermost one has for its layer
    for names, solutions in recordings.get():
        if (name := names.get(id(module))) is not None:
            named = named or replace(solution, layer=name)
            solutions.append(named)


def _table(columns: dict[str, dict[str, float]], title: str = "") -> str:
    """Return summaries as an HTML table, one row per quantity; statuses without a sample are left out."""
    names = {status.name.lower() for status in Status}
    head = "".join(f"<th>{escape(name)}</th>" for name in (title, *columns)) if any(columns) or title else ""
    rows = [f"<tr>{head}</tr>"] if head else []
    for key in next(iter(columns.values())):
        cells = [summary[key] for summary in columns.values()]
        if key in names and not any(cells):
            continue
        texts = [f"{value:.0%}" if key in names else f"{value:.3g}" for value in cells]
        rows.append(f"<tr><td>{key.replace('_', ' ')}</td>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def empty_stats(batch: int, device: torch.device) -> Stats:
    """Return the statistics of a solve of `batch` samples without steps, all CONVERGED with a residual of zero."""
    return Stats(
        status=torch.zeros(batch, dtype=torch.int8, device=device),
        steps=torch.zeros(batch, dtype=torch.int64, device=device),
        rejected=torch.zeros(batch, dtype=torch.int64, device=device),
        best=torch.zeros(batch, dtype=torch.int64, device=device),
        residual=torch.zeros(batch, device=device),
        evaluations=0,
        sample_evaluations=0,
    )
