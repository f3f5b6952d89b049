"""Self-contained HTML pages with light and dark colours, for the diagnosis and for the reports of runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from importlib.resources import files

Pictures = Mapping[str, tuple[str, bytes]]  # (title, PNG) by name


def document(title: str, body: str) -> str:
    """Return a page with an inline stylesheet. `title` is text and gets escaped; `body` is HTML."""
    style = files("equilibria.analysis").joinpath("style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>\n{body}\n</main></body></html>\n"
    )


def plots(pictures: Pictures) -> str:
    """Return the pictures side by side, inlined as base64, each with its title as the caption."""
    figures = []
    for title, content in pictures.values():
        source, caption = f"data:image/png;base64,{base64.b64encode(content).decode()}", escape(title)
        figures.append(f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>')
    return '<div class="plots">' + "".join(figures) + "</div>"
