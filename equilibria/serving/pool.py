"""Rows of one kind of request in one solve: they enter and leave while their neighbours go on."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import (
    DIVERGENCE,
    DIVERGENCE_EVERY,
    FALL,
    FLOOR,
    FLOOR_PATIENCE,
    GROWN,
    LEAST,
    PROGRESS,
    Ended,
    describe,
    euclidean_norm,
    judge,
    max_norm,
    rms_norm,
    usual_range,
)
from equilibria.serving.pacing import Pacing
from equilibria.serving.row_solvers import row_solver
from equilibria.serving.split import Arguments
from equilibria.serving.template import Template, stack
from equilibria.serving.tickets import InvalidRequestError, Ticket
from equilibria.solution import Status

INF = float("inf")
SPARSE = 0.5  # a pool with fewer of its rows in use exchanges rows at every step: there is time, and nobody waits
SHRINK = 8  # empty rows are dropped when they are this share of those evaluated, as in the loop's own compaction
WORTH = 4096  # numbers in empty rows that make dropping an eighth worth it; fewer are dropped when they are half


@dataclass(eq=False)
class Row:
    """A request in its row."""

    ticket: Ticket
    born: int  # step of the pool at which its start was evaluated
    end: int  # step of the pool at which its steps run out
    rtol: float
    root: float  # norm of a state whose numbers are 1
    start: Tensor  # (n,)
    length: int | None = None  # of inputs that were filled up
    watched: bool = False  # is its progress to be followed?
    best: int = 0  # step of its best iterate
    best_length: float = INF
    best_size: float = 1.0
    first_length: float = 0.0
    first_size: float = 0.0
    peak: float = 0.0
    last: float = 0.0
    milestone: float = INF
    waiting: int = 0


@dataclass(eq=False)
class Left:
    """A row that has left the solve. Its place keeps what it carried until rows are exchanged."""

    row: Row
    place: int
    z: Tensor  # (rows, n), the best iterates when it left; no later step writes over them
    excess: float
    steps: int
    reason: str


@dataclass
class Done:
    """Rows that wait for the part of the model behind the layer."""

    rows: list[Row]
    z: Tensor  # (rows, n)
    carried: list[Tensor]
    status: list[int]
    steps: list[int]
    residual: list[float]
    late: list[bool]


@dataclass
class Counts:
    """What a pool has done so far."""

    answered: int = 0
    steps: int = 0
    row_steps: int = 0  # rows in use, summed over the steps
    evaluated: int = 0  # rows evaluated, summed over the steps
    exchanges: int = 0
    alone: int = 0  # requests that were solved by the library's own loop
    statuses: dict[str, int] = field(default_factory=dict)


class Pool:
    """Up to `capacity` rows of one template. Not thread-safe: the engine holds its lock."""

    def __init__(
        self, template: Template, capacity: int, *, full: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock  # in which the costs of steps and exchanges are measured
        self.template, self.capacity, self.full = template, capacity, full
        layout, stop = template.layout, template.stop
        self.n, self.stop = layout.columns, stop
        self.like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        self.norm = euclidean_norm if stop.norm in (rms_norm, euclidean_norm) else stop.norm
        self.solver = row_solver(template.solver, self.like, self.n)
        self.least, self.most = usual_range(layout.dtype)
        self.floor = FLOOR * layout.precision
        self.step_number = 0
        self.rows: list[Row | None] = []  # those evaluated; None: empty
        self.best: list[float] = []  # residual over tolerance of each row's best iterate
        self.z = self.fz = self.best_z = self.like.new_zeros(0, self.n)
        self.residual, self.length = self.z, self.like
        self.improved: Tensor | None = None
        self.tolerances = self.like.new_zeros(2, 0)  # (rtol, atol) of the rows
        self.mask: Tensor | None = None  # (capacity, n), 0 for numbers of positions that were filled up
        self.room = 0
        self.buffers: list[Tensor] = []  # what rows carry: arguments of the cell, kept outputs, inputs of the model
        self.left: list[Left] = []
        self.pacing, self.counts = Pacing(), Counts()
        self.next_deadline = INF
        self.exchanged_at = 0
        self.oldest = 1  # the step at which the row began that is here for longest

    # who is here

    @property
    def active(self) -> int:
        return len(self.rows) - self.rows.count(None)

    @property
    def free(self) -> int:
        return self.capacity - self.active

    @property
    def idle(self) -> bool:
        return not self.left and self.active == 0

    def residuals(self) -> list[tuple[int, int, float]]:
        """(row, steps, residual over tolerance) of every row in use."""
        found = ((i, row, best) for i, (row, best) in enumerate(zip(self.rows, self.best, strict=True)) if row is not None)
        return [(i, self.step_number - row.born, best) for i, row, best in found]

    def due(self) -> bool:
        """True if rows should be exchanged now."""
        busy = self.active
        return busy < SPARSE * self.capacity or self.step_number - self.exchanged_at >= self.pacing.period

    # entering

    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Give requests rows; their starts are evaluated together with the next step of the others."""
        begin = self.clock()
        tickets, batch, reached = self._reach(list(tickets))
        if not tickets:
            return
        z0 = self.template.layout.pack(reached.start)
        places = self._places(len(tickets))
        self._advance(torch.tensor(places, device=self.like.device), z0, tickets, batch, reached)
        self.pacing.exchanged(len(tickets), max(self.clock() - begin - self.pacing.step, 0.0))

    def _reach(self, tickets: list[Ticket]) -> tuple[list[Ticket], Any, Any]:
        """The batch at the layer. A request that raises is found and left out, and the others are run without it."""
        template = self.template
        while tickets:
            batch = self._filled([ticket.arguments for ticket in tickets])
            try:
                return tickets, batch, template.split.reach(batch)
            except Exception as error:
                good = [ticket for ticket in tickets if len(tickets) > 1 and self._reaches(ticket)]
                if len(good) == len(tickets) or len(tickets) == 1:  # it is the batch that fails, not a request
                    for ticket in tickets:
                        ticket.fail(_invalid(error))
                    return [], None, None
                tickets = good
        return [], None, None

    def _reaches(self, ticket: Ticket) -> bool:
        try:
            self.template.split.reach(stack([ticket.arguments]))
        except Exception as error:
            ticket.fail(_invalid(error))
            return False
        return True

    def _filled(self, samples: Sequence[Arguments]) -> Arguments:
        """A batch; of the pool's full size where answers must not depend on the load."""
        missing = self.capacity - len(samples) if self.full else 0
        return stack([*samples, *[samples[-1]] * missing])

    def _places(self, count: int) -> list[int]:
        """Empty rows first, then new ones."""
        empty = [i for i, row in enumerate(self.rows) if row is None][:count]
        more = count - len(empty)
        have = len(self.rows)
        want = self.capacity if self.full else have + max(more, 0)
        self._reserve(want)
        self._extend(want - have)
        return empty + list(range(have, have + more)) if not self.full else self._empty(count)

    def _empty(self, count: int) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row is None][:count]

    def _reserve(self, rows: int) -> None:
        if rows <= self.room:
            return
        self.room = self.capacity if self.full else min(max(rows, 2 * self.room), self.capacity)
        self.solver.reserve(self.room)
        tolerances = self.like.new_ones(2, self.room)
        tolerances[:, : self.tolerances.shape[1]] = self.tolerances
        self.tolerances = tolerances
        self.buffers = [_grown(buffer, self.room) for buffer in self.buffers]
        if self.mask is not None:
            self.mask = _grown(self.mask, self.room)

    def _extend(self, rows: int) -> None:
        if rows <= 0:
            return
        self.rows += [None] * rows
        self.best += [INF] * rows
        zeros = self.like.new_zeros(rows, self.n)
        self.z, self.fz = torch.cat([self.z, zeros]), torch.cat([self.fz, zeros])
        self.best_z = torch.cat([self.best_z, zeros])
        self.length = torch.cat([self.length, zeros[:, 0]])
        self.residual = self.solver.residual(self.z, self.fz)
        if self.improved is not None:
            self.improved = torch.cat([self.improved, torch.ones(rows, dtype=torch.bool, device=self.like.device)])

    def _carry(self, places: Tensor, batch: Any, reached: Any) -> None:
        """Write what the rows carry to their places."""
        template, count = self.template, len(places)
        values = [*template.given.flatten(reached.given), *template.kept.flatten(reached.outputs), *batch.tensors]
        if not self.buffers:
            self.buffers = [_grown(value[:1], self.room) for value in values]
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.index_copy_(0, places, value[:count])

    def _row(self, ticket: Ticket, start: Tensor) -> Row:
        stop = self.stop
        rtol = float(stop.rtol) if ticket.rtol is None else ticket.rtol
        steps = stop.max_steps if ticket.max_steps is None else ticket.max_steps
        numbers = self._numbers(ticket)
        root = max(numbers, 1) ** 0.5 if stop.norm is rms_norm else 1.0
        watched = stop.patience is not None or rtol < self.floor
        return Row(ticket, self.step_number, self.step_number + steps, rtol, root, start, ticket.length, watched)

    def _numbers(self, ticket: Ticket) -> int:
        """Numbers of a request's state, without those that were filled up."""
        return self.n if ticket.length is None else int(self.template.mask(ticket.length).sum())

    def _settle_in(self, places: Sequence[int], tickets: Sequence[Ticket], z0: Tensor) -> None:
        now, info = time.monotonic(), torch.finfo(self.like.dtype)
        rtols, atols = [], []
        for place, ticket, start in zip(places, tickets, z0, strict=False):
            row = self._row(ticket, start)
            ticket.admitted = now
            self.rows[place], self.best[place] = row, INF
            rtols.append(max(row.rtol, LEAST * info.eps))
            atols.append(max(self.stop.atol * row.root, info.tiny**0.8))
            self.next_deadline = min(self.next_deadline, ticket.deadline or INF)
        index = torch.tensor(list(places), device=self.like.device)
        self.tolerances.index_copy_(1, index, self.like.new_tensor([rtols, atols]))

    # stepping

    def step(self) -> None:
        """One step of the solver for every row."""
        if self.active:
            begin = self.clock()
            self._advance()
            self.pacing.stepped(self.clock() - begin)

    def _advance(
        self,
        places: Tensor | None = None,
        z0: Tensor | None = None,
        tickets: Sequence[Ticket] = (),
        batch: Any = None,
        reached: Any = None,
    ) -> None:
        """One step, in which new rows have their starts evaluated."""
        going = any(row is not None for row in self.rows)
        z = self._propose() if going else self.z
        self.step_number += 1
        if places is not None and z0 is not None:
            self._carry(places, batch, reached)
            self._settle_in(places.tolist(), tickets, z0)
            self._set_masks(places, tickets)
            z0 = z0[: len(places)]
            z = z.index_copy(0, places, z0 if self.mask is None else z0 * self.mask.index_select(0, places))
        fz = self._evaluate(z)
        if fz is None:
            return
        if going:
            self.solver.absorb(z, fz)
        self.z, self.fz = z, fz
        self.residual = self.solver.residual(z, fz)
        self.length = torch.linalg.vector_norm(self.residual, dim=1)
        if places is not None:
            padded = self.template.padding is not None
            numbers = [self._numbers(ticket) for ticket in tickets] if padded else None
            self.solver.begin(places, self.length.index_select(0, places), numbers)
        self._look(set() if places is None else set(places.tolist()))

    def _propose(self) -> Tensor:
        depth = self.step_number - self.oldest
        return self.solver.propose(self.z, self.fz, self.residual, self.length, depth, self.improved)

    def _set_masks(self, places: Tensor, tickets: Sequence[Ticket]) -> None:
        if self.template.padding is None:
            return
        if self.mask is None:
            self.mask = self.like.new_ones(self.room, self.n)
        masks = torch.stack([self.template.mask(ticket.length) for ticket in tickets if ticket.length is not None])
        self.mask.index_copy_(0, places, masks)

    def _given(self, rows: int) -> tuple[Any, ...]:
        given = self.template.given
        return given.unflatten([buffer[:rows] for buffer in self.buffers[: given.count]])

    def _evaluate(self, z: Tensor) -> Tensor | None:
        """The cell on all rows; where it raises, the rows that make it raise fail, and it is run without them."""
        rows = len(z)
        self.counts.steps += 1
        self.counts.evaluated += rows
        self.counts.row_steps += self.active
        try:
            fz = self.template.evaluate(z, self._given(rows))
        except Exception as error:
            if not self._drop_raising(z, error):
                return None
            return self._evaluate(z)
        return fz if self.mask is None else fz * self.mask[:rows]

    def _drop_raising(self, z: Tensor, error: Exception) -> bool:
        """Fail the rows that raise alone and put a sound row's numbers in their place; False if no row is sound."""
        given, good, bad = self.template.given, [], []
        for i in range(len(z)):
            own = given.unflatten([buffer[i : i + 1] for buffer in self.buffers[: given.count]])
            try:
                self.template.evaluate(z[i : i + 1], own)
                good.append(i)
            except Exception as own_error:
                bad.append((i, own_error))
        if not good or not bad:  # nothing to put in their place, or it is the batch that raises
            for i, row in enumerate(self.rows):
                if row is not None:
                    row.ticket.fail(_invalid(error))
                    self._clear(i)
            self._shrink()
            return False
        for i, reason in bad:
            row = self.rows[i]
            if row is not None:
                row.ticket.fail(_invalid(reason))
            self._clear(i)
            z[i] = z[good[0]]
            for buffer in self.buffers[: given.count]:
                buffer[i] = buffer[good[0]]
        return True

    # looking

    def _look(self, new: set[int]) -> None:
        """Record the iterate; rows that are done leave."""
        count = len(self.rows)
        length = self.length if self.norm is euclidean_norm else self.norm(self.residual)
        size = self.norm(self.fz)
        rtol, atol = self.tolerances[0, :count], self.tolerances[1, :count]
        excess = length / torch.addcmul(atol, size, rtol)
        excesses, lengths, sizes = torch.stack((excess, length, size)).tolist()  # the one read-back
        finished: dict[int, str] = {}
        worse: list[int] = []
        for i in [i for i, (e, b) in enumerate(zip(excesses, self.best, strict=True)) if not 1.0 < e < b or i in new]:
            row = self.rows[i]
            if row is None:
                continue
            if i in new:
                row.first_length, row.first_size = lengths[i], sizes[i]
                row.peak = row.last = lengths[i]
            if not excesses[i] < self.best[i]:
                worse.append(i)
            if not 1.0 < excesses[i] < INF:
                finished[i] = "stopped"
        self._note(excesses, lengths, sizes, set(worse))
        if worse:
            mask = torch.ones(count, dtype=torch.bool)
            mask[worse] = False
            self.improved = mask.to(self.like.device)
            self.best_z = torch.where(self.improved.unsqueeze(1), self.z, self.best_z)
        else:
            self.improved, self.best_z = None, self.z
        self._watch(finished, lengths, sizes, new)
        if finished:
            self._leave(finished)

    def _note(self, excesses: list[float], lengths: list[float], sizes: list[float], worse: set[int]) -> None:
        step = self.step_number
        for i, row in enumerate(self.rows):
            if row is None:
                continue
            row.last = length = lengths[i]
            if length > row.peak:
                row.peak = length
            if i not in worse:
                self.best[i], row.best, row.best_length, row.best_size = excesses[i], step, length, sizes[i]

    def _watch(self, finished: dict[int, str], lengths: list[float], sizes: list[float], new: set[int]) -> None:
        """Rows that diverge, stall, run out of steps, or whose start is of unusual size."""
        step = self.step_number
        for i in new:
            row = self.rows[i]
            if row is not None and not (self.least <= sizes[i] <= self.most and lengths[i] < INF) and self._unusual(i):
                finished[i] = "unusual"
        for i, row in enumerate(self.rows):
            if row is None or i in finished:
                continue
            taken = step - row.born
            if taken > 0 and taken % DIVERGENCE_EVERY == 0:
                if lengths[i] > DIVERGENCE * max(row.first_length, row.first_size, row.root):
                    finished[i] = "diverged"
                    continue
            if row.watched and self._stalled(i, row):
                finished[i] = "stalled"
            elif step >= row.end:
                finished[i] = "steps"

    def _unusual(self, i: int) -> bool:
        """True if squares of a row's finite numbers leave the dtype."""
        largest = float(torch.maximum(max_norm(self.z[i : i + 1]), max_norm(self.fz[i : i + 1])))
        return self.most < largest < INF or 0 < largest < self.least

    def _stalled(self, i: int, row: Row) -> bool:
        """Out of patience, or down where only rounding moves the residual."""
        if self.best[i] < PROGRESS * row.milestone:
            row.milestone, row.waiting = self.best[i], 0
        else:
            row.waiting += 1
        patience = self.stop.patience
        at_floor = row.best_length < self.floor * row.best_size and row.waiting >= FLOOR_PATIENCE
        return at_floor or (patience is not None and row.waiting >= patience)

    # leaving

    def expire(self, now: float) -> None:
        """Rows whose deadline has passed leave with their best iterate."""
        if now < self.next_deadline:
            return
        late = {i: "late" for i, row in enumerate(self.rows) if row is not None and now >= (row.ticket.deadline or INF)}
        if late:
            self._leave(late)
        deadlines = [row.ticket.deadline or INF for row in self.rows if row is not None]
        self.next_deadline = min(deadlines, default=INF)

    def drop_cancelled(self) -> None:
        for i, row in enumerate(self.rows):
            if row is not None and row.ticket.cancelled():
                self._clear(i)
        self._shrink()

    def _leave(self, finished: dict[int, str]) -> None:
        for place, reason in finished.items():
            row = self.rows[place]
            if row is not None:
                steps = self.step_number - row.born
                self.left.append(Left(row, place, self.best_z, self.best[place], steps, reason))
                self.pacing.finished(steps)
            self._clear(place)
        self._shrink()

    def _gather(self) -> Done | None:
        """The rows that have left, with their statuses; those that need the library's own loop are answered here."""
        left, self.left = self.left, []
        alone = [each for each in left if each.reason == "unusual"]
        left = [each for each in left if each.reason != "unusual"]
        for each in alone:
            self._solve_alone(each.row.ticket)
        if not left:
            return None
        z = self._answers(left)
        place = torch.tensor([each.place for each in left], device=self.like.device)
        carried = [buffer.index_select(0, place) for buffer in self.buffers[self.template.given.count :]]
        rows = [each.row for each in left]
        tiny = torch.finfo(self.like.dtype).tiny
        residual = [row.best_length / max(row.best_size, tiny) for row in rows]
        done = Done(
            rows,
            z,
            carried,
            [int(Status.CONVERGED)] * len(rows),
            [each.steps for each in left],
            residual,
            [each.reason == "late" for each in left],
        )
        faint = [j for j, each in enumerate(left) if not self._judge(done, j, each)]
        for j in faint:
            self._solve_alone(rows[j].ticket)
        stay = [j for j in range(len(rows)) if j not in faint]
        return _selected(done, stay) if stay else None

    def _answers(self, left: Sequence[Left]) -> Tensor:
        """(rows, n), the iterates of rows that left at different steps."""
        parts, begin = [], 0
        for end in range(1, len(left) + 1):
            if end == len(left) or left[end].z is not left[begin].z:
                index = torch.tensor([each.place for each in left[begin:end]], device=self.like.device)
                parts.append(left[begin].z.index_select(0, index))
                begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _judge(self, done: Done, j: int, left: Left) -> bool:
        """Set status and residual of a row; False if its answer is too small for the squares it was computed with."""
        if self._doubtful(left):
            precision, start = self.template.layout.precision, left.row.start.unsqueeze(0)
            answer, status, residual = judge(self.stop, precision, start, done.z[j : j + 1], _ended(left))
            done.z[j], done.status[j], done.residual[j] = answer[0], status, residual
        row = left.row
        arrived = done.status[j] in (Status.CONVERGED, Status.STALLED)
        return not (arrived and 0 < row.best_size < self.least and row.best > row.born)

    def _doubtful(self, left: Left) -> bool:
        """True unless the row has plainly converged: its state has not grown so far that any residual would be small."""
        if not left.excess <= 1:
            return True
        row = left.row
        bound = max(GROWN * row.first_size, row.first_length * FALL / max(row.rtol, self.template.layout.precision))
        return row.best_size > bound

    def _clear(self, i: int) -> None:
        self.rows[i], self.best[i] = None, -INF

    def _shrink(self) -> None:
        """Evaluate fewer rows: those at the end that are empty, and, where it pays, others by moving rows."""
        self.oldest = min((row.born for row in self.rows if row is not None), default=self.step_number + 1)
        if not self.full:
            self._cut(max((i + 1 for i, row in enumerate(self.rows) if row is not None), default=0))

    def compact(self) -> None:
        """Move rows from the end into empty places, where nobody waits for those and enough are empty."""
        empty, count = self.rows.count(None), len(self.rows)
        share = SHRINK if empty * self.n >= WORTH else 2
        if self.full or empty == 0 or empty * share < count:
            return
        kept = count - empty
        source = [i for i in range(kept, count) if self.rows[i] is not None]
        target = [i for i in range(kept) if self.rows[i] is None]
        if source:
            self._move(source, target)
        self._cut(kept)

    def _move(self, source: list[int], target: list[int]) -> None:
        here, there = (torch.tensor(places, device=self.like.device) for places in (source, target))
        for a, b in zip(source, target, strict=True):
            self.rows[b], self.best[b] = self.rows[a], self.best[a]
            self._clear(a)
        self.solver.move(here, there)
        for buffer in self.buffers if self.mask is None else [*self.buffers, self.mask]:
            buffer.index_copy_(0, there, buffer.index_select(0, here))
        self.tolerances.index_copy_(1, there, self.tolerances.index_select(1, here))
        same = self.best_z is self.z
        self.z, self.fz = (t.index_copy(0, there, t.index_select(0, here)) for t in (self.z, self.fz))
        self.best_z = self.z if same else self.best_z.index_copy(0, there, self.best_z.index_select(0, here))
        self.length = self.length.index_copy(0, there, self.length.index_select(0, here))
        if self.improved is not None:
            self.improved = self.improved.index_copy(0, there, self.improved.index_select(0, here))
        self.residual = self.solver.residual(self.z, self.fz)

    def _cut(self, count: int) -> None:
        if count == len(self.rows):
            return
        del self.rows[count:], self.best[count:]
        same = self.best_z is self.z
        self.z, self.fz, self.residual = self.z[:count], self.fz[:count], self.residual[:count]
        self.best_z = self.z if same else self.best_z[:count]
        self.length = self.length[:count]
        self.improved = None if self.improved is None else self.improved[:count]

    # after the layer

    def answer(self) -> None:
        """Run the part of the model behind the layer for all rows that have left, and resolve their tickets."""
        if not self.left:
            return
        begin, count = self.clock(), len(self.left)
        done = self._gather()
        if done is not None:
            self._resolve(done)
        self.counts.exchanges += 1
        self.pacing.exchanged(count, self.clock() - begin)

    def _resolve(self, done: Done) -> None:
        try:
            outputs = self._finish(done)
        except Exception as error:
            if len(done.rows) == 1:
                done.rows[0].ticket.fail(_invalid(error))
                return
            for j in range(len(done.rows)):  # find the row that raises
                self._resolve(_selected(done, [j]))
            return
        for j, (row, output) in enumerate(zip(done.rows, outputs, strict=True)):
            status = Status(done.status[j])
            self.count(status)
            row.ticket.resolve(output, status, done.steps[j], done.residual[j], late=done.late[j])

    def _finish(self, done: Done) -> list[Any]:
        template, count = self.template, len(done.rows)
        z, carried = done.z, done.carried
        status, steps, residual = done.status, done.steps, done.residual
        if self.full and count < self.capacity:
            missing = self.capacity - count
            z, *carried = (torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in (z, *carried))
            status, steps = status + status[-1:] * missing, steps + steps[-1:] * missing
            residual = residual + residual[-1:] * missing
        kept = template.kept.count
        batch = Arguments(tuple(carried[kept:]), template.spec)
        outputs = template.kept.unflatten(carried[:kept])
        found = template.split.finish(batch, outputs, z, template.layout, describe(status, steps, residual, z))
        return template.split_output(found, [row.length for row in done.rows])

    def count(self, status: Status) -> None:
        self.counts.answered += 1
        self.counts.statuses[status.name] = self.counts.statuses.get(status.name, 0) + 1

    def _solve_alone(self, ticket: Ticket) -> None:
        """By the library's own loop, which handles numbers whose squares leave the dtype."""
        self.counts.alone += 1
        changes: dict[str, Any] = {"on_failure": "ignore", "check_every": 1}
        changes |= {} if ticket.rtol is None else {"rtol": ticket.rtol}
        changes |= {} if ticket.max_steps is None else {"max_steps": ticket.max_steps}
        arguments = ticket.arguments
        if ticket.length is not None and self.template.padding is not None:
            dim = self.template.padding.dim
            cut = tuple(t.narrow(dim, 0, ticket.length) for t in arguments.tensors)
            arguments = dataclasses.replace(arguments, tensors=cut)
        try:
            output, found = self.template.split.alone(stack([arguments]), dataclasses.replace(self.stop, **changes))
        except Exception as error:
            ticket.fail(_invalid(error))
            return
        stats = found.stats
        status = Status(int(stats.status[0]))
        (own,) = self.template.split_output(output, [None])
        self.count(status)
        ticket.resolve(own, status, int(stats.steps[0]), float(stats.residual[0]), late=False)


