"""Write the figures of results/*/table.json into README.md, docs/*.md and results/NOTES.md: `python docs/stored_figures.py`.

A figure stands between marks, `<!-- = TABLE ROW COLUMN -->1.23<!-- /= -->`; README.md has a block of lines besides. What is
between the marks is replaced by what the table has, mean and deviation over runs.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- results: [^>]*-->\n).*?(<!-- end of results -->)", re.DOTALL)
MARK = re.compile(r"(<!-- = (\S+) (\S+) (\S+) -->).*?(<!-- /= -->)", re.DOTALL)
# table, row, column: one line each
LINES = [
    ("skipdeq-mnist-mlp", "v2", "accuracy"),
    ("jfb-mnist", "jfb", "accuracy"),
    ("ignn-cox2", "implicit", "best"),
    ("ignn-chains", "implicit", "at_10"),
    ("ptb-transformer", "deq", "valid"),
]


def files() -> list[Path]:
    """All files with figures."""
    return [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "NOTES.md"]


def lines() -> str:
    """The table of the README in Markdown."""
    head = "| table, row | measure | ours | published | runs, scale |\n|---|---|---:|---:|---|\n"
    return head + "".join(f"| {' | '.join(_cells(*line))} |\n" for line in LINES)


def written(text: str) -> str:
    """A text with its figures made anew."""
    text = BLOCK.sub(lambda found: found[1] + lines() + found[2], text)
    return MARK.sub(lambda found: found[1] + figure(found[2], found[3], found[4]) + found[5], text)


def figure(table: str, row: str, column: str) -> str:
    """A figure of a table; ValueError if it has none."""
    found = _read(table)["rows"].get(row, {}).get("ours", {}).get(column)
    if found is None:
        raise ValueError(f"results/{table}/table.json has no figure of row {row!r}, column {column!r}.")
    return _text(found)


def _cells(table: str, row: str, column: str) -> list[str]:
    found = _read(table)
    entry = found["rows"][row]
    runs, scale = len(entry["runs"]), found["scale"]
    name = f"[{table}](results/{table}/report.md), {entry['title']}"
    figures = [_text(entry["ours"].get(column)), _text(entry["published"].get(column))]
    return [name, found["columns"][column], *figures, f"{runs}, {scale}"]


@cache
def _read(table: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / table / "table.json").read_text())
    return found


def _text(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    mean, deviation = value["mean"], value.get("std")
    digits = 0 if abs(mean) >= 1000 else 1 if abs(mean) >= 100 else 2 if abs(mean) >= 0.1 or mean == 0 else 4
    return f"{mean:,.{digits}f}" if deviation is None else f"{mean:,.{digits}f} ± {deviation:,.{digits}f}"


if __name__ == "__main__":
    for path in files():
        text = path.read_text()
        if (new := written(text)) != text:
            path.write_text(new)
