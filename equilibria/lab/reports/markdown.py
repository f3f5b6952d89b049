"""A table's report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from equilibria.lab.experiments.definitions import Column, TableRow
from equilibria.lab.reports.measured import Measured
from equilibria.lab.reports.table import TableResults, figure_text, letter, protocol

MARKS = {"held": "held", "did not hold": "**did not hold**", "undecided": "undecided"}


def page(results: TableResults, pictures: Mapping[str, str]) -> str:
    """Return the report as Markdown; `pictures` are titles by file name."""
    table = results.table
    parts = [
        f"# {table.title}",
        f"Source: {table.source}. Scale: {results.scale}.",
        "\n".join(_rows(heads(results), body(results))),
        "## Claims",
        "\n".join(f"- {MARKS[v.word]}: {v.claim.text}. Seen: {v.text}." for v in results.verdicts()) or "None.",
        "## Protocol",
        "\n".join(f"- {line}" for line in protocol(results)),
    ]
    if pictures:
        parts += ["## Curves", "\n\n".join(f"![{title}]({name})" for name, title in pictures.items())]
    return "\n\n".join(parts) + "\n"


def published_columns(results: TableResults) -> set[str]:
    """Return the names of columns with a published figure in any row."""
    return {name for row in results.table.rows for name in row.published}


def heads(results: TableResults) -> list[str]:
    """Return the titles of the columns; columns with published figures appear twice."""
    known = published_columns(results)

    def titles(column: Column) -> list[str]:
        return [f"{column.title}, published", f"{column.title}, ours"] if column.name in known else [column.title]

    return ["model", "runs", *(title for column in results.table.columns for title in titles(column))]


def body(results: TableResults) -> list[list[str]]:
    """Return a line for each row and machine, published figures before ours; a row that was not run has one line."""
    return [
        _line(results, row, measured)
        for row in results.table.rows
        for measured in results.measured.get(row.name, ()) or (None,)
    ]


def _line(results: TableResults, row: TableRow, measured: Measured | None) -> list[str]:
    """Return the texts of one line of the table."""
    known, machines = published_columns(results), results.machines()
    runs = "0" if measured is None else str(len(measured.runs))
    if measured is not None and len(machines) > 1:
        runs += f" on {letter(machines.index(measured.machine))}"
    cells = [row.label(results.scale), runs]
    for column in results.table.columns:
        if column.name in known:
            cells.append(figure_text(row.published.get(column.name), column))
        cells.append(figure_text(None if measured is None else results.figure(row.name, column, measured), column))
    return cells


def _rows(head: list[str], lines: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]
