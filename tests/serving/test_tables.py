"""The tables of docs/serving.md are those of the stored figures."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_the_page_are_made_from_the_stored_figures() -> None:
    found = runpy.run_path(str(DOCS / "serving_tables.py"))
    page = (DOCS / "serving.md").read_text()
    assert found["written"](page) == page, "Run `python docs/serving_tables.py`."
    assert {name for _, name, _ in found["BLOCK"].findall(page)} == set(found["TABLES"])
