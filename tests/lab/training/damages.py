"""Damages to the files of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _text(content: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(content)

    return damage


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00{")


DAMAGES = {
    "empty": _text(""),
    "half": _cut,
    "null": _text("null\n"),
    "list": _text("[1, 2]\n"),
    "number": _text("3\n"),
    "no keys": _text("{}\n"),
    "other types": _text('{"epoch": "1", "step": [], "split": 3, "training": 4, "epochs": "x", "final": 1}\n'),
    "not UTF-8": _not_text,
    "directory": _directory,
}


def rewrite_state(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change state.json, and the manifest so that it agrees."""
    state = json.loads((checkpoint / "state.json").read_text())
    text = json.dumps(change(state))
    (checkpoint / "state.json").write_text(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
