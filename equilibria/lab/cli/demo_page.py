"""The sections of the demo, as text for the terminal and as one HTML page with charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from equilibria.analysis.html_document import document, plots
from equilibria.analysis.plots import COLOURS, INK, finish, new_axes, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from equilibria.lab.experiments.digits.argument import DemoSetting, Quarter

TITLE = "An equilibrium classifier of digits"


@dataclass(frozen=True)
class Section:
    """A section of the demo: a title, a table, and a chart as (caption, function that draws it)."""

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    chart: tuple[str, Callable[[Axes], object]] | None = None

    def text(self) -> str:
        """Return the section as text, with columns separated by two spaces; lines fit into 80 characters."""
        if not self.rows:
            return self.title
        lines = [self.heads, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.heads))]
        shown = [
            "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([self.title, *(f"  {line}" for line in shown)])

    def html(self) -> str:
        """Return the title and the table as HTML."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.heads)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<h2>{escape(self.title)}</h2>" + (f"<table><tr>{head}</tr>{body}</table>" if self.rows else "")


def page(sections: Sequence[Section]) -> str:
    """Return the HTML page: the charts of all sections side by side, then the sections."""
    drawn = {section.title: _drawn(*section.chart) for section in sections if section.chart is not None}
    link = '<p>All figures, curves and the protocol: <a href="report.html">the report of the runs</a>.</p>'
    about = "<p>Measured on this machine by <code>equilibria demo</code>, with one seed.</p>"
    return document(TITLE, f"<h1>{TITLE}</h1>{about}{plots(drawn)}{''.join(section.html() for section in sections)}{link}")


def _drawn(caption: str, draw: Callable[[Axes], object]) -> tuple[str, bytes]:
    """Return the caption and the chart as a PNG file."""
    axes = new_axes()
    draw(axes)
    return caption, png(axes)


def draw_memory(axes: Axes, rows: Mapping[int, Mapping[str, int]]) -> None:
    """Plot the peak memory over depth, one line per kind of network."""
    for kind, colour in zip(("equilibrium", "explicit"), COLOURS, strict=False):
        axes.plot(list(rows), [row[kind] / 1e6 for row in rows.values()], color=colour, marker="o", lw=1.8, label=kind)
    axes.set_ylim(bottom=0)  # from zero, so that a constant memory looks constant
    finish(axes, "layers or solver steps", "peak memory of a step, MB", legend=True)


def draw_quarters(axes: Axes, quarters: Sequence[Quarter]) -> None:
    """Plot the mean steps of every quarter as bars, with its accuracy above."""
    bars = axes.bar([q.name.replace(" ", "\n") for q in quarters], [q.steps for q in quarters], color=COLOURS[0])
    axes.bar_label(bars, [f"{q.accuracy:.1%}" for q in quarters], color=INK)
    finish(axes, "test digits by difficulty, their accuracy above", "solver steps, mean")


def draw_dial(axes: Axes, settings: Sequence[DemoSetting]) -> None:
    """Plot the accuracy over evaluations, with the tolerance at every point."""
    points = [(s.evaluations, 100 * s.accuracy) for s in settings]
    axes.plot(*zip(*points, strict=True), color=COLOURS[0], marker="o", lw=1.8)
    for s, point in zip(settings, points, strict=True):
        axes.annotate(f"{s.tolerance:g}", point, (4, 6), textcoords="offset points", color=INK)
    axes.margins(x=0.12, y=0.2)
    finish(axes, "evaluations per digit, tolerance at the points", "test accuracy, %")
