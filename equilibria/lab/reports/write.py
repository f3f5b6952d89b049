"""Writing a table's report: HTML, Markdown, numbers and pictures."""

from __future__ import annotations

import json
from pathlib import Path

from equilibria._core.files import replace_file
from equilibria.lab.experiments.definitions import SCALES, Scale, Table
from equilibria.lab.reports.figures import pictures
from equilibria.lab.reports.html import page as html_page
from equilibria.lab.reports.markdown import page as markdown_page
from equilibria.lab.reports.table import TableResults, collect, plain
from equilibria.lab.training.durable import read_object

AGAIN = "Remove it, and write the report again with `equilibria reproduce`."
PAGE, TEXT, NUMBERS = "report.html", "report.md", "table.json"


def write_report(table: Table, scale: Scale, runs: Path, folder: Path | None = None) -> TableResults:
    """Read the runs below `runs` and write their report there, or to `folder`, then without pictures of samples."""
    results = collect(table, scale, runs)
    drawn, folder = pictures(results, with_data=folder is None), runs if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, content) in drawn.items():
        replace_file(folder / f"{name}.png", content)
    titles = {f"{name}.png": title for name, (title, _) in drawn.items()}
    replace_file(folder / NUMBERS, (json.dumps(plain(results), indent=1) + "\n").encode())
    replace_file(folder / TEXT, markdown_page(results, titles).encode())
    replace_file(folder / PAGE, html_page(results, drawn).encode())
    return results


def reported_scale(folder: Path) -> Scale | None:
    """The scale of the report in a folder; None without a report."""
    file = folder / NUMBERS
    scale = read_object(file, AGAIN).get("scale") if file.exists() else None
    return next((known for known in SCALES if known == scale), None)
