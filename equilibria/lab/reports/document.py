"""One HTML page that needs nothing but itself, for light and dark screens."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from importlib.resources import files

STYLE = """
td.published { opacity: .75; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.scale { border: 1px solid var(--line); border-radius: .4rem; padding: .1rem .5rem; font-size: .9rem; }
"""

Pictures = Mapping[str, tuple[str, bytes]]  # (title, PNG) by name


def document(title: str, body: str) -> str:
    """`body` is HTML, `title` is not."""
    style = files("equilibria.analysis.diagnosis").joinpath("style.css").read_text() + STYLE
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>\n{body}\n</main></body></html>\n"
    )


def plots(pictures: Pictures) -> str:
    return '<div class="plots">' + "".join(_figure(title, content) for title, content in pictures.values()) + "</div>"


def _figure(title: str, content: bytes) -> str:
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return f'<figure><img alt="{escape(title)}" src="{source}"><figcaption>{escape(title)}</figcaption></figure>'
