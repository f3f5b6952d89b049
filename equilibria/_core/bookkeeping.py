"""The books of one solve: per sample the best iterate, its residual, the steps taken and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria._core.maps import FALLEN, Counter
from equilibria._core.norms import Norm, euclidean_norm, rms_norm
from equilibria.solution import Stats, Status
from equilibria.solvers.base import Iterate, without_graph

RUNNING = -1
FLOOR = 8.0  # a relative residual below this many spacings of the numbers is rounding, not progress to come
FLOOR_PATIENCE = 5  # steps without progress down there until the tolerance is called out of reach
LEAST = 1e-6  # spacings of the numbers that a tolerance may have: the same as none
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
        self.tolerance = None if scale is None else self._tolerance(scale)
        self.floor = FLOOR * precision
        self.rows = z0.shape[0]
        self.z = z0.detach()
        self.excess: Tensor | None = None  # residual over tolerance of `z`: what "best" means
        self.length, self.size = z0, z0  # of the residual of `z` and what it is relative to
        self.step = 0  # the last one, while no row has stopped
        self.open: Tensor | None = None  # rows that are running; None: all, and what follows is not kept
        self.residual: Tensor
        self.steps: Tensor
        self.best: Tensor | None = None  # the step whose iterate is kept; None: the last one
        self.rejected: Tensor
        self.worse: Tensor  # running rows whose last iterate was not their best
        self.stalled: Tensor  # rows given up, where progress is followed
        self.counted: tuple[int, float] | None = None  # rows running after the last entry and `growth`, where known
        self.growth = 0.0  # of the worst row: its excess, over the least it had before
        self.watchful = patience is not None or rtol < self.floor  # is progress to be followed?
        self.trace: list[tuple[Tensor | None, Tensor]] | None = [] if trace else None
        self.keep_every = keep_every
        self.iterates: list[tuple[int, Tensor | None, Tensor | None, Tensor]] = []
        self.index: Tensor | None = None  # (rows,) places in the batch of the rows carried; None: all
        self.closed: dict[str, Tensor] = {}
        self.coupled = False  # have rows turned out to depend on each other?

    def observe(self, state: Iterate, step: int, *, look: bool, rejected: Tensor | None = None) -> None:
        """Enter an iterate, where it is the one before (`rejected`) too. Waits for the device only to `look`."""
        length = without_graph(state.length) if self.norm is euclidean_norm else self.norm(without_graph(state.residual))
        size = self.norm(without_graph(state.fz)) if self.scale is None else self.scale
        if self.trace is not None:
            self.trace.append((self.index, length / size.clamp_min(torch.finfo(size.dtype).tiny)))
        quiet = look and self.open is None and not self.watchful and rejected is None
        if not (quiet and self._glance(state.z, length, size, step)):
            self._enter(state.z, length, size, step, rejected)
        if self.keep_every is not None and step > 0 and step % self.keep_every == 0:
            self._keep(state.z.detach(), step)

    def enter(self, state: Iterate, step: int | Tensor) -> None:
        """An iterate, row by row, without asking anything: also in a trace."""
        size = self.norm(state.fz) if self.scale is None else self.scale
        self._enter(state.z, self.norm(state.residual), size, step, None)

    def _names(self) -> list[str]:
        """Of all that is kept about the rows carried, once any has stopped."""
        names = ["z", "excess", "residual", "steps", "rejected", "best", "open", "worse"]
        return names + (["milestone", "waiting", "stalled"] if self.watchful else [])

    def books(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names()]

    def load(self, books: Sequence[Tensor]) -> None:
        """Go on from the books of another ledger."""
        for name, tensor in zip(self._names(), books, strict=True):
            setattr(self, name, tensor)

    def _glance(self, z: Tensor, length: Tensor, size: Tensor, step: int) -> bool:
        """Has no row arrived? Then there is no more to write down than which iterate is the best: mostly the last one."""
        if not self.rows:
            return False
        excess = length / (self._tolerance(size) if self.tolerance is None else self.tolerance)
        growth = excess if self.excess is None else excess / self.excess
        worst, short = torch.stack((growth.amax(), (excess > 1).sum(dtype=excess.dtype))).tolist()
        self.growth = worst if self.excess is not None else 0.0
        if not (worst < float("inf") and short == self.rows):  # nan compares false
            # nan is not short of its tolerance: it has stopped
            self.counted = None if worst == float("inf") else (int(short), self.growth)
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

    def _tolerance(self, size: Tensor) -> Tensor:
        """What a residual may be; never quite zero, so that it can be divided by."""
        return size * max(self.rtol, LEAST * torch.finfo(size.dtype).eps) + max(self.atol, 1e-30)

    def _enter(self, z: Tensor, length: Tensor, size: Tensor, step: int | Tensor, rejected: Tensor | None) -> None:
        """Row by row, without asking."""
        if self.open is None:
            assert isinstance(step, int)
            self._open(step)
        assert self.open is not None and self.excess is not None and self.best is not None
        self.growth = float("inf")
        residual = length / size.clamp_min(torch.finfo(size.dtype).tiny)
        excess = length / (self._tolerance(size) if self.tolerance is None else self.tolerance)
        better = self.open & (excess < self.excess)
        self.worse = self.open ^ better
        self.z = torch.where(better.unsqueeze(1), z, self.z)
        self.excess = torch.where(better, excess, self.excess)
        self.residual = torch.where(better, residual, self.residual)
        self.best = torch.where(better, step, self.best)
        self.steps = self.steps + self.open
        if rejected is not None:
            self.rejected = self.rejected + (self.open & rejected)
        self.open = self.open & (excess > 1) & (excess < float("inf"))  # not where it is nan
        if self.watchful:
            self._watch_progress()

    def _open(self, step: int) -> None:
        """Books for every row, as they stand before this step."""
        batch, device = self.rows, self.z.device
        self.open = torch.ones(batch, dtype=torch.bool, device=device)
        self.steps = torch.full((batch,), step - 1, dtype=torch.int64, device=device)
        self.best = torch.full_like(self.steps, self.step) if self.best is None else self.best
        self.rejected = torch.zeros_like(self.steps)
        if self.excess is None:
            self.z = torch.where(torch.isfinite(self.z), self.z, torch.zeros_like(self.z))
            self.excess = self.residual = self.z.new_full((batch,), float("inf"))
        else:
            self.residual = self.length / self.size.clamp_min(torch.finfo(self.size.dtype).tiny)
        if self.watchful:
            self.milestone, self.waiting, self.stalled = self.excess, self.rejected, ~self.open

    def _keep(self, z: Tensor, step: int) -> None:
        on_their_way = None if self.open is None else (self.steps == step) & (self._status() != Status.NONFINITE)
        self.iterates.append((step, self.index, on_their_way, z))

    def _watch_progress(self) -> None:
        """Stalled: out of patience, or down where only rounding moves the residual."""
        assert self.open is not None and self.excess is not None
        progress = self.excess < PROGRESS * self.milestone
        self.milestone = torch.where(progress, self.excess, self.milestone)
        self.waiting = torch.where(progress, 0, self.waiting + 1)
        stalled = (self.residual < self.floor) & (self.waiting >= FLOOR_PATIENCE)
        if self.patience is not None:
            stalled = stalled | (self.waiting >= self.patience)
        self.stalled = self.stalled | (self.open & stalled)
        self.open = self.open & ~stalled

    def _status(self) -> Tensor:
        """(rows,), how each row ended: by arriving, by stalling, or else by an iterate that was not finite."""
        assert self.open is not None and self.excess is not None
        status = torch.where(self.excess <= 1, Status.CONVERGED, Status.NONFINITE)
        if self.watchful:
            status = torch.where(self.stalled, Status.STALLED, status)
        return torch.where(self.open, RUNNING, status)

    def running(self) -> int:
        """Rows still running; asks the device, where that was not done at a glance."""
        if self.open is None:
            return self.rows
        counted, self.counted = self.counted, None
        if counted is None:
            running, worse = torch.stack((self.open.sum(), self.worse.sum())).tolist()
            counted = running, float("inf") if worse else FALLEN
        running, self.growth = counted
        return running

    def running_rows(self) -> Tensor:
        assert self.open is not None
        return self.open.nonzero().squeeze(1)

    def freeze(self, state: Any) -> Any:
        """A solver's state in which finished rows stand still at their best iterate, with a residual of zero."""
        assert self.open is not None
        keep = self.open.unsqueeze(1)
        z, fz = torch.where(keep, state.z, self.z), torch.where(keep, state.fz, self.z)
        return dataclasses.replace(state, z=z, fz=fz, active=self.open)

    def drop_finished(self, index: Tensor) -> None:
        """Write the finished rows off and carry on with those at `index`."""
        self._write_off()
        place = index if self.index is None else self.index.index_select(0, index)
        for name in [*self._names(), *(["scale", "tolerance"] if self.scale is not None else [])]:
            setattr(self, name, getattr(self, name).index_select(0, index))
        self.index, self.rows = place, index.shape[0]

    def _write_off(self) -> None:
        if self.open is None:
            self._open(self.step + 1)
        current = {name: getattr(self, name) for name in ("z", "residual", "steps", "rejected", "best")}
        current["status"] = self._status()
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
