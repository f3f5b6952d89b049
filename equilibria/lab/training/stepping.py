"""One training step: loss, gradients, and the decision whether to apply them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from equilibria.lab.errors import TrainingError
from equilibria.lab.training.optimisers import lr_factor, momentum_at, set_lr, set_momentum
from equilibria.lab.training.processes import agree, step_clock
from equilibria.lab.training.run_state import RunState
from equilibria.lab.training.settings import Training
from equilibria.lab.training.statistics import BatchSolves, Observed, observe
from equilibria.solution import record


@dataclass(frozen=True)
class Stepped:
    """The outcome of a step.

    backward  seconds of the backward pass
    skipped   reason why the weights were not updated; None: they were
    solves    convergence of its solves; None without equilibria
    """

    loss: float
    backward: float
    skipped: str | None
    asked: bool  # flags of `Stepper.step`, True if set on any process
    due: bool
    solves: BatchSolves | None = None


class Stepper:
    """Takes the training steps of a run; `steps` is their total number."""

    def __init__(self, state: RunState, training: Training, optimizer: Any, steps: int) -> None:
        self.state, self.training, self.optimizer, self.steps = state, training, optimizer, steps
        self.fabric = state.fabric

    def step(self, batch: Any, asked: bool, due: bool) -> Stepped:
        """Train on a batch. All processes agree on whether to skip the step, and on the two flags.

        asked  an interruption was requested
        due    a checkpoint is due
        """
        state, before = self.state, self._buffers()  # to restore running statistics if the step is skipped
        schedule, step = self.training.schedule, state.progress.step
        set_lr(state.optimizer, self.training.optimizer.lr * lr_factor(schedule, step, self.steps))
        momentum = momentum_at(schedule, step, self.steps)
        if momentum is not None:
            set_momentum(state.optimizer, momentum)
        with self.fabric.autocast(), record(state.model) as solutions:
            outcome = state.task.loss(state.model, batch, state.progress.step)
        backward = self._backward(outcome.loss * self._share(outcome.size))
        norm, seen = self._clip(), observe(outcome, solutions)
        flags = (not math.isfinite(seen.loss), not math.isfinite(norm), _failed(seen), asked, due)
        # all processes must skip a step together, or their weights would differ
        no_loss, no_gradient, failed, asked, due = agree(self.fabric, flags)
        reason = self._reason(no_loss, no_gradient, failed, seen)
        if reason is None:
            self.state.task.improve(self.state.module, self.optimizer)
            if self.state.average is not None:
                self.state.average.update(self.state.module)
        else:
            self._undo(before)
        self.optimizer.zero_grad()
        state.meter.add_batch(seen, skipped=reason is not None)
        return Stepped(seen.loss, backward, reason, asked, due, seen.solves)

    def _backward(self, loss: Tensor) -> float:
        """Run the backward pass, and return its seconds by the clock of training steps."""
        device = self.fabric.device
        clock = step_clock(device)
        begin = clock()
        self.fabric.backward(loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # kernels are queued; without this only their launches are timed
        return clock() - begin

    def _reason(self, no_loss: bool, no_gradient: bool, failed: bool, seen: Observed) -> str | None:
        """Return the reason to skip a step, or None; raises TrainingError if failed_solves is "stop"."""
        if no_loss:
            return f"the loss is {seen.loss}"
        if no_gradient:
            return "the gradient is not finite"
        if not failed or self.training.failed_solves == "count":
            return None
        s = seen.solves
        counts = "" if s is None else f" ({s.failed} forward, {s.adjoint_failed} adjoint of {s.samples} on this process)"
        if self.training.failed_solves == "skip":
            return f"solves failed{counts}"
        raise TrainingError(
            f'Step {self.state.progress.step + 1}: solves failed{counts}, and failed_solves is "stop". Give the solver more '
            'steps or a larger tolerance, or set failed_solves to "skip" or "count".'
        )

    def _undo(self, buffers: Mapping[str, Tensor]) -> None:
        """Undo side effects of a skipped step, such as running statistics that became nan."""
        with torch.no_grad():
            for name, buffer in self.state.module.named_buffers():
                buffer.copy_(buffers.get(name, buffer))
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        if scaler is not None:  # the loss scaler of half precision, which lowers its factor after an overflow
            scaler.update()

    def _buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers."""
        return {name: buffer.clone() for name, buffer in self.state.module.named_buffers()}

    def _clip(self) -> float:
        """Clip the gradient to `clip_norm`, if set, and return its norm before clipping."""
        limit = math.inf if self.training.clip_norm is None else self.training.clip_norm
        norm = self.fabric.clip_gradients(self.state.model, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        assert norm is not None
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _share(self, size: int) -> float:
        """Return the factor on the loss of this process: gradients are averaged over processes, whose parts may differ in
        size and must count by it.
        """
        if self.fabric.world_size == 1:
            return 1.0
        sizes = torch.tensor([size], dtype=torch.float64, device=self.fabric.device)
        dist.all_reduce(sizes)
        return size * self.fabric.world_size / float(sizes)


def _failed(seen: Observed) -> bool:
    """Return True if any forward or adjoint solve failed."""
    return seen.solves is not None and seen.solves.failed + seen.solves.adjoint_failed > 0
