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
    """Return the pictures side by side, each with its title as the caption."""
    return '<div class="plots">' + "".join(_figure(title, content) for title, content in pictures.values()) + "</div>"


def _figure(title: str, content: bytes) -> str:
    """Return an HTML figure with the PNG inlined as base64."""
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return f'<figure><img alt="{escape(title)}" src="{source}"><figcaption>{escape(title)}</figcaption></figure>'
