"""Asking whether a solve would run native steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import equilibria as eq
from equilibria._core import autodiff_modes
from equilibria._core.maps import Map
from equilibria._core.results import LoopRun
from equilibria.native import solve


def can_run(z0: Tensor, solver: Any, stop: eq.Stop) -> bool:
    """True if a solve from z0 would run native steps here."""
    run = LoopRun(Map(lambda z: z), stop, None, 1e-7, ordinary=autodiff_modes.is_ordinary())
    return solve.can_run(run, z0, solver)
