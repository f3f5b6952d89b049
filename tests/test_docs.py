"""Every Python block of README and docs runs as it stands, in order, page by page; the API page has all that is public."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest

import equilibria as eq

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"^::: (equilibria[.\w]*)(?:\n +options:\n +members: \[([^\]]*)\])?", re.MULTILINE)
NEEDS = {"monitoring.md": ("accelerate", "lightning", "transformers")}  # the extra `integrations`
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_runs(page: Path) -> None:
    for library in NEEDS.get(page.name, ()):
        pytest.importorskip(library, reason="needs the extra `integrations`: pip install 'equilibria[integrations]'")
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_api_page_has_every_public_name_and_no_other() -> None:
    shown: dict[str, set[str]] = {}
    for name, members in ENTRY.findall((ROOT / "docs" / "api.md").read_text()):
        home, _, last = name.rpartition(".")
        shown.setdefault(home, set()).add(last)
        if members:
            shown.setdefault(name, set()).update(members.replace(",", " ").split())
    assert (shown.pop("equilibria") | {"nn"}) - {"models", "serving"} == set(eq.__all__)
    for name, members in shown.items():
        own = set(importlib.import_module(name).__all__) - set(eq.__all__)
        assert members - set(eq.__all__) == own, name


def test_the_readme_shows_the_committed_results() -> None:
    found = runpy.run_path(str(ROOT / "docs" / "stored_figures.py"))
    for path in found["files"]():
        text = path.read_text()
        assert found["written"](text) == text, f"{path}: run `make readme`."
    assert found["lines"]() in (ROOT / "README.md").read_text()


def test_measured_figures_come_from_the_committed_results() -> None:
    """Beside a mention of a table, and in the notes, figures stand between marks, settings in code spans."""
    mark = runpy.run_path(str(ROOT / "docs" / "stored_figures.py"))["MARK"]
    texts = {"results/NOTES.md": (ROOT / "results" / "NOTES.md").read_text()}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        paragraphs = re.split(r"\n\s*\n", path.read_text())
        texts |= {f"{path.name} {i}": text for i, text in enumerate(paragraphs) if re.search(r"`results/[a-z0-9-]+`", text)}
    for name, text in texts.items():
        bare = re.sub(r"`[^`]*`", "", mark.sub("", text))
        typed = re.findall(r"\d+\.\d+|\d+ %", bare)
        assert not typed, f"{name}: {typed} typed by hand"


def test_the_page_of_machines_shows_the_committed_runs() -> None:
    found = runpy.run_path(str(ROOT / "docs" / "machine_tables.py"))
    page = (ROOT / "docs" / "machines.md").read_text()
    assert found["written"](page) == page, "Run `python docs/machine_tables.py`."
    assert all(table() in page for table in found["TABLES"].values())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600
