"""A table's report as one HTML page."""

from __future__ import annotations

from html import escape

from equilibria.analysis.html_document import Pictures, document, plots
from equilibria.lab.reports.markdown import body, heads, published_columns
from equilibria.lab.reports.table import TableResults, protocol
from equilibria.lab.reports.verdicts import Verdict

CLASSES = {"held": "ok", "did not hold": "error", "undecided": "hint"}


def page(results: TableResults, pictures: Pictures) -> str:
    """Return the report as one HTML document with the pictures inlined."""
    table = results.table
    claims = "".join(map(_claim, results.verdicts())) or "<li>None.</li>"
    notes = "".join(f"<li>{escape(line)}</li>" for line in protocol(results))
    body = (
        f'<h1>{escape(table.title)} <span class="scale">{results.scale}</span></h1>\n'
        f"<p>Source: {escape(table.source)}.</p>\n"
        f"{_table(results)}\n<h2>Claims</h2>\n<ul>{claims}</ul>\n<h2>Protocol</h2>\n<ul>{notes}</ul>\n"
        f"<h2>Curves</h2>\n{plots(pictures)}"
    )
    return document(table.title, body)


def _claim(verdict: Verdict) -> str:
    """Return a claim with its verdict as a list item."""
    return (
        f'<li class="{CLASSES[verdict.word]}"><b>{verdict.word.capitalize()}:</b> {escape(verdict.claim.text)}. '
        f"<i>Seen:</i> {escape(verdict.text)}.</li>"
    )


def _table(results: TableResults) -> str:
    """Return the table with published figures and ours side by side."""
    known = published_columns(results)
    columns = results.table.columns
    top = "".join(f'<th colspan="{2 if c.name in known else 1}">{escape(c.title)}</th>' for c in columns)
    under = "".join("<th>published</th><th>ours</th>" if c.name in known else "<th>ours</th>" for c in columns)
    published = [head.endswith(", published") for head in heads(results)]
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td class="published">{escape(cell)}</td>' if old else f"<td>{escape(cell)}</td>"
            for cell, old in zip(cells, published, strict=True)
        )
        + "</tr>"
        for cells in body(results)
    )
    return (
        f"<table class='report'><tr><th>model</th><th>runs</th>{top}</tr><tr><th></th><th></th>{under}</tr>{lines}</table>"
    )
