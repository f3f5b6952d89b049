"""The rows of a pool, which start and stop at different steps, and the interface of their solve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equilibria.serving.tickets import Ticket

INF = float("inf")
NUMBERS = ("length", "size", "first_length", "first_size", "peak", "last")  # of a row that has left, see `RowResults`


@dataclass(eq=False, slots=True)
class Row:
    """A request and its row."""

    ticket: Ticket
    born: int  # pool step at which its start is evaluated
    end: int  # pool step at which its steps run out
    rtol: float
    root: float  # norm of a state of ones
    starts: Tensor  # (requests, n), the starts of the requests that entered with it
    at: int  # position of its own start in `starts`
    watched: bool = False  # its progress is checked at every step
    milestone: float = INF  # residual over tolerance at the last progress
    waiting: int = 0  # steps since then


@dataclass(eq=False, slots=True)
class Left:
    """A row that has left the solve. Its place keeps its stored tensors until rows are exchanged."""

    row: Row
    place: int
    reason: str  # "stopped", "stalled", "diverged", "steps", "late" or "unusual"
    kept: Any = None  # what the solve recorded when the row left


@dataclass(eq=False, slots=True)
class RowResults:
    """The results of rows that have left.

    z        (rows, n), best iterates
    status   values of `Status`, not yet settled for rows that failed
    numbers  6 lists, NUMBERS: norm of the residual and of f(z) at the best iterate, both at the start, the largest and
             the last residual
    """

    z: Tensor
    status: list[int]
    steps: list[int]
    numbers: list[list[float]]


class SolveRows(ABC):
    """The iterates, histories and records of the rows of a pool.

    A step is `propose`, then `begin` for new rows, an evaluation of the cell, and `record`.
    """

    @abstractmethod
    def extend(self, count: int) -> None:
        """Append rows without a request."""

    @abstractmethod
    def cut(self, count: int) -> None:
        """Keep the first `count` rows."""

    @abstractmethod
    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Move the rows at `source` to `target`."""

    @abstractmethod
    def propose(self, depth: Callable[[], int] | None) -> Tensor:
        """Return the points to evaluate next, (rows, n).

        depth  returns the number of steps that the oldest row has taken; None if all rows are new
        """

    @abstractmethod
    def begin(self, z: Tensor, index: Tensor, rows: Sequence[Row], numbers: Sequence[int] | None, z0: Tensor) -> Tensor:
        """Return the points `z` with the starts of new rows at `index`, and set up these rows.

        numbers  size of each new row's state without padding; None: the full size
        """

    @abstractmethod
    def record(self, z: Tensor, fz: Tensor, step: int, rows: Sequence[Row | None], new: Sequence[int]) -> dict[int, str]:
        """Record the values at the points; return the rows that are done, with the reason.

        new  rows at their start
        """

    @abstractmethod
    def suspects(self, new: Sequence[int], least: float, most: float) -> list[int]:
        """Return the `new` rows with a norm of f(z) outside of [least, most] or a residual norm that is not finite."""

    @abstractmethod
    def leave(self, place: int, row: Row, step: int, reason: str) -> Left:
        """Take a row out of the solve."""

    @abstractmethod
    def release(self, place: int) -> None:
        """Drop a row whose request was cancelled."""

    @abstractmethod
    def results(self, left: Sequence[Left]) -> RowResults:
        """Return the results of rows that have left since the last exchange."""

    @abstractmethod
    def excess(self) -> list[float]:
        """Return the residual over tolerance of the best iterate of every row."""
