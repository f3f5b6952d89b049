"""Static batching, the baseline that the engine is measured against."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from equilibria.serving.split import Arguments, CellSplit
from equilibria.serving.template import stack
from equilibria.serving.tickets import Ticket
from equilibria.solution import Status
from equilibria.stop import Stop


class StaticBatching:
    """Collect a batch, solve it until its slowest row is done, then answer all its requests.

    The solve is the library's own, which drops converged rows. `submit` and the tickets are those of `Engine`. If requests
    have an rtol or max_steps of their own, the whole batch uses the smallest rtol and the largest max_steps among these.

    model  as in `Engine`; all requests have the same shape
    rows   largest batch
    wait   seconds that the first request of a batch waits for the batch to fill
    """

    def __init__(
        self, model: nn.Module, rows: int = 64, *, wait: float = 0.005, solver: Any = None, stop: Stop | None = None
    ) -> None:
        self.split = CellSplit(model, solver=solver, stop=stop)
        self.layer = next(iter(self.split.layers.values()))
        self.rows, self.wait = rows, wait
        self.device = next(iter(model.parameters())).device
        self.waiting: deque[Ticket] = deque()

    def submit(
        self, inputs: Any, rtol: float | None = None, max_steps: int | None = None, deadline: float | None = None
    ) -> Ticket:
        ticket = Ticket(Arguments.of(inputs, self.device), rtol, max_steps, deadline)
        self.waiting.append(ticket)
        return ticket

    def step(self) -> bool:
        """Solve a batch if it is full or its first request has waited long enough; return False if no request waits."""
        if not self.waiting:
            return False
        full = len(self.waiting) >= self.rows
        if full or time.monotonic() - self.waiting[0].submitted >= self.wait:
            self._solve([self.waiting.popleft() for _ in range(min(self.rows, len(self.waiting)))])
        return bool(self.waiting)

    def run(self) -> None:
        """Answer all requests, without waiting for full batches."""
        while self.waiting:
            self._solve([self.waiting.popleft() for _ in range(min(self.rows, len(self.waiting)))])

    def _solve(self, tickets: list[Ticket]) -> None:
        """Solve one batch with the options described in the class, and resolve its tickets."""
        now = time.monotonic()
        for ticket in tickets:
            ticket.admitted = now
        stop = self.split.stop_of(self.layer)
        rtol = min((ticket.rtol for ticket in tickets if ticket.rtol is not None), default=stop.rtol)
        steps = max((ticket.max_steps for ticket in tickets if ticket.max_steps is not None), default=stop.max_steps)
        own = dataclasses.replace(stop, rtol=rtol, max_steps=steps, on_failure="ignore")
        with torch.no_grad():
            output, solution = self.split.alone(stack([ticket.arguments for ticket in tickets]), own)
        leaves, structure = pytree.tree_flatten(output)
        stats = solution.stats
        columns = [leaf.unbind(0) for leaf in leaves]
        rows = zip(*columns, strict=True)
        found = zip(stats.status.tolist(), stats.steps.tolist(), stats.residual.tolist(), strict=True)
        for ticket, own_leaves, (status, taken, residual) in zip(tickets, rows, found, strict=True):
            ticket.resolve(pytree.tree_unflatten(list(own_leaves), structure), Status(status), taken, residual, late=False)
