"""A table's report as one HTML page that needs nothing but itself, for light and dark screens."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from equilibria.reports.markdown import body, heads, published_columns
from equilibria.reports.table import Results, Verdict, protocol

CLASSES = {"held": "well", "did not hold": "ill", "undecided": "hint"}
STYLE = """
td.published { opacity: .75; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.scale { border: 1px solid var(--line); border-radius: .4rem; padding: .1rem .5rem; font-size: .9rem; }
"""


def page(results: Results, pictures: Mapping[str, tuple[str, bytes]]) -> str:
    """One document; `pictures` are (title, PNG) by name."""
    table = results.table
    claims = "".join(map(_claim, results.verdicts())) or "<li>None.</li>"
    notes = "".join(f"<li>{escape(line)}</li>" for line in protocol(results))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(table.title)}</title><style>{_style()}</style></head><body><main>\n"
        f'<h1>{escape(table.title)} <span class="scale">{results.scale}</span></h1>\n'
        f"<p>Source: {escape(table.source)}.</p>\n"
        f"{_table(results)}\n<h2>Claims</h2>\n<ul>{claims}</ul>\n<h2>Protocol</h2>\n<ul>{notes}</ul>\n"
        f'<h2>Curves</h2>\n<div class="plots">{_plots(pictures)}</div>\n</main></body></html>\n'
    )


def _claim(verdict: Verdict) -> str:
    return (
        f'<li class="{CLASSES[verdict.word]}"><b>{verdict.word.capitalize()}:</b> {escape(verdict.claim.text)}. '
        f"<i>Seen:</i> {escape(verdict.seen)}.</li>"
    )


def _table(results: Results) -> str:
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
    return f"<table><tr><th>model</th>{top}</tr><tr><th></th>{under}</tr>{lines}</table>"


def _plots(pictures: Mapping[str, tuple[str, bytes]]) -> str:
    return "".join(
        f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        f"<figcaption>{escape(title)}</figcaption></figure>"
        for title, content in pictures.values()
    )


def _style() -> str:
    return files("equilibria.diagnosis").joinpath("style.css").read_text() + STYLE
