"""A callback for Lightning."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from equilibria.monitoring import Monitor, monitor


class LightningMonitor(Callback):
    """Logs the convergence of every DEQ of a LightningModule with `log_dict`, one row per training batch.

        trainer = lightning.Trainer(callbacks=[eq.integrations.LightningMonitor()])

    The rows go to every logger of the trainer, every `log_every_n_steps` steps. Their last values are in
    `trainer.callback_metrics`, which `EarlyStopping` and `ModelCheckpoint` read. A row covers all solves of a training
    batch and their adjoints. Validation is not monitored.

    prefix      prefix of all names
    quantities  the entries of `Stats.summary()` to log; None: all
    """

    def __init__(self, *, prefix: str = "deq/", quantities: Collection[str] | None = None) -> None:
        self.prefix, self.quantities = prefix, quantities
        self._monitor: Monitor | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        settings: dict[str, Any] = {"prefix": self.prefix, "quantities": self.quantities}
        self._monitor = monitor(pl_module, to=pl_module, manual=True, **settings).__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *others: Any) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._monitor is not None:
            self._monitor.discard()  # Lightning refuses log_dict outside of a batch
            self._close()

    def _close(self) -> None:
        """Stop the monitor, which logs the row of this batch."""
        running, self._monitor = self._monitor, None
        if running is not None:
            running.__exit__(None, None, None)
