"""Write the pages of the site, from docs/ and results/, to build/pages: `python docs/site_pages.py` before a build.

A script instead of hooks, because other builders ignore the hooks of mkdocs. It adds the reports of results/, divides the
API into pages, shows captions below pictures, and links `tests/FILE.py::test_name` to a page with the sources of tests.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
BY_HAND = "NOTES.md"  # the overview of results ends with it
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
TESTS = "named-tests.md"
PICTURE = re.compile(r"^!\[(?P<caption>[^\]]+)\]\((?P<file>[^)]+)\)$", re.MULTILINE)
VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
# page: its title, and the sections of docs/api.md that it has
API = {
    "layers": ("Layers, starts, stopping", ("Layers", "Starts", "Looped models", "Stopping", "Results")),
    "solvers": ("Solvers", ("Solvers",)),
    "gradients": ("Gradients", ("Gradients",)),
    "cells": ("Cells, penalties, constraints", ("Monotone cells", "Penalties", "Constraints")),
    "analysis": ("Analysis", ("Measurements", "Diagnosis and tuning")),
    "models": ("Models and export", ("Models", "Export")),
    "lab": ("Data, training, experiments", ("Data", "Training", "Experiments")),
    "serving": ("Serving and integrations", ("Serving", "Integrations")),
}


def write(pages: Path = PAGES) -> None:
    """Write all pages anew."""
    shutil.rmtree(pages, ignore_errors=True)
    texts = sources()
    texts |= api_pages(texts.pop("api.md"))
    texts[TESTS] = tests_page(texts)
    texts["index.md"] = landing(texts["index.md"])
    for name, text in texts.items():
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        (pages / name).write_text(with_links(with_captions(text), name))
    for name, path in files().items():
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, pages / name)


def sources() -> dict[str, str]:
    """The Markdown pages by name."""
    found = {path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
    reports = (path for path in sorted((ROOT / "results").rglob("*.md")) if path.name != BY_HAND)
    found |= {path.relative_to(ROOT).as_posix(): path for path in reports}
    return {name: path.read_text() for name, path in found.items()}


def files() -> dict[str, Path]:
    """Everything else that pages show or link to."""
    kinds = {".png", ".gif", ".svg", ".css", ".json"}
    docs = (path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in kinds)
    found = {path.relative_to(ROOT / "docs").as_posix(): path for path in docs}
    return found | {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "results").rglob("*.png"))}


def api_pages(text: str) -> dict[str, str]:
    """The API in pages by room, and an overview that links to them."""
    first, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    if left := sections.keys() - {section for _, own in API.values() for section in own}:
        raise SystemExit(f"docs/api.md has sections that no page shows: {', '.join(sorted(left))}. Add them to API here.")
    found, lines = {}, []
    for name, (title, own) in API.items():
        body = "".join(f"## {section}\n{sections[section]}" for section in own) if len(own) > 1 else sections[own[0]]
        found[f"api/{name}.md"] = f"# {title}\n\n{body.lstrip()}"
        names = re.findall(r"^::: equilibria\.(\S+)", body, flags=re.MULTILINE)
        shown = ", ".join(f"[`{each.rpartition('.')[2]}`][equilibria.{each}]" for each in names)
        lines.append(f"| [{title}](api/{name}.md) | {shown} |")
    found["api.md"] = first + "| page | names |\n|---|---|\n" + "\n".join(lines) + "\n"
    return found


def tests_page(texts: dict[str, str]) -> str:
    """The sources of all tests that pages name."""
    named = sorted({found for text in texts.values() for found in TEST.findall(text)})
    parts = ["# Tests that these pages name"]
    for path, name in named:
        parts.append(f'<span id="{_anchor(path, name)}"></span>\n`{path}`\n\n```python\n{_source(ROOT / path, name)}\n```')
    return "\n\n".join(parts) + "\n"


def landing(text: str) -> str:
    """The first page with the version."""
    (version,) = VERSION.findall((ROOT / "equilibria" / "__init__.py").read_text())
    return text.replace("# equilibria\n", f"# equilibria\n\nVersion {version}.\n", 1)


def with_captions(text: str) -> str:
    """Pictures that stand alone get their description as a visible caption."""
    return PICTURE.sub(
        r'<figure markdown="span">\n![\g<caption>](\g<file>)\n<figcaption>\g<caption></figcaption>\n</figure>', text
    )


def with_links(text: str, name: str) -> str:
    """Names of tests link to the page with their sources."""
    up = "../" * name.count("/")
    return TEST.sub(lambda found: f"[{found[0]}]({up}{TESTS}#{_anchor(*found.groups())})", text) if name != TESTS else text


def _anchor(path: str, name: str) -> str:
    return f"{Path(path).stem}-{name}"


def _source(path: Path, name: str) -> str:
    """The source of a test, with its decorators."""
    text = path.read_text()
    (test,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == name)
    first = min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : test.end_lineno])


if __name__ == "__main__":
    write()
