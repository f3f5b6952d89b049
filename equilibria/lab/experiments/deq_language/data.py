"""Texts for language models: which one, how much of it, and its segments in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equilibria.lab.data.batches import Ordered, TextBatches
from equilibria.lab.data.catalogue import info, load
from equilibria.lab.data.sets import Dataset
from equilibria.lab.data.text import END, UNKNOWN, Level

TextName = Literal["toy", "ptb", "wikitext-2", "wikitext-103"]
SplitName = Literal["train", "valid", "test"]
SETTLED = 4  # segments after which every model has a full memory

# characters of the training text, and <eos>; for WikiText-103 they are not known; set data.tokens
CHARACTERS: dict[TextName, int] = {"ptb": 50, "wikitext-2": 283}

_ARTICLES = ("the", "a", "some", "every")
_ADJECTIVES = ("small", "old", "quiet", "red", "clever", "lazy")
_NOUNS = ("cat", "dog", "bird", "fox", "child", "farmer", "horse", "mouse")
_VERBS = ("sees", "likes", "follows", "hears", "fears")
TOY_WORDS = (END, *_ARTICLES, *_ADJECTIVES, *_NOUNS, *_VERBS, UNKNOWN)
TOY_LETTERS = (" ", END, *"etaoinshrdlucmfwygpbvkxqjz", UNKNOWN)


class TextSegment(NamedTuple):
    """A piece of a text.

    x, y      (rows, length) tokens, and the one after each
    split     whose memory it goes on with
    position  index of the segment in its split
    look      the segment of its split to measure on, with the memory full where the split is long enough
    """

    x: Tensor
    y: Tensor
    split: SplitName
    position: int
    look: bool


class Segments(Ordered[TextSegment]):
    """`TextBatches` with the split and position of each segment."""

    def __init__(
        self, split: SplitName, tokens: Tensor, batch_size: int, length: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(batch_size, rank, world_size)
        self.split = split
        self.text = TextBatches(tokens, batch_size, length, drop_last=split == "train", rank=rank, world_size=world_size)

    def __len__(self) -> int:
        return len(self.text)

    def identity(self) -> dict[str, int]:
        return self.text.identity()

    def batch(self, epoch: int, position: int) -> TextSegment:
        x, y = self.text.batch(epoch, position)
        return TextSegment(x, y, self.split, position, position == min(SETTLED, len(self) - 1))


@dataclass(frozen=True, kw_only=True)
class TextData:
    """The choice of a text, and of how much of it.

    name         "toy": sentences made by a rule, without any file
    level        of the tokens
    train, valid, test  tokens, from the beginning of each text; None: all
    length       of a segment
    eval_length  the same in evaluation; None: as in training
    tokens       in the vocabulary, if it is not the catalogue's: a text of your own in the same files, or the characters
                 of WikiText-103
    """

    name: TextName = "ptb"
    level: Level = "word"
    train: int | None = None
    valid: int | None = None
    test: int | None = None
    length: int = 64
    eval_length: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test", "length", "eval_length", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} counts tokens, at least 1, got {value}.")

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, known without the files."""
        if self.tokens is not None:
            return self.tokens
        if self.name == "toy":
            return len(TOY_WORDS if self.level == "word" else TOY_LETTERS)
        if self.level == "word":
            return info(self.name).classes
        if self.name not in CHARACTERS:
            raise ValueError(f"The number of characters of {self.name} is not known. Count them and set data.tokens.")
        return CHARACTERS[self.name]

    def load(self, root: Path | None) -> Dataset[Tensor]:
        """The whole texts, with `classes` the vocabulary."""
        if self.name == "toy":
            return toy_text(self.level)
        found: Dataset[Tensor] = load(self.name, root, level=self.level)
        if len(found.classes) > self.vocabulary:
            raise ValueError(
                f"The vocabulary of this {self.name} has {len(found.classes):,} tokens, more than the {self.vocabulary:,} "
                f"that the model is made for: set data.tokens={len(found.classes)}."
            )
        return found

    def splits(self, root: Path | None) -> dict[SplitName, Tensor]:
        """The tokens that are used of each text."""
        return self.cut(self.load(root))

    def cut(self, whole: Dataset[Tensor]) -> dict[SplitName, Tensor]:
        """Like `splits`, for texts that are loaded already."""
        parts: dict[SplitName, tuple[Tensor | None, int | None]] = {
            "train": (whole.train, self.train),
            "valid": (whole.valid, self.valid),
            "test": (whole.test, self.test),
        }
        return {name: self._cut(name, tokens, count) for name, (tokens, count) in parts.items() if tokens is not None}

    def _cut(self, name: SplitName, tokens: Tensor, count: int | None) -> Tensor:
        if count is not None and count > len(tokens):
            raise ValueError(f"data.{name}={count}: there are 1 to {len(tokens)} tokens to take of {self.name}.")
        return tokens[:count]


@cache
def toy_text(level: Level) -> Dataset[Tensor]:
    """Sentences of one form; the article occurs again before the second noun, so that memory helps."""
    units = TOY_WORDS if level == "word" else TOY_LETTERS
    index = {unit: i for i, unit in enumerate(units)}
    draws = Random("toy text")

    def text(sentences: int) -> Tensor:
        lines = (_sentence(draws) for _ in range(sentences))
        found = [unit for line in lines for unit in (*(line if level == "word" else " ".join(line)), END)]
        return torch.tensor([index[unit] for unit in found], dtype=torch.int32)

    train, valid, test = text(600), text(100), text(100)
    return Dataset("toy", train, test, valid, classes=units)


def _sentence(draws: Random) -> list[str]:
    article, verb = draws.choice(_ARTICLES), draws.choice(_VERBS)
    first, second = ([draws.choice(_ADJECTIVES), draws.choice(_NOUNS)] for _ in range(2))
    return [article, *first, verb, article, *second]
