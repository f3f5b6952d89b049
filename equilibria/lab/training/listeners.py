"""Listeners: objects that receive the progress of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO


class Listener(Protocol):
    """Receives the events of a run on rank 0; an exception raised here ends the run."""

    def epoch_started(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        """Receive the start of epoch `epoch` (from 1) of `epochs`; it has `steps` steps, `done` of them before a resume."""

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        """Receive the end of step `step` of the run, with its `loss` (may be nan) and its `seconds`."""

    def epoch_done(self, record: Mapping[str, Any]) -> None:
        """Receive the end of an epoch; `record` is its line of metrics.jsonl."""

    def message(self, text: str) -> None:
        """Show a message to the user, such as that a run was resumed or a step skipped."""


class Silent:
    """Ignores all events; a base class for listeners that need only some."""

    def epoch_started(self, epoch: int, epochs: int, steps: int, done: int) -> None: ...

    def step_done(self, step: int, loss: float, seconds: float) -> None: ...

    def epoch_done(self, record: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...


class PlainLog(Silent):
    """Prints a line per epoch and per message, by default to stderr."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out

    def epoch_done(self, record: Mapping[str, Any]) -> None:
        parts = []
        for split, values in record["split"].items():
            shown = [f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, (int, float))]
            parts.append(f"{split} {', '.join(shown)}")
        self.message(f"epoch {record['epoch']}: {'; '.join(parts)}; {record['seconds_train']:.1f} s")

    def message(self, text: str) -> None:
        print(text, file=self.out or sys.stderr, flush=True)
