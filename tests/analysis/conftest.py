"""Measurements have no time limit here: on a loaded machine they would be stopped, and findings differ."""

from __future__ import annotations

import math

import pytest

from equilibria.analysis.diagnosis import examine


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "SECONDS", math.inf)
    monkeypatch.setattr(examine, "GRADIENT_SECONDS", math.inf)
