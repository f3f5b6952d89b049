"""Options that several commands share. Only light modules are imported, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.lab.choices import Scale

DataRoot = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", envvar="EQUILIBRIA_DATA", help="Folder of the datasets; default: a user cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting by its dotted name, such as training.epochs=1; repeatable."
    ),
]
ExperimentName = Annotated[
    str, typer.Argument(help="A name from `equilibria list`, or FILE.py:NAME for an experiment of your own.")
]
OwnExperiment = Annotated[
    str | None,
    typer.Option(
        "--experiment",
        metavar="FILE.py:NAME",
        help="The experiment of the run, if it is your own: the file runs as code. What a folder names is not imported.",
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read settings from a YAML, TOML or JSON file; --set overrides them."),
]
ScaleOption = Annotated[
    Scale, typer.Option(help="debug: toys, in seconds; reduced: a small budget; full: the protocol of the paper.")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all runs.")]
Devices = Annotated[int, typer.Option(min=1, help="Number of devices of this machine to train on.")]
