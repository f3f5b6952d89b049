"""Shared by all commands: output streams, exit codes for errors, and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equilibria.lab.data.files import DataError
from equilibria.lab.experiments.assignments import SettingError
from equilibria.lab.experiments.catalogue import UnknownName
from equilibria.lab.training.checkpoints import CorruptCheckpointError
from equilibria.lab.training.stepping import TrainingError

INTERRUPTED = 130

DataRoot = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", envvar="EQUILIBRIA_DATA", help="Folder of the datasets; default: a user cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]


def is_first_process() -> bool:
    """True on rank 0."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def progress_console() -> Console:
    """For progress and messages: stderr, so that stdout has results alone."""
    return Console(stderr=True)


@contextmanager
def explained() -> Iterator[None]:
    """Turn expected errors into a message and an exit code: 2 for wrong arguments, 1 for failures."""
    try:
        yield
    except (SettingError, UnknownName) as error:
        raise typer.BadParameter(str(error)) from error
    except (DataError, TrainingError, CorruptCheckpointError, ImportError, OSError, ValueError) as error:
        typer.echo(f"Error: {_words(error)}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo(str(error) or "Interrupted. The same command goes on with what is not done.", err=True)
        raise typer.Exit(INTERRUPTED) from error


def _words(error: Exception) -> str:
    """The text of an error, without the errno of an OSError."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}."


def counted(count: int, noun: str) -> str:
    """A number with its noun, "1 run" or "2 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def show_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Drawn on a terminal; elsewhere columns with two spaces between them, whatever their width."""
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(cells[i]) for cells in (heads, *rows)) for i in range(len(heads))]
    typer.echo(title)
    for cells in (heads, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
