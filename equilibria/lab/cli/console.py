"""Functions that all commands share: output streams, exit codes for errors, and tables."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from equilibria.lab.choices import Scale
from equilibria.lab.errors import (
    CorruptCheckpointError,
    DataError,
    SettingError,
    TrainingError,
    UnknownName,
    UnnamedCodeError,
)

INTERRUPTED = 130  # 128 plus the number of SIGINT, as shells report it


def is_first_process() -> bool:
    """Return True on rank 0, and without a launcher."""
    # torchrun sets RANK, Fabric's own launcher only LOCAL_RANK
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def progress_console() -> Console:
    """Return the console for progress and messages. It writes to stderr, so that stdout holds only results."""
    return Console(stderr=True)


def say(text: str) -> None:
    """Print a message to stderr."""
    progress_console().print(text, markup=False, highlight=False, soft_wrap=True)


def say_if_toy(scale: Scale) -> None:
    """Print that the figures are not results, at debug scale only."""
    if scale == "debug":
        say(
            "Debug scale: toy data and a toy model check that the code runs. The figures are not results, and no claim is "
            "judged."
        )


@contextmanager
def explained() -> Iterator[None]:
    """Turn expected errors of a command into a message and an exit code: 2 for wrong arguments, 1 for failures."""
    try:
        yield
    except (SettingError, UnknownName) as error:
        raise typer.BadParameter(str(error)) from error  # typer exits with 2
    except UnnamedCodeError as error:
        # a name with control characters could show something else than it is
        words = shlex.join(["equilibria", *sys.argv[1:], "--experiment", error.name]) if error.name.isprintable() else ""
        typer.echo(f"Error: {error}{words and f' The command is then:{chr(10)}{words}'}", err=True)
        raise typer.Exit(2) from error
    except (DataError, TrainingError, CorruptCheckpointError, ImportError, OSError, ValueError) as error:
        typer.echo(f"Error: {_message(error)}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo(str(error) or "Interrupted. Run the same command again to continue.", err=True)
        raise typer.Exit(INTERRUPTED) from error


ADVICE: dict[type[OSError], str] = {
    FileNotFoundError: "Check the path.",
    NotADirectoryError: "A part of the path is a file, but a folder is expected. Choose another path.",
    FileExistsError: "The path is a file, but a folder is expected. Choose another path.",
    IsADirectoryError: "A file is expected. Choose another path.",
    PermissionError: "Choose a path that you may read and write.",
}


def _message(error: Exception) -> str:
    """Return the text of an error; errors of the operating system get the file name and advice."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    advice = ADVICE.get(type(error), "")
    return f"{where}{error.strerror}. {advice}".rstrip()


def check_folder(path: Path) -> None:
    """Create the folder for results before they are computed; raises OSError if it cannot be written."""
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 run", "2 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def show_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with borders on a terminal, otherwise as columns separated by two spaces."""
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
