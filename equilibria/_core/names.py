"""Suggestions for misspelled names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 40  # most names listed in an error


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a sentence that suggests the choices closest to `name`, or lists the choices if none is close."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    more = len(choices) - SHOWN
    return f"There are: {', '.join(choices[:SHOWN])}{f' and {more} more' if more > 0 else ''}."
