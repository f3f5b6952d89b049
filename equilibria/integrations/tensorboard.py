"""A monitor that writes TensorBoard events."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.tensorboard import SummaryWriter

from equilibria.monitoring import Monitor, monitor

FLUSH_SECONDS = 10  # the writer's default of 120 s is long for someone who watches a run


@contextmanager
def tensorboard_monitor(
    model: nn.Module,
    folder: str | Path,
    *,
    every: int = 1,
    prefix: str = "deq/",
    quantities: Collection[str] | None = None,
    first_step: int = 0,
) -> Iterator[Monitor]:
    """Write the convergence of every DEQ in `model` as TensorBoard scalars to `folder`, one point per forward pass.

        with eq.integrations.tensorboard_monitor(model, "runs/one"):
            for x, y in batches:
                criterion(model(x), y).backward()

    To write beside your own scalars, give your SummaryWriter to `eq.monitor(model, to=writer)`. The other settings are those
    of `eq.monitor`.

    first_step  the step of the first point, for a run that is resumed; later points of the folder are discarded
    """
    purge = first_step or None
    with SummaryWriter(str(folder), purge_step=purge, flush_secs=FLUSH_SECONDS) as writer:
        settings: dict[str, Any] = {"every": every, "prefix": prefix, "quantities": quantities, "first_step": first_step}
        with monitor(model, to=writer, **settings) as watched:
            yield watched
