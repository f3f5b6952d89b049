"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from equilibria.monitoring import Monitor, monitor


class TrainerMonitor(TrainerCallback):
    """Logs the convergence of every DEQ of a Trainer's model with `trainer.log`, at every step that the Trainer logs.

        trainer.add_callback(eq.integrations.TrainerMonitor(trainer))

    The rows are in `trainer.state.log_history` and go to everything in `report_to`. With gradient accumulation a row
    describes the last batch of the step. Evaluation is not monitored.

    prefix      prefix of all names
    quantities  the entries of `Stats.summary()` to log; None: all
    """

    def __init__(self, trainer: Trainer, *, prefix: str = "deq/", quantities: Collection[str] | None = None) -> None:
        self.trainer, self.prefix, self.quantities = trainer, prefix, quantities
        self._monitor: Monitor | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self._close()  # a training that was interrupted may have left a monitor
        settings: dict[str, Any] = {"prefix": self.prefix, "quantities": self.quantities}
        self._monitor = monitor(self.trainer.model, to=self.trainer, manual=True, **settings).__enter__()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if self._monitor is not None:
            self._monitor.discard()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if control.should_log and self._monitor is not None:
            self._monitor.flush()
            control.should_log = True  # trainer.log resets it, and the Trainer has yet to log its loss
        self._close()

    def _close(self) -> None:
        """Stop the monitor without logging a row."""
        running, self._monitor = self._monitor, None
        if running is not None:
            running.discard()
            running.__exit__(None, None, None)
