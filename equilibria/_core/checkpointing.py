"""One step many times over, with fewer than all of its activations kept for backward.

Chen et al. 2016, "Training deep nets with sublinear memory cost": keep the states at which segments begin, and replay
a segment when backward arrives there. The graph is that of plain backpropagation, so the gradients are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as replay_in_backward

from equilibria._core import autodiff_modes

Checkpoint = Literal["sqrt", "recursive"] | None
Tensors = tuple[Tensor, ...]
Buffers = dict[str, Tensor] | None  # None: the module's own


class Step(Protocol):
    """One application, from the tensors of a state to those of the next."""

    def buffers(self) -> dict[str, Tensor]:
        """Those that may move in a step, by name."""

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors: ...


def repeat(step: Step, z: Tensors, times: int, checkpoint: Checkpoint) -> Tensors:
    """step(step(... step(z))).

    None         every activation is kept: memory O(times), `times` evaluations
    "sqrt"       those of one segment and the starts of all: O(√times), at most 2 * times evaluations with the backward
    "recursive"  halves of halves: O(log times), times * (1 + log2(times) / 2) evaluations
    """
    # without a graph there is nothing to save; torch.func does its own saving, out of the reach of checkpoints
    if not torch.is_grad_enabled() or autodiff_modes.inside_transform():
        checkpoint = None
    return _PLANS[checkpoint](step, z, times, None)


def check_checkpoint(checkpoint: Any) -> None:
    if checkpoint not in _PLANS:
        raise ValueError(f"checkpoint must be one of {tuple(_PLANS)}, got {checkpoint!r}.")


def _plain(step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    for _ in range(times):
        z = step(z, buffers)
    return z


def _sqrt(step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    segment = isqrt(max(times - 1, 0)) + 1  # √times, rounded up
    while times > segment:
        z = _forgotten(_plain, step, z, segment, buffers)
        times -= segment
    return _plain(step, z, times, buffers)  # backward begins here: forgetting it would only replay it at once


def _recursive(step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    while times > 1:
        half = times // 2
        z = _forgotten(_recursive, step, z, half, buffers)
        times -= half
    return _plain(step, z, times, buffers)


Plan = Callable[[Step, Tensors, int, Buffers], Tensors]
_PLANS: dict[Any, Plan] = {None: _plain, "sqrt": _sqrt, "recursive": _recursive}


def _forgotten(plan: Plan, step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    """A segment of which only its start is kept.

    A replay works on copies of the buffers as they stood at the start: batch norm must not count the batch twice, and
    spectral norm must see the vectors it saw before. Random numbers are those of the first run.
    """
    before, replaying = _copy(step.buffers() if buffers is None else buffers), False

    def segment(*z: Tensor) -> Tensors:
        nonlocal replaying
        used = _copy(before) if replaying else buffers
        replaying = True
        return plan(step, z, times, used)

    out: Tensors = replay_in_backward(segment, *z, use_reentrant=False)
    return out


def _copy(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}
