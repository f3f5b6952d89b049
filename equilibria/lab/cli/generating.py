"""generate: sample text from the language model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.lab.choices import Which
from equilibria.lab.cli.console import explained, show_json
from equilibria.lab.cli.options import AsJson, OwnExperiment


@explained()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of a language model.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; a new line begins a new sentence.")] = "",
    length: Annotated[int, typer.Option(min=1, help="Number of tokens to draw.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Divides the scores; 0: take the most probable token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many most probable tokens; default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draws.")] = 0,
    which: Annotated[Which, typer.Option(help="Weights: last, best, or raw (last, not averaged).")] = "best",
    experiment: OwnExperiment = None,
    as_json: AsJson = False,
) -> None:
    """Sample text from a trained language model. The run folder contains the weights and the vocabulary."""
    from equilibria.lab.cli.sampling import sample

    text = sample(run, prompt, length, temperature=temperature, top_k=top_k, seed=seed, which=which, named=experiment)
    if as_json:
        return show_json({"run": str(run), "prompt": prompt, "text": text})
    typer.echo(text)
