"""Optimisers, learning rates and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equilibria.lab.training.settings import Optimizer, Schedule

# of torch's OneCycleLR: share of the steps that rise, first factor, last factor below the first, limits of the momentum
CYCLE_TOP, CYCLE_RISE, CYCLE_FALL, CYCLE_MOMENTUM = 0.3, 25.0, 1e4, (0.85, 0.95)


def make_optimizer(settings: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of `torch.optim` that the settings name."""
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
    """The factor on the learning rate at `step` (from 0) of `steps`."""
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
    """The momentum that a schedule sets at `step`; None where it leaves that of the optimiser."""
    if schedule.name != "one-cycle":
        return None
    low, high = CYCLE_MOMENTUM
    return _cycle(step / max(steps, 1), steps, low=high, high=low, end=high)


def _cycle(done: float, steps: int, *, low: float, high: float, end: float) -> float:
    """Rise from `low` to `high`, then change to `end`, by half a cosine each; `done` is the share of steps, in [0, 1)."""
    step, top = done * steps, CYCLE_TOP * steps - 1
    if step <= top:
        return _between(low, high, step / top)
    return _between(high, end, (step - top) / max(steps - 1 - top, 1e-9))


def _between(start: float, stop: float, share: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * share)) / 2


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class Average:
    """mean <- d mean + (1 - d) weights after every step, d = min(decay, (1 + n) / (10 + n)) after n steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.means = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, weight in model.named_parameters():
            self.means[name].lerp_(weight, 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model has the averaged weights."""
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
