"""A monitor that logs to the trackers of Hugging Face's accelerate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from accelerate import Accelerator
from torch import nn

from equilibria.monitoring import Monitor, monitor


def accelerate_monitor(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    every: int = 1,
    prefix: str = "deq/",
    quantities: Collection[str] | None = None,
    first_step: int = 0,
) -> Monitor:
    """Log the convergence of every DEQ in `model` to the trackers of an Accelerator, one row per forward pass.

        accelerator.init_trackers("run")
        with eq.integrations.accelerate_monitor(accelerator, model):
            for x, y in loader:
                accelerator.backward(criterion(model(x), y))

    `model` may be the prepared one; layers keep the names that they have without the wrapper. Only the main process writes
    to trackers, so the rows describe its share of the batch. The other settings are those of `eq.monitor`.

    first_step  the step of the first row, for a run that is resumed
    """
    settings: dict[str, Any] = {"every": every, "prefix": prefix, "quantities": quantities, "first_step": first_step}
    watched: Monitor = monitor(
        accelerator.unwrap_model(model), to=lambda row: accelerator.log(row, step=watched.step), **settings
    )
    return watched
