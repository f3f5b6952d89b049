"""The classical systems: what Robust solves of them, and the table in the documentation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from tests.classical import SYSTEMS, System

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "solvers.md"
# one of every kind: local minima, singular roots, bad scaling, steep polynomials, cells
QUICK = {
    "Powell singular",
    "Powell badly scaled",
    "Brown almost linear, 10",
    "matrix square root, 2 by 2",
    "Dennis and Schnabel",
    "Boggs",
    "Chebyquad, 5",
    "Box, 3",
    "tanh cell, skew, norm 5",
    "normed residual cell",
    "affine cell, norm 1.5",
}


def load_comparison() -> Any:
    spec = importlib.util.spec_from_file_location("classical_systems", ROOT / "benchmarks" / "classical_systems.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


comparison = load_comparison()


def test_there_are_49_systems_of_49_names() -> None:
    assert len(SYSTEMS) == len({system.name for system in SYSTEMS}) == 49


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_rows_of_a_system_are_independent(system: System) -> None:
    z = system.z0(3) + torch.arange(3, dtype=torch.float64).unsqueeze(1) / 7
    together = system.function(z)
    assert together.shape == z.shape
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], system.function(z[row : row + 1]))


@pytest.mark.parametrize("system", [s for s in SYSTEMS if s.name in QUICK], ids=lambda system: system.name)
def test_robust_solves_one_system_of_every_kind(system: System) -> None:
    with torch.no_grad():
        solution = eq.fixed_point(system.cell, system.z0(), solver=eq.Robust(), stop=comparison.TIGHT_STOP)
    assert bool(solution.stats.converged.all())
    assert comparison.largest(system, solution.z) <= comparison.TIGHT


def test_the_table_in_the_documentation_is_that_of_the_results() -> None:
    results = json.loads(comparison.RESULTS.read_text())
    assert results["systems"] == [system.name for system in SYSTEMS]
    assert comparison.table(results) in DOCS.read_text()
    counts = {name: comparison.solved(runs["tight"], comparison.TIGHT) for name, runs in results["methods"].items()}
    assert counts["Robust()"] >= 48
    assert counts["Robust()"] == max(counts.values())


@pytest.mark.slow
def test_robust_solves_48_of_the_49_systems() -> None:
    runs = {system.name: comparison.run_ours(system, eq.Robust(), "tight") for system in SYSTEMS}
    assert comparison.solved(runs, comparison.TIGHT) >= 48
