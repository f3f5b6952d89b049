"""Run the part of the model behind the equilibrium layer for rows that have left the solve."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equilibria.serving.adapter import describe
from equilibria.serving.leaving import Done
from equilibria.serving.split import Arguments, Reached
from equilibria.serving.template import Template, stack
from equilibria.serving.tickets import Ticket, as_invalid_request
from equilibria.solution import Status

STATUSES = {int(status): status for status in Status}


@dataclass
class Counts:
    """Counters of a pool since it was opened."""

    answered: int = 0
    steps: int = 0
    row_steps: int = 0  # rows in use, summed over the steps
    evaluated: int = 0  # rows evaluated, summed over the steps
    exchanges: int = 0  # times that rows were answered
    alone: int = 0  # requests that were solved by the library's own loop
    statuses: dict[str, int] = field(default_factory=dict)


class Answering:
    """Resolve the tickets of rows that have left.

    full  run the model's last part on batches of `capacity` rows, so that outputs do not depend on the load
    """

    def __init__(self, template: Template, capacity: int, full: bool, counts: Counts) -> None:
        self.template, self.capacity, self.full, self.counts = template, capacity, full, counts

    def resolve(self, done: Done) -> None:
        """Compute the outputs of these rows and resolve their tickets; only rows for which the model raises fail."""
        try:
            outputs = self._outputs(done)
        except Exception as error:
            if len(done.rows) == 1:
                done.rows[0].ticket.fail(as_invalid_request(error))
                return
            for j in range(len(done.rows)):  # find the row that raises
                self.resolve(done.select([j]))
            return
        self._count(done.status)
        now = time.monotonic()
        found = zip(done.rows, outputs, done.status, done.steps, done.residual, done.late, strict=True)
        for row, output, status, steps, residual, late in found:
            row.ticket.resolve(output, STATUSES[status], steps, residual, late=late, now=now)

    def _outputs(self, done: Done) -> list[Any]:
        """Return the model's output for every row."""
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

    def solve_alone(self, ticket: Ticket) -> None:
        """Solve one request by the library's own loop, which handles numbers whose squares overflow or underflow."""
        self.counts.alone += 1
        changes: dict[str, Any] = {"on_failure": "ignore", "check_every": 1}
        changes |= {} if ticket.rtol is None else {"rtol": ticket.rtol}
        changes |= {} if ticket.max_steps is None else {"max_steps": ticket.max_steps}
        stop = dataclasses.replace(self.template.stop, **changes)
        arguments = ticket.arguments
        if ticket.length is not None and self.template.padding is not None:
            dim = self.template.padding.dim
            cut = tuple(t.narrow(dim, 0, ticket.length) for t in arguments.tensors)
            arguments = dataclasses.replace(arguments, tensors=cut)
        try:
            output, found = self.template.split.alone(stack([arguments]), stop)
        except Exception as error:
            ticket.fail(as_invalid_request(error))
            return
        stats = found.stats
        status = Status(int(stats.status[0]))
        (own,) = self.template.split_output(output, [None])
        self._count([status])
        ticket.resolve(own, status, int(stats.steps[0]), float(stats.residual[0]), late=False)

    def _count(self, statuses: Sequence[int]) -> None:
        self.counts.answered += len(statuses)
        for status, count in Counter(statuses).items():
            name = STATUSES[status].name
            self.counts.statuses[name] = self.counts.statuses.get(name, 0) + count
