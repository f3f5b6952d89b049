"""The books of one solve: per sample the best iterate, its residual, the steps taken and how it ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equilibria.maps import Counter
from equilibria.norms import Norm, euclidean_norm, rms_norm
from equilibria.solution import Stats, Status
from equilibria.solvers.base import Iterate, without_graph

RUNNING = -1
FLOOR = 8.0  # a relative residual below this many spacings of the numbers is rounding, not progress to come
FLOOR_PATIENCE = 5  # steps without progress down there until the tolerance is called out of reach
PROGRESS = 0.9  # what counts as progress: a tenth off the residual


class Ledger:
    """Books over the rows still carried; rows dropped by compaction are written off to their place in the batch.

    While no row has stopped there is little to write down, and most steps are such: those are seen through at a glance.
    """

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
        if norm is rms_norm:  # lengths in place of means: every comparison comes out the same, and costs less
            root = max(z0.shape[1], 1) ** 0.5
            norm, atol, scale = euclidean_norm, atol * root, None if scale is None else scale * root
        self.rtol, self.atol, self.norm, self.scale, self.patience = rtol, atol, norm, scale, patience
        self.floor = FLOOR * precision
        self.rows = z0.shape[0]
        self.z = z0.detach()
        self.excess: Tensor | None = None  # residual over tolerance of `z`: what "best" means
        self.length, self.size = z0, z0  # of the residual of `z` and what it is relative to
        self.step = 0  # the last one, while no row has stopped
        self.status: Tensor | None = None  # None: every row is running
        self.residual: Tensor
        self.steps: Tensor
        self.best: Tensor | None = None  # the step whose iterate is kept; None: the last one
        self.rejected: Tensor
        self.counted: int | None = None  # rows running after the last entry, where that is known
        self.watchful = patience is not None or rtol < self.floor  # is progress to be followed?
        self.trace: list[tuple[Tensor | None, Tensor]] | None = [] if trace else None
        self.keep_every = keep_every
        self.iterates: list[tuple[int, Tensor | None, Tensor | None, Tensor]] = []
        self.index: Tensor | None = None  # (rows,) places in the batch of the rows carried; None: all
        self.closed: dict[str, Tensor] = {}
        self.coupled = False  # have rows turned out to depend on each other?

    def observe(self, state: Iterate, step: int, *, look: bool, rejected: Tensor | None = None) -> None:
        """Enter an iterate, where it is the one before (`rejected`) too. Waits for the device only to `look`."""
        length = self.norm(without_graph(state.residual))
        size = self.norm(without_graph(state.fz)) if self.scale is None else self.scale
        if self.trace is not None:
            self.trace.append((self.index, length / size.clamp_min(torch.finfo(size.dtype).tiny)))
        quiet = look and self.status is None and not self.watchful and rejected is None
        if not (quiet and self._glance(state.z, length, size, step)):
            self._enter(state.z, length, size, step, rejected)
        if self.keep_every is not None and step > 0 and step % self.keep_every == 0:
            self._keep(state.z.detach(), step)

    def _glance(self, z: Tensor, length: Tensor, size: Tensor, step: int) -> bool:
        """Has no row arrived? Then there is no more to write down than which iterate is the best: mostly the last one."""
        if not self.rows:
            return False
        tolerance = self.rtol * size if self.atol == 0 else torch.add(self.atol, size, alpha=self.rtol)
        excess = length / tolerance
        growth = excess if self.excess is None else excess / self.excess
        worst, short = torch.stack((growth.amax(), (excess > 1).sum(dtype=excess.dtype))).tolist()
        if not (worst < float("inf") and short == self.rows):  # nan compares false
            self.counted = None if worst == float("inf") else int(short)  # nan is not short of its tolerance: it has stopped
            return False
        if self.excess is None or worst < 1:
            self.z, self.excess, self.length, self.size, self.best = z, excess, length, size, None
        else:
            self._keep_best(z, excess, length, size, step)
        self.step = step
        return True

    def _keep_best(self, z: Tensor, excess: Tensor, length: Tensor, size: Tensor, step: int) -> None:
        """Some rows are no better than before."""
        assert self.excess is not None
        better = excess < self.excess
        self.best = torch.where(better, step, self.step if self.best is None else self.best)
        self.z = torch.where(better.unsqueeze(1), z, self.z)
        self.excess = torch.where(better, excess, self.excess)
        self.length, self.size = torch.where(better, length, self.length), torch.where(better, size, self.size)

    def _enter(self, z: Tensor, length: Tensor, size: Tensor, step: int, rejected: Tensor | None) -> None:
        """Row by row, without asking."""
        if self.status is None:
            self._open()
        assert self.status is not None and self.excess is not None and self.best is not None
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

    def _open(self) -> None:
        """Books for every row, as they stand."""
        batch, device = self.rows, self.z.device
        self.status = torch.full((batch,), RUNNING, dtype=torch.int8, device=device)
        self.steps = torch.full((batch,), self.step, dtype=torch.int64, device=device)
        self.best = self.steps if self.best is None else self.best
        self.rejected = torch.zeros_like(self.steps)
        self.waiting = self.rejected
        if self.excess is None:
            self.z = torch.where(torch.isfinite(self.z), self.z, torch.zeros_like(self.z))
            self.excess = self.residual = self.z.new_full((batch,), float("inf"))
        else:
            self.residual = self.length / self.size.clamp_min(torch.finfo(self.size.dtype).tiny)
        self.milestone = self.excess

    def _keep(self, z: Tensor, step: int) -> None:
        on_their_way = None if self.status is None else (self.steps == step) & (self.status != Status.NONFINITE)
        self.iterates.append((step, self.index, on_their_way, z))

    def _watch_progress(self, running: Tensor) -> None:
        """Stalled: out of patience, or down where only rounding moves the residual."""
        if not self.watchful:
            return
        assert self.status is not None and self.excess is not None
        progress = self.excess < PROGRESS * self.milestone
        self.milestone = torch.where(progress, self.excess, self.milestone)
        self.waiting = torch.where(progress, 0, self.waiting + 1)
        stalled = (self.residual < self.floor) & (self.waiting >= FLOOR_PATIENCE)
        if self.patience is not None:
            stalled = stalled | (self.waiting >= self.patience)
        self.status = torch.where(running & stalled, Status.STALLED, self.status)

    def running(self) -> int:
        """Rows still running; asks the device, where that was not done at a glance."""
        if self.status is None:
            return self.rows
        counted, self.counted = self.counted, None
        return int((self.status == RUNNING).sum()) if counted is None else counted

    def running_rows(self) -> Tensor:
        assert self.status is not None
        return (self.status == RUNNING).nonzero().squeeze(1)

    def freeze(self, state: Any) -> Any:
        """A solver's state in which finished rows stand still at their best iterate, with a residual of zero."""
        assert self.status is not None
        active = self.status == RUNNING
        keep = active.unsqueeze(1)
        z, fz = torch.where(keep, state.z, self.z), torch.where(keep, state.fz, self.z)
        return dataclasses.replace(state, z=z, fz=fz, active=active)

    def drop_finished(self, index: Tensor) -> None:
        """Write the finished rows off and carry on with those at `index`."""
        assert self.status is not None
        self._write_off()
        place = index if self.index is None else self.index.index_select(0, index)
        for name in ("z", "excess", "residual", "steps", "rejected", "best", "status", "milestone", "waiting"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        if self.scale is not None:
            self.scale = self.scale.index_select(0, index)
        self.index, self.rows = place, index.shape[0]

    def _write_off(self) -> None:
        if self.status is None:
            self._open()
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
        if not self.iterates:
            return ()
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


def _placed(answer: Tensor, index: Tensor | None, rows: Tensor | None, z: Tensor) -> Tensor:
    """(batch, n), z in its place where a row was still on its way (None: all), else the answer."""
    if rows is None:
        return z
    if index is None:
        return torch.where(rows.unsqueeze(1), z, answer)
    return answer.index_copy(0, index, torch.where(rows.unsqueeze(1), z, answer.index_select(0, index)))
