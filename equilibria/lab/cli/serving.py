"""serve: serve the model of a run or of a model file over HTTP."""

from __future__ import annotations

import gc
import logging
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equilibria._core.files import optional
from equilibria.lab.choices import Which
from equilibria.lab.cli.console import explained
from equilibria.lab.cli.options import OwnExperiment

if TYPE_CHECKING:
    import torch
    from torch import nn

    from equilibria.serving import Engine

LOOPBACK = "127.0.0.1"


@explained()
def serve(
    target: Annotated[Path, typer.Argument(metavar="RUN|MODEL_FILE", help="Folder of a run, or a file of eq.models.save.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default accepts connections only from this machine.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    rows: Annotated[int, typer.Option(min=1, help="Largest number of requests in one solve, per shape of inputs.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Number of requests that may wait; others get 429.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Largest body of a request, in bytes.")] = 8 * 2**20,
    deadline: Annotated[float, typer.Option(min=0.001, help="Longest time of a request, in seconds.")] = 30.0,
    max_steps: Annotated[int, typer.Option(min=1, help="Largest number of solver steps a request may ask for.")] = 1000,
    padding: Annotated[int, typer.Option(min=1, help="Pad texts to a multiple of this many tokens.")] = 32,
    api_key: Annotated[
        str | None, typer.Option(envvar="EQUILIBRIA_API_KEY", help="Key that clients must send; prefer the variable.")
    ] = None,
    which: Annotated[Which, typer.Option(help="Weights of a run: last, best, or raw (last, not averaged).")] = "last",
    experiment: OwnExperiment = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print a line per request.")] = False,
) -> None:
    """Serve a model over HTTP; requests join a running solve, and answers leave it as they converge."""
    optional("uvicorn", "serve")
    optional("starlette", "serve")
    from equilibria.models import ModelFileError
    from equilibria.serving import UnservableModelError
    from equilibria.serving import server as http

    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        model = served_model(target, which, experiment)
        engine, dtype = make_engine(model, rows=rows, queue=queue, padding=padding)
    except (ModelFileError, UnservableModelError) as error:
        raise ValueError(str(error)) from error  # `explained` does not know these types
    limits = http.Limits(body=max_body, deadline=deadline, max_steps=max_steps)
    front = http.Server(engine, limits=limits, dtype=dtype, api_key=api_key, verbose=verbose)
    if host != LOOPBACK and api_key is None:
        typer.echo(f"Warning: anybody who reaches {host} may use this server; set EQUILIBRIA_API_KEY.", err=True)
    gc.freeze()  # garbage collections then skip the objects of the libraries, which live until the end
    http.serve(front, host, port, ready=lambda address: typer.echo(f"Serving {target} at {address}"))


def served_model(target: Path, which: str = "last", named: str | None = None) -> nn.Module:
    """Return the model of a run or of a model file, in eval mode; `named` is the experiment of a run if it is the user's."""
    if target.is_dir():
        from equilibria.lab.experiments.evaluation import experiment_of
        from equilibria.lab.training.folder import Run

        run = Run.open(target)
        return run.model(experiment_of(run, named).task(), which)
    if named is not None:
        raise ValueError(f"--experiment goes with the folder of a run; {target} is none.")
    from equilibria.models import load

    return load(target).eval()


def make_engine(model: nn.Module, *, rows: int, queue: int = 1024, padding: int = 32) -> tuple[Engine, torch.dtype]:
    """Return an engine for a model and the dtype of its inputs; language models take token sequences of any length."""
    import torch

    from equilibria.models import SequenceModel
    from equilibria.serving import Engine, Padding

    if isinstance(model, SequenceModel):
        filled = Padding(multiple=padding)
        scores = operator.itemgetter(0)  # the model returns (scores, memory)
        return Engine(model, rows, queue=queue, padding=filled, output=scores), torch.int64
    real = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return Engine(model, rows, queue=queue), real[0] if real else torch.float32
