"""Atomic writes of files, and imports of optional packages."""

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
    """Open a temporary file that replaces `path` when the block ends; if the block raises, it is deleted.

    The data are synced to disk before the rename, and the folder after it. Missing parent folders are made.
    """
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
    """Write `data` to `path` atomically; an OSError names the path."""
    try:
        with atomic(path) as out:
            out.write(data)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk; does nothing on systems that cannot open folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optional(module: str, extra: str) -> Any:
    """Import an optional module; the ImportError names the extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This needs {module} ({error}). Install it with: pip install 'equilibria[{extra}]'") from error


def missing(error: ModuleNotFoundError, extra: str) -> ImportError:
    """Return the error for a failed import: it names the extra, unless a module of this package is missing."""
    if (error.name or "").partition(".")[0] == "equilibria":
        return error
    return ImportError(f"This needs {error.name} ({error}). Install it with: pip install 'equilibria[{extra}]'")
