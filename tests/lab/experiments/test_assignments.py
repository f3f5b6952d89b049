"""Settings changed by dotted names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from equilibria.lab.errors import SettingError
from equilibria.lab.experiments.assignments import assign, fields


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.1
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}.")


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int = 1
    flag: bool = False
    limit: float | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[int, ...] = ()
    name: str = "x"
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("count=3", "count", 3),
        ("flag=yes", "flag", True),
        ("flag=False", "flag", False),
        ("limit=2", "limit", 2.0),
        ("limit=none", "limit", None),
        ("pair=1, 2.5", "pair", (1.0, 2.5)),
        ("many=(1,2,3)", "many", (1, 2, 3)),
        ("name=a=b", "name", "a=b"),
        ("inner.rate=1e-3", "inner.rate", 1e-3),
        ("inner.kind=b", "inner.kind", "b"),
    ],
)
def test_values_are_converted_to_the_type_of_their_field(text: str, name: str, value: Any) -> None:
    found = fields(assign({"": Outer()}, [text])[""])[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count", "Expected key=value, got 'count'"),
        ("conut=3", "There is no setting 'conut'. Did you mean count"),
        ("inner.rat=3", "Did you mean inner.rate"),
        ("inner=3", "inner is a group of settings: inner.rate, inner.kind"),
        ("inner.rate.x=3", "There is no setting 'inner.rate.x'"),
        ("count=2.5", "count must be a whole number, got '2.5'"),
        ("limit=few", "limit must be a number, got 'few'"),
        ("flag=maybe", "flag must be true or false"),
        ("inner.kind=c", "inner.kind must be one of a, b, got 'c'"),
        ("pair=1", "pair takes 2 values"),
        ("inner.rate=-1", "inner.rate=-1: rate must not be negative"),
        ("other.count=1", "There is no setting 'other.count'"),
    ],
)
def test_invalid_assignments_are_explained(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        assign({"": Outer()}, [text])


def test_groups_have_prefixes() -> None:
    changed = assign({"": Inner(), "training.": Outer()}, ["rate=2", "training.inner.rate=3", "training.count=4"])
    assert changed[""].rate == 2
    assert (changed["training."].inner.rate, changed["training."].count) == (3, 4)
