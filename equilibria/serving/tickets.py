"""The interface of a request: `submit` returns a Ticket, which later has an Answer or an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from equilibria.solution import Status


class ServingError(RuntimeError):
    """A request or a model cannot be served; the message gives the reason and a remedy."""


class UnservableModelError(ServingError):
    """The engine cannot serve this model; the message gives the reason."""


class InvalidRequestError(ServingError):
    """The inputs of a request do not fit the model."""


class QueueFullError(ServingError):
    """The queue of the engine is full; try again later."""


class DeadlineExceededError(ServingError):
    """The deadline passed before the request got a row, so there is no iterate to return."""


class EngineClosedError(ServingError):
    """The engine was closed before the request was answered."""


@dataclass(frozen=True, init=False)
class Answer:
    """The output for one request, and how its solve ended."""

    output: Any  # what the model returns, without the batch dimension
    status: Status  # MAX_STEPS if the deadline ended the solve
    steps: int
    residual: float  # relative residual of the iterate behind the output
    late: bool  # True if the deadline passed before convergence; the output then belongs to the best iterate so far
    waited: float  # seconds from `submit` until the request got a row
    seconds: float  # seconds from `submit` to the answer

    def __init__(
        self, output: Any, status: Status, steps: int, residual: float, late: bool, waited: float, seconds: float
    ) -> None:
        # fields are set together, because the constructor of a frozen dataclass sets each one and takes four times as long
        values = {"output": output, "status": status, "steps": steps, "residual": residual, "late": late}
        self.__dict__.update(values, waited=waited, seconds=seconds)

    @property
    def converged(self) -> bool:
        return self.status == Status.CONVERGED


class _Promise(Future[Answer]):
    """A future that notifies the engine when it is cancelled."""

    def __init__(self, given_up: Callable[[], None] | None) -> None:
        super().__init__()
        self._given_up = given_up

    def cancel(self) -> bool:
        done = super().cancel()
        if done and self._given_up is not None:
            self._given_up()
        return done


class Ticket:
    """A submitted request. `result()` waits for its Answer, or raises the error of the request."""

    def __init__(
        self,
        arguments: Any,
        rtol: float | None = None,
        max_steps: int | None = None,
        deadline: float | None = None,
        length: int | None = None,
        given_up: Callable[[], None] | None = None,
    ) -> None:
        self.arguments, self.length = arguments, length  # length before padding
        self.rtol, self.max_steps = rtol, max_steps
        self.submitted = time.monotonic()
        self.deadline = None if deadline is None else self.submitted + deadline
        self.admitted: float | None = None
        self.future: Future[Answer] = _Promise(given_up)

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the answer and return it; raises TimeoutError after `timeout` seconds."""
        return self.future.result(timeout)

    def done(self) -> bool:
        return self.future.done()

    def cancel(self) -> bool:
        """Cancel the request; its row is freed at the next step. Returns False if it is already answered."""
        return self.future.cancel()

    def cancelled(self) -> bool:
        return self.future.cancelled()

    def add_done_callback(self, call: Callable[[Ticket], None]) -> None:
        """Call `call(ticket)` when the request is answered, has failed or is cancelled."""
        self.future.add_done_callback(lambda _: call(self))

    def resolve(
        self, output: Any, status: Status, steps: int, residual: float, *, late: bool, now: float | None = None
    ) -> None:
        """Set the answer, unless the request was cancelled. `now` is the time of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        waited = (now if self.admitted is None else self.admitted) - self.submitted
        answer = Answer(output, status, steps, residual, late, waited, now - self.submitted)
        if self._claim():
            self.future.set_result(answer)

    def fail(self, error: BaseException) -> None:
        if self._claim():
            self.future.set_exception(error)

    def _claim(self) -> bool:
        """Mark the request as running, after which it cannot be cancelled; return False if it was cancelled before."""
        return not self.future.done() and self.future.set_running_or_notify_cancel()


def as_invalid_request(error: Exception) -> Exception:
    """Return an error of the model as an InvalidRequestError that names it."""
    if isinstance(error, InvalidRequestError):
        return error
    wrapped = InvalidRequestError(f"The model raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
