"""The command line: parse, build, run; nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit("The command line needs the extra `train`: pip install 'equilibria[train]'.") from error

import equilibria
from equilibria.bench.command import main as run_bench
from equilibria.diagnosis.doctor import diagnose as run_diagnosis
from equilibria.diagnosis.illnesses import EXAMPLES

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


@app.command()
def diagnose(
    target: Annotated[
        str | None,
        typer.Argument(help="file.py:function or package.module:function, a function that returns (model, batch)."),
    ] = None,
    example: Annotated[str | None, typer.Option(help=f"A model with one thing wrong: {', '.join(EXAMPLES)}.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the page, the plots and the numbers.")] = Path("diagnosis"),
    evaluating: Annotated[bool, typer.Option("--eval", help="Examine in eval mode instead of training mode.")] = False,
) -> None:
    """Examine every equilibrium layer of a model: what is wrong with it, and what to try."""
    model, batch = _example(example) if example is not None else _built(target)
    model.train(not evaluating)
    found = run_diagnosis(model, batch)
    typer.echo(str(found))
    typer.echo(f"\npage, plots and numbers: {found.save(output)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Training steps next to TorchDEQ's at equal achieved accuracy; `equilibria bench --help` lists the options."""
    raise typer.Exit(run_bench(context.args))


def _example(name: str) -> tuple[Any, Any]:
    if name not in EXAMPLES:
        raise typer.BadParameter(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}.", param_hint="--example")
    return EXAMPLES[name]()


def _built(target: str | None) -> tuple[Any, Any]:
    """What the function that `target` names returns."""
    if target is None:
        raise typer.BadParameter("name a function that returns (model, batch), as in train.py:build, or take --example.")
    place, separator, name = target.rpartition(":")
    if not separator or not name:
        raise typer.BadParameter(f"expected file.py:function or package.module:function, got {target!r}.")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise typer.BadParameter(f"{place} has no function {name!r}.")
    built = function()
    if not isinstance(built, tuple) or len(built) != 2:
        raise typer.BadParameter(f"{target} must return a pair (model, batch), got {type(built).__name__}.")
    return built


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, "")  # what lies in the current folder, as `python -m` finds it
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise typer.BadParameter(f"cannot import {place!r}: {error}.") from error
    path = Path(place)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # its neighbours, as `python file.py` finds them
    spec.loader.exec_module(module)
    return module
