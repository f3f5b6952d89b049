"""Statistics of training steps and their means over an epoch: task metrics and solver statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equilibria.analysis.spectrum import spectral_radius
from equilibria.lab.training.task import Outcome
from equilibria.solution import Solution, Stats

RADIUS_STEPS = 30  # enough for a curve over epochs; without convergence the estimate is the growth over the later half


@dataclass(frozen=True)
class BatchSolves:
    """Statistics of all solves of one batch."""

    evaluations: int  # evaluations of the cell in all solves
    adjoint_evaluations: int | None  # products with the transposed Jacobian; None: no adjoint equation was solved
    samples: int
    depth: float  # sum over samples
    finite: int  # number of samples with a finite residual
    residual: float  # sum over these samples
    residual_max: float
    failed: int
    adjoint_failed: int


@dataclass(frozen=True)
class Observed:
    """Loss, metrics and solver statistics of one batch, read back from the device in one transfer."""

    loss: float
    metrics: dict[str, float]
    size: int
    solves: BatchSolves | None = None


def observe(outcome: Outcome, solutions: Sequence[Solution]) -> Observed:
    """Collect the statistics of a batch; call it after `backward()` to include the adjoint solve."""
    loss = outcome.loss.detach()
    values = [torch.as_tensor(v, device=loss.device).detach().double().reshape(1) for v in outcome.metrics.values()]
    rows = [_summed(s.stats, s.adjoint) for s in solutions]
    read = torch.cat([loss.double().reshape(1), *values, *rows]).tolist()  # the only device sync of a step's statistics
    metrics = dict(zip(outcome.metrics, read[1:], strict=False))
    return Observed(read[0], metrics, outcome.size, _solves(solutions, read[1 + len(metrics) :]))


def radius(solutions: Sequence[Solution], seed: int) -> float | None:
    """Return the mean spectral radius over samples and solves; None if none is finite."""
    if not solutions:
        return None
    device = solutions[0].layout.device
    draws = torch.Generator(device).manual_seed(seed)
    found = torch.cat(
        [spectral_radius(s, steps=RADIUS_STEPS, generator=draws).radius.double().reshape(-1) for s in solutions]
    )
    known = found[torch.isfinite(found)]
    return float(known.mean()) if known.numel() else None


@dataclass
class Meter:
    """Weighted means and maxima by name."""

    sums: dict[str, list[float]] = field(default_factory=dict)  # weighted sum, sum of weights
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, weight: float) -> None:
        """Add a sum and its weight to the mean of a name."""
        pair = self.sums.setdefault(name, [0.0, 0.0])
        pair[0] += total
        pair[1] += weight

    def add_max(self, name: str, value: float) -> None:
        """Include a value in the maximum of a name."""
        self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def add_batch(self, seen: Observed, skipped: bool = False) -> None:
        """Add a batch; of a skipped batch only the solves count, because its loss may be nan."""
        values = {} if skipped else {"loss": seen.loss, **seen.metrics}
        for name, value in values.items():
            self.add(name, value * seen.size, seen.size)
        if (s := seen.solves) is not None:
            self.add("evaluations", s.evaluations, 1)
            if s.adjoint_evaluations is not None:
                self.add("adjoint_evaluations", s.adjoint_evaluations, 1)
            self.add("depth", s.depth, s.samples)
            self.add("failed", s.failed, s.samples)
            if s.adjoint_evaluations is not None:
                self.add("adjoint_failed", s.adjoint_failed, s.samples)
            self.add("residual", s.residual, s.finite)
            if s.finite:
                self.add_max("residual_max", s.residual_max)

    def means(self) -> dict[str, float]:
        """Return the weighted means of all names with a positive weight, and the maxima."""
        return {name: total / weight for name, (total, weight) in self.sums.items() if weight} | self.maxima

    def state(self) -> dict[str, Any]:
        """Return the sums and maxima for a checkpoint."""
        return {"sums": {name: list(pair) for name, pair in self.sums.items()}, "maxima": dict(self.maxima)}

    @staticmethod
    def merged(states: Iterable[Mapping[str, Any]]) -> Meter:
        """Merge several `state()`, such as those of all processes, into one meter."""
        meter = Meter()
        for state in states:
            for name, (total, weight) in state["sums"].items():
                meter.add(name, total, weight)
            for name, value in state["maxima"].items():
                meter.add_max(name, value)
        return meter


def _summed(stats: Stats, adjoint: Stats | None) -> Tensor:
    """Return (6,) float64: sum of depths, finite residuals, their sum and maximum, failed solves, failed adjoints."""
    residual = stats.residual.detach().double()
    finite = torch.isfinite(residual)
    known = torch.where(finite, residual, 0.0)
    failed_adjoint = known.new_zeros(()) if adjoint is None else adjoint.failed.sum()
    largest = known.max() if known.numel() else known.new_zeros(())
    parts = (stats.depth.sum(), finite.sum(), known.sum(), largest, stats.failed.sum(), failed_adjoint)
    return torch.stack([part.to(known) for part in parts])


def _solves(solutions: Sequence[Solution], read: Sequence[float]) -> BatchSolves | None:
    """Return the statistics of all solves from the numbers of `_summed`, six per solve; None without solves."""
    if not solutions:
        return None
    # `_summed` gives six numbers per solve
    depth, finite, residual, largest, failed, failed_adjoint = (read[i::6] for i in range(6))
    adjoints = [s.adjoint for s in solutions if s.adjoint is not None]
    return BatchSolves(
        evaluations=sum(s.stats.evaluations for s in solutions),
        adjoint_evaluations=sum(a.evaluations for a in adjoints) if adjoints else None,
        samples=sum(s.stats.status.numel() for s in solutions),
        depth=sum(depth),
        finite=int(sum(finite)),
        residual=sum(residual),
        residual_max=max(largest),
        failed=int(sum(failed)),
        adjoint_failed=int(sum(failed_adjoint)),
    )
