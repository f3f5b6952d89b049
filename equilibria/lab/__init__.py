"""The laboratory: datasets, training, experiments, reports, benchmarks and the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equilibria.lab import data, experiments, training

ROOMS = ("data", "experiments", "training")  # imported on first use

__all__ = ["data", "experiments", "training"]


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"equilibria.lab.{name}")
    raise AttributeError(f"module 'equilibria.lab' has no attribute {name!r}")
