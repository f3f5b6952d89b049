"""Files that are written whole or not at all, and packages that only some features need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its name when the block ends well; otherwise nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            yield out
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def optional(module: str, extra: str) -> Any:
    """A module of a package that only some data needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This needs {module} ({error}). Install it with: pip install 'equilibria[{extra}]'") from error
