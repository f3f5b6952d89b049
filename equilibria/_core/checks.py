"""Checks of arguments."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)
