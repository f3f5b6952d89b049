"""watch: a live view of a run in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from equilibria.lab.cli.console import explained


@explained()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run; of several runs, the one written to last.")],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the view once; always so if the output is not a terminal.")
    ] = False,
) -> None:
    """Show the convergence of a run in the terminal while it trains.

    The view ends when the run is finished. Ctrl-C ends the view, and the run continues.
    """
    from equilibria.lab.cli.view import newest, view

    folder, console = newest(run), Console()
    shown, finished = view(folder)
    if once or not console.is_terminal:
        return console.print(shown)
    try:
        with Live(shown, console=console, auto_refresh=False) as live:
            while not finished:
                time.sleep(interval)
                shown, finished = view(folder)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return
