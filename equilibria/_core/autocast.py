"""Autocast around a solve: the cell runs as the user set it, the solver never in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward pass; backward runs outside of it and must evaluate the same function."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> Autocast:
        if not torch.amp.is_autocast_available(device.type):
            return Autocast(device.type, False, torch.float32)
        return Autocast(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def inside(self) -> AbstractContextManager[Any]:
        """As the cell is to be run."""
        return torch.autocast(self.device, dtype=self.dtype) if self.enabled else nullcontext()


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """As a solver is to be run: Gram matrices and small systems are nothing for half precision."""
    if not Autocast.current(device).enabled:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
    # weights that were cast while no graph was kept must not serve where one is: they would cut the gradient
    torch.clear_autocast_cache()
