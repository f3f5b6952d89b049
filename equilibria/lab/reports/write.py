"""Write the report of a table: HTML, Markdown, numbers and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from equilibria._core.files import replace_file
from equilibria.lab.experiments.definitions import SCALES, Scale, Table
from equilibria.lab.reports.figures import pictures
from equilibria.lab.reports.html import page as html_page
from equilibria.lab.reports.markdown import page as markdown_page
from equilibria.lab.reports.measured import AGAIN, Measured, read_rows
from equilibria.lab.reports.table import TableResults, collect, plain, with_stored
from equilibria.lab.training.durable import read_object

PICTURE = re.compile(r"^!\[(.*)\]\((.*\.png)\)$", re.MULTILINE)
PAGE, TEXT, NUMBERS = "report.html", "report.md", "table.json"


def write_report(table: Table, scale: Scale, runs: Path, folder: Path | None = None) -> TableResults:
    """Read the runs below `runs` and write their report there, or to `folder` without pictures of samples.

    If `folder` has a report of the same scale, its measurements on other machines, and of rows without a run here, are kept.
    """
    results = collect(table, scale, runs)
    if folder is None:
        _write(results, pictures(results), runs)
        return results
    results = with_stored(results, stored_rows(table, scale, folder))
    _write(results, pictures(results, with_data=False), folder)
    return results


def rewrite_report(table: Table, folder: Path) -> TableResults | None:
    """Write a stored report again with the table's present claims and texts; None if there is no report."""
    scale = reported_scale(folder)
    if scale is None:
        return None
    results = TableResults(table, scale, stored_rows(table, scale, folder))
    _write(results, pictures(results), folder)
    return results


def stored_folders(folder: Path, table: str) -> list[Path]:
    """Return the folders of a table's stored reports: `TABLE`, and `TABLE-full` for runs of the full scale beside it."""
    return [place for place in (folder / table, folder / f"{table}-full") if (place / NUMBERS).is_file()]


def stored_rows(table: Table, scale: Scale, folder: Path) -> dict[str, tuple[Measured, ...]]:
    """Return the measurements of the report in a folder by row; empty if there is no report of this scale."""
    return read_rows(folder / NUMBERS, table) if reported_scale(folder) == scale else {}


def _write(results: TableResults, drawn: Mapping[str, tuple[str, bytes]], folder: Path) -> None:
    """Write all files of a report; pictures of an earlier report that are not drawn again are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = _kept_pictures(folder, {f"{name}.png" for name in drawn})
    for name, (_, content) in drawn.items():
        replace_file(folder / f"{name}.png", content)
    titles = {f"{name}.png": title for name, (title, _) in drawn.items()} | kept
    shown = {**drawn, **{Path(name).stem: (title, (folder / name).read_bytes()) for name, title in kept.items()}}
    # the numbers before the pages: they are what later reports read
    replace_file(folder / NUMBERS, (json.dumps(plain(results), indent=1) + "\n").encode())
    replace_file(folder / TEXT, markdown_page(results, titles).encode())
    replace_file(folder / PAGE, html_page(results, shown).encode())


def _kept_pictures(folder: Path, drawn: Collection[str]) -> dict[str, str]:
    """Return titles by file name of existing pictures in a folder's report that are not drawn again."""
    file = folder / TEXT
    found = PICTURE.findall(file.read_text()) if file.is_file() else []
    return {name: title for title, name in found if name not in drawn and (folder / name).is_file()}


def reported_scale(folder: Path) -> Scale | None:
    """Return the scale of the report in a folder; None without a report."""
    file = folder / NUMBERS
    scale = read_object(file, AGAIN).get("scale") if file.exists() else None
    return next((known for known in SCALES if known == scale), None)
