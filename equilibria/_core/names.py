"""The choices nearest to a name that is not among them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 40  # names in an error: more are not read


def nearest(name: str, choices: Iterable[str]) -> str:
    """Say which of the choices may have been meant, as a sentence; list them if none is near."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    more = len(choices) - SHOWN
    return f"There are: {', '.join(choices[:SHOWN])}{f' and {more} more' if more > 0 else ''}."
