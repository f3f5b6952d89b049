"""Read settings from a YAML, TOML or JSON file as the assignments that `--set` takes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equilibria._core.files import optional
from equilibria.lab.errors import SettingError

READERS = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML", ".json": "JSON"}


def read_settings(path: Path) -> list[str]:
    """Return the settings of a file as `name=value`; nested tables become dotted names, such as training.optimizer.lr."""
    if path.suffix not in READERS:
        raise SettingError(f"{path} must end with {', '.join(READERS)}.")
    try:
        found = _parsed(path)
    except (ValueError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid {READERS[path.suffix]}: {error}") from error
    if not isinstance(found, Mapping):
        raise SettingError(f"{path} must hold a table of settings, got {type(found).__name__}.")
    return _assignments(found, path)


def _parsed(path: Path) -> Any:
    """Return the content of a file; raises ValueError if it is malformed."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    yaml = optional("yaml", "train")
    try:
        return yaml.safe_load(text) or {}  # an empty file is None in YAML
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _assignments(values: Mapping[str, Any], path: Path, prefix: str = "") -> list[str]:
    """Return nested settings as a list of `name=value`."""
    found = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += (
            _assignments(value, path, f"{name}.") if isinstance(value, Mapping) else [f"{name}={_text(value, name, path)}"]
        )
    return found


def _text(value: Any, name: str, path: Path) -> str:
    """Return a value as text that `--set` accepts."""
    if isinstance(value, (list, tuple)):
        return ",".join(_text(each, name, path) for each in value)
    if isinstance(value, bool) or value is None:  # before numbers: a bool is an int
        return str(value).lower()
    if not isinstance(value, (int, float, str)):
        raise SettingError(f"{path}: {name} must be a number, a text, true, false, null or a list, got {value!r}.")
    return str(value)
