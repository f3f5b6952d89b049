"""Write the results table of README.md from results/*/table.json: `python docs/readme_table.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- results: [^>]*-->\n).*?(<!-- end of results -->)", re.DOTALL)
# table, row, column: one line each
LINES = [
    ("skipdeq-mnist-mlp", "v2", "accuracy"),
    ("skipdeq-mnist-mlp", "v2", "nfe"),
    ("jfb-mnist", "jfb", "accuracy"),
    ("ignn-cox2", "implicit", "best"),
    ("ptb-transformer", "deq", "valid"),
]


def lines() -> str:
    """The table in Markdown."""
    head = "| table, row | measure | ours | published | runs, scale |\n|---|---|---:|---:|---|\n"
    return head + "".join(f"| {' | '.join(_cells(*line))} |\n" for line in LINES)


def written(readme: str) -> str:
    """The README with its results table made anew."""
    return BLOCK.sub(lambda found: found[1] + lines() + found[2], readme)


def _cells(table: str, row: str, column: str) -> list[str]:
    found = json.loads((ROOT / "results" / table / "table.json").read_text())
    entry = found["rows"][row]
    runs, scale = len(entry["runs"]), found["scale"]
    name = f"[{table}](results/{table}/report.md), {entry['title']}"
    figures = [_figure(entry["ours"].get(column)), _figure(entry["published"].get(column))]
    return [name, found["columns"][column], *figures, f"{runs}, {scale}"]


def _figure(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    mean, deviation = value["mean"], value.get("std")
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
