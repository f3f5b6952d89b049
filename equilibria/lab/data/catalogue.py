"""Datasets by name: information, loading, fetching and checking of their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from equilibria._core.names import nearest
from equilibria.lab.data.download import Progress, obtain
from equilibria.lab.data.entries import CATALOGUE, Info
from equilibria.lab.data.files import FileState, data_root, state_of
from equilibria.lab.data.sets import Dataset

Root = str | os.PathLike[str] | None


def names() -> list[str]:
    """Return the names of all datasets."""
    return list(CATALOGUE)


def info(name: str) -> Info:
    """Return information about a dataset without loading it."""
    key = name.lower().replace("_", "-")
    if key not in CATALOGUE:
        raise ValueError(f"There is no dataset {name!r}. {nearest(key, CATALOGUE)}")
    return CATALOGUE[key]


def load(
    name: str, root: Root = None, *, download: bool = True, progress: Progress | None = None, **options: Any
) -> Dataset[Any]:
    """Load a dataset into memory; missing files are fetched first.

        mnist = data.load("mnist")
        mnist.train.x  # uint8 (60000, 1, 28, 28)

    root      folder of all data; default: $EQUILIBRIA_DATA, else a cache of the user
    download  False: raise DataError instead of fetching missing files
    progress  called during a download with file name, bytes so far and total bytes (or None)
    options   options of the dataset, which `info(name).options` lists
    """
    entry = info(name)
    if unknown := sorted(set(options) - set(entry.options)):
        known = ", ".join(f"{key}={value!r}" for key, value in entry.options.items()) or "none"
        raise TypeError(f"{entry.name} has no option {', '.join(unknown)}. Its options are: {known}.")
    if not entry.files:
        return entry.read(**options)
    paths = obtain(entry.name, entry.files, data_root(root), progress, download=download, manual=entry.manual)
    return entry.read(paths, **options)


def fetch(name: str, root: Root = None, progress: Progress | None = None) -> list[Path]:
    """Fetch missing files of a dataset and return the paths of all."""
    entry = info(name)
    return list(obtain(entry.name, entry.files, data_root(root), progress, manual=entry.manual).values())


def check(name: str, root: Root = None) -> dict[str, FileState]:
    """Return the state of each file of a dataset, by its path below the data root; files with a checksum are read."""
    return {file.path: state_of(file, data_root(root)) for file in info(name).files}
