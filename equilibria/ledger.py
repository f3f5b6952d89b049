"""The books of one solve: per sample the best iterate, its residual, the steps taken and how it ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equilibria.maps import Counter
from equilibria.norms import Norm
from equilibria.solution import Stats, Status

RUNNING = -1
FLOOR = 8.0  # a relative residual below this many spacings of the numbers is rounding, not progress to come
FLOOR_PATIENCE = 5  # steps without progress down there until the tolerance is called out of reach
PROGRESS = 0.9  # what counts as progress: a tenth off the residual


class Ledger:
    """Books over the rows still carried; rows dropped by compaction are written off to their place in the batch."""

    def __init__(
        self,
        z0: Tensor,
        rtol: float,
        atol: float,
        norm: Norm,
        scale: Tensor | None,
        patience: int | None,
        precision: float,
        trace: bool,
        keep_every: int | None,
    ) -> None:
        batch, device = z0.shape[0], z0.device
        self.rtol, self.atol, self.norm, self.scale, self.patience = rtol, atol, norm, scale, patience
        self.floor = FLOOR * precision
        self.rows = batch
        self.z = torch.where(torch.isfinite(z0), z0, torch.zeros_like(z0)).detach()
        self.excess = z0.new_full((batch,), float("inf"))  # residual over tolerance: what "best" means
        self.residual = z0.new_full((batch,), float("inf"))
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)
        self.rejected = torch.zeros_like(self.steps)
        self.best = torch.zeros_like(self.steps)  # the step whose iterate is kept
        self.status = torch.full((batch,), RUNNING, dtype=torch.int8, device=device)
        self.milestone = self.excess
        self.waiting = torch.zeros_like(self.steps)
        self.trace: list[tuple[Tensor | None, Tensor]] | None = [] if trace else None
        self.keep_every = keep_every
        self.iterates: list[tuple[int, Tensor | None, Tensor, Tensor]] = []
        self.index: Tensor | None = None  # (rows,) places in the batch of the rows carried; None: all
        self.closed: dict[str, Tensor] = {}
        self.coupled = False  # have rows turned out to depend on each other?

    def observe(self, z: Tensor, fz: Tensor, step: int, rejected: Tensor | None = None) -> None:
        """Enter an iterate, where it is the one before (`rejected`) too. Nothing here waits for the device."""
        length = self.norm((fz - z).detach())
        size = self.norm(fz.detach()) if self.scale is None else self.scale
        residual = length / size.clamp_min(torch.finfo(size.dtype).tiny)
        tolerance = self.atol + self.rtol * size
        excess = length / torch.maximum(tolerance, 1e-6 * torch.finfo(size.dtype).eps * size).clamp_min(1e-30)
        running = self.status == RUNNING
        finite = torch.isfinite(residual) & torch.isfinite(size)
        done = running & finite & (length <= tolerance)
        better = running & finite & ((excess < self.excess) | done)
        self.z = torch.where(better.unsqueeze(1), z, self.z)
        self.excess = torch.where(better, excess, self.excess)
        self.residual = torch.where(better, residual, self.residual)
        self.steps = torch.where(running, step, self.steps)
        self.best = torch.where(better, step, self.best)
        if rejected is not None:
            self.rejected = self.rejected + (running & rejected)
        self.status = torch.where(done, Status.CONVERGED, self.status)
        self.status = torch.where(running & ~finite, Status.NONFINITE, self.status)
        self._watch_progress(running & ~done & finite)
        if self.trace is not None:
            self.trace.append((self.index, residual))
        if self.keep_every is not None and step > 0 and step % self.keep_every == 0:
            self.iterates.append((step, self.index, running & finite, z.detach()))

    def _watch_progress(self, running: Tensor) -> None:
        """Stalled: out of patience, or down where only rounding moves the residual."""
        if self.patience is None and self.rtol >= self.floor:
            return
        progress = self.excess < PROGRESS * self.milestone
        self.milestone = torch.where(progress, self.excess, self.milestone)
        self.waiting = torch.where(progress, 0, self.waiting + 1)
        stalled = (self.residual < self.floor) & (self.waiting >= FLOOR_PATIENCE)
        if self.patience is not None:
            stalled = stalled | (self.waiting >= self.patience)
        self.status = torch.where(running & stalled, Status.STALLED, self.status)

    def running(self) -> int:
        """Rows still running: the loop's one read-back."""
        return int((self.status == RUNNING).sum())

    def running_rows(self) -> Tensor:
        return (self.status == RUNNING).nonzero().squeeze(1)

    def freeze(self, state: Any) -> Any:
        """A solver's state in which finished rows stand still at their best iterate, with a residual of zero."""
        active = self.status == RUNNING
        keep = active.unsqueeze(1)
        z, fz = torch.where(keep, state.z, self.z), torch.where(keep, state.fz, self.z)
        return dataclasses.replace(state, z=z, fz=fz, active=active)

    def drop_finished(self, index: Tensor) -> None:
        """Write the finished rows off and carry on with those at `index`."""
        self._write_off()
        place = index if self.index is None else self.index.index_select(0, index)
        for name in ("z", "excess", "residual", "steps", "rejected", "best", "status", "milestone", "waiting"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        if self.scale is not None:
            self.scale = self.scale.index_select(0, index)
        self.index, self.rows = place, index.shape[0]

    def _write_off(self) -> None:
        current = {name: getattr(self, name) for name in ("z", "residual", "steps", "rejected", "best", "status")}
        if self.index is None:
            self.closed = current
        else:
            self.closed = {name: self.closed[name].index_copy(0, self.index, value) for name, value in current.items()}

    def close(self, counter: Counter) -> tuple[Tensor, Stats]:
        """The best iterates of the whole batch and their statistics."""
        self._write_off()
        status = self.closed["status"]
        return self.closed["z"], Stats(
            status=torch.where(status == RUNNING, Status.MAX_STEPS, status).to(torch.int8),
            steps=self.closed["steps"],
            rejected=self.closed["rejected"],
            best=self.closed["best"],
            residual=self.closed["residual"],
            evaluations=counter.evaluations,
            sample_evaluations=counter.rows,
            products=counter.products,
            trace=self._traces(),
            iterates=self._iterates(),
        )

    def _iterates(self) -> tuple[Tensor, ...]:
        """(batch, n) each, but for the last step's, which is the answer."""
        answer, last = self.closed["z"], int(self.closed["steps"].max()) if len(self.closed["steps"]) else 0
        return tuple(_placed(answer, index, rows, z) for step, index, rows, z in self.iterates if step < last)

    def _traces(self) -> tuple[Tensor, ...] | None:
        """One row per sample, cut where that sample stopped."""
        if self.trace is None:
            return None
        batch = self.closed["steps"].shape[0]
        whole = torch.full((len(self.trace), batch), float("nan"), dtype=self.residual.dtype, device=self.residual.device)
        for step, (index, residual) in enumerate(self.trace):
            if index is None:
                whole[step] = residual
            else:
                whole[step].index_copy_(0, index, residual)
        return tuple(whole[: int(steps) + 1, sample].clone() for sample, steps in enumerate(self.closed["steps"]))


def _placed(answer: Tensor, index: Tensor | None, rows: Tensor, z: Tensor) -> Tensor:
    """(batch, n), z in its place where a row was still on its way, else the answer."""
    if index is None:
        return torch.where(rows.unsqueeze(1), z, answer)
    return answer.index_copy(0, index, torch.where(rows.unsqueeze(1), z, answer.index_select(0, index)))
