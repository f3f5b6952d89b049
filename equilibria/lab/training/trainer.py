"""The one training loop."""

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
from equilibria.lab.training.run_state import State, whole
from equilibria.lab.training.settings import Training
from equilibria.lab.training.statistics import Meter
from equilibria.lab.training.step_log import StepLog
from equilibria.lab.training.stepping import Stepped, Stepper
from equilibria.lab.training.task import Task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_fits = itertools.count()  # runs of this process
FLUSH_SECONDS = 10  # of TensorBoard's events, so that a run can be watched


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the step was finished and a checkpoint written."""


class Trainer:
    """Trains a task and keeps the run in a folder.

        summary = Trainer(task, Training(epochs=10), Path("runs/digits")).fit()

    A run that was interrupted, killed or out of disk goes on from its last sound checkpoint: the same call once more. On
    the CPU the weights come out the same to the bit, and so do all metrics but times and memory; not so with
    DEQ(compile=True), which chooses by the clock, nor with `eq.Remember`, whose memory is not kept.

    config       what to keep beside the training settings, as JSON: {"experiment": name, "settings": {...}}
    root         folder of the datasets, by default that of `data`
    devices      of this machine; under torchrun, as many as that starts
    strategy     of several processes: "ddp" copies the model to each, "fsdp" shards every DEQ's cell, then the rest, with
                 torch's fully_shard, and lets all processes stop a solve together; "auto" is "ddp"
    accelerator  lightning-fabric's: "auto", "cpu", "cuda" ...
    listener     receives the progress, by default a line per epoch on stderr
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
        if self.fabric.is_global_zero:
            changed = self.folder.begin(self.config)
            if changed:
                self._tell(f"Not the same software as before, so perhaps not the same bits: {'; '.join(changed)}.")
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
        try:
            while self._state.progress.epoch <= self.training.epochs:
                self._train_epoch()
                self._finish_epoch()
        except Interrupted as interruption:
            path = self._checkpoint()
            raise Interrupted(f"{interruption} The checkpoint is in {path}: the same call goes on from it.") from None
        progress = self._state.progress
        parameters = sum(weight.numel() for weight in self._state.module.parameters())
        summary = RunSummary(
            self.training.epochs, progress.last or {}, progress.best or {}, progress.seconds_train, parameters
        )
        if self.fabric.is_global_zero:
            self.folder.finish(summary)
        self.fabric.barrier()
        return summary

    # the beginning

    def _build(self) -> None:
        fabric, training = self.fabric, self.training
        self.task.prepare(self.root, training)
        seed_all(training.seed)
        module = self.task.model()
        loaders = self.task.batches(self.root, training, fabric.global_rank, fabric.world_size)
        model = fabric.setup_module(module)
        optimizer = make_optimizer(training.optimizer, module.parameters())
        average = None if training.ema is None else Average(module, training.ema)
        self._state = State(fabric, self.task, model, module, optimizer, average, loaders, self.sharded)
        self._stepper = Stepper(
            self._state, training, fabric.setup_optimizers(optimizer), training.epochs * len(loaders.train)
        )
        self._evaluator = Evaluator(self._state, training, self._pause)
        self._pretraining = False
        seed_all(training.seed, fabric.global_rank)  # weights are the same everywhere, masks are not

    def _resume(self) -> None:
        """Restore the newest sound checkpoint, if there is one."""
        found = self.folder.checkpoints.newest(self._tell) if self.fabric.is_global_zero else None
        path = self.fabric.broadcast(None if found is None else str(found.path))
        if path is not None:
            parts = read(Path(path)).parts if found is None else found.parts
            try:
                self._state.restore(parts)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise does_not_fit(Path(path), error) from error
            self._tell(f"Going on from {path}.")
            before = len(parts["processes"])
            if before != self.fabric.world_size:
                self._tell(
                    f"There were {before} processes, now there are {self.fabric.world_size}: random numbers and what the "
                    "task itself remembers begin anew."
                )
        if self.fabric.is_global_zero:
            self.folder.cut_metrics(self._state.progress.epoch - 1)
            self._step_log = StepLog(self.folder.path, self.training.epochs * len(self._state.loaders.train))
            self._step_log.cut(self._state.progress.step)
        self._written = time.monotonic()

    @contextmanager
    def _writer(self) -> Iterator[SummaryWriter | None]:
        """TensorBoard's writer on rank 0; events after the restored step are purged."""
        if not self.fabric.is_global_zero:
            yield None
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = self._state.progress.step + 1
        with SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=purge, flush_secs=FLUSH_SECONDS) as writer:
            yield writer

    # an epoch

    def _train_epoch(self) -> None:
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
            # after the checkpoint, whose time is not that of a step
            begin, step_begin = time.perf_counter(), clock()
        progress.trained = True

    def _count(self, stepped: Stepped, seconds: float) -> None:
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
        progress, limit = self._state.progress, self.training.max_bad_steps
        progress.bad_steps += 1
        progress.bad_in_a_row += 1
        self._tell(f"Step {progress.step} is skipped: {reason}; {progress.bad_in_a_row} in a row, {limit} end the run.")
        if progress.bad_in_a_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row were skipped, the last one, step {progress.step}, because {reason}. A smaller lr, "
                "clip_norm or a penalty on the Jacobian may help."
            )

    def _switch_pretraining(self, on: bool) -> None:
        if on != self._pretraining:
            self.task.pretrain(self._state.module, on)
            self._pretraining = on

    def _pause(self) -> None:
        if any(agree(self.fabric, [self._interrupts.asked])):
            raise Interrupted(f"Interrupted while epoch {self._state.progress.epoch} was evaluated.")

    # the end of an epoch

    def _finish_epoch(self) -> None:
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
        """The line of metrics.jsonl."""
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
        """Keep the weights that were evaluated, if they are the best so far."""
        progress, (name, way) = self._state.progress, self.task.better
        split = next(split for split in ("valid", "test", "train") if split in entry["split"])
        if name not in entry["split"][split]:
            raise ValueError(f"Task.better is {name!r}, but the metrics of {split} are {', '.join(entry['split'][split])}.")
        value, before = entry["split"][split][name], progress.best_value
        if math.isfinite(before) and not (value > before if way == "max" else value < before):
            return
        progress.best, progress.best_value = {**entry, "by": {"split": split, "metric": name, "value": value}}, value
        with self._evaluator.weights():
            weights = whole(self._state.module.state_dict())
            if self.fabric.is_global_zero:  # inside the block: these are the model's own tensors
                self.folder.best.write(progress.step, {"model": weights})

    def _checkpoint(self) -> Path | None:
        parts = self._state.snapshot()
        path = self.folder.checkpoints.write(self._state.progress.step, parts) if self.fabric.is_global_zero else None
        self.fabric.barrier()
        self._written = time.monotonic()
        return path

    def _tell(self, text: str) -> None:
        if self.fabric.is_global_zero:
            self.listener.message(text)
