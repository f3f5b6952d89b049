"""Engine: continuous batching of equilibrium solves."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, get_args

import torch
from torch import nn

from equilibria.serving.answering import Counts
from equilibria.serving.pacing import Admission
from equilibria.serving.pool import Pool
from equilibria.serving.split import Arguments, CellSplit
from equilibria.serving.template import Padding, Template
from equilibria.serving.tickets import (
    DeadlineExceededError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    Ticket,
    UnservableModelError,
)
from equilibria.stop import Stop

INF = float("inf")


class Engine:
    """Serve a model with one equilibrium layer by continuous batching.

    Requests enter a running solve, and converged ones leave it:

        with eq.serving.Engine(model, rows=64) as engine:
            ticket = engine.submit(x)                 # one sample, without a batch dimension
            answer = ticket.result()                  # answer.output, .status, .steps, .residual

    Inside `with`, a thread of the engine runs the steps. Without `with`, call `step()` or `run()`.

    model    any module whose forward pass runs exactly one DEQ; the engine finds it by running the model once, and serves a
             copy in eval mode that shares the weights
    rows     largest number of requests in one solve, per shape of the inputs
    solver   replaces the layer's solver: Picard, Anderson or Broyden
    stop     replaces the layer's `eval_stop` or `stop`
    queue    largest number of waiting requests; if it is reached, `submit` raises QueueFullError
    pools    largest number of input shapes served at the same time; requests of other shapes wait until a pool is idle
    padding  lets requests of different lengths share a solve, see `Padding`
    output   function applied to the model's output for a batch: `lambda out: out[0]`
    admission  "auto": requests enter when that costs less time than it saves, by measurement (see `Pacing`); "continuous":
             as soon as rows are free; "grouped": when all rows have left, as in static batching
    full     evaluate all rows at every step, used or not. The bits of an answer then do not depend on the other requests.
             A step takes longer whenever not all rows are in use
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int = 64,
        *,
        solver: Any = None,
        stop: Stop | None = None,
        queue: int = 1024,
        pools: int = 8,
        padding: Padding | None = None,
        output: Any = None,
        admission: Admission = "auto",
        full: bool = False,
    ) -> None:
        for name, value in (("rows", rows), ("queue", queue), ("pools", pools)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.split = CellSplit(model, solver=solver, stop=stop, output=output)
        self.rows, self.queue, self.pools_limit = rows, queue, pools
        self.padding, self.admission, self.full = padding, admission, full
        if admission not in get_args(Admission):
            raise ValueError(f"admission must be one of {', '.join(get_args(Admission))}, got {admission!r}.")
        self.clock = time.perf_counter  # clock for the measured costs of steps and exchanges
        tensors = [*model.parameters(), *model.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.pools: dict[Any, Pool] = {}
        self.waiting: dict[Any, deque[Ticket]] = {}
        self.refused: dict[Any, Exception] = {}  # error by kind of request for which no pool can be made, most recent last
        self._queued = 0
        self._next_overdue = INF  # the earliest deadline in the queue
        self._cancelled = False  # a request was cancelled since the last step
        self._lock = threading.RLock()  # guards the pools; held during a step
        self._changed = threading.Condition()  # guards the queue
        self._thread: threading.Thread | None = None
        self._closing = self._draining = False
        self._asleep = False  # the thread waits for requests

    # requests

    def submit(
        self, inputs: Any, rtol: float | None = None, max_steps: int | None = None, deadline: float | None = None
    ) -> Ticket:
        """Queue one request and return its ticket.

        inputs     one sample, without a batch dimension: a tensor, a tuple of arguments or a dict of keyword arguments
        rtol       tolerance of this request; None uses that of the layer
        max_steps  largest number of steps of this request; None uses that of the layer
        deadline   seconds from now after which the best iterate so far is returned, flagged `late`
        """
        # the arguments are read outside of the lock, because this takes longer than queueing them
        ticket = self._ticket(inputs, rtol, max_steps, deadline)
        key = ticket.arguments.key
        with self._changed:
            if self._closing or self._draining:
                raise EngineClosedError("The engine is closed and accepts no more requests.")
            if self._queued >= self.queue:
                raise QueueFullError(f"{self._queued} requests are waiting, the limit is {self.queue}. Try again later.")
            self._queued += 1
            if ticket.deadline is not None:
                self._next_overdue = min(self._next_overdue, ticket.deadline)
            queue = self.waiting.get(key)
            if queue is None:
                queue = self.waiting[key] = deque()
            queue.append(ticket)
            if self._asleep:  # waking a thread that runs would cost time in every request
                self._changed.notify_all()
        return ticket

    def _ticket(self, inputs: Any, rtol: float | None, max_steps: int | None, deadline: float | None) -> Ticket:
        """Check the options of a request and return its ticket, with inputs padded if the engine pads."""
        if rtol is not None and not 0 <= rtol < float("inf"):
            raise InvalidRequestError(f"rtol must be finite and not negative, got {rtol}.")
        if max_steps is not None and max_steps < 0:
            raise InvalidRequestError(f"max_steps must not be negative, got {max_steps}.")
        if deadline is not None and not deadline > 0:
            raise InvalidRequestError(f"deadline must be a positive number of seconds, got {deadline}.")
        arguments = Arguments.of(inputs, self.device)
        if not arguments.tensors:
            raise InvalidRequestError(
                f"A request needs a tensor, a tuple or a dict with tensors; got {type(inputs).__name__}."
            )
        length = None
        if self.padding is not None:
            length = self._length(arguments)
            arguments = self.padding.fill(arguments)
        return Ticket(arguments, rtol, max_steps, deadline, length, self._notice_cancel)

    def _length(self, arguments: Arguments) -> int:
        """Return the common length of the inputs along the padded dimension; raises InvalidRequestError if there is none."""
        assert self.padding is not None
        dim = self.padding.dim
        if any(t.dim() <= dim for t in arguments.tensors) or len({t.shape[dim] for t in arguments.tensors}) > 1:
            shapes = [tuple(t.shape) for t in arguments.tensors]
            raise InvalidRequestError(f"Inputs must have one length along dimension {dim}, got shapes {shapes}.")
        if arguments.tensors[0].shape[dim] == 0:
            raise InvalidRequestError(f"Inputs are empty along dimension {dim}; at least one position is needed.")
        return arguments.tensors[0].shape[dim]

    # stepping

    def step(self) -> bool:
        """Admit waiting requests, take one solver step for all rows and answer finished ones.

        Returns False if no request waits or is under way.
        """
        with torch.no_grad():
            return self._step()

    def run(self) -> None:
        """Step until every request is answered, or the engine is closed."""
        with torch.no_grad():
            while not self._closing and self._step():
                pass

    def _step(self) -> bool:
        """Do the work of `step`; the caller disables gradients."""
        with self._lock:
            now = time.monotonic()
            if self._cancelled:
                self._drop_cancelled()
            if now >= self._next_overdue:
                self._fail_overdue(now)
            for key in self._keys():
                self._step_pool(key, now)
            return self._queued > 0 or any(not pool.idle for pool in self.pools.values())

    def _keys(self) -> list[Any]:
        """Return the kinds of requests that wait or are under way."""
        if len(self.pools) == 1 and self.waiting.keys() <= self.pools.keys():
            return list(self.pools)
        with self._changed:
            waiting = list(self.waiting)  # without empty queues
        return list(dict.fromkeys([*(key for key, pool in self.pools.items() if not pool.idle), *waiting]))

    def _step_pool(self, key: Any, now: float) -> None:
        """Take one turn of the pool of this kind of request, opening it if there is none."""
        pool = self.pools.get(key)
        if pool is None:
            pool = self._open(key)
            if pool is None:
                return
        if now >= pool.next_deadline:
            pool.expire(now)
        pool.turn(len(self.waiting.get(key, ())), lambda count: self._take(key, count))

    def _take(self, key: Any, count: int) -> list[Ticket]:
        """Remove up to `count` requests of one kind from the queue and return them.

        A request that was cancelled during this step may be among them; its row is freed at the next step.
        """
        with self._changed:
            queue = self.waiting.get(key)
            if queue is None:
                return []
            taken = [queue.popleft() for _ in range(min(count, len(queue)))]
            self._queued -= len(taken)
            if not queue:
                del self.waiting[key]
            return taken

    def _open(self, key: Any) -> Pool | None:
        """Return a new pool for this kind of request; None if the model cannot serve it, or all pools are busy."""
        with self._changed:
            queue = self.waiting.get(key)
            if not queue:
                return None
            first = queue[0]
        if len(self.pools) >= self.pools_limit:
            idle = next((other for other, pool in self.pools.items() if pool.idle and other not in self.waiting), None)
            if idle is None:
                return None
            del self.pools[idle]
        try:
            template = Template(self.split, first.arguments, self.padding, first.length or 0)
        except Exception as error:
            self._refuse(key, error)
            return None
        self.pools[key] = pool = Pool(template, self.rows, admission=self.admission, full=self.full, clock=self.clock)
        return pool

    def _refuse(self, key: Any, error: Exception) -> None:
        """Fail all waiting requests of a kind that the model cannot serve."""
        shapes = [tuple(shape) for shape, _ in key[1]]
        if not isinstance(error, UnservableModelError):
            reason = InvalidRequestError(
                f"The model does not take inputs of shape {shapes}: {type(error).__name__}: {error}"
            )
            reason.__cause__ = error
            error = reason
        for ticket in self._take(key, self.queue):
            ticket.fail(error)

    def _notice_cancel(self) -> None:
        self._cancelled = True

    def _drop_cancelled(self) -> None:
        """Free the rows of cancelled requests."""
        self._cancelled = False
        self._next_overdue = -INF  # check the queue too
        for pool in self.pools.values():
            pool.drop_cancelled()

    def _fail_overdue(self, now: float) -> None:
        """Fail requests whose deadline passed in the queue: they have no iterate to return."""
        overdue: list[Ticket] = []
        with self._changed:
            for key, queue in list(self.waiting.items()):
                kept = deque(t for t in queue if not t.cancelled() and (t.deadline is None or now < t.deadline))
                overdue += [t for t in queue if not t.cancelled() and t.deadline is not None and now >= t.deadline]
                self._queued -= len(queue) - len(kept)
                self.waiting[key] = kept
                if not kept:
                    del self.waiting[key]
            queued = [ticket for queue in self.waiting.values() for ticket in queue]
            staged = [ticket for pool in self.pools.values() for ticket in pool.staging.tickets]
            self._next_overdue = min((ticket.deadline or INF for ticket in queued + staged), default=INF)
        overdue += [ticket for pool in self.pools.values() for ticket in pool.staging.take_overdue(now)]
        for ticket in overdue:
            message = "The deadline passed before a row was free. Allow more time, or send fewer requests."
            ticket.fail(DeadlineExceededError(message))

    # the thread

    def start(self) -> Engine:
        """Run the steps in a thread, which sleeps while there is nothing to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="equilibria-engine", daemon=True)
            self._thread.start()
        return self

    def _loop(self) -> None:
        """Step until the engine is closed, or drained and idle; the body of the thread."""
        while not self._closing:
            self.run()
            with self._changed:
                if self._draining and self._queued == 0:
                    return
                self._asleep = True
                self._changed.wait_for(lambda: self._queued > 0 or self._closing or self._draining)
                self._asleep = False

    def drain(self, timeout: float | None = None) -> bool:
        """Accept no more requests and answer the accepted ones; return False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
        if self._thread is None:
            self.run()
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop the engine; unanswered requests fail with EngineClosedError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            left = [ticket for pool in self.pools.values() for ticket in pool.tickets()]
            with self._changed:
                left += [ticket for queue in self.waiting.values() for ticket in queue]
                self.waiting.clear()
                self._queued = 0
            self.pools.clear()
        for ticket in left:
            ticket.fail(EngineClosedError("The engine was closed before this request was answered."))

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    # state

    @property
    def alive(self) -> bool:
        """True while the thread of `start` runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def queued(self) -> int:
        """Number of requests that wait for a row."""
        return self._queued + sum(len(pool.staging.tickets) for pool in list(self.pools.values()))

    @property
    def active(self) -> int:
        """Number of rows in use."""
        return sum(pool.active for pool in list(self.pools.values()))

    def counts(self) -> Counts:
        """Return the counts summed over all open pools."""
        total = Counts()
        for pool in list(self.pools.values()):
            for name in ("answered", "steps", "row_steps", "evaluated", "exchanges", "alone"):
                setattr(total, name, getattr(total, name) + getattr(pool.counts, name))
            for status, number in list(pool.counts.statuses.items()):
                total.statuses[status] = total.statuses.get(status, 0) + number
        return total

    def residuals(self) -> list[tuple[int, int, float]]:
        """Return (row, steps so far, residual over tolerance of the best iterate) for the rows in use.

        The call does not wait for the end of a step.
        """
        return [entry for pool in list(self.pools.values()) for entry in pool.residuals()]
