"""Convergence of equilibrium layers in the logs of Lightning, the Hugging Face Trainer, accelerate and TensorBoard.

Every name wraps `eq.monitor` and imports its library on first use. The extra `integrations` installs all of these libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibria._core.files import optional

if TYPE_CHECKING:
    from equilibria.integrations.accelerate import accelerate_monitor
    from equilibria.integrations.huggingface import TrainerMonitor
    from equilibria.integrations.lightning import LightningMonitor
    from equilibria.integrations.tensorboard import tensorboard_monitor

__all__ = ["LightningMonitor", "TrainerMonitor", "accelerate_monitor", "tensorboard_monitor"]

# name: the module that has it, and the library that the module needs
HOMES = {
    "LightningMonitor": ("lightning", "lightning"),
    "TrainerMonitor": ("huggingface", "transformers"),
    "accelerate_monitor": ("accelerate", "accelerate"),
    "tensorboard_monitor": ("tensorboard", "tensorboard"),
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'equilibria.integrations' has no attribute {name!r}")
    module, library = HOMES[name]
    optional(library, "integrations")
    return getattr(importlib.import_module(f"equilibria.integrations.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
