"""Files that are written whole or not at all, and packages that only some features need."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its name when the block ends and the disk has it; otherwise nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or exchange it for another in one moment; an error names it."""
    try:
        with atomic(path) as out:
            out.write(data)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of a folder; systems that cannot do so do without."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optional(module: str, extra: str) -> Any:
    """A module of a package that only some data needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This needs {module} ({error}). Install it with: pip install 'equilibria[{extra}]'") from error
