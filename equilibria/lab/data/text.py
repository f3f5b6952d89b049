"""Language modelling corpora: one sentence or paragraph per line, as words or as characters."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from equilibria._core.files import atomic
from equilibria.lab.data.files import DataError, Paths, digest
from equilibria.lab.data.sets import Dataset

END, UNKNOWN = "<eos>", "<unk>"
Level = Literal["word", "character"]


def corpus(name: str, files: Sequence[str], paths: Paths, *, level: Level = "word") -> Dataset[Tensor]:
    """Read a corpus as tokens of three splits, int32 (n,), with an <eos> after every line; `classes` is the vocabulary.

    The vocabulary holds the units (words or characters) of the training text, the most frequent first, as adaptive softmaxes
    need them. It is cached as JSON next to the text. Units that occur only in validation or test text become <unk>.

    files  base names of train, validation and test text
    level  "word", or "character"; characters include single spaces between words
    """
    if level not in ("word", "character"):
        raise ValueError(f"level must be 'word' or 'character', got {level!r}.")
    places = [paths[file] for file in files]
    units = _vocabulary(places, level)
    index = _Index(units)
    train, valid, test = (_encode(place, level, index) for place in places)
    return Dataset(name, train, test, valid, classes=units)


class _Index(dict[str, int]):
    """Maps a unit to its number; unknown units have the number of <unk>."""

    def __init__(self, units: Sequence[str]) -> None:
        super().__init__((unit, i) for i, unit in enumerate(units))

    def __missing__(self, unit: str) -> int:
        return self[UNKNOWN]


def _lines(path: Path, level: Level) -> Iterator[list[str]]:
    """Yield the units of every line, ending with <eos>."""
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as text:
            for line in text:
                words = line.split()
                yield [*(words if level == "word" else " ".join(words)), END]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Delete it and fetch it again.") from error


def _encode(path: Path, level: Level, index: _Index) -> Tensor:
    """Return the tokens of a text, int32 (n,)."""
    numbers = array("i")  # 4 bytes per token; a list of Python integers would take several times as much
    for line in _lines(path, level):
        numbers.extend(map(index.__getitem__, line))
    if not numbers:
        raise DataError(f"{path} is empty. Delete it and fetch it again.")
    return torch.frombuffer(numbers, dtype=torch.int32)


def _vocabulary(places: Sequence[Path], level: Level) -> tuple[str, ...]:
    """Return the vocabulary, from the cache if it was made for the same texts."""
    cache = places[0].with_name(f"vocabulary-{level}.json")
    sums = [digest(place) for place in places]
    units = _cached(cache, sums)
    if units is None:
        units = _count(places, level)
        with suppress(OSError), atomic(cache) as out:  # without write access the units are counted again next time
            out.write(json.dumps({"sha256": sums, "units": units}, ensure_ascii=False).encode())
    return tuple(units)


def _cached(cache: Path, sums: Sequence[str]) -> list[str] | None:
    """Return the cached vocabulary if its checksums are `sums`; None if there is none or it is damaged."""
    try:
        content = json.loads(cache.read_bytes())
        return content["units"] if content["sha256"] == sums and isinstance(content["units"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _count(places: Sequence[Path], level: Level) -> list[str]:
    """Return the units of the training text by frequency, and <unk> if another text has units that it lacks."""
    counts: Counter[str] = Counter()
    for line in _lines(places[0], level):
        counts.update(line)
    units = [unit for unit, _ in counts.most_common()]  # ties in the order of their first occurrence
    others = (unit for place in places[1:] for line in _lines(place, level) for unit in line)
    return units if UNKNOWN in counts or all(unit in counts for unit in others) else [*units, UNKNOWN]
