from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from equilibria.lab.training import Optimizer, Schedule, Training, from_plain, to_plain


def test_settings_survive_json() -> None:
    training = Training(
        epochs=3,
        optimizer=Optimizer(name="sgd", momentum=0.9),
        schedule=Schedule(name="step", milestones=(0.5, 0.75)),
        ema=0.99,
    )
    assert from_plain(Training, json.loads(json.dumps(to_plain(training)))) == training


def test_missing_settings_keep_their_defaults_and_integers_become_floats() -> None:
    training = from_plain(Training, {"optimizer": {"lr": 1}, "clip_norm": 2})
    assert training == Training(optimizer=Optimizer(lr=1.0), clip_norm=2.0)
    assert isinstance(training.clip_norm, float)


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ({"epoch": 3}, ValueError, "no setting epoch. Did you mean epochs?"),
        ({"optimizer": {"lrr": 3.0}}, ValueError, "no setting optimizer.lrr. Did you mean lr?"),
        ({"epochs": "3"}, TypeError, "epochs must be int, got '3'"),
        ({"epochs": True}, TypeError, "epochs must be int, got True"),
        ({"epochs": 2.5}, TypeError, "epochs must be int, got 2.5"),
        ({"clip_norm": "big"}, TypeError, "clip_norm must be float, got 'big'"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be an object with the settings of Optimizer"),
        ({"optimizer": {"betas": [0.9]}}, TypeError, "optimizer.betas must be"),
        ({"schedule": {"milestones": [0.5, "x"]}}, TypeError, r"schedule.milestones\[1\] must be float"),
        ({"optimizer": {"name": "adan"}}, ValueError, "no optimizer 'adan'. Did you mean adam"),
        ({"schedule": {"name": "cosin"}}, ValueError, "Did you mean cosine"),
        ({"precision": "32"}, ValueError, "There are: 32-true, 64-true"),
        ({"failed_solves": "ignore"}, ValueError, "There are: count, skip, stop"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"ema": 1.5}, ValueError, r"must lie in \(0, 1\)"),
        ({"clip_norm": 0.0}, ValueError, "must be positive"),
        ({"schedule": {"name": "step"}}, ValueError, "needs milestones"),
        ({"schedule": {"milestones": [30.0]}}, ValueError, "shares of all steps"),
        ({"optimizer": {"momentum": 0.9}}, ValueError, "adam has no momentum"),
        ({"optimizer": {"nesterov": True}}, ValueError, "for sgd with momentum"),
    ],
)
def test_invalid_settings_are_named(values: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        from_plain(Training, values)


@dataclass(frozen=True)
class _Other:
    kind: Literal["big", "small"] = "big"
    size: int | tuple[int, ...] = 3
    names: dict[str, Any] | None = None


def test_settings_of_an_experiment_are_read_the_same_way() -> None:
    assert from_plain(_Other, {"size": [1, 2], "kind": "small", "names": {"a": 1}}) == _Other("small", (1, 2), {"a": 1})
    with pytest.raises(ValueError, match=r"no settings.kind 'bigg'. Did you mean big"):
        from_plain(_Other, {"kind": "bigg"}, "settings.")
    with pytest.raises(TypeError, match=r"size must be int \| tuple\[int, ...\], got 'x'"):
        from_plain(_Other, {"size": "x"})


def test_only_plain_values_are_settings() -> None:
    with pytest.raises(TypeError, match="dataclasses, tuples, strings and numbers"):
        to_plain(object())
