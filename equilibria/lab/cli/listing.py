"""The commands `list`, `data list`, `data fetch` and `data check`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equilibria.lab.choices import SCALES
from equilibria.lab.cli.console import explained, show_json, show_table
from equilibria.lab.cli.options import AsJson, DataRoot
from equilibria.lab.data.catalogue import check, fetch
from equilibria.lab.data.catalogue import info as data_info
from equilibria.lab.data.catalogue import names as data_names
from equilibria.lab.data.files import FileState, data_root

if TYPE_CHECKING:
    from equilibria.lab.experiments.definitions import Table, TableRow

Names = Annotated[list[str] | None, typer.Argument(help="Names of datasets; default: all.")]

data_app = typer.Typer(help="List, fetch and check datasets.", no_args_is_help=True)


@explained()
def list_all(data: DataRoot = None, as_json: AsJson = False) -> None:
    """List all tables with their experiments, all models and all datasets."""
    from equilibria.lab.experiments.catalogue import tables
    from equilibria.models.registry import info as model_info
    from equilibria.models.registry import names as model_names

    found = [
        {
            "table": table.name,
            "title": table.title,
            "experiments": [f"{table.name}-{row.name}" for row in table.rows],
            "seeds": {scale: table.seeds[scale] for scale in SCALES},
        }
        for table in tables().values()
    ]
    known = [model_info(name) for name in model_names()]
    sets = [_entry(name, data) for name in data_names()]
    if as_json:
        built = [{"name": m.name, "summary": m.summary, "parameters": m.parameters} for m in known]
        return show_json({"tables": found, "models": built, "data": sets})
    for table in tables().values():
        rows = [(f"{table.name}-{row.name}", row.experiment("full").summary, _epochs(table, row)) for row in table.rows]
        show_table(f"Table {table.name}: {table.title}", ("experiment", "what", "epochs, seeds"), rows)
        typer.echo("")
    show_table("Models", ("model", "what", "parameters"), [(m.name, m.summary, f"{m.parameters:,}") for m in known])
    typer.echo("")
    _show_sets(sets)


@data_app.command("list")
@explained()
def list_data(data: DataRoot = None, as_json: AsJson = False) -> None:
    """List all datasets with their samples, size, and whether their files are present."""
    sets = [_entry(name, data) for name in data_names()]
    return show_json(sets) if as_json else _show_sets(sets)


@data_app.command("fetch")
@explained()
def fetch_data(
    names: Annotated[list[str], typer.Argument(help="Names of datasets.")], data: DataRoot = None, as_json: AsJson = False
) -> None:
    """Download missing files of datasets from their official sources."""
    _check_names(names)
    found = {name: fetch(name, data, _progress) for name in names}
    if as_json:
        return show_json({name: [str(path) for path in paths] for name, paths in found.items()})
    for name, paths in found.items():
        typer.echo(f"{name}: {', '.join(map(str, paths)) or 'needs no files'}")


@data_app.command("check")
@explained()
def check_data(names: Names = None, data: DataRoot = None, as_json: AsJson = False) -> None:
    """Compare files with the official checksums.

    Exits with 1 if a file differs, or if a file of a named dataset is missing.
    """
    _check_names(names or [])
    states = {name: check(name, data) for name in names or data_names()}
    # without names all datasets are checked, most of which a user has not fetched
    bad = {FileState.DIFFERS, FileState.MISSING} if names else {FileState.DIFFERS}
    if as_json:
        show_json({name: {path: state.value for path, state in files.items()} for name, files in states.items()})
    else:
        rows = [(name, path, state.value) for name, files in states.items() for path, state in files.items()]
        rows += [(name, "–", "needs no files") for name, files in states.items() if not files]
        show_table(f"Files below {data_root(data)}", ("dataset", "file", "state"), rows)
    if any(state in bad for files in states.values() for state in files.values()):
        raise typer.Exit(1)


def _check_names(names: list[str]) -> None:
    """Raise BadParameter for the first unknown dataset."""
    for name in names:
        try:
            data_info(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


def _entry(name: str, root: Path | None) -> dict[str, Any]:
    """Return the description of a dataset and whether its files are present, for JSON."""
    entry, place = data_info(name), data_root(root)
    there = sum(file.locate(place) is not None for file in entry.files)
    train, valid, test = entry.counts
    return {
        "name": entry.name,
        "kind": entry.kind,
        "summary": entry.summary,
        "train": train,
        "valid": valid,
        "test": test,
        "megabytes": entry.size,
        "present": there == len(entry.files),
        "files": len(entry.files),
    }


def _show_sets(sets: list[dict[str, Any]]) -> None:
    """Print the table of datasets."""

    def present(s: dict[str, Any]) -> str:
        return "generated" if not s["files"] else "yes" if s["present"] else "no"

    def size(s: dict[str, Any]) -> str:
        return f"{s['megabytes']:g}" if s["megabytes"] else "unknown" if s["files"] else "-"

    rows = [
        (s["name"], s["summary"], f"{s['train']:,}", f"{s['valid']:,}", f"{s['test']:,}", size(s), present(s)) for s in sets
    ]
    show_table("Data", ("dataset", "what", "train", "valid", "test", "download, MB", "present"), rows)


def _epochs(table: Table, row: TableRow) -> str:
    """Return the epochs and seeds of the full scale as text."""
    return f"{row.experiment('full').training.epochs}, {table.seeds['full']}"


def _progress(name: str, done: int, total: int | None) -> None:
    """Print the progress of a download on one line of a terminal; print nothing to a log."""
    if sys.stderr.isatty():
        share = f" of {total / 1e6:.1f}" if total else ""
        typer.echo(f"\r{name}: {done / 1e6:.1f}{share} MB", nl=done == total, err=True)
