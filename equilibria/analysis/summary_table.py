"""The table that `summary` returns, and how it is printed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from equilibria.analysis.measuring import brief
from equilibria.gradients.base import Gradient
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

WIDTH = 100  # characters of the table
NARROWEST = 16  # least characters of a text column that is cut
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Solves:
    """Statistics of the solves of one layer."""

    state: Shapes  # shapes of the tensors of a sample's state
    count: int
    samples: int  # summed over all solves, like the numbers below
    evaluations: int
    mean_depth: float
    max_depth: int
    residual: float  # largest relative residual of a sample
    failed: int

    @property
    def numbers(self) -> int:
        """Size of the state of a sample."""
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
    """The settings of an equilibrium layer, and its solves if it ran."""

    solver: AnySolver
    stop: Stop
    eval_stop: Stop | None
    gradient: Gradient
    solves: Solves | None

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of every setting."""
        yield "solver", brief(self.solver)
        yield "stop", _stop_text(self.stop)
        if self.eval_stop is not None:
            yield "eval stop", _stop_text(self.eval_stop)
        yield "gradient", brief(self.gradient)
        if self.solves is not None:
            yield "state", f"{shapes_text(self.solves.state)}, {self.solves.numbers:,} numbers a sample"
            yield "solved", str(self.solves)


@dataclass(frozen=True)
class SummaryRow:
    """One part of a model, including everything inside it.

    trained, frozen, buffers  counts of numbers; tied tensors count once
    output                    shapes of the tensors that its first call returned; None: it did not run
    equilibrium               settings, for a DEQ
    """

    name: str  # name in the model, "" for the model itself
    label: str  # name relative to the part it is shown under
    kind: str
    level: int  # indentation
    trained: int
    frozen: int
    buffers: int
    output: Shapes | None = None
    equilibrium: Settings | None = None


@dataclass(frozen=True)
class Summary:
    """The parts of a model, the model itself first; prints as a table of at most 100 columns."""

    rows: tuple[SummaryRow, ...]
    bytes: int  # of parameters and buffers

    @property
    def parameters(self) -> int:
        """Number of trained and frozen parameters."""
        return self.rows[0].trained + self.rows[0].frozen

    @property
    def megabytes(self) -> float:
        """Size in millions of bytes."""
        return self.bytes / 1e6

    @property
    def equilibria(self) -> dict[str, Settings]:
        """Settings of the equilibrium layers, by name."""
        return {row.name: row.equilibrium for row in self.rows if row.equilibrium is not None}

    def __str__(self) -> str:
        lines: list[str] = []
        for name, settings in self.equilibria.items():
            lines += ["", f"{name or self.rows[0].kind}: an equilibrium"]
            for what, text in settings.lines():
                lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {what:<10} ", subsequent_indent=" " * 13)
        total = self.rows[0]
        return "\n".join(
            [
                *self._table(),
                *lines,
                "",
                f"{self.parameters:,} parameters, {total.trained:,} of them trained; {total.buffers:,} numbers in buffers; "
                f"{self.megabytes:.3g} MB",
            ]
        )

    def _table(self) -> list[str]:
        """Return the lines of the table."""
        with_output = any(row.output is not None for row in self.rows)
        cells = [["part", "kind", *(["output"] if with_output else []), "trained", "frozen", "buffers"]]
        cells += [_cells(row, with_output) for row in self.rows]
        text = 3 if with_output else 2  # text columns are left-aligned, numbers right-aligned
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        # the widest columns shrink until the line fits into `room` characters
        room = WIDTH - sum(widths[text:]) - 2 * (len(widths) - 1)
        found = list(widths[:text])
        while sum(found) > room and max(found) > NARROWEST:
            found[found.index(max(found))] -= 1
        widths[:text] = found
        lines = []
        for line in cells:
            left = [_cut(each, width).ljust(width) for each, width in zip(line[:text], widths, strict=False)]
            right = [each.rjust(width) for each, width in zip(line[text:], widths[text:], strict=True)]
            lines.append("  ".join([*left, *right]))
        return [lines[0], "-" * len(lines[0]), *lines[1:]]


def shapes_text(shapes: Shapes) -> str:
    """Return shapes as text, separated by commas."""
    return ", ".join(map(str, shapes))


def _cells(row: SummaryRow, with_output: bool) -> list[str]:
    """Return the texts of a row, one per column."""
    output = "-" if not row.output else shapes_text(row.output)
    numbers = (f"{number:,}" if number else "-" for number in (row.trained, row.frozen, row.buffers))
    return ["  " * row.level + row.label, row.kind, *([output] if with_output else []), *numbers]


def _stop_text(stop: Stop) -> str:
    return f"rtol {stop.rtol:g}, atol {stop.atol:g}, at most {stop.max_steps} steps"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
