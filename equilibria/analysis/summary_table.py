"""The parts of a model and the settings of its equilibria, and how they are printed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equilibria._core.loop import Stop
from equilibria.analysis.measuring import brief
from equilibria.gradients.base import Gradient
from equilibria.solvers.fallback import AnySolver

WIDTH = 100  # of the table
NARROWEST = 16  # of a column of text that is cut
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Solves:
    """What the solves of one layer took on some inputs."""

    state: Shapes  # of the tensors of a sample's state
    count: int
    samples: int  # of all solves together, as the numbers that follow
    evaluations: int
    mean_depth: float
    max_depth: int
    residual: float  # relative, of the worst sample
    failed: int

    @property
    def numbers(self) -> int:
        """The size of the state of a sample."""
        return sum(map(math.prod, self.state))

    def __str__(self) -> str:
        solves = f"{self.count} solves of " if self.count > 1 else ""
        return (
            f"{solves}{self.samples:,} {'sample' if self.samples == 1 else 'samples'}, {self.failed:,} failed: "
            f"{self.evaluations:,} evaluations, depth {self.mean_depth:.1f} mean, {self.max_depth} max, "
            f"worst residual {self.residual:.1e}"
        )


@dataclass(frozen=True)
class Settings:
    """How an equilibrium layer is set, and what its solves took where inputs were given that lead to it."""

    solver: AnySolver
    stop: Stop
    eval_stop: Stop | None
    gradient: Gradient
    solves: Solves | None

    def lines(self) -> Iterator[tuple[str, str]]:
        """One line per setting."""
        yield "solver", brief(self.solver)
        yield "stop", _stop_text(self.stop)
        if self.eval_stop is not None:
            yield "eval stop", _stop_text(self.eval_stop)
        yield "gradient", brief(self.gradient)
        if self.solves is not None:
            yield "state", f"{shapes_text(self.solves.state)}, {self.solves.numbers:,} numbers a sample"
            yield "solved", str(self.solves)


@dataclass(frozen=True)
class Row:
    """One part of a model with all that is inside of it.

    trained, frozen, buffers  numbers in them; tied ones count once
    output                    shapes of the tensors it returned first; None: it was not run
    equilibrium               of a DEQ
    """

    name: str  # in the model, "" for all of it
    label: str  # the same below the part that it is shown under
    kind: str
    level: int  # how far it is indented
    trained: int
    frozen: int
    buffers: int
    output: Shapes | None = None
    equilibrium: Settings | None = None


@dataclass(frozen=True)
class Summary:
    """The parts of a model, the model itself first; printed, a table of at most 100 columns."""

    rows: tuple[Row, ...]
    bytes: int  # of parameters and buffers

    @property
    def parameters(self) -> int:
        """Trained and frozen."""
        return self.rows[0].trained + self.rows[0].frozen

    @property
    def megabytes(self) -> float:
        """Millions of bytes."""
        return self.bytes / 1e6

    @property
    def equilibria(self) -> dict[str, Settings]:
        """The settings of the equilibrium layers, by name."""
        return {row.name: row.equilibrium for row in self.rows if row.equilibrium is not None}

    def __str__(self) -> str:
        return "\n".join([*self._table(), *self._equilibria(), "", self._totals()])

    def _table(self) -> list[str]:
        with_output = any(row.output is not None for row in self.rows)
        cells = [["part", "kind", *(["output"] if with_output else []), "trained", "frozen", "buffers"]]
        cells += [_cells(row, with_output) for row in self.rows]
        text = 3 if with_output else 2  # columns of text stand left, numbers right
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        widths[:text] = _squeezed(widths[:text], WIDTH - sum(widths[text:]) - 2 * (len(widths) - 1))
        lines = []
        for line in cells:
            left = [_cut(each, width).ljust(width) for each, width in zip(line[:text], widths, strict=False)]
            right = [each.rjust(width) for each, width in zip(line[text:], widths[text:], strict=True)]
            lines.append("  ".join([*left, *right]))
        return [lines[0], "-" * len(lines[0]), *lines[1:]]

    def _equilibria(self) -> list[str]:
        lines: list[str] = []
        for name, settings in self.equilibria.items():
            lines += ["", f"{name or self.rows[0].kind}: an equilibrium"]
            for what, text in settings.lines():
                lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {what:<10} ", subsequent_indent=" " * 13)
        return lines

    def _totals(self) -> str:
        total = self.rows[0]
        return (
            f"{self.parameters:,} parameters, {total.trained:,} of them trained; {total.buffers:,} numbers in buffers; "
            f"{self.megabytes:.3g} MB"
        )


def shapes_text(shapes: Shapes) -> str:
    """Shapes as text, separated by commas."""
    return ", ".join(map(str, shapes))


def _cells(row: Row, with_output: bool) -> list[str]:
    output = "-" if not row.output else shapes_text(row.output)
    numbers = (f"{number:,}" if number else "-" for number in (row.trained, row.frozen, row.buffers))
    return ["  " * row.level + row.label, row.kind, *([output] if with_output else []), *numbers]


def _stop_text(stop: Stop) -> str:
    return f"rtol {stop.rtol:g}, atol {stop.atol:g}, at most {stop.max_steps} steps"


def _squeezed(widths: Sequence[int], room: int) -> list[int]:
    """The widest of some columns made narrower, as long as they do not fit."""
    found = list(widths)
    while sum(found) > room and max(found) > NARROWEST:
        found[found.index(max(found))] -= 1
    return found


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
