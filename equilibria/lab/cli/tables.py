"""The commands `reproduce` and `report`: run a table and report it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equilibria.lab.choices import SCALES, Scale
from equilibria.lab.cli.console import check_folder, counted, explained, say, say_if_toy, show_json, show_table
from equilibria.lab.cli.options import AsJson, Assignments, DataRoot, Devices, Out, ScaleOption

if TYPE_CHECKING:
    from equilibria.lab.experiments.definitions import Table
    from equilibria.lab.experiments.runner import Failure
    from equilibria.lab.reports.table import TableResults


@explained()
def reproduce(
    table: Annotated[str | None, typer.Argument(help="Name of a table from `equilibria list`.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Run all tables, and write an overview to the folder of --report.")
    ] = False,
    scale: ScaleOption = "full",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per row; default: those of the protocol.")] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Run only this row; repeatable.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of runs at a time, each in a process; default: one, for debug in this process."),
    ] = None,
    assignments: Assignments = None,
    devices: Devices = 1,
    out: Out = Path("runs"),
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the report, or with --all of all reports; default: next to the runs."),
    ] = None,
    data: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Run a published table, or --all, and compare it with the published figures; finished runs are not run again."""
    from equilibria.lab.cli.running import exit_on_failures, run_jobs
    from equilibria.lab.experiments.catalogue import table as find_table
    from equilibria.lab.experiments.catalogue import tables
    from equilibria.lab.experiments.runner import Resources, plan
    from equilibria.lab.reports.overview import write_overview
    from equilibria.lab.reports.write import write_report

    chosen = [find_table(name) for name in _chosen(table, everything, rows, assignments, as_json)]
    if report is not None:
        check_folder(report)  # now, not after hours of training
    say_if_toy(scale)
    failures: list[Failure] = []
    for found in chosen:
        planned = plan(found, scale, out, seeds=seeds, rows=rows or (), assignments=assignments or ())
        for job in planned:
            job.check_settings()  # before the first run starts, so that a mistake costs no training
        todo = [job for job in planned if not job.finished]
        say(f"{found.name}, {scale}: {counted(len(planned), 'run')}, {len(planned) - len(todo)} of them finished.")
        # runs of other scales get a process each, so that their peak memory can be measured
        here = jobs is None and scale == "debug" and devices == 1
        failures += run_jobs(todo, Resources(data, devices), at_once=0 if here else jobs or 1)
        folder = report_folder(found, scale, out, report, everything=everything)
        _show(write_report(found, scale, found.folder(out, scale), folder), folder, as_json)
    if everything and report is not None:
        typer.echo(f"overview: {write_overview(report, tables())}")
    say_if_toy(scale)
    exit_on_failures(failures)


def report_folder(table: Table, scale: Scale, out: Path, report: Path | None, *, everything: bool) -> Path:
    """Return the folder for the report; with --all a report of a larger scale is not replaced."""
    from equilibria.lab.reports.write import reported_scale

    own = table.folder(out, scale)
    if report is None or not everything:
        return report or own
    before = reported_scale(report / table.name)
    if before is None or SCALES.index(before) <= SCALES.index(scale):
        return report / table.name
    say(f"{report / table.name} has a report of the larger scale {before!r} and is kept; this report is written to {own}.")
    return own


@explained()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the reports, one folder per table.")],
) -> None:
    """Check the claims of all stored reports again, without their runs, and rewrite the pages and the overview."""
    from equilibria.lab.experiments.catalogue import tables
    from equilibria.lab.reports.overview import write_overview
    from equilibria.lab.reports.write import NUMBERS, rewrite_report, stored_folders

    found = [rewrite_report(table, place) for name, table in tables().items() for place in stored_folders(folder, name)]
    if not found:
        raise typer.BadParameter(f"{folder} has no report of a table: expected DIR/TABLE/{NUMBERS}.")
    typer.echo(f"{counted(len(found), 'report')}; overview: {write_overview(folder, tables())}")


def _chosen(
    table: str | None, everything: bool, rows: list[str] | None, assignments: list[str] | None, as_json: bool
) -> list[str]:
    """Return the names of the tables to run; raises BadParameter for options that do not go together."""
    if (table is None) != everything:
        raise typer.BadParameter("Pass the name of one table, or --all.")
    if everything and (rows or assignments or as_json):  # names of rows and settings differ between tables
        raise typer.BadParameter("--row, --set and --json work with one table, not with --all.")
    from equilibria.lab.experiments.catalogue import tables

    return list(tables()) if table is None else [table]


def _show(results: TableResults, folder: Path, as_json: bool) -> None:
    """Print the table, the verdicts on its claims and the files of the report, or everything as JSON."""
    from equilibria.lab.reports.table import plain
    from equilibria.lab.reports.write import NUMBERS, PAGE, TEXT

    files = {"html": folder / PAGE, "markdown": folder / TEXT, "numbers": folder / NUMBERS}
    if as_json:
        return show_json(plain(results) | {"files": {kind: str(path) for kind, path in files.items()}})
    titles = [row.label(results.scale) for row in results.table.rows]
    show_table(results.table.title, [f"{results.scale} scale", *titles], _lines(results))
    typer.echo("")
    for verdict in results.verdicts():
        typer.echo(f"{verdict.word}: {verdict.claim.text}. {verdict.text}")
    typer.echo(f"\nreport: {files['html']}\n        {files['markdown']}")


def _lines(results: TableResults) -> list[list[str]]:
    """Return a line per column of the table, each followed by its published figures if there are any."""
    from equilibria.lab.reports.table import figure_text

    lines = []
    for column in results.table.columns:
        lines.append([column.title, *(figure_text(results.figure(row.name, column), column) for row in results.table.rows)])
        published = [row.published.get(column.name) for row in results.table.rows]
        if any(published):
            lines.append(["  published", *(figure_text(figure, column) for figure in published)])
    return lines