def _grown(buffer: Tensor, rows: int) -> Tensor:
    new = buffer[:1].expand(rows, *buffer.shape[1:]).clone(memory_format=torch.contiguous_format)
    new[: len(buffer)] = buffer
    return new


def _invalid(error: Exception) -> Exception:
    if isinstance(error, InvalidRequestError):
        return error
    wrapped = InvalidRequestError(f"The model raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _ended(left: Left) -> Ended:
    row, finite = left.row, math.isfinite(left.excess)
    return Ended(
        rtol=row.rtol,
        excess=left.excess,
        length=row.best_length if finite else INF,
        size=row.best_size if finite else 1.0,
        first_length=row.first_length,
        first_size=row.first_size,
        peak=row.peak,
        last=row.last,
        best=max(row.best - row.born, 0),
        steps=left.steps,
        open=left.reason in ("steps", "late"),
        stalled=left.reason == "stalled",
        diverged=left.reason == "diverged",
        root=row.root,
    )


def _selected(done: Done, rows: Sequence[int]) -> Done:
    if len(rows) == len(done.rows):
        return done
    index = torch.tensor(rows, device=done.z.device)
    picked = [[getattr(done, name)[j] for j in rows] for name in ("rows", "status", "steps", "residual", "late")]
    own, status, steps, residual, late = picked
    z, *carried = (tensor.index_select(0, index) for tensor in (done.z, *done.carried))
    return Done(own, z, carried, status, steps, residual, late)
