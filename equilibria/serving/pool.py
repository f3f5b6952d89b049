"""Rows of one kind of request in one solve: they enter and leave while their neighbours go on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import FLOOR, LEAST, describe, euclidean_norm, max_norm, rms_norm, usual_range
from equilibria.serving.admission import Admission, Admitting
from equilibria.serving.leaving import Done, Left
from equilibria.serving.pacing import Pacing
from equilibria.serving.records import INF, Records, Row
from equilibria.serving.row_solvers import row_solver
from equilibria.serving.split import Arguments, Reached
from equilibria.serving.template import Template, stack
from equilibria.serving.tickets import InvalidRequestError, Ticket
from equilibria.solution import Status

SPARSE = 0.5  # a pool with fewer of its rows in use exchanges rows at every step: there is time, and nobody waits
SHRINK = 8  # empty rows are dropped when they are this share of those evaluated, as in the loop's own compaction
WORTH = 4096  # numbers in empty rows that make dropping an eighth worth it; fewer are dropped when they are half


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


@dataclass
class Entry:
    """Requests at the layer that wait for rows. Many are brought there at once, and enter as rows become free."""

    tickets: list[Ticket]
    values: list[Tensor]  # what rows carry, a row per ticket
    z0: Tensor  # (tickets, n)

    def join(self, other: Entry) -> Entry:
        values = [torch.cat(pair) for pair in zip(self.values, other.values, strict=True)]
        return Entry(self.tickets + other.tickets, values, torch.cat((self.z0, other.z0)))

    def split(self, count: int) -> tuple[Entry, Entry]:
        """The first `count` of them, and the others."""
        parts = (slice(None, count), slice(count, None))
        first, rest = (Entry(self.tickets[p], [value[p] for value in self.values], self.z0[p]) for p in parts)
        return first, rest


class Pool:
    """Up to `capacity` rows of one template. Not thread-safe: the engine holds its lock."""

    def __init__(
        self,
        template: Template,
        capacity: int,
        *,
        admission: Admission = "auto",
        full: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.template, self.capacity, self.full = template, capacity, full
        self.clock = clock  # in which the costs of steps and exchanges are measured
        layout, stop = template.layout, template.stop
        self.n, self.stop = layout.columns, stop
        self.like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        self.norm = euclidean_norm if stop.norm in (rms_norm, euclidean_norm) else stop.norm
        self.solver = row_solver(template.solver, self.like, self.n)
        self.least, self.most = usual_range(layout.dtype)
        self.records = Records(FLOOR * layout.precision, stop.patience)
        self.step_number = 0
        self.rows: list[Row | None] = []  # those evaluated; None: empty
        self.active = 0  # rows in use
        self.oldest = 1  # the step at which the row began that is here for longest
        self.z = self.fz = self.best_z = self.like.new_zeros(0, self.n)
        self.residual, self.length = self.z, self.like
        self.improved: Tensor | None = None  # (rows,) bool, rows whose last iterate was their best; None: all
        self.tolerances = self.like.new_zeros(2, 0)  # (rtol, atol) of the rows
        self.mask: Tensor | None = None  # (capacity, n), 0 for numbers of positions that were filled up
        self.room = 0
        self.buffers: list[Tensor] = []  # what rows carry: arguments of the cell, kept outputs, inputs of the model
        self.left: list[Left] = []  # rows that have left, in their places
        self.done: list[Done] = []  # those that have been taken out of them
        self.staged: Entry | None = None
        self.pacing, self.counts = Pacing(), Counts()
        self.admitting = Admitting(admission, capacity)
        self.finished = 0  # rows that have left since the beginning
        self.next_deadline = INF
        self.entered_at = self.done_at = 0

    # who is here

    @property
    def free(self) -> int:
        return self.capacity - self.active

    @property
    def idle(self) -> bool:
        return not self.left and not self.done and self.active == 0 and self.staged is None

    def residuals(self) -> list[tuple[int, int, float]]:
        """(row, steps, residual over tolerance) of every row in use."""
        rows, excess, step = list(self.rows), self.records.excess, self.step_number  # other threads may ask
        return [
            (i, step - row.born, best) for i, (row, best) in enumerate(zip(rows, excess, strict=False)) if row is not None
        ]

    def turn(self, waiting: int, take: Callable[[int], list[Ticket]]) -> None:
        """Answer rows that have left, let requests enter where that is due, and step.

        waiting  requests in the queue, which `take` takes from
        """
        begin, before = self.clock(), self.finished
        want = waiting + self.staged_count
        self._turn(waiting, want, take)
        finished, empty = self.finished - before, self.active == 0
        self.admitting.turned(self.clock() - begin, finished, saturated=want >= self.capacity, empty=empty)

    def _turn(self, waiting: int, want: int, take: Callable[[int], list[Ticket]]) -> None:
        now, sparse = self.step_number, self.active < SPARSE * self.capacity
        grouped = self.admitting.grouped and want >= self.capacity and self.active > 0
        first = self.done_at if self.done else now
        due = now - first >= self.pacing.answer_period
        if self.idle_rows() and (due or want == 0 or (sparse and not grouped)):
            self.answer()
        entry = None
        due = sparse or now - self.entered_at >= self.pacing.enter_period
        if want and self.free and due and not grouped:
            entry = self._next_entry(waiting, take)
        elif (want == 0 or grouped) and self._worth_compacting():
            self._collect()
            self.compact()
        begin = self.clock()
        if entry is not None:
            self._collect()
            self._advance(entry)
            self.entered_at = self.step_number
            self.pacing.entered(len(entry.tickets), max(self.clock() - begin - self.pacing.step, 0.0))
        elif self.active:
            self._advance()
            self.pacing.stepped(self.clock() - begin)
        if not self.active and not self.staged_count:
            self.answer()

    def idle_rows(self) -> bool:
        """True if rows have left that are not answered."""
        return bool(self.left or self.done)

    # entering

    @property
    def staged_count(self) -> int:
        return len(self.staged.tickets) if self.staged is not None else 0

    def _next_entry(self, waiting: int, take: Callable[[int], list[Ticket]]) -> Entry | None:
        """Requests for the free rows. Where many wait, the model's first part runs for a whole pool of them at once."""
        if self.staged_count < self.free and waiting:
            tickets = take(self.capacity if waiting >= self.capacity else self.free - self.staged_count)
            more = self._reach(tickets) if tickets else None
            if more is not None:
                self.staged = more if self.staged is None else self.staged.join(more)
        entry, self.staged = self.staged, None
        if entry is not None and len(entry.tickets) > self.free:
            entry, self.staged = entry.split(self.free)
        return entry

    def _reach(self, tickets: list[Ticket]) -> Entry | None:
        """The requests at the layer. One that raises is found and left out, and the others are run without it."""
        template = self.template
        while tickets:
            batch = self._filled([ticket.arguments for ticket in tickets])
            try:
                reached = template.split.reach(batch)
            except Exception as error:
                good = [ticket for ticket in tickets if len(tickets) > 1 and self._reaches(ticket)]
                if len(good) == len(tickets) or len(tickets) == 1:  # it is the batch that fails, not a request
                    for ticket in tickets:
                        ticket.fail(_invalid(error))
                    return None
                tickets = good
                continue
            values = [*template.given.flatten(reached.given), *template.kept.flatten(reached.outputs), *batch.tensors]
            count = len(tickets)
            return Entry(tickets, [value[:count] for value in values], template.layout.pack(reached.start)[:count])
        return None

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
        have = len(self.rows)
        missing = self.capacity - have if self.full else count - self.rows.count(None)
        if missing > 0:
            self._reserve(have + missing)
            self._extend(missing)
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
        self.rows += [None] * rows
        self.records.extend(rows)
        zeros = self.like.new_zeros(rows, self.n)
        self.z, self.fz = torch.cat([self.z, zeros]), torch.cat([self.fz, zeros])
        self.best_z = torch.cat([self.best_z, zeros])
        self.length = torch.cat([self.length, zeros[:, 0]])
        self.residual = self.solver.residual(self.z, self.fz)
        if self.improved is not None:
            self.improved = torch.cat([self.improved, torch.ones(rows, dtype=torch.bool, device=self.like.device)])

    def _enter(self, entry: Entry, z: Tensor, places: list[int], index: Tensor) -> Tensor:
        """Write what new rows have to their places; `z` with their starts."""
        if not self.buffers:
            self.buffers = [_grown(value[:1], self.room) for value in entry.values]
        for buffer, value in zip(self.buffers, entry.values, strict=True):
            buffer.index_copy_(0, index, value)
        z0 = entry.z0
        if self.template.padding is not None:
            z0 = z0 * self._set_masks(index, entry.tickets)
        self._seat(places, index, entry.tickets, z0)
        return z.index_copy(0, index, z0)

    def _seat(self, places: list[int], index: Tensor, tickets: Sequence[Ticket], z0: Tensor) -> None:
        now, info = time.monotonic(), torch.finfo(self.like.dtype)
        rows = [self._row(ticket, start) for ticket, start in zip(tickets, z0.unbind(0), strict=True)]
        for place, row in zip(places, rows, strict=True):
            row.ticket.admitted = now
            self.rows[place] = row
        self.next_deadline = min([self.next_deadline, *(ticket.deadline or INF for ticket in tickets)])
        self.oldest = self.oldest if self.active else self.step_number
        self.active += len(rows)
        self.records.begin(places, rows)
        rtols = [max(row.rtol, LEAST * info.eps) for row in rows]
        atols = [max(self.stop.atol * row.root, info.tiny**0.8) for row in rows]
        self.tolerances.index_copy_(1, index, self.like.new_tensor([rtols, atols]))

    def _row(self, ticket: Ticket, start: Tensor) -> Row:
        stop, now = self.stop, self.step_number
        rtol = float(stop.rtol) if ticket.rtol is None else ticket.rtol
        steps = stop.max_steps if ticket.max_steps is None else ticket.max_steps
        root = max(self._numbers(ticket), 1) ** 0.5 if stop.norm is rms_norm else 1.0
        return Row(ticket, now, now + steps, rtol, root, start, stop.patience is not None or rtol < self.records.floor)

    def _numbers(self, ticket: Ticket) -> int:
        """Numbers of a request's state, without those that were filled up."""
        return self.n if ticket.length is None else int(self.template.mask(ticket.length).sum())

    def _set_masks(self, index: Tensor, tickets: Sequence[Ticket]) -> Tensor:
        if self.mask is None:
            self.mask = self.like.new_ones(self.room, self.n)
        masks = torch.stack([self.template.mask(ticket.length) for ticket in tickets if ticket.length is not None])
        self.mask.index_copy_(0, index, masks)
        return masks

    # stepping

    def _advance(self, entry: Entry | None = None) -> None:
        """One step, in which new rows have their starts evaluated."""
        going, new = self.active > 0, self._places(len(entry.tickets)) if entry is not None else []
        z = self._propose() if going else self.z
        self.step_number += 1
        index = torch.tensor(new, device=self.like.device) if new else None
        if entry is not None and index is not None:
            z = self._enter(entry, z, new, index)
        fz = self._evaluate(z)
        if fz is None:
            return
        if going:
            self.solver.absorb(z, fz)
        self.z, self.fz = z, fz
        self.residual = self.solver.residual(z, fz)
        self.length = torch.linalg.vector_norm(self.residual, dim=1)
        if entry is not None and index is not None:
            padded = self.template.padding is not None
            numbers = [self._numbers(ticket) for ticket in entry.tickets] if padded else None
            self.solver.begin(index, self.length.index_select(0, index), numbers)
        self._look(new)

    def _propose(self) -> Tensor:
        depth = self.step_number - self.oldest
        return self.solver.propose(self.z, self.fz, self.residual, self.length, depth, self.improved)

    def _given(self, rows: int) -> tuple[Any, ...]:
        given = self.template.given
        found: tuple[Any, ...] = given.unflatten([buffer[:rows] for buffer in self.buffers[: given.count]])
        return found

    def _evaluate(self, z: Tensor) -> Tensor | None:
        """The cell on all rows; where it raises, the rows that make it raise fail, and it is run without them."""
        rows = len(z)
        self.counts.steps += 1
        self.counts.evaluated += rows
        self.counts.row_steps += self.active
        try:
            fz = self.template.evaluate(z, self._given(rows))
        except Exception as error:
            return self._evaluate(z) if self._drop_raising(z, error) else None
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
            bad = [(i, error) for i in range(len(z))]
        for i, reason in bad:
            row = self.rows[i]
            if row is not None:
                row.ticket.fail(_invalid(reason))
                self._clear(i)
            if good:
                z[i] = z[good[0]]
                for buffer in self.buffers[: given.count]:
                    buffer[i] = buffer[good[0]]
        if len(bad) == len(z):
            self._shrink()
        return len(bad) < len(z)

    def _look(self, new: list[int]) -> None:
        """Record the iterate; rows that are done leave."""
        count = len(self.rows)
        length = self.length if self.norm is euclidean_norm else self.norm(self.residual)
        size = self.norm(self.fz)
        excess = length / torch.addcmul(self.tolerances[1, :count], size, self.tolerances[0, :count])
        numbers = torch.stack((excess, length, size)).tolist()  # the one read-back
        excesses, lengths, sizes = numbers
        stopped, worse = self.records.look(excesses, lengths, sizes, self.rows, new)
        if worse:
            better = torch.ones(count, dtype=torch.bool)
            better[worse] = False
            self.improved = better.to(self.like.device)
            self.best_z = torch.where(self.improved.unsqueeze(1), self.z, self.best_z)
        else:
            self.improved, self.best_z = None, self.z
        finished = self.records.given_up(self.step_number, self.rows) | dict.fromkeys(stopped, "stopped")
        finished |= {i: "unusual" for i in new if self._unusual(i, lengths[i], sizes[i])}
        if finished:
            self._leave(finished)

    def _unusual(self, i: int, length: float, size: float) -> bool:
        """True if squares of the finite numbers of a row's start leave the dtype."""
        if (self.least <= size <= self.most and length < INF) or self.rows[i] is None:
            return False
        largest = float(torch.maximum(max_norm(self.z[i : i + 1]), max_norm(self.fz[i : i + 1])))
        return self.most < largest < INF or 0 < largest < self.least

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
        self._drop_staged([i for i, ticket in enumerate(self.staged_tickets()) if not ticket.cancelled()])

    def staged_tickets(self) -> list[Ticket]:
        return self.staged.tickets if self.staged is not None else []

    def _drop_staged(self, kept: list[int]) -> None:
        if self.staged is None or len(kept) == len(self.staged.tickets):
            return
        index = torch.tensor(kept, dtype=torch.int64, device=self.like.device)
        values = [value.index_select(0, index) for value in self.staged.values]
        rest = Entry([self.staged.tickets[i] for i in kept], values, self.staged.z0.index_select(0, index))
        self.staged = rest if kept else None

    def overdue(self, now: float) -> list[Ticket]:
        """Take out requests whose deadline has passed before they got a row."""
        staged = self.staged_tickets()
        late = [ticket for ticket in staged if now >= (ticket.deadline or INF)]
        if late:
            self._drop_staged([i for i, ticket in enumerate(staged) if now < (ticket.deadline or INF)])
        return late

    def tickets(self) -> list[Ticket]:
        """All requests here."""
        rows = [row for row in self.rows if row is not None] + [each.row for each in self.left]
        rows += [row for done in self.done for row in done.rows]
        return [row.ticket for row in rows] + self.staged_tickets()

    def _leave(self, finished: dict[int, str]) -> None:
        z, records, step, precision = self.best_z, self.records, self.step_number, self.template.layout.precision
        for place, reason in finished.items():
            row = self.rows[place]
            if row is not None:
                self.left.append(Left.of(row, place, z, records, step, reason, precision))
                self.pacing.finished(self.step_number - row.born)
                self.finished += 1
                self._clear(place)
        self._shrink()

    def _clear(self, i: int) -> None:
        self.active -= self.rows[i] is not None
        self.rows[i] = None

    def _shrink(self) -> None:
        """Evaluate no empty rows at the end, and find the oldest row."""
        self.oldest = min([row.born for row in self.rows if row is not None], default=self.step_number)
        count = len(self.rows)
        while count and self.rows[count - 1] is None and not self.full:
            count -= 1
        self._cut(count)

    def _worth_compacting(self) -> bool:
        count, empty = len(self.rows), len(self.rows) - self.active
        share = SHRINK if empty * self.n >= WORTH else 2
        return not self.full and empty > 0 and empty * share >= count

    def compact(self) -> None:
        """Move rows from the end into empty places."""
        count = len(self.rows)
        source = [i for i in range(self.active, count) if self.rows[i] is not None]
        target = [i for i in range(self.active) if self.rows[i] is None]
        if source:
            self._move(source, target)
        self._cut(self.active)

    def _move(self, source: list[int], target: list[int]) -> None:
        here, there = (torch.tensor(places, device=self.like.device) for places in (source, target))
        for a, b in zip(source, target, strict=True):
            self.rows[a], self.rows[b] = None, self.rows[a]
        self.records.move(source, target)
        self.solver.move(here, there)
        for buffer in self.buffers if self.mask is None else [*self.buffers, self.mask]:
            buffer.index_copy_(0, there, buffer.index_select(0, here))
        self.tolerances.index_copy_(1, there, self.tolerances.index_select(1, here))
        same = self.best_z is self.z
        self.z, self.fz, self.length = (_moved(t, here, there) for t in (self.z, self.fz, self.length))
        self.best_z = self.z if same else _moved(self.best_z, here, there)
        self.improved = None if self.improved is None else _moved(self.improved, here, there)
        self.residual = self.solver.residual(self.z, self.fz)

    def _cut(self, count: int) -> None:
        if count == len(self.rows):
            return
        del self.rows[count:]
        self.records.cut(count)
        same = self.best_z is self.z
        self.z, self.fz, self.residual = self.z[:count], self.fz[:count], self.residual[:count]
        self.best_z = self.z if same else self.best_z[:count]
        self.length = self.length[:count]
        self.improved = None if self.improved is None else self.improved[:count]

    # after the layer

    def answer(self) -> None:
        """Run the part of the model behind the layer for all rows that have left, and resolve their tickets."""
        begin = self.clock()
        self._collect()
        if self.done:
            done, self.done = Done.join(self.done), []
            self._resolve(done)
            self.counts.exchanges += 1
            self.pacing.answered(len(done.rows), self.clock() - begin)

    def _collect(self) -> None:
        """Take rows that have left, and what they carried, out of their places."""
        if not self.left:
            return
        left, self.left = self.left, []
        for each in left:
            if each.reason == "unusual":
                self._solve_alone(each.row.ticket)
        left = [each for each in left if each.reason != "unusual"]
        if not left:
            return
        done = Done.of(left, self.buffers)
        precision = self.template.layout.precision
        sound = [j for j, each in enumerate(left) if done.judge(j, each, self.stop, precision, self.least)]
        for j in sorted(set(range(len(left))) - set(sound)):
            self._solve_alone(done.rows[j].ticket)
        if sound:
            self.done_at = self.done_at if self.done else self.step_number
            self.done.append(done.select(sound))

    def _resolve(self, done: Done) -> None:
        try:
            outputs = self._finish(done)
        except Exception as error:
            if len(done.rows) == 1:
                done.rows[0].ticket.fail(_invalid(error))
                return
            for j in range(len(done.rows)):  # find the row that raises
                self._resolve(done.select([j]))
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
        first, last = template.given.count, template.given.count + template.kept.count
        given, outputs = template.given.unflatten(carried[:first]), template.kept.unflatten(carried[first:last])
        batch = Arguments(tuple(carried[last:]), template.spec)
        stats = describe(status, steps, residual, z)
        found = template.split.finish(batch, Reached(given, None, outputs), z, template.layout, stats)
        return template.split_output(found, [row.ticket.length for row in done.rows])

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


def _moved(tensor: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return tensor.index_copy(0, target, tensor.index_select(0, source))


def _invalid(error: Exception) -> Exception:
    if isinstance(error, InvalidRequestError):
        return error
    wrapped = InvalidRequestError(f"The model raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
