"""Files below a data root: paths, checksums and atomic writes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from equilibria.lab.errors import DataError as DataError

Paths = Mapping[str, Path]  # the files of a dataset by base name
CHUNK = 1 << 18  # bytes read at once, so that a large file does not fill the memory


@dataclass(frozen=True)
class Archive:
    """A zip or tar file that holds files of a dataset.

    path      path below the data root; an archive that is already there is used without a download
    checksum  "md5:..." or "sha256:..."; empty if none is published
    """

    path: str
    urls: tuple[str, ...]
    checksum: str = ""


@dataclass(frozen=True)
class File:
    """A file of a dataset in its official format.

    path      path below the data root
    urls      addresses of the file, tried in turn
    checksum  "md5:..." or "sha256:..." of the official file; empty if none is known
    archive   archive that holds the file under the same base name
    also      other paths below the data root where the file may be
    """

    path: str
    urls: tuple[str, ...] = ()
    checksum: str = ""
    archive: Archive | None = None
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def locate(self, root: Path) -> Path | None:
        """Return the path of the file below `root`; None if it is missing."""
        places = (root / path for path in (self.path, *self.also))
        return next((place for place in places if place.is_file()), None)


class FileState(Enum):
    """The state of a file of a dataset, in words."""

    PRESENT = "present"
    UNVERIFIED = "present, no official checksum to compare"
    DIFFERS = "differs from the official file"
    MISSING = "missing"


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data: `root`, else $EQUILIBRIA_DATA, else equilibria/data in the user's cache."""
    chosen = root or os.environ.get("EQUILIBRIA_DATA")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "equilibria" / "data"


def state_of(file: File, root: Path) -> FileState:
    """Return whether a file is present and has its official checksum."""
    place = file.locate(root)
    if place is None:
        return FileState.MISSING
    if not file.checksum or place.name != file.name:  # the checksum is that of another form, such as the gzipped one
        return FileState.UNVERIFIED
    return FileState.PRESENT if matches(place, file.checksum) else FileState.DIFFERS


def matches(path: Path, checksum: str) -> bool:
    """Return True if a file has this checksum, or if the checksum is empty."""
    algorithm, _, expected = checksum.partition(":")
    return not checksum or digest(path, algorithm) == expected


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the hexadecimal digest of a file."""
    sums = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sums.update(chunk)
    return sums.hexdigest()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder inside the block if the system can, so that ranks that start together do not download twice."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # releases the lock
