"""publish: write a run as a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.lab.choices import Which
from equilibria.lab.cli.console import explained, show_json
from equilibria.lab.cli.options import AsJson, DataRoot, OwnExperiment


@explained()
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    which: Annotated[Which, typer.Option(help="Weights: last, best, or raw (last, not averaged).")] = "best",
    name: Annotated[
        str | None, typer.Option(help="Name of the model in `equilibria list`, by which the file alone creates it.")
    ] = None,
    data: DataRoot = None,
    experiment: OwnExperiment = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a run, a model card, results and provenance in the layout of the Hugging Face hub.

    Nothing is uploaded: `huggingface_hub.upload_folder(folder_path=DIR, repo_id=...)` does that.
    """
    from equilibria.lab.publishing import publish as write
    from equilibria.lab.training.folder import Run

    found = write(Run.open(run), folder, which=which, root=data, name=name, named=experiment)
    if as_json:
        return show_json(found)
    typer.echo(
        f"{folder}: {found['experiment']}, {found['parameters']:,} parameters; weights {found['weights_sha256'][:12]}"
    )
