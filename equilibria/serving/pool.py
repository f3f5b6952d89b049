"""One solve shared by requests of one kind: rows enter and leave while the others continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import (
    FLOOR,
    can_run_native,
    euclidean_norm,
    history_limit,
    max_norm,
    rms_norm,
    usual_range,
)
from equilibria.serving.answering import Answering, Counts
from equilibria.serving.carried import Carried
from equilibria.serving.leaving import Done
from equilibria.serving.native_rows import NativeRows
from equilibria.serving.pacing import Admission, Pacing
from equilibria.serving.rows import INF, Left, Row, SolveRows
from equilibria.serving.staging import Entry, Staging
from equilibria.serving.template import Template
from equilibria.serving.tickets import Ticket, as_invalid_request
from equilibria.serving.torch_rows import TorchRows


class Pool:
    """The solve of up to `capacity` rows of one template. It is not thread-safe: callers hold the lock of the engine."""

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
        self.clock = clock  # measures the costs of steps and exchanges
        layout, stop = template.layout, template.stop
        self.n, self.stop = layout.columns, stop
        self.like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        self.least, self.most = usual_range(layout.dtype)
        self.solve = self._solve()
        self.carried = Carried(self.like, self.n)
        self.root = max(self.n, 1) ** 0.5 if stop.norm is rms_norm else 1.0  # norm of a state of ones
        self.floor = FLOOR * layout.precision
        self.step_number = 0
        self.rows: list[Row | None] = []  # evaluated rows; None: empty
        self.active = 0  # rows in use
        self.left: list[Left] = []  # rows that have left, still in their places
        self.done: list[Done] = []  # rows taken out of their places, not yet answered
        self.unanswered = 0  # rows in `left` and `done`
        self.pacing, self.counts = Pacing(capacity, admission), Counts()
        self.staging = Staging(template, capacity, full)
        self.answering = Answering(template, capacity, full, self.counts)
        self.views: tuple[tuple[int, int], tuple[Any, ...]] | None = None  # the arguments of the cell, see `_given`
        self.next_deadline = INF

    def _solve(self) -> SolveRows:
        """Return the solve of the rows, which is native if the kernels can run it."""
        template, stop, like = self.template, self.stop, self.like
        precision = template.layout.precision
        if can_run_native(like, template.solver, stop):
            sizes = template.sizes()  # a short text may keep a longer history than a long one
            most = max(1, *(history_limit(template.solver, n, like) for n in sizes))
            return NativeRows(like, self.capacity, self.n, template.solver, stop, precision, most)
        norm = euclidean_norm if stop.norm in (rms_norm, euclidean_norm) else stop.norm
        return TorchRows(like, self.capacity, self.n, template.solver, stop, FLOOR * precision, norm)

    # state

    @property
    def free(self) -> int:
        return self.capacity - self.active

    @property
    def idle(self) -> bool:
        return not self.left and not self.done and self.active == 0 and not self.staging.tickets

    def residuals(self) -> list[tuple[int, int, float]]:
        """Return (row, steps, residual over tolerance) of every row in use that has taken a step."""
        rows, excess, step = list(self.rows), self.solve.excess(), self.step_number  # copied: other threads call this
        used = ((i, row, best) for i, (row, best) in enumerate(zip(rows, excess, strict=False)) if row is not None)
        return [(i, step - row.born, best) for i, row, best in used if step > row.born]

    def tickets(self) -> list[Ticket]:
        """Return all requests of this pool that are not answered."""
        rows = [row for row in self.rows if row is not None] + [each.row for each in self.left]
        rows += [row for done in self.done for row in done.rows]
        return [row.ticket for row in rows] + self.staging.tickets

    # one turn

    def turn(self, waiting: int, take: Callable[[int], list[Ticket]]) -> None:
        """Answer rows that have left, admit requests, and take a step, each where it is due (see `Pacing`).

        waiting  requests in the queue, from which `take(count)` removes up to `count`
        """
        begin, pacing = self.clock(), self.pacing
        want = waiting + len(self.staging.tickets)
        if self.unanswered and pacing.may_answer(self.active, want, self.unanswered):
            begin = self.answer()
        entry = None
        if want and self.free and pacing.may_enter(self.active, want):
            entry = self.staging.take(self.free, waiting, take)
        if entry is not None:
            self._collect()
            self._advance(entry)
            pacing.entered(len(entry.tickets), max(self.clock() - begin - pacing.step.whole, 0.0))
        elif self.active:
            if pacing.may_compact():
                begin = self.compact(begin)
            evaluated, empty = len(self.rows), len(self.rows) - self.active
            idle = min(want, self.free)
            self._advance()
            spare = 0 if self.full else empty if pacing.mode == "grouped" else max(empty - idle, 0)
            pacing.stepped(evaluated, self.clock() - begin, idle=idle, unanswered=self.unanswered, empty=spare)
        if not self.active and not self.staging.tickets:
            self.answer()

    # entering

    def _places(self, count: int) -> list[int]:
        """Return places for `count` new rows: empty ones first, then ones appended at the end."""
        want = self.capacity if self.full else max(self.active + count, len(self.rows) if self.active else 0)
        if want != len(self.rows):
            self._resize(want)
        return [i for i, row in enumerate(self.rows) if row is None][:count]

    def _resize(self, count: int) -> None:
        """Append rows without a request, or drop empty rows at the end, so that there are `count` rows."""
        have = len(self.rows)
        if count > self.carried.room:
            self.carried.reserve(self.capacity if self.full else min(max(count, 2 * self.carried.room), self.capacity))
        if count > have:
            self.rows += [None] * (count - have)
            self.solve.extend(count - have)
        elif count < have:
            del self.rows[count:]
            self.solve.cut(count)

    def _enter(self, entry: Entry, z: Tensor, places: list[int], index: Tensor) -> Tensor:
        """Set up new rows at `places`; returns the points `z` with their starts."""
        self.carried.write(index, entry.values)
        z0, tickets, numbers = entry.z0, entry.tickets, None
        if self.template.padding is not None:
            lengths = [ticket.length for ticket in tickets if ticket.length is not None]
            masks = torch.stack([self.template.mask(length) for length in lengths])
            self.carried.set_masks(index, masks)
            z0, numbers = z0 * masks, [self._numbers(ticket) for ticket in tickets]
        now = time.monotonic()
        rows = self._new_rows(tickets, z0)
        for place, row in zip(places, rows, strict=True):
            row.ticket.admitted = now
            self.rows[place] = row
        deadlines = [ticket.deadline for ticket in tickets if ticket.deadline is not None]
        self.next_deadline = min([self.next_deadline, *deadlines])
        self.active += len(rows)
        return self.solve.begin(z, index, rows, numbers, z0)

    def _new_rows(self, tickets: Sequence[Ticket], starts: Tensor) -> list[Row]:
        """Return rows that start at the current step from `starts` with the options of their requests."""
        stop, now, root, rows = self.stop, self.step_number, self.root, []
        watched, usual, most = stop.patience is not None, float(stop.rtol), stop.max_steps
        for at, ticket in enumerate(tickets):
            rtol = usual if ticket.rtol is None else ticket.rtol
            end = now + (most if ticket.max_steps is None else ticket.max_steps)
            if ticket.length is not None and self.root != 1.0:
                root = max(self._numbers(ticket), 1) ** 0.5
            rows.append(Row(ticket, now, end, rtol, root, starts, at, watched or rtol < self.floor))
        return rows

    def _numbers(self, ticket: Ticket) -> int:
        """Return the size of a request's state without padding."""
        return self.n if ticket.length is None else int(self.template.mask(ticket.length).sum())

    # stepping

    def _advance(self, entry: Entry | None = None) -> None:
        """Take one step, in which the starts of new rows are evaluated too."""
        depth = self._depth if self.active else None
        new = self._places(len(entry.tickets)) if entry is not None else []
        z = self.solve.propose(depth)
        self.step_number += 1
        if entry is not None:
            z = self._enter(entry, z, new, torch.tensor(new, device=self.like.device))
        fz = self._evaluate(z)
        if fz is None:
            return
        finished = self.solve.record(z, fz, self.step_number, self.rows, new)
        if new:
            finished |= dict.fromkeys(self._unusual(new, z, fz), "unusual")
        if finished:
            self._leave(finished)

    def _depth(self) -> int:
        """Return the number of steps that the oldest row has taken."""
        return self.step_number - min(row.born for row in self.rows if row is not None)

    def _given(self, rows: int) -> tuple[Any, ...]:
        """Return the arguments of the cell for the first `rows` rows. They are views: later writes are seen through them."""
        if self.views is None or self.views[0] != (rows, self.carried.version):
            self.views = (rows, self.carried.version), self._views(slice(rows))
        return self.views[1]

    def _views(self, places: slice) -> tuple[Any, ...]:
        given = self.template.given
        found: tuple[Any, ...] = given.unflatten([buffer[places] for buffer in self.carried.buffers[: given.count]])
        return found

    def _evaluate(self, z: Tensor) -> Tensor | None:
        """Return the cell's values on all rows; rows that make it raise fail, and it runs again. None if all rows fail."""
        rows = len(z)
        self.counts.steps += 1
        self.counts.evaluated += rows
        self.counts.row_steps += self.active
        try:
            fz = self.template.evaluate(z, self._given(rows))
        except Exception as error:
            return self._evaluate(z) if self._drop_raising(z, error) else None
        mask = self.carried.mask
        return fz if mask is None else fz * mask[:rows]

    def _drop_raising(self, z: Tensor, error: Exception) -> bool:
        """Fail the rows that raise and overwrite them with the numbers of another row; return False if all rows raise."""
        good, bad = [], []
        for i in range(len(z)):
            place = slice(i, i + 1)
            try:
                self.template.evaluate(z[place], self._views(place))
                good.append(i)
            except Exception as own_error:
                bad.append((i, own_error))
        if not good or not bad:  # every row raises, or the batch raises although no row does by itself
            bad = [(i, error) for i in range(len(z))]
        for i, reason in bad:
            row = self.rows[i]
            if row is not None:
                row.ticket.fail(as_invalid_request(reason))
                self._clear(i)
            if good:
                z[i] = z[good[0]]
                for buffer in self.carried.buffers[: self.template.given.count]:
                    buffer[i] = buffer[good[0]]
        return len(bad) < len(z)

    def _unusual(self, new: list[int], z: Tensor, fz: Tensor) -> list[int]:
        """Return the rows whose start has finite numbers with squares that overflow or underflow."""
        found = []
        for i in self.solve.suspects(new, self.least, self.most):
            largest = float(torch.maximum(max_norm(z[i : i + 1]), max_norm(fz[i : i + 1])))
            if self.rows[i] is not None and (self.most < largest < INF or 0 < largest < self.least):
                found.append(i)
        return found

    # leaving

    def expire(self, now: float) -> None:
        """Let rows whose deadline has passed leave with their best iterate."""
        late = {i: "late" for i, row in enumerate(self.rows) if row is not None and now >= (row.ticket.deadline or INF)}
        if late:
            self._leave(late)
        deadlines = [row.ticket.deadline or INF for row in self.rows if row is not None]
        self.next_deadline = min(deadlines, default=INF)

    def drop_cancelled(self) -> None:
        """Free the rows of cancelled requests, and drop cancelled requests that are staged."""
        for i, row in enumerate(self.rows):
            if row is not None and row.ticket.cancelled():
                self._clear(i)
        self.staging.drop_cancelled()

    def _leave(self, finished: dict[int, str]) -> None:
        """Free the places of `finished` rows, a dict of reasons by place, and keep their records for the answer."""
        rows, solve, step = self.rows, self.solve, self.step_number
        before = len(self.left)
        for place, reason in finished.items():
            row = rows[place]
            if row is not None:
                self.left.append(solve.leave(place, row, step, reason))
                self.pacing.steps.add(step - row.born)
                rows[place] = None
        count = len(self.left) - before
        self.active -= count
        self.unanswered += count

    def _clear(self, i: int) -> None:
        """Drop the request of a row without an answer."""
        if self.rows[i] is not None:
            self.active -= 1
            self.rows[i] = None
            self.solve.release(i)

    def compact(self, begin: float) -> float:
        """Move rows from the end into empty places and drop the end. `begin` is the time before; returns the time after."""
        self._collect()
        empty = len(self.rows) - self.active
        source = [i for i in range(self.active, len(self.rows)) if self.rows[i] is not None]
        target = [i for i in range(self.active) if self.rows[i] is None]
        if source:
            for a, b in zip(source, target, strict=True):
                self.rows[a], self.rows[b] = None, self.rows[a]
            self.solve.move(source, target)
            self.carried.move(source, target)
        self._resize(self.active)
        end = self.clock()
        self.pacing.compacted(empty, end - begin)
        return end

    # answering

    def answer(self) -> float:
        """Run the part of the model behind the layer for all rows that have left, and resolve their tickets.

        Returns the time of the clock at the end.
        """
        begin = self.clock()
        self._collect()
        self.unanswered = 0
        if self.done:
            done, self.done = Done.join(self.done), []
            self.answering.resolve(done)
            self.counts.exchanges += 1
            end = self.clock()
            self.pacing.answered(len(done.rows), end - begin)
            return end
        return begin

    def _collect(self) -> None:
        """Copy the results and tensors of rows that have left into `done`; unusual rows are solved separately."""
        left, self.left = self.left, []
        for each in left:
            if each.reason == "unusual":
                self.answering.solve_alone(each.row.ticket)
        left = [each for each in left if each.reason != "unusual"]
        if not left:
            return
        precision = self.template.layout.precision
        results = self.solve.results(left)
        done, faint = Done.of(left, results, self.carried.buffers, precision, self.least)
        for j in faint:
            self.answering.solve_alone(done.rows[j].ticket)
        if not faint:
            self.done.append(done)
        elif sound := [j for j in range(len(left)) if j not in faint]:
            self.done.append(done.select(sound))
