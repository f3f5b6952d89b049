"""Files of a run: writes that survive a crash, and JSON without nan."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from equilibria._core.plain import to_plain


def write_new(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_to(path: Path, data: bytes) -> None:
    """Append to a file and wait until it is on the disk; an interruption may leave an incomplete last line."""
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Read a file that holds a JSON object; raises ValueError with the path and `advice`."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}. {advice}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, got {found!s:.80}. {advice}")
    return found


def as_json(value: Any) -> bytes:
    """Return the content of a JSON file; nan and inf, which JSON does not have, become null."""
    return (json.dumps(to_plain(value, _finite), indent=1, allow_nan=False) + "\n").encode()


def as_line(record: Any) -> bytes:
    """Return a line of a JSON Lines file; nan and inf become null."""
    return (json.dumps(to_plain(record, _finite), allow_nan=False) + "\n").encode()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
