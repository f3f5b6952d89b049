"""generate: text from the model of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from equilibria.lab.cli.console import AsJson, explained, show_json
from equilibria.lab.cli.runs import Which
from equilibria.lab.data.text import END, UNKNOWN, Level
from equilibria.lab.experiments.deq_language.task import SEPARATOR, Language
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.training.folder import Run, does_not_fit
from equilibria.models.language.sequence import SequenceModel
from equilibria.models.language.sequence import generate as draw


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of a language model.")],
    prompt: Annotated[str, typer.Option(help="Text to go on with; a new line begins a new sentence.")] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens to draw.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Scores are divided by it; 0: the most probable token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many most probable tokens; default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 0,
    which: Annotated[Which, typer.Option(help="Weights: last, best, or raw (last, never averaged).")] = "best",
    as_json: AsJson = False,
) -> None:
    """Sample text from a trained language model. The run folder contains the weights and the vocabulary."""
    with explained():
        text = sample(run, prompt, length, temperature=temperature, top_k=top_k, seed=seed, which=which)
    if as_json:
        return show_json({"run": str(run), "prompt": prompt, "text": text})
    typer.echo(text)


def sample(
    run: Path,
    prompt: str,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    which: str = "best",
) -> str:
    """The prompt and `length` more tokens from the model of a run."""
    found = Run.open(run)
    task = experiment_of(found).task()
    if not isinstance(task, Language):
        raise ValueError(f"{run} is a run of {found.config.get('experiment')}, which is no language model.")
    level, units = task.settings.data.level, vocabulary(found)
    model = found.model(task, which)
    assert isinstance(model, SequenceModel)
    tokens = encode(prompt, units, level).unsqueeze(0)
    # the vocabulary that a model is made for may be larger than that of the text: what it has no name for is <unk>
    drawn = draw(model, tokens, length, temperature, top_k, torch.Generator().manual_seed(seed))[0].tolist()
    begin = 0 if spelled(prompt, level) else 1  # without the end of a text that an empty prompt stands for
    return decode([units[i] if i < len(units) else UNKNOWN for i in drawn[begin:]], level)


def vocabulary(run: Run) -> tuple[str, ...]:
    """The units that the model of a run was trained on, from its newest checkpoint."""
    found = run.checkpoint("checkpoints", ("processes",))
    try:
        return tuple(found.parts["processes"][0]["task"]["vocabulary"].split(SEPARATOR))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise does_not_fit(found.path, error) from error


def encode(prompt: str, units: Sequence[str], level: Level) -> torch.Tensor:
    """Tokens (n,) of the prompt; an empty prompt becomes one end-of-text token."""
    index = {unit: i for i, unit in enumerate(units)}
    found = spelled(prompt, level)
    missing = [unit for unit in found if unit not in index]
    if missing and UNKNOWN not in index:
        raise ValueError(
            f"This model does not know {', '.join(map(repr, dict.fromkeys(missing)))}: its vocabulary has "
            f"{len(units)} {level}s, and none for unknown ones. Leave it out of the prompt."
        )
    return torch.tensor([index.get(unit, index.get(UNKNOWN, 0)) for unit in found or [END]])


def spelled(prompt: str, level: Level) -> list[str]:
    """Its units, as a text has them: at the level of characters with one space in place of several."""
    lines = prompt.split("\n")
    pieces = [line.split() if level == "word" else list(re.sub(r"\s+", " ", line)) for line in lines]
    return [unit for piece in pieces[:-1] for unit in (*piece, END)] + pieces[-1]


def decode(units: Sequence[str], level: Level) -> str:
    """As text, with a new line for every end of a sentence."""
    joined = ("" if level == "character" else " ").join("\n" if unit == END else unit for unit in units)
    return "\n".join(line.strip() for line in joined.split("\n")) if level == "word" else joined
