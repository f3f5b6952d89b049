"""Optimisers, learning rate schedules and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equilibria.lab.training.settings import Optimizer, Schedule

# as in torch's OneCycleLR: share of the steps with a rising rate, ratios of the peak to the first rate and of the first to
# the last rate, and limits of the momentum
CYCLE_TOP, CYCLE_RISE, CYCLE_FALL, CYCLE_MOMENTUM = 0.3, 25.0, 1e4, (0.85, 0.95)


def make_optimizer(settings: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimiser of `torch.optim` that the settings name."""
    lr, decay, momentum = settings.lr, settings.weight_decay, settings.momentum
    match settings.name:
        case "adam":
            return torch.optim.Adam(parameters, lr=lr, betas=settings.betas, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr, betas=settings.betas, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay, nesterov=settings.nesterov)
        case _:
            return torch.optim.RMSprop(parameters, lr=lr, momentum=momentum, weight_decay=decay)


def lr_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor on the learning rate at `step` (from 0) of `steps`."""
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    match schedule.name:
        case "cosine":
            return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return 1 - (1 - schedule.final) * done
        case "step":
            return math.prod(schedule.factor for milestone in schedule.milestones if step >= milestone * steps)
        case "inverse-sqrt":
            return math.sqrt(max(warmup, 1) / (step + 1))
        case "one-cycle":
            return _cycle(done, steps, low=1 / CYCLE_RISE, high=1.0, end=1 / (CYCLE_RISE * CYCLE_FALL))
        case _:
            return 1.0


def momentum_at(schedule: Schedule, step: int, steps: int) -> float | None:
    """Return the momentum that a schedule sets at `step`; None if it does not change the momentum."""
    if schedule.name != "one-cycle":
        return None
    low, high = CYCLE_MOMENTUM
    return _cycle(step / max(steps, 1), steps, low=high, high=low, end=high)


def _cycle(done: float, steps: int, *, low: float, high: float, end: float) -> float:
    """Return the value of a cycle from `low` to `high` to `end`, by half a cosine each; `done` in [0, 1) is the progress."""
    step, top = done * steps, CYCLE_TOP * steps - 1  # - 1 as in torch, which counts steps from 0
    if step <= top:
        return _between(low, high, step / top)
    return _between(high, end, (step - top) / max(steps - 1 - top, 1e-9))


def _between(start: float, stop: float, share: float) -> float:
    """Return the value at `share` in [0, 1] of half a cosine from `start` to `stop`."""
    return stop + (start - stop) * (1 + math.cos(math.pi * share)) / 2


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Set the momentum, or the first beta of Adam, in all groups."""
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class Average:
    """Averaged weights: mean <- d mean + (1 - d) weights, with d = min(decay, (1 + n) / (10 + n)) after n steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.means = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Include the model's present weights in the means."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, weight in model.named_parameters():
            self.means[name].lerp_(weight, 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and restore its own after it."""
        own = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        _set(model, self.means)
        try:
            yield
        finally:
            _set(model, own)


@torch.no_grad()
def _set(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])
