"""Serve models by continuous batching of equilibrium solves.

with eq.serving.Engine(model, rows=64) as engine:
    answer = engine.submit(x).result()
"""

from equilibria.serving.engine import Engine
from equilibria.serving.template import Padding
from equilibria.serving.tickets import (
    Answer,
    DeadlineExceededError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    ServingError,
    Ticket,
    UnservableModelError,
)

__all__ = [
    "Answer",
    "DeadlineExceededError",
    "Engine",
    "EngineClosedError",
    "InvalidRequestError",
    "Padding",
    "QueueFullError",
    "ServingError",
    "Ticket",
    "UnservableModelError",
]
