"""Change fields of nested settings dataclasses by dotted names, with values given as text."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from equilibria._core.names import nearest
from equilibria.lab.errors import SettingError

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every setting of a dataclass, and of dataclasses inside it, by its dotted name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        found |= fields(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def assign(groups: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply assignments `name=value` to the dataclasses in `groups`, which are keyed by the prefix of their names."""
    found: dict[str, list[_Change]] = {}
    known = {name: prefix for prefix, group in groups.items() for name in fields(group, prefix)}
    for text in assignments:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not name:
            raise SettingError(f"Expected key=value, got {text!r}.")
        if name not in known:
            raise SettingError(_unknown(name, known))
        prefix = known[name]
        found.setdefault(prefix, []).append(_Change(tuple(name.removeprefix(prefix).split(".")), name, value))
    return {prefix: _replace(group, found.get(prefix, [])) for prefix, group in groups.items()}


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown setting, with the settings of a group or the nearest name."""
    inside = [other for other in known if other.startswith(f"{name}.")]
    if inside:
        return f"{name} is a group of settings: {', '.join(inside)}. Set one of them."
    return f"There is no setting {name!r}. {nearest(name, known)}"


class _Change(NamedTuple):
    """A setting and its new value."""

    path: tuple[str, ...]  # names of the fields that lead to it, from the current dataclass
    name: str  # full dotted name, for errors
    text: str


def _replace(config: Any, changes: Sequence[_Change]) -> Any:
    """Replace all changed fields at once, because some are only valid together."""
    if not changes:
        return config
    hints, values = get_type_hints(type(config)), {}
    inner: dict[str, list[_Change]] = {}
    for change in changes:
        field, *rest = change.path
        if rest:
            inner.setdefault(field, []).append(change._replace(path=tuple(rest)))
        else:
            values[field] = convert(change.text, hints[field], change.name)
    values |= {field: _replace(getattr(config, field), some) for field, some in inner.items()}
    try:
        return dataclasses.replace(config, **values)
    except SettingError:
        raise
    except (ValueError, TypeError) as error:
        given = ", ".join(f"{change.name}={change.text}" for change in changes)
        raise SettingError(f"{given}: {error}") from error


def convert(text: str, kind: Any, name: str) -> Any:
    """Parse text as a value of the type `kind`: numbers, booleans, strings, choices, optional ones and tuples of them."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(text, parts, name)
    if origin is Literal:
        if text not in parts:
            raise SettingError(f"{name} must be one of {', '.join(parts)}, got {text!r}.")
        return text
    if origin is tuple:
        return _tuple(text, parts, name)
    if kind is bool:  # bool("false") would be True
        if text.lower() not in _BOOLEANS:
            raise SettingError(f"{name} must be true or false, got {text!r}.")
        return _BOOLEANS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            raise SettingError(f"{name} must be a {'whole ' * (kind is int)}number, got {text!r}.") from error
    return text


def _optional(text: str, parts: tuple[Any, ...], name: str) -> Any:
    """Parse text as the first type of a union that accepts it; "none" and "null" are None."""
    if type(None) in parts and text.lower() in ("none", "null"):
        return None
    kinds = [part for part in parts if part is not type(None)]
    # if no type accepts the text, the error of the last one is raised
    for kind in kinds[:-1]:
        try:
            return convert(text, kind, name)
        except SettingError:
            continue
    return convert(text, kinds[-1], name)


def _tuple(text: str, parts: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Parse values separated by commas."""
    items = [item.strip() for item in text.strip("()[]").split(",") if item.strip()]
    kinds = [parts[0]] * len(items) if parts[1:] == (...,) else list(parts)
    if len(kinds) != len(items):
        raise SettingError(f"{name} takes {len(kinds)} values separated by commas, got {text!r}.")
    return tuple(convert(item, kind, name) for item, kind in zip(items, kinds, strict=True))
