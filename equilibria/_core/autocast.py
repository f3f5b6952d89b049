"""Autocast in a solve: the cell runs under the user's autocast setting, the solver runs without autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward pass, stored because backward must evaluate the cell in the same state."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> Autocast:
        """The autocast state that is active now for this type of device."""
        if not torch.amp.is_autocast_available(device.type):
            return Autocast(device.type, False, torch.float32)
        return Autocast(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def inside(self) -> AbstractContextManager[Any]:
        """A context that restores this state, for evaluations of the cell."""
        return torch.autocast(self.device, dtype=self.dtype) if self.enabled else nullcontext()


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """A context without autocast, for the solver: Gram matrices and small systems need full precision."""
    if not Autocast.current(device).enabled:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
    # casts cached under no_grad have no graph; reused in a later evaluation, they would cut the gradient
    torch.clear_autocast_cache()
