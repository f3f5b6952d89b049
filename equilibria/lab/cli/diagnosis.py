"""diagnose: examine the model of a run, a model from a function of the user, or an example."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from equilibria._core.names import nearest
from equilibria.analysis.diagnosis.diagnose import diagnose as run_diagnosis
from equilibria.analysis.diagnosis.example_models import EXAMPLES
from equilibria.lab.cli.console import check_folder, explained
from equilibria.lab.cli.options import AsJson, DataRoot, OwnExperiment


@explained()
def diagnose(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a run, or file.py:function or package.module:function, a function that returns (model, batch)."
        ),
    ] = None,
    example: Annotated[str | None, typer.Option(help=f"An example model instead: {', '.join(EXAMPLES)}.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for page, plots and numbers; default: RUN/diagnosis, or ./diagnosis without a run."),
    ] = None,
    evaluating: Annotated[bool, typer.Option("--eval", help="Examine in eval mode instead of training mode.")] = False,
    data: DataRoot = None,
    experiment: OwnExperiment = None,
    as_json: AsJson = False,
) -> None:
    """Examine every equilibrium layer of a model, and report problems with advice."""
    is_run = example is None and target is not None and Path(target).is_dir()
    if experiment is not None and not is_run:
        raise typer.BadParameter("--experiment goes with the folder of a run.", param_hint="--experiment")
    if example is not None:
        if example not in EXAMPLES:
            raise typer.BadParameter(
                f"There is no example {example!r}. {nearest(example, EXAMPLES)}", param_hint="--example"
            )
        model, batch = EXAMPLES[example]()
    elif is_run:
        from equilibria.lab.experiments.evaluation import model_and_batch
        from equilibria.lab.training.folder import Run

        model, batch = model_and_batch(Run.open(Path(str(target))), root=data, named=experiment)
    else:
        model, batch = _built(target)
    model.train(not evaluating)
    folder = output or (Path(str(target)) / "diagnosis" if is_run else Path("diagnosis"))
    check_folder(folder)
    found = run_diagnosis(model, batch)
    page = found.save(folder, "equilibria " + shlex.join(sys.argv[1:]))
    if as_json:
        return typer.echo(json.dumps(json.loads(found.to_json()) | {"page": str(page)}, indent=1))
    typer.echo(str(found))
    typer.echo(f"\npage, plots and numbers: {page}")


def _built(target: str | None) -> tuple[Any, Any]:
    """Import the function that `target` names and return its result."""
    if target is None:
        raise typer.BadParameter(
            "Pass the folder of a run, a function that returns (model, batch) such as train.py:build, or --example."
        )
    from equilibria.lab.experiments.own import find

    function = find(target)
    if not callable(function) or isinstance(function, nn.Module):
        raise typer.BadParameter(
            f"{target} must be a function that returns a pair (model, batch), got {type(function).__name__}."
        )
    built = function()
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        raise typer.BadParameter(f"{target} must return a pair (model, batch), got {type(built).__name__}.")
    return built
