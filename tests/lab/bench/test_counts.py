"""A training step of our default costs no more than the counts recorded in counts.json."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria import native
from equilibria.lab.bench.cases import make
from equilibria.lab.bench.counts import BATCHES, SMALL, Lists, Operations, main, measured, regressions
from equilibria.lab.bench.methods import Ours
from equilibria.lab.bench.rules import count

BASELINE: dict[str, Any] = json.loads((Path(__file__).parent / "counts.json").read_text())


@pytest.mark.recorded
def test_counts_do_not_exceed_the_baseline() -> None:
    found = regressions(measured(), BASELINE)
    accept = "python -m equilibria.lab.bench.counts tests/lab/bench/counts.json"
    assert not found, "\n".join([*found, f"To accept the new counts: {accept}"])


@pytest.mark.recorded
@pytest.mark.skipif(not native.available(), reason=native.reason() or "native")
@pytest.mark.parametrize("name", SMALL)
def test_native_steps_take_as_many_calls_and_rows(name: str) -> None:
    found, case = asdict(count(make(name, BATCHES.get(name)), Ours(), 1e-3)), BASELINE["cases"][name]
    assert found == {key: case[key] for key in found}


@pytest.mark.parametrize("name", ["evaluations", "graph_evaluations", "products", "rows"])
def test_one_more_evaluation_is_a_regression(name: str) -> None:
    assert regressions(changed("mlp-b32", name, 1), BASELINE)
    assert not regressions(changed("mlp-b32", name, -1), BASELINE)


def test_operations_may_grow_by_three_percent_within_a_version_of_torch() -> None:
    before = BASELINE["cases"]["mlp-b32"]["operations"]
    assert not regressions(changed("mlp-b32", "operations", int(0.029 * before)), BASELINE)
    more = changed("mlp-b32", "operations", int(0.031 * before) + 1)
    (line,) = regressions(more, BASELINE)
    assert line.startswith("mlp-b32: operations ")
    assert not regressions(more | {"torch": "another"}, BASELINE)


def test_every_kind_of_read_back_is_counted() -> None:
    x = torch.arange(3.0)
    with Operations() as seen, Lists() as lists:
        assert bool(x.any()) and float(x.sum()) == 3.0 and x[1].item() == 1.0
        assert len(x.nonzero()) == 2 and len(x[x > 1]) == 1
    assert (seen.read_backs, lists.read_backs) == (5, 0)
    with Operations() as seen, Lists() as lists:
        assert x.tolist() == [0.0, 1.0, 2.0]
        assert len(x[torch.tensor([1, 2])]) == 2  # the shape is known: nobody waits
    assert (seen.read_backs, lists.read_backs) == (0, 1)


def test_the_baseline_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of all tests that follow
    monkeypatch.setattr("equilibria.lab.bench.counts.SMALL", ("mlp-b32",))
    path = tmp_path / "counts.json"
    assert main([str(path)]) == 0
    assert set(json.loads(path.read_text())["cases"]["mlp-b32"]) == set(BASELINE["cases"]["mlp-b32"])


def changed(case: str, name: str, by: int) -> dict[str, Any]:
    found = copy.deepcopy(BASELINE)
    found["cases"][case][name] += by
    return found
