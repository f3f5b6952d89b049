"""Every test begins with the same random state: torch draws its own seed anew in every process, and a test that draws
numbers without a seed would pass in one run and fail in the next.

EQUILIBRIA_TEST_SEED=N shifts every seeded generator of the tests by N, so that no test leans on the luck of its seed.
Tests marked `recorded` keep their seeds: they compare with numbers that were recorded with them.
"""

from __future__ import annotations

import os
import random
from typing import Any

import hypothesis
import pytest
import torch

OFFSET = int(os.environ.get("EQUILIBRIA_TEST_SEED", "0"))
_offset = OFFSET  # of the test that runs


def shift_seeds() -> None:
    """Shift the seeds of torch's default generator, of generators that tests make, and of Python's."""
    seed_torch, seed_python = torch.manual_seed, random.seed

    class Shifted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + _offset)

    def shifted_torch(seed: int) -> torch.Generator:
        return seed_torch(seed + _offset)

    def shifted_python(a: Any = None, version: int = 2) -> None:
        seed_python(a + _offset if isinstance(a, int) else a, version)

    torch.manual_seed = torch.random.manual_seed = shifted_torch
    torch.Generator = Shifted  # type: ignore[misc]
    random.seed = shifted_python


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _offset
    _offset = 0 if item.get_closest_marker("recorded") else OFFSET
    torch.manual_seed(0)
    random.seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Derandomized property tests take their seed from their own source; here from the offset."""
    for item in items if OFFSET else []:
        test: Any = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            hypothesis.seed(OFFSET)(test)


if OFFSET:
    shift_seeds()
torch.manual_seed(0)  # for tensors made while test modules are imported
