"""Run the part of the model before the equilibrium layer for waiting requests, before rows are free for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.serving.rows import INF
from equilibria.serving.split import Arguments
from equilibria.serving.template import Template, stack
from equilibria.serving.tickets import Ticket, as_invalid_request


@dataclass
class Entry:
    """Requests that have reached the layer and wait for rows."""

    tickets: list[Ticket]
    values: list[Tensor]  # the tensors stored per row during the solve, one row per ticket
    z0: Tensor  # (tickets, n)

    def join(self, other: Entry) -> Entry:
        """Return both groups as one."""
        values = [torch.cat(pair) for pair in zip(self.values, other.values, strict=True)]
        return Entry(self.tickets + other.tickets, values, torch.cat((self.z0, other.z0)))

    def split(self, count: int) -> tuple[Entry, Entry]:
        """Return the first `count` requests, and the others."""
        parts = (slice(None, count), slice(count, None))
        first, rest = (Entry(self.tickets[p], [value[p] for value in self.values], self.z0[p]) for p in parts)
        return first, rest


class Staging:
    """Run requests of one template up to the layer, many at once, and return them as rows become free.

    full  run the model's first part on batches of `capacity` samples, so that results do not depend on the load
    """

    def __init__(self, template: Template, capacity: int, full: bool) -> None:
        self.template, self.capacity, self.full = template, capacity, full
        self.entry: Entry | None = None

    @property
    def tickets(self) -> list[Ticket]:
        """Requests that have reached the layer and have no row."""
        return self.entry.tickets if self.entry is not None else []

    def take(self, free: int, waiting: int, take: Callable[[int], list[Ticket]]) -> Entry | None:
        """Return requests for up to `free` rows; None if there are none.

        If at least `capacity` requests wait, the first part of the model runs for `capacity` of them at once.

        waiting  requests in the queue, from which `take(count)` removes up to `count`
        """
        staged = len(self.tickets)
        if staged < free and waiting:
            tickets = take(self.capacity if waiting >= self.capacity else free - staged)
            more = self._reach(tickets) if tickets else None
            if more is not None:
                self.entry = more if self.entry is None else self.entry.join(more)
        entry, self.entry = self.entry, None
        if entry is not None and len(entry.tickets) > free:
            entry, self.entry = entry.split(free)
        return entry

    def _reach(self, tickets: list[Ticket]) -> Entry | None:
        """Run the model up to the layer; requests that raise fail, and the others run again without them."""
        template = self.template
        while tickets:
            batch = self._batch([ticket.arguments for ticket in tickets])
            try:
                reached = template.split.reach(batch)
            except Exception as error:
                good = [ticket for ticket in tickets if len(tickets) > 1 and self._reaches(ticket)]
                if len(good) == len(tickets) or len(tickets) == 1:  # the batch raises, although no request does by itself
                    for ticket in tickets:
                        ticket.fail(as_invalid_request(error))
                    return None
                tickets = good
                continue
            values = [*template.given.flatten(reached.given), *template.kept.flatten(reached.outputs), *batch.tensors]
            count = len(tickets)
            return Entry(tickets, [value[:count] for value in values], template.layout.pack(reached.start)[:count])
        return None

    def _reaches(self, ticket: Ticket) -> bool:
        """Run the model up to the layer for one request; if it raises, the request fails and the result is False."""
        try:
            self.template.split.reach(stack([ticket.arguments]))
        except Exception as error:
            ticket.fail(as_invalid_request(error))
            return False
        return True

    def _batch(self, samples: Sequence[Arguments]) -> Arguments:
        missing = self.capacity - len(samples) if self.full else 0
        return stack([*samples, *[samples[-1]] * missing])

    def drop_cancelled(self) -> None:
        """Remove cancelled requests."""
        self._keep([i for i, ticket in enumerate(self.tickets) if not ticket.cancelled()])

    def take_overdue(self, now: float) -> list[Ticket]:
        """Remove and return requests whose deadline has passed."""
        late = [ticket for ticket in self.tickets if now >= (ticket.deadline or INF)]
        if late:
            self._keep([i for i, ticket in enumerate(self.tickets) if now < (ticket.deadline or INF)])
        return late

    def _keep(self, kept: list[int]) -> None:
        """Keep the requests at these positions."""
        if self.entry is None or len(kept) == len(self.entry.tickets):
            return
        index = torch.tensor(kept, dtype=torch.int64, device=self.entry.z0.device)
        values = [value.index_select(0, index) for value in self.entry.values]
        rest = Entry([self.entry.tickets[i] for i in kept], values, self.entry.z0.index_select(0, index))
        self.entry = rest if kept else None
