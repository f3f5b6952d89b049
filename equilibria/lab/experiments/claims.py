"""Claims of papers as comparisons of means, and one function per kind of comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper as a comparison of means: at_least <= left / right (or left - right) <= at_most.

    right    row to compare with; None: the value of `left` itself is bounded
    against  column to compare with, in the row `right`, or in the row `left` if there is no `right`
    id       number that equal claims of several tables share
    """

    text: str
    column: str
    left: str
    right: str | None = None
    by: Literal["ratio", "difference"] = "ratio"
    at_least: float | None = None
    at_most: float | None = None
    against: str | None = None
    id: str = ""


def at_most(column: str, left: str, right: str, bound: float, text: str, *, id: str = "") -> Claim:
    """Return the claim left / right <= bound."""
    return Claim(id=id, text=text, column=column, left=left, right=right, at_most=bound)


def at_least(column: str, left: str, right: str, bound: float, text: str, *, id: str = "") -> Claim:
    """Return the claim left / right >= bound."""
    return Claim(id=id, text=text, column=column, left=left, right=right, at_least=bound)


def within(column: str, left: str, right: str, low: float, high: float, text: str, *, id: str = "") -> Claim:
    """Return the claim low <= left / right <= high."""
    return Claim(id=id, text=text, column=column, left=left, right=right, at_least=low, at_most=high)


def alike(column: str, left: str, right: str, margin: float, text: str, *, id: str = "") -> Claim:
    """Return the claim |left - right| <= margin."""
    return Claim(id=id, text=text, column=column, left=left, right=right, by="difference", at_least=-margin, at_most=margin)


def higher(column: str, left: str, right: str, text: str, *, by: float = 0.0, id: str = "") -> Claim:
    """Return the claim left - right >= by; with a negative `by`, left may be that much lower."""
    return Claim(id=id, text=text, column=column, left=left, right=right, by="difference", at_least=by)


def lower(column: str, left: str, right: str, text: str, *, by: float = 0.0, id: str = "") -> Claim:
    """Return the claim right - left >= by; with a negative `by`, left may be that much higher."""
    return Claim(id=id, text=text, column=column, left=left, right=right, by="difference", at_most=0.0 - by)


def value_at_most(column: str, row: str, bound: float, text: str, *, id: str = "") -> Claim:
    """Return the claim that the value of a row is <= bound."""
    return Claim(id=id, text=text, column=column, left=row, at_most=bound)


def value_at_least(column: str, row: str, bound: float, text: str, *, id: str = "") -> Claim:
    """Return the claim that the value of a row is >= bound."""
    return Claim(id=id, text=text, column=column, left=row, at_least=bound)


def column_higher(column: str, other: str, row: str, text: str, *, by: float = 0.0, id: str = "") -> Claim:
    """Return the claim column - other >= by within a row."""
    return Claim(id=id, text=text, column=column, left=row, against=other, by="difference", at_least=by)


def column_lower(column: str, other: str, row: str, text: str, *, by: float = 0.0, id: str = "") -> Claim:
    """Return the claim other - column >= by within a row."""
    return Claim(id=id, text=text, column=column, left=row, against=other, by="difference", at_most=0.0 - by)


def column_at_most(column: str, other: str, row: str, bound: float, text: str, *, id: str = "") -> Claim:
    """Return the claim column / other <= bound within a row."""
    return Claim(id=id, text=text, column=column, left=row, against=other, at_most=bound)


def column_at_least(column: str, other: str, row: str, bound: float, text: str, *, id: str = "") -> Claim:
    """Return the claim column / other >= bound within a row."""
    return Claim(id=id, text=text, column=column, left=row, against=other, at_least=bound)
