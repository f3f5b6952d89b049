"""info: print versions, devices, and whether native solver steps are available."""

from __future__ import annotations

import platform

import torch
import typer

import equilibria
from equilibria import native
from equilibria.lab.cli.console import explained, show_json
from equilibria.lab.cli.options import AsJson


@explained()
def info(as_json: AsJson = False) -> None:
    """Show versions, threads, devices, and whether native solver steps are available."""
    found = {
        "equilibria": equilibria.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "native": native.available(),
        "reason": native.reason(),
    }
    if as_json:
        return show_json(found)
    for name, value in found.items():
        if value != "":
            typer.echo(f"{name:11}{value}")
