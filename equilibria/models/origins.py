"""The origin of a model: its name and options, stored on the model and as plain data for JSON.

Options are restored exactly: plain values, tuples, the library's settings (frozen dataclasses such as Stop or MDEQConfig)
and its norms. Settings are looked up by name in modules that are already imported, so a file cannot run code.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from torch import nn

from equilibria.stop import euclidean_norm, max_norm, rms_norm

PACKAGE = "equilibria."
NORMS = {norm.__name__: norm for norm in (rms_norm, euclidean_norm, max_norm)}
_ATTRIBUTE = "_origin"

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Origin:
    """The arguments of `create`, with the defaults filled in."""

    name: str
    options: Mapping[str, Any]


def remember_origin(model: M, name: str, options: Mapping[str, Any]) -> M:
    """Store the name and options of a model on it; copies and pickles keep them."""
    setattr(model, _ATTRIBUTE, Origin(name, dict(options)))
    return model


def origin_of(model: nn.Module) -> Origin | None:
    """Return the name and options from which a model was made; None if `create` did not make it."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Origin) else None


def to_data(value: Any) -> Any:
    """Return a value as JSON data from which `from_data` restores its type; raises TypeError for unsupported values."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:  # not a subclass, whose type would be lost
        return [to_data(each) for each in value]
    # without NamedTuples, which would come back as plain tuples
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [to_data(each) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_data(each) for key, each in value.items()}}
    if any(value is norm for norm in NORMS.values()):
        return {"norm": value.__name__}
    if (path := _path(type(value))) is not None:
        values = {name: to_data(getattr(value, name)) for name in _field_names(type(value))}
        return {"settings": path, "values": values}
    raise TypeError(f"A file can hold numbers, strings, lists, tuples, dicts and the library's settings, got {value!r}.")


def from_data(data: Any) -> Any:
    """Return the value that `to_data` was given; raises ValueError for anything else."""
    if isinstance(data, list):
        return [from_data(each) for each in data]
    if not isinstance(data, dict):
        return data
    if set(data) == {"settings", "values"} and isinstance(data["values"], dict):
        path = data["settings"]
        found = _lookup(path) if isinstance(path, str) else None
        if found is None:
            raise ValueError(f"This version of the library has no settings class {path!r}.")
        return _made(found, {name: from_data(each) for name, each in data["values"].items()})
    if len(data) == 1:
        ((kind, inner),) = data.items()
        if kind == "float" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if kind == "tuple" and isinstance(inner, list):
            return tuple(from_data(each) for each in inner)
        if kind == "dict" and isinstance(inner, dict):
            return {key: from_data(each) for key, each in inner.items()}
        if kind == "norm" and inner in NORMS:
            return NORMS[inner]
    raise ValueError(f"Expected a value that the library wrote to a model file, got {str(data)[:80]}")


def _made(kind: type, values: dict[str, Any]) -> Any:
    """Return settings built from their fields, checked by their constructor if it takes fields."""
    unknown = sorted(set(values) - set(_field_names(kind)))
    if unknown:
        raise ValueError(f"{kind.__name__} has no setting {', '.join(unknown)} in this version of the library.")
    if vars(kind)["__dataclass_params__"].init:
        return kind(**values)
    if missing := sorted(set(_field_names(kind)) - set(values)):
        raise ValueError(f"{kind.__name__} needs the setting {', '.join(missing)} in this version of the library.")
    made: Any = object.__new__(kind)  # its constructor takes other arguments than its fields, as Fallback(*solvers) does
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _field_names(kind: type) -> list[str]:
    """Return the fields of settings that are stored."""
    assert dataclasses.is_dataclass(kind)
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _path(kind: type) -> str | None:
    """Return the name of a settings class in a file; None if the class is not the library's."""
    return kind.__name__ if _lookup(kind.__name__) is kind else None


def _lookup(path: str) -> type | None:
    """Return the settings class of this name in the modules that are imported already; None if there is not exactly one.

    Files of version 0.1 have the module before the name ("solve.Stop"). It is ignored, since classes may change modules.
    """
    name = path.rpartition(".")[2]
    modules = [module for key, module in sys.modules.items() if key.startswith(PACKAGE)]
    found = {
        id(kind): kind
        for module in modules
        if _is_settings(kind := vars(module).get(name)) and kind.__module__.startswith(PACKAGE)
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _is_settings(found: Any) -> TypeGuard[type]:
    """Return True for frozen dataclasses."""
    parameters = vars(found).get("__dataclass_params__") if isinstance(found, type) else None
    return parameters is not None and bool(parameters.frozen)
