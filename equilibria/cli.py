"""The command line: parse, build, run; nothing else."""

from __future__ import annotations

from typing import Annotated

try:
    import typer

    from equilibria.commands.diagnosis import diagnose
    from equilibria.commands.generating import generate
    from equilibria.commands.listing import data_app, list_all
    from equilibria.commands.runs import evaluate, train
    from equilibria.commands.tables import demo, reproduce
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "equilibria":
        raise
    raise SystemExit(f"The command line needs the extra `train`: pip install 'equilibria[train]'. ({error})") from error

import equilibria
from equilibria.bench.command import main as run_bench

app = typer.Typer(help="Deep equilibrium models: tools around them.", no_args_is_help=True, add_completion=False)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(equilibria.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Deep equilibrium models: tools around them."""


app.command()(demo)
app.command("list")(list_all)
app.command()(train)
app.command()(evaluate)
app.command()(reproduce)
app.command()(generate)
app.command()(diagnose)
app.add_typer(data_app, name="data")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Training steps next to TorchDEQ's at equal achieved accuracy; `equilibria bench --help` lists the options."""
    raise typer.Exit(run_bench(context.args))
