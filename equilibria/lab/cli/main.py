"""The command line. The module of a command is imported when the command runs, so that `--help` is quick."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    raise SystemExit(f"The command line needs the extra `train`: pip install 'equilibria[train]'. ({error})") from error

import equilibria

# name: (module in equilibria.lab.cli, its function or group of commands, help text)
COMMANDS = {
    "demo": (
        "demo",
        "demo",
        "Train an equilibrium classifier of digits and its explicit twin, and report both; a minute, no download.",
    ),
    "list": ("listing", "list_all", "List all tables with their experiments, all models and all datasets."),
    "train": ("runs", "train", "Train an experiment, or resume it where it was interrupted."),
    "sweep": (
        "sweeping",
        "sweep",
        "Train an experiment over a grid of settings and compare the runs in a table; finished runs are not run again.",
    ),
    "extend": ("runs", "extend", "Train a finished run for more epochs, from its last checkpoint."),
    "watch": ("watching", "watch", "Show the convergence of a run in the terminal while it trains."),
    "evaluate": ("runs", "evaluate", "Evaluate the model of a run on the test data."),
    "reproduce": (
        "tables",
        "reproduce",
        "Run a published table, or --all, and compare it with the published figures; finished runs are not run again.",
    ),
    "report": (
        "tables",
        "report",
        "Check the claims of all stored reports again, without their runs, and rewrite the pages and the overview.",
    ),
    "publish": (
        "publishing",
        "publish",
        "Write the weights of a run, a model card, results and provenance in the layout of the Hugging Face hub.",
    ),
    "generate": (
        "generating",
        "generate",
        "Sample text from a trained language model. The run folder contains the weights and the vocabulary.",
    ),
    "diagnose": (
        "diagnosis",
        "diagnose",
        "Examine every equilibrium layer of a model, and report problems with advice.",
    ),
    "serve": (
        "serving",
        "serve",
        "Serve a model over HTTP; requests join a running solve, and answers leave it as they converge.",
    ),
    "info": ("info", "info", "Show versions, threads, devices, and whether native solver steps are available."),
    "load": ("loading", "load", "Send requests to a server at a given rate and report latencies."),
    "data": ("listing", "data_app", "List, fetch and check datasets."),
}


class _Commands(TyperGroup):
    """A group of commands that loads a command only when it runs; until then only its name and help are known."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else command, rest


def load(name: str) -> Any:
    """Import the module of a command and return the command that typer makes of its function."""
    module, attribute, _ = COMMANDS[name]
    try:
        found = getattr(importlib.import_module(f"equilibria.lab.cli.{module}"), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "equilibria":
            raise  # a missing module of this package is a bug, not a missing extra
        raise SystemExit(f"The command line needs the extra `train`: pip install 'equilibria[train]'. ({error})") from error
    except ImportError as error:
        raise SystemExit(f"Error: {error}") from error
    group = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name)(found)
    return typer.main.get_group(group).commands[name]


app = typer.Typer(cls=_Commands, help="Tools for deep equilibrium models.", no_args_is_help=True, add_completion=False)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(equilibria.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Tools for deep equilibrium models."""


# placeholders with the help texts; `_Commands` loads the command that runs
for _name, (_, _, _help) in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


# bench parses its own options, including --help
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Time training steps against TorchDEQ at equal achieved accuracy; `equilibria bench --help` lists the options."""
    from equilibria.lab.bench.command import main as run_bench

    raise typer.Exit(run_bench(context.args))
