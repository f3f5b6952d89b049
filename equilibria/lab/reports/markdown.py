"""A table's report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from equilibria.lab.experiments.definitions import Column
from equilibria.lab.reports.table import TableResults, figure_text, protocol

MARKS = {"held": "held", "did not hold": "**did not hold**", "undecided": "undecided"}


def page(results: TableResults, pictures: Mapping[str, str]) -> str:
    """`pictures` are titles by file name."""
    table = results.table
    parts = [
        f"# {table.title}",
        f"Source: {table.source}. Scale: {results.scale}.",
        "\n".join(_rows(heads(results), body(results))),
        "## Claims",
        "\n".join(f"- {MARKS[v.word]}: {v.claim.text}. Seen: {v.seen}." for v in results.verdicts()) or "None.",
        "## Protocol",
        "\n".join(f"- {line}" for line in protocol(results)),
    ]
    if pictures:
        parts += ["## Curves", "\n\n".join(f"![{title}]({name})" for name, title in pictures.items())]
    return "\n\n".join(parts) + "\n"


def published_columns(results: TableResults) -> set[str]:
    """Names of the columns with a published figure in any row."""
    return {name for row in results.table.rows for name in row.published}


def heads(results: TableResults) -> list[str]:
    known = published_columns(results)

    def titles(column: Column) -> list[str]:
        return [f"{column.title}, published", f"{column.title}, ours"] if column.name in known else [column.title]

    return ["model", *(title for column in results.table.columns for title in titles(column))]


def body(results: TableResults) -> list[list[str]]:
    """A line per row, the published figure before ours."""
    known = published_columns(results)
    lines = []
    for row in results.table.rows:
        cells = [row.title]
        for column in results.table.columns:
            if column.name in known:
                cells.append(figure_text(row.published.get(column.name), column))
            cells.append(figure_text(results.figure(row.name, column), column))
        lines.append(cells)
    return lines


def _rows(head: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]
