"""Conversion of settings and results to values that JSON can represent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def to_plain(value: Any, replaced: Callable[[Any], Any] = lambda value: value) -> Any:
    """Convert dataclasses and mappings to dicts and tuples to lists; `replaced` is applied to every value first.

    Raises TypeError for values that are none of these and no string, number or None.
    """
    value = replaced(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name), replaced) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(each, replaced) for each in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(each, replaced) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"Only dataclasses, tuples, strings and numbers can be written as JSON, got {value!r}.")
