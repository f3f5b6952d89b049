"""The record of one solve: per sample the best iterate, its residual, its number of steps and its status.

States of a `SolveRecord`. While no row has stopped (`open` is None) only the best iterate is updated, by the fast path
`_record_fast`. When the first row stops, `_open` allocates the tensors per row. Rows dropped by compaction are written to
`closed` at their place in the batch; `index` has the places of the rows that remain. `close` joins both in a `ClosedRecord`,
which decides the status of samples that failed.

Invariants. A row's result and status are fixed once it has stopped, whatever the solver does with the row afterwards. During
the loop the device is waited for only in `record` (if `look`), `running`, `running_rows`, `unusual` and `unusual_rows`.
In a trace iterates are recorded by `record_rows`, which reads no value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.closed_record import DIVERGENCE, RUNNING, ClosedRecord
from equilibria._core.iterate_log import IterateLog, beyond_rounding, larger
from equilibria._core.maps import FALLEN
from equilibria.solution import Status
from equilibria.solvers.base import Iterate
from equilibria.solvers.rowwise import without_graph
from equilibria.stop import FLOOR, USUAL, Stop, euclidean_norm, rms_norm

FLOOR_PATIENCE = 5  # steps without progress below that floor after which a sample is STALLED
LEAST = 1e-6  # smallest tolerance in machine epsilons, which has the effect of none
PROGRESS = 0.9  # a step makes progress if the residual falls below this share of the smallest before
DIVERGENCE_EVERY = 8  # steps between two checks of divergence


class SolveRecord:
    """The best iterate, residual, steps and status of every row during a solve; see the header of this module."""

    def __init__(self, stop: Stop, z0: Tensor, scale: Tensor | None, precision: float, unit: Tensor | None = None) -> None:
        """Start a record. `unit`, (batch,), is what the problem is divided by; tolerances are those of the original one."""
        rtol, atol, norm, patience = stop.rtol, stop.atol, stop.norm, stop.patience
        self.root = 1.0  # the norm of a state whose entries are of size 1, but for the factor between norms
        if norm is rms_norm:  # lengths in place of means: every comparison comes out the same, and costs less
            self.root = root = max(z0.shape[1], 1) ** 0.5
            norm, atol, scale = euclidean_norm, atol * root, None if scale is None else scale * root
        self.atol: float | Tensor = atol
        self.rtol, self.norm, self.scale, self.patience = rtol, norm, scale, patience
        self.tolerance = None if scale is None else self._tolerance(scale)
        self.floor = FLOOR * precision
        self.rows = self.whole_rows = z0.shape[0]
        self.z = z0.detach()
        self.excess: Tensor | None = None  # residual over tolerance of `z`: what "best" means
        self.length, self.size = z0, z0  # of the residual of `z` and what it is relative to
        self.precision, self.start, self.whole_scale = precision, z0, scale
        self.first_length: Tensor | None = None  # (batch,), of the residual of the start; never without dropped rows
        self.first_size: Tensor
        self.log = IterateLog(stop, precision, linear=scale is not None)
        self.peak: Tensor  # the largest residual beyond rounding: in a trace, where no list can be kept
        self.last: Tensor  # of the last iterate before a row stopped, where progress is followed, and in a trace
        self.diverged: Tensor | None = None  # rows that have diverged; None: not checked yet
        self.limit: Tensor | None = None  # (batch,), a residual beyond this has diverged
        self.traced = False
        self.least, self.most = USUAL[z0.dtype]  # sizes between which squares can be computed with
        self.range: tuple[float, float] | None = None  # of the sizes of all starts, where known
        self.natural: float | Tensor = self.root  # (batch,), below which no residual has diverged
        if unit is not None:
            self.atol, self.natural = self.atol / unit, (self.root / unit).clamp_min(self.root)
        self.step = 0  # the last one, while no row has stopped
        self.open: Tensor | None = None  # rows that are running; None: all, and what follows is not kept
        self.steps: Tensor
        self.best: Tensor | None = None  # the step whose iterate is kept; None: the last one
        self.rejected: Tensor
        self.worse: Tensor  # running rows whose last iterate was not their best
        self.stalled: Tensor  # rows that have stalled, where progress is checked
        self.counted: tuple[int, float] | None = None  # rows running after the last entry and `growth`, where known
        self.growth = 0.0  # of the worst row: its excess, over the least it had before
        self.better: Tensor | None = None  # rows whose last iterate is their best; None: all, or not known
        self.watchful = patience is not None or rtol < self.floor  # True if progress is checked in every step
        self.keep_every = stop.keep_every
        self.index: Tensor | None = None  # (rows,) places in the batch of the rows carried; None: all
        self.closed: dict[str, Tensor] = {}
        self.opened_at: int | None = None  # the first step at which a row stopped; None: no row has

    def record(self, state: Iterate, step: int, *, look: bool, rejected: Tensor | None = None) -> None:
        """Record an iterate; `rejected` marks rows whose step was discarded. Waits for the device only if `look`."""
        length = without_graph(state.length) if self.norm is euclidean_norm else self.norm(without_graph(state.residual))
        size = self.norm(without_graph(state.fz)) if self.scale is None else self.scale
        if self.first_length is None:
            self.first_length, self.first_size = length, size
        self.log.note(self.index, length, size)
        quiet = look and self.open is None and not self.watchful and rejected is None
        if not (quiet and self._record_fast(state.z, length, size, step)):
            self._update_rows(state.z, length, size, step, rejected)
        if self.keep_every is not None and step > 0 and step % self.keep_every == 0:
            on_their_way = None if self.open is None else (self.steps == step) & (self._status() != Status.NONFINITE)
            self.log.iterates.append((step, self.index, on_their_way, state.z.detach()))

    def record_rows(self, state: Iterate, step: int | Tensor) -> None:
        """Record an iterate row by row without a device sync; works in a trace too."""
        length, size = self.norm(state.residual), self.norm(state.fz) if self.scale is None else self.scale
        if self.first_length is None:
            self.first_length, self.first_size, self.peak, self.last, self.traced = length, size, length, length, True
            self.diverged = torch.zeros_like(length, dtype=torch.bool)
        self.peak = larger(self.peak, beyond_rounding(length, size, self.precision))
        self._update_rows(state.z, length, size, step, None)

    def _names(self) -> list[str]:
        """Return the names of the tensors per row that are kept once a row has stopped."""
        names = ["z", "excess", "length", "steps", "rejected", "best", "open", "worse"]
        names += ["size"] if self.scale is None else []
        names += ["milestone", "waiting", "stalled"] if self.watchful else []
        names += ["last"] if self.watchful or self.traced else []
        names += ["diverged"] if self.diverged is not None else []
        return names + (["peak", "first_length", "first_size"] if self.traced else [])

    def tensors(self) -> list[Tensor]:
        """Return the tensors per row, in the order of `_names`; a compiled loop carries them."""
        return [getattr(self, name) for name in self._names()]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Take over the tensors that a compiled loop carried, in the order of `_names`."""
        self.traced, self.diverged = True, self.start
        for name, tensor in zip(self._names(), tensors, strict=True):
            setattr(self, name, tensor)

    def _record_fast(self, z: Tensor, length: Tensor, size: Tensor, step: int) -> bool:
        """Update only the best iterate, and return True, if no row has stopped; the fast path."""
        if not self.rows:
            return False
        excess = length / (self._tolerance(size) if self.tolerance is None else self.tolerance)
        growth = excess if self.excess is None else excess / self.excess
        asked = [growth.amax(), (excess > 1).sum(dtype=excess.dtype)]
        if step == 0 and self.scale is None:
            asked += torch.aminmax(size)
        elif self._is_due(step):
            asked.append(length.amax())
        worst, short, *more = autodiff_modes.numbers(torch.stack(asked))
        if len(more) == 2:
            self.range = more[0], more[1] if worst < float("inf") else worst
        elif more and more[0] > DIVERGENCE * self.root and bool((length > self._limit()).any()):
            return False
        self.growth = worst if self.excess is not None else 0.0
        if not (worst < float("inf") and short == self.rows):  # nan compares false
            # nan is not short of its tolerance: it has stopped
            self.counted = None if worst == float("inf") else (int(short), self.growth)
            return False
        if self.excess is None or worst < 1:
            self.z, self.excess, self.length, self.size, self.best = z, excess, length, size, None
            self.better = None
        else:
            self._keep_best(z, excess, length, size, step)
        self.step = step
        return True

    @staticmethod
    def _is_due(step: int) -> bool:
        """Return True if divergence is checked in this step."""
        return step > 0 and step % DIVERGENCE_EVERY == 0

    def _limit(self) -> Tensor:
        """Return (rows,), the residual beyond which a row has diverged."""
        if self.limit is None:
            assert self.first_length is not None
            scale = torch.maximum(self.first_length, self.first_size)
            self.limit = DIVERGENCE * scale.clamp_min(self.natural)
        return self.limit if self.index is None else self.limit.index_select(0, self.index)

    def unusual(self) -> bool:
        """Return True if entries of the start may be so small or large that their squares leave the dtype."""
        if self.scale is not None or not self.rows:
            return False
        if self.range is None:
            assert self.open is not None and self.first_length is not None
            counts = self.open.sum(dtype=self.first_size.dtype), self.worse.sum(dtype=self.first_size.dtype)
            asked = torch.stack((*counts, *torch.aminmax(self.first_size), self.first_length.amax()))
            running, worse, low, high, longest = autodiff_modes.numbers(asked)
            self.counted = int(running), float("inf") if worse else FALLEN
            self.range = low, high if longest < float("inf") else longest
        low, high = self.range
        return not (low >= self.least and high <= self.most)  # nan compares false

    def unusual_rows(self) -> bool:
        """Return True if squares may have left the dtype for a row whose entries may all be finite."""
        assert self.first_length is not None
        rows = (self.first_size > self.most) | (self.first_length == float("inf"))
        return bool((rows | (self.first_size < self.least)).any())

    def _keep_best(self, z: Tensor, excess: Tensor, length: Tensor, size: Tensor, step: int) -> None:
        """Update the best iterate of the rows that improved; the others keep theirs."""
        assert self.excess is not None
        self.better = better = excess < self.excess
        self.best = torch.where(better, step, self.step if self.best is None else self.best)
        self.z = torch.where(better.unsqueeze(1), z, self.z)
        self.excess = torch.where(better, excess, self.excess)
        self.length, self.size = torch.where(better, length, self.length), torch.where(better, size, self.size)

    def _tolerance(self, size: Tensor) -> Tensor:
        """Return the tolerance of the residual; positive, because residuals are divided by it."""
        info = torch.finfo(size.dtype)
        least = info.tiny**0.8  # small beside all usual sizes, and still something to divide by
        atol = max(self.atol, least) if isinstance(self.atol, float) else self.atol.clamp_min(least)
        return size * max(self.rtol, LEAST * info.eps) + atol

    def _update_rows(self, z: Tensor, length: Tensor, size: Tensor, step: int | Tensor, rejected: Tensor | None) -> None:
        """Update every row without a device sync."""
        if self.open is None:
            assert isinstance(step, int)
            self._open(step)
        assert self.open is not None and self.excess is not None and self.best is not None
        self.growth = float("inf")
        excess = length / (self._tolerance(size) if self.tolerance is None else self.tolerance)
        better = self.open & (excess < self.excess)
        self.worse = self.open ^ better
        self.z = torch.where(better.unsqueeze(1), z, self.z)
        self.excess = torch.where(better, excess, self.excess)
        self.length = torch.where(better, length, self.length)
        if self.scale is None:
            self.size = torch.where(better, size, self.size)
        self.best = torch.where(better, step, self.best)
        self.steps = self.steps + self.open
        if rejected is not None:
            self.rejected = self.rejected + (self.open & rejected)
        if self.watchful or self.traced:
            self.last = torch.where(self.open, length, self.last)
        self.open = self.open & (excess > 1) & (excess < float("inf"))  # not where it is nan
        if isinstance(step, Tensor) or self._is_due(step):
            # stop rows whose residual exceeds the limit of divergence
            assert self.open is not None
            away = self.open & (length > self._limit())
            if isinstance(step, Tensor):
                away = away & (step % DIVERGENCE_EVERY == 0)
            self.diverged = away if self.diverged is None else self.diverged | away
            self.open = self.open ^ away
        if self.watchful:
            self._watch_progress()

    def _open(self, step: int) -> None:
        """Allocate the tensors per row, with their values before this step."""
        self.opened_at = step
        batch, device = self.rows, self.z.device
        self.open = torch.ones(batch, dtype=torch.bool, device=device)
        self.steps = torch.full((batch,), step - 1, dtype=torch.int64, device=device)
        self.best = torch.full_like(self.steps, self.step) if self.best is None else self.best
        self.rejected = torch.zeros_like(self.steps)
        if self.excess is None:
            self.z = torch.where(torch.isfinite(self.z), self.z, torch.zeros_like(self.z))
            self.excess = self.length = self.z.new_full((batch,), float("inf"))
            self.size = torch.ones_like(self.length) if self.scale is None else self.scale
        if self.watchful:
            self.milestone, self.waiting, self.stalled = self.excess, self.rejected, ~self.open
            self.last = self.length

    def _watch_progress(self) -> None:
        """Mark rows as stalled that made no progress for `patience` steps, or whose residual is at the level of rounding."""
        assert self.open is not None and self.excess is not None
        progress = self.excess < PROGRESS * self.milestone
        self.milestone = torch.where(progress, self.excess, self.milestone)
        self.waiting = torch.where(progress, 0, self.waiting + 1)
        size = self.size if self.scale is None else self.scale
        stalled = (self.length < self.floor * size) & (self.waiting >= FLOOR_PATIENCE)
        if self.patience is not None:
            stalled = stalled | (self.waiting >= self.patience)
        self.stalled = self.stalled | (self.open & stalled)
        self.open = self.open & ~stalled

    def _status(self) -> Tensor:
        """Return (rows,), the status of each row that stopped: converged, stalled, or not finite."""
        assert self.open is not None and self.excess is not None
        status = torch.where(self.excess <= 1, Status.CONVERGED, Status.NONFINITE)
        if self.watchful:
            status = torch.where(self.stalled, Status.STALLED, status)
        if self.diverged is not None:
            status = torch.where(self.diverged, Status.DIVERGED, status)
        return torch.where(self.open, RUNNING, status)

    @property
    def fell(self) -> Tensor | None:
        """(rows,), True for rows whose last iterate is their best; None if `growth` implies it for all."""
        return self.better if self.open is None else ~self.worse

    def running(self) -> int:
        """Return the number of rows still running; waits for the device unless the fast path has read it."""
        if self.open is None:
            return self.rows
        counted, self.counted = self.counted, None
        if counted is None:
            running, worse = autodiff_modes.numbers(torch.stack((self.open.sum(), self.worse.sum())))
            counted = running, float("inf") if worse else FALLEN
        running, self.growth = counted
        return running

    def stopped_apart(self, taken: int) -> bool:
        """Return True if some rows stopped before the last step, so that the result joins rows of different evaluations."""
        return self.opened_at is not None and self.opened_at < taken and self.whole_rows > 1

    def running_excess(self) -> Tensor:
        """Return (rows,), the least residual of each row over its tolerance; negative for rows that have stopped."""
        assert self.excess is not None
        return self.excess if self.open is None else torch.where(self.open, self.excess, -1.0)

    def running_rows(self) -> Tensor:
        """Return the indices of the rows that still run, among the rows carried; waits for the device."""
        assert self.open is not None
        return self.open.nonzero().squeeze(1)

    def freeze(self, state: Any) -> Any:
        """Return the solver's state with finished rows fixed at their best iterate, with a residual of zero."""
        assert self.open is not None
        keep = self.open.unsqueeze(1)
        z, fz = torch.where(keep, state.z, self.z), torch.where(keep, state.fz, self.z)
        return dataclasses.replace(state, z=z, fz=fz, active=self.open)

    def drop_finished(self, index: Tensor) -> None:
        """Store the results of the finished rows and continue with the rows at `index`."""
        self._write_off()
        place = index if self.index is None else self.index.index_select(0, index)
        for name in [*self._names(), *(["scale", "tolerance"] if self.scale is not None else [])]:
            setattr(self, name, getattr(self, name).index_select(0, index))
        self.index, self.rows = place, index.shape[0]

    def _write_off(self) -> None:
        """Write the current values of all carried rows into `closed`, at their places in the batch."""
        if self.open is None:
            self._open(self.step + 1)
        names = ["z", "length", "steps", "rejected", "best", *(["size"] if self.scale is None else [])]
        names += ["last"] if self.watchful or self.traced else []
        current = {name: getattr(self, name) for name in names}
        current["status"] = self._status()
        if self.index is None:
            self.closed = current
        else:
            self.closed = {name: self.closed[name].index_copy(0, self.index, value) for name, value in current.items()}

    def close(self) -> ClosedRecord:
        """Close the rows that still run, and return the record of the whole batch."""
        self._write_off()
        closed, log, first = self.closed, self.log, self.first_length
        assert first is not None

        def extremes() -> tuple[Tensor, Tensor]:
            """Return the residual of the last iterate and the largest residual, (batch,) each."""
            last = closed["last"] if self.watchful or self.traced else log.last(first)
            return last, self.peak if self.traced else log.peak(first)

        return ClosedRecord(
            closed["z"],
            closed["status"],
            closed["length"],
            closed["size"] if self.whole_scale is None else self.whole_scale,
            closed["steps"],
            closed["best"],
            closed["rejected"],
            start=self.start,
            first_length=first,
            first_size=self.first_size,
            extremes=extremes,
            rtol=self.rtol,
            precision=self.precision,
            natural=self.natural,
            atol=self.atol,
            linear=self.whole_scale is not None,
            moved=self.traced or len(log.lengths) > 1,
            trace=log.traces(closed["steps"]),
            iterates=log.placed_iterates(closed["z"], closed["steps"]),
        )
