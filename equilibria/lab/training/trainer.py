"""The training loop that all experiments share."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric

from equilibria.lab.choices import Strategy
from equilibria.lab.errors import TrainingError
from equilibria.lab.training.checkpoints import read
from equilibria.lab.training.evaluating import Evaluator
from equilibria.lab.training.folder import Folder, RunSummary, does_not_fit, whole_config
from equilibria.lab.training.listeners import Listener, PlainLog
from equilibria.lab.training.optimisers import Average, make_optimizer
from equilibria.lab.training.processes import (
    Interrupts,
    agree,
    deterministic,
    make_fabric,
    peak_bytes,
    seed_all,
    step_clock,
)
from equilibria.lab.training.run_state import RunState, whole
from equilibria.lab.training.settings import Training
from equilibria.lab.training.statistics import Meter
from equilibria.lab.training.step_log import StepLog
from equilibria.lab.training.stepping import Stepped, Stepper
from equilibria.lab.training.task import Task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_fits = itertools.count()  # number of runs of this process so far
FLUSH_SECONDS = 10  # interval at which TensorBoard events are written, short enough to watch a run


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM, once the step is finished and a checkpoint written."""


class Trainer:
    """Trains a task and stores the run in a folder.

        summary = Trainer(task, Training(epochs=10), Path("runs/digits")).fit()

    After an interruption, a kill or a full disk, the same call resumes the run from its last intact checkpoint. On the CPU
    weights and metrics, except times and memory, are then equal bit by bit to those of an uninterrupted run. This does not
    hold with DEQ(compile=True), which chooses by measured times, and with `eq.Remember`, whose starts are not stored.

    config       further content of config.json: {"experiment": name, "settings": {...}}
    root         folder of the datasets; default: that of `data`
    devices      number of devices of this machine; torchrun, if used, determines it
    strategy     with several processes: "ddp" copies the model to each; "fsdp" shards every DEQ's cell, then the rest, with
                 torch's fully_shard, and makes all processes stop a solve together; "auto" is "ddp"
    accelerator  a name of lightning-fabric: "auto", "cpu", "cuda" ...
    listener     receives the progress; default: a line per epoch on stderr
    """

    def __init__(
        self,
        task: Task[Any],
        training: Training,
        folder: Path,
        *,
        config: Mapping[str, Any] | None = None,
        root: Path | None = None,
        devices: int = 1,
        strategy: Strategy = "auto",
        accelerator: str = "auto",
        listener: Listener | None = None,
    ) -> None:
        self.task, self.training, self.root = task, training, root
        self.config = whole_config(config, training)
        self.folder = Folder(Path(folder))
        self.listener: Listener = PlainLog() if listener is None else listener
        self.sharded = strategy == "fsdp"
        self.fabric: Fabric = make_fabric(devices, strategy, accelerator, training.precision)

    def fit(self) -> RunSummary:
        """Start or resume the run; a finished run is not trained again."""
        self.fabric.launch()
        with self.folder.held() if self.fabric.is_global_zero else nullcontext():
            return self._fit()

    def _fit(self) -> RunSummary:
        """Check the folder, build the state, restore a checkpoint and train; the folder is locked already."""
        if self.fabric.is_global_zero:
            changed = self.folder.begin(self.config)
            if changed:
                self._tell(
                    f"Versions changed since the last start; results may differ in the last bits: {'; '.join(changed)}."
                )
        self.fabric.barrier()
        done = self.folder.summary()
        if done is not None:
            self._tell(f"The run in {self.folder.path} is finished.")
            return done
        self._alone = next(_fits) == 0
        with deterministic():
            self._build()
            self._resume()
            with self._writer() as self._events, Interrupts() as self._interrupts:
                return self._run()

    def _run(self) -> RunSummary:
        """Train the remaining epochs and write the summary; an interruption writes a checkpoint."""
        try:
            while self._state.progress.epoch <= self.training.epochs:
                self._train_epoch()
                self._finish_epoch()
        except Interrupted as interruption:
            path = self._checkpoint()
            raise Interrupted(f"{interruption} The checkpoint is in {path}: the same call resumes from it.") from None
        progress = self._state.progress
        parameters = sum(weight.numel() for weight in self._state.module.parameters())
        summary = RunSummary(
            self.training.epochs, progress.last or {}, progress.best or {}, progress.seconds_train, parameters
        )
        if self.fabric.is_global_zero:
            self.folder.finish(summary)
        self.fabric.barrier()
        return summary

    def _build(self) -> None:
        """Make model, data, optimiser and average; weights depend only on the seed."""
        fabric, training = self.fabric, self.training
        self.task.prepare(self.root, training)
        seed_all(training.seed)
        module = self.task.model()
        loaders = self.task.batches(self.root, training, fabric.global_rank, fabric.world_size)
        model = fabric.setup_module(module)
        optimizer = make_optimizer(training.optimizer, module.parameters())
        average = None if training.ema is None else Average(module, training.ema)
        self._state = RunState(fabric, self.task, model, module, optimizer, average, loaders, self.sharded)
        self._stepper = Stepper(
            self._state, training, fabric.setup_optimizers(optimizer), training.epochs * len(loaders.train)
        )
        self._evaluator = Evaluator(self._state, training, self._pause)
        self._pretraining = False
        seed_all(training.seed, fabric.global_rank)  # initial weights are equal on all ranks, dropout masks must not be

    def _resume(self) -> None:
        """Restore the newest intact checkpoint, if there is one, and remove metrics that are ahead of it."""
        found = self.folder.checkpoints.newest(self._tell) if self.fabric.is_global_zero else None
        path = self.fabric.broadcast(None if found is None else str(found.path))
        if path is not None:
            parts = read(Path(path)).parts if found is None else found.parts
            try:
                self._state.restore(parts)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise does_not_fit(Path(path), error) from error
            self._tell(f"Resuming from {path}.")
            before = len(parts["processes"])
            if before != self.fabric.world_size:
                self._tell(
                    f"The run had {before} processes and now has {self.fabric.world_size}: random numbers and the state of "
                    "the task are not restored."
                )
        if self.fabric.is_global_zero:
            self.folder.cut_metrics(self._state.progress.epoch - 1)
            self._step_log = StepLog(self.folder.path, self.training.epochs * len(self._state.loaders.train))
            self._step_log.cut(self._state.progress.step)
        self._written = time.monotonic()

    @contextmanager
    def _writer(self) -> Iterator[SummaryWriter | None]:
        """Yield TensorBoard's writer on rank 0, else None; events after the restored step are purged."""
        if not self.fabric.is_global_zero:
            yield None
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = self._state.progress.step + 1
        with SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=purge, flush_secs=FLUSH_SECONDS) as writer:
            yield writer

    def _train_epoch(self) -> None:
        """Take the remaining steps of the current epoch."""
        progress, loader = self._state.progress, self._state.loaders.train
        self._seconds: list[float] = []
        self._backward: list[float] = []
        if progress.trained:  # the run was stopped between the last batch and the end of the evaluation
            return
        if self.fabric.is_global_zero:
            self.listener.epoch_started(progress.epoch, self.training.epochs, len(loader), loader.state()["position"])
        if self.fabric.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.fabric.device)
        self._state.model.train()
        clock = step_clock(self.fabric.device)
        begin, step_begin = time.perf_counter(), clock()
        for batch in loader:
            self._switch_pretraining(progress.step < self.training.pretrain_steps)
            step, limit = self._state.progress.step, self.training.pretrain_steps
            if limit and step in (0, limit):
                self._tell(f"Unrolled pre-training {'begins' if step == 0 else 'ends'} at step {step + 1}.")
            stepped = self._stepper.step(
                self.fabric.to_device(batch),
                self._interrupts.asked,
                time.monotonic() - self._written >= 60 * self.training.checkpoint_minutes,
            )
            self._seconds.append(clock() - step_begin)
            self._backward.append(stepped.backward)
            self._count(stepped, time.perf_counter() - begin)
            if stepped.asked:
                raise Interrupted(f"Interrupted after step {progress.step}.")
            if stepped.due:
                self._checkpoint()
            # after the checkpoint, whose time must not count as that of a step
            begin, step_begin = time.perf_counter(), clock()
        progress.trained = True

    def _count(self, stepped: Stepped, seconds: float) -> None:
        """Update the progress after a step and report it."""
        progress = self._state.progress
        progress.step += 1
        progress.seconds_epoch += seconds
        progress.seconds_train += seconds
        if self.fabric.is_global_zero:
            self.listener.step_done(progress.step, stepped.loss, seconds)
            self._step_log.add(progress.step, progress.epoch, stepped, self._events)
        if stepped.skipped is None:
            progress.bad_in_a_row = 0
        else:
            self._count_skipped(stepped.skipped)

    def _count_skipped(self, reason: str) -> None:
        """Count a skipped step; raises TrainingError after `max_bad_steps` in a row."""
        progress, limit = self._state.progress, self.training.max_bad_steps
        progress.bad_steps += 1
        progress.bad_in_a_row += 1
        self._tell(f"Step {progress.step} is skipped: {reason}; {progress.bad_in_a_row} in a row, {limit} end the run.")
        if progress.bad_in_a_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row were skipped, the last one, step {progress.step}, because {reason}. Try a smaller "
                "lr, clip_norm, or a penalty on the Jacobian."
            )

    def _switch_pretraining(self, on: bool) -> None:
        """Switch unrolled pre-training on or off if that is a change."""
        if on != self._pretraining:
            self.task.pretrain(self._state.module, on)
            self._pretraining = on

    def _pause(self) -> None:
        """Raise Interrupted if any process was asked to stop; called between batches of the evaluation."""
        if any(agree(self.fabric, [self._interrupts.asked])):
            raise Interrupted(f"Interrupted while epoch {self._state.progress.epoch} was evaluated.")

    def _finish_epoch(self) -> None:
        """Evaluate the model, store metrics, best weights and a checkpoint, and move on to the next epoch."""
        self._switch_pretraining(False)  # the equilibrium is evaluated, not the unrolled network of pre-training
        progress, entry = self._state.progress, self._entry()
        self._keep_best(entry)
        if self._events is not None:
            self.folder.add_metrics(entry)
            for split, values in entry["split"].items():
                for name, value in values.items():
                    self._events.add_scalar(f"{split}/{name}", value, entry["step"])
            for name in ("lr", "seconds_step", "bad_steps"):
                if entry[name] is not None:
                    self._events.add_scalar(f"run/{name}", entry[name], entry["step"])
            self._events.flush()
            self.listener.epoch_done(entry)
        progress.last = entry
        progress.epoch, progress.trained, progress.bad_steps, progress.seconds_epoch = progress.epoch + 1, False, 0, 0.0
        self._state.meter = Meter()
        self._checkpoint()

    def _entry(self) -> dict[str, Any]:
        """Evaluate the model and return the epoch's line of metrics.jsonl."""
        progress = self._state.progress
        train = self._evaluator.means(self._state.meter)
        return {
            "epoch": progress.epoch,
            "step": progress.step,
            "split": {"train": train, **self._evaluator.splits()},
            "lr": self._state.optimizer.param_groups[0]["lr"],
            "seconds_train": progress.seconds_epoch,
            "seconds_step": statistics.median(self._seconds) if self._seconds else None,
            "seconds_backward": statistics.median(self._backward) if self._backward else None,
            "peak_bytes": peak_bytes(self.fabric.device, alone=self._alone),
            "bad_steps": progress.bad_steps,
            "failed_share": train.get("failed", 0.0),
        }

    def _keep_best(self, entry: Mapping[str, Any]) -> None:
        """Store the evaluated weights if they are the best so far."""
        progress, (name, way) = self._state.progress, self.task.better
        split = next(split for split in ("valid", "test", "train") if split in entry["split"])
        if name not in entry["split"][split]:
            raise ValueError(
                f"Task.better is {name!r}, but the metrics of {split} are {', '.join(entry['split'][split])}. Set it to one "
                "of these."
            )
        value, before = entry["split"][split][name], progress.best_value
        if math.isfinite(before) and not (value > before if way == "max" else value < before):
            return
        progress.best, progress.best_value = {**entry, "by": {"split": split, "metric": name, "value": value}}, value
        with self._evaluator.weights():
            weights = whole(self._state.module.state_dict())
            if self.fabric.is_global_zero:  # inside the block, since these tensors belong to the model
                self.folder.best.write(progress.step, {"model": weights})

    def _checkpoint(self) -> Path | None:
        """Write a checkpoint; returns its path on rank 0, else None; a collective call."""
        parts = self._state.snapshot()
        path = self.folder.checkpoints.write(self._state.progress.step, parts) if self.fabric.is_global_zero else None
        self.fabric.barrier()
        self._written = time.monotonic()
        return path

    def _tell(self, text: str) -> None:
        """Send a message to the listener, on rank 0 only."""
        if self.fabric.is_global_zero:
            self.listener.message(text)
