"""The page that compares us with others: every claim of ours names a test that is there; so do those of other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import equilibria as eq

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "comparison.md").read_text()
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
DEFINED = re.compile(r"^\s*def (test_\w+)\(", re.MULTILINE)
COLUMNS = ["feature", "equilibria", "TorchDEQ", "DEQ.jl", "jaxopt", "optimistix"]


def _rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row != COLUMNS]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    references = REFERENCE.findall(text)
    missing = [f"{file}::{name}" for file, name in references if name not in DEFINED.findall((ROOT / file).read_text())]
    assert not missing
    assert len(references) == text.count("::test_"), "a reference is not written as `tests/FILE.py::test_name`"


def test_every_row_is_complete_and_names_a_test_in_our_column() -> None:
    rows = _rows()
    assert len(rows) >= 60 and len({row[0] for row in rows}) == len(rows)
    assert all(len(row) == len(COLUMNS) and all(row) for row in rows)
    assert [row[0] for row in rows if not REFERENCE.search(row[1])] == []


def test_the_number_of_tests_is_not_overstated() -> None:
    stated = re.search(r"more than (\d+) test functions", PAGE)
    found = sum(len(DEFINED.findall(file.read_text())) for file in (ROOT / "tests").rglob("test_*.py"))
    assert stated is not None and found > int(stated[1])


def test_types_and_licence_ship_with_the_package() -> None:
    assert (Path(eq.__file__).parent / "py.typed").exists()
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^equilibria = \[.*"py\.typed".*\]$', project, re.MULTILINE)
    assert 'license = "MIT"' in project and (ROOT / "LICENSE").read_text().startswith("MIT")
