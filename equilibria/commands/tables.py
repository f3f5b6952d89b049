"""reproduce and demo: the runs of a table, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from equilibria.commands.console import AsJson, DataRoot, explained, show_json, show_table
from equilibria.commands.running import run_jobs, say, tell_failures
from equilibria.commands.runs import Assignments, Devices, Out, ScaleOption
from equilibria.experiments.catalogue import table as find_table
from equilibria.experiments.digits import DIGITS
from equilibria.experiments.runner import plan
from equilibria.reports.table import Results, figure_text, plain
from equilibria.reports.write import NUMBERS, PAGE, TEXT, write_report


def reproduce(
    table: Annotated[str, typer.Argument(help="Its name; `equilibria list` has them.")],
    scale: ScaleOption = "full",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of every row; default: those of the protocol.")] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Only this row; repeatable.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at once, each a process of its own; default: one, in debug scale in this process."),
    ] = None,
    assignments: Assignments = None,
    devices: Devices = 1,
    out: Out = Path("runs"),
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the report; default: beside the runs, OUT/TABLE/SCALE.")
    ] = None,
    data: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Run a published table and report it beside the published figures; runs that are finished are not run again."""
    with explained():
        found = find_table(table)
        planned = plan(found, scale, out, seeds=seeds, rows=rows or (), assignments=assignments or ())
        todo = [job for job in planned if not job.finished]
        say(f"{found.name}, {scale}: {len(planned)} runs, {len(planned) - len(todo)} of them finished.")
        here = jobs is None and scale == "debug" and devices == 1
        failures = run_jobs(todo, data, devices, at_once=0 if here else jobs or 1)
        runs = found.folder(out, scale)
        results = write_report(found, scale, runs, report)
    _show(results, report or runs, as_json)
    tell_failures(failures)


def demo(
    out: Out = Path("runs"),
    scale: ScaleOption = "full",
) -> None:
    """Train an equilibrium classifier of digits beside its explicit twin, and report: a minute, nothing to download."""
    with explained():
        found = find_table(DIGITS)
        todo = [job for job in plan(found, scale, out) if not job.finished]
        torch.set_num_threads(1)  # its kernels are too small for more, which would only wait for each other
        failures = run_jobs(todo)
        folder = found.folder(out, scale)
        results = write_report(found, scale, folder)
    _show(results, folder, as_json=False)
    tell_failures(failures)


def _show(results: Results, folder: Path, as_json: bool) -> None:
    files = {"html": folder / PAGE, "markdown": folder / TEXT, "numbers": folder / NUMBERS}
    if as_json:
        return show_json(plain(results) | {"files": {kind: str(path) for kind, path in files.items()}})
    titles = [row.title for row in results.table.rows]
    show_table(results.table.title, [f"{results.scale} scale", *titles], _lines(results))
    typer.echo("")
    for verdict in results.verdicts():
        typer.echo(f"{verdict.word}: {verdict.claim.text}. {verdict.seen}")
    typer.echo(f"\nreport: {files['html']}\n        {files['markdown']}")


def _lines(results: Results) -> list[list[str]]:
    """A line per column of the table, the published figures below ours."""
    lines = []
    for column in results.table.columns:
        lines.append([column.title, *(figure_text(results.figure(row.name, column), column) for row in results.table.rows)])
        published = [row.published.get(column.name) for row in results.table.rows]
        if any(published):
            lines.append(["  published", *(figure_text(figure, column) for figure in published)])
    return lines
