"""Generation of text with the model of a run: prompts to tokens, tokens to text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from equilibria.lab.data.text import END, UNKNOWN, Level
from equilibria.lab.experiments.deq_language.task import SEPARATOR, Language
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.training.folder import Run, does_not_fit
from equilibria.models.language.sequence import SequenceModel
from equilibria.models.language.sequence import generate as draw


def sample(
    run: Path,
    prompt: str,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    which: str = "best",
    named: str | None = None,
) -> str:
    """Return the prompt continued by `length` tokens from the model of a run."""
    found = Run.open(run)
    task = experiment_of(found, named).task()
    if not isinstance(task, Language):
        raise ValueError(
            f"{run} is a run of {found.config.get('experiment')}, which is not a language model. Pass a run of one."
        )
    level, units = task.settings.data.level, vocabulary(found)
    model = found.model(task, which)
    assert isinstance(model, SequenceModel)
    tokens = encode(prompt, units, level).unsqueeze(0)
    # the model may have more tokens than the vocabulary of the text; those without a name are shown as <unk>
    drawn = draw(model, tokens, length, temperature, top_k, torch.Generator().manual_seed(seed))[0].tolist()
    begin = 0 if spelled(prompt, level) else 1  # skip the end-of-text token that an empty prompt becomes
    return decode([units[i] if i < len(units) else UNKNOWN for i in drawn[begin:]], level)


def vocabulary(run: Run) -> tuple[str, ...]:
    """Return the words or characters that the model of a run knows, from its newest checkpoint."""
    found = run.checkpoint("checkpoints", ("processes",))
    try:
        return tuple(found.parts["processes"][0]["task"]["vocabulary"].split(SEPARATOR))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise does_not_fit(found.path, error) from error


def encode(prompt: str, units: Sequence[str], level: Level) -> torch.Tensor:
    """Return the tokens of a prompt, (n,); an empty prompt becomes one end-of-text token."""
    index = {unit: i for i, unit in enumerate(units)}
    found = spelled(prompt, level)
    missing = [unit for unit in found if unit not in index]
    if missing and UNKNOWN not in index:
        raise ValueError(
            f"This model does not know {', '.join(map(repr, dict.fromkeys(missing)))}: its vocabulary has "
            f"{len(units)} {level}s and no token for unknown ones. Leave it out of the prompt."
        )
    return torch.tensor([index.get(unit, index.get(UNKNOWN, 0)) for unit in found or [END]])


def spelled(prompt: str, level: Level) -> list[str]:
    """Split a prompt into words or characters, as the training text is split; several spaces become one."""
    lines = prompt.split("\n")
    pieces = [line.split() if level == "word" else list(re.sub(r"\s+", " ", line)) for line in lines]
    return [unit for piece in pieces[:-1] for unit in (*piece, END)] + pieces[-1]


def decode(units: Sequence[str], level: Level) -> str:
    """Join words or characters to a text; every end of a sentence becomes a new line."""
    joined = ("" if level == "character" else " ").join("\n" if unit == END else unit for unit in units)
    return "\n".join(line.strip() for line in joined.split("\n")) if level == "word" else joined
