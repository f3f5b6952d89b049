"""Repeating a step many times while keeping fewer than all of its activations for backward.

Chen et al. 2016, "Training deep nets with sublinear memory cost": the forward keeps the state at the start of each
segment, and backward replays a segment when it needs its activations.

States. A segment is run first, with the module's own buffers (or those of the enclosing replay). Each later run is a
replay in backward, on copies of the buffers as they were before the first run. Random numbers of a replay are those of the
first run (torch.utils.checkpoint restores the generators). Segments nest for "recursive": a replay of an outer segment is
the first run of its inner segments.

Invariants. A replay does not modify the module: batch norm counts a batch once, and spectral norm sees the same vectors.
The graph is that of plain backpropagation, so the gradients are bitwise equal. The last segment is kept, because backward
starts there. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as replay_in_backward

from equilibria._core import autodiff_modes

Checkpoint = Literal["sqrt", "recursive"] | None
Tensors = tuple[Tensor, ...]
Buffers = dict[str, Tensor] | None  # None stands for the module's own buffers


class Step(Protocol):
    """One application of the step, from the tensors of a state to those of the next state."""

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a step may update, by name."""

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors: ...


def repeat(step: Step, z: Tensors, times: int, checkpoint: Checkpoint) -> Tensors:
    """Apply `step` `times` times to z. Memory and evaluations, backward included, by `checkpoint`:

    None         all activations are kept: memory O(times), `times` evaluations
    "sqrt"       the activations of one segment and the starts of all: O(√times), at most 2 * times evaluations
    "recursive"  segments are halved recursively: O(log times), times * (1 + log2(times) / 2) evaluations
    """
    # without a graph nothing is kept anyway; under torch.func, torch.utils.checkpoint has no effect
    if not torch.is_grad_enabled() or autodiff_modes.inside_transform():
        checkpoint = None
    return _PLANS[checkpoint](step, z, times, None)


def check_checkpoint(checkpoint: Any) -> None:
    """Raise ValueError unless `checkpoint` is one of the plans of `repeat`."""
    if checkpoint not in _PLANS:
        raise ValueError(f"checkpoint must be one of {tuple(_PLANS)}, got {checkpoint!r}.")


def _plain(step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    """Take all steps and keep every activation."""
    for _ in range(times):
        z = step(z, buffers)
    return z


def _sqrt(step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    """Replay segments of about sqrt(times) steps; the last segment is kept."""
    segment = isqrt(max(times - 1, 0)) + 1  # √times, rounded up
    while times > segment:
        z = _forgotten(_plain, step, z, segment, buffers)
        times -= segment
    return _plain(step, z, times, buffers)  # backward starts with this segment and would replay it at once


def _recursive(step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    """Replay halves, which are replayed in halves themselves; memory grows with the logarithm of `times`."""
    while times > 1:
        half = times // 2
        z = _forgotten(_recursive, step, z, half, buffers)
        times -= half
    return _plain(step, z, times, buffers)


Plan = Callable[[Step, Tensors, int, Buffers], Tensors]
_PLANS: dict[Any, Plan] = {None: _plain, "sqrt": _sqrt, "recursive": _recursive}


def _forgotten(plan: Plan, step: Step, z: Tensors, times: int, buffers: Buffers) -> Tensors:
    """Run `times` steps by `plan`, keep only the start, and replay them in backward on copies of the initial buffers."""
    before, draws, replaying = _copy(step.buffers() if buffers is None else buffers), _Draws(z[0].device), False

    def segment(*z: Tensor) -> Tensors:
        """Run the segment, for the first time or again."""
        nonlocal replaying
        if replaying:
            with draws.again():
                return plan(step, z, times, _copy(before))
        replaying = True
        with draws.watched():
            return plan(step, z, times, buffers)

    # torch would keep 5 kB of generator state for every segment, until the garbage collector finds it: where states are
    # small and segments many, far more than the states
    out: Tensors = replay_in_backward(segment, *z, use_reentrant=False, preserve_rng_state=False)
    return out


class _Draws:
    """The random numbers of a segment: the state of the generators at its start, kept if the segment draws any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None
        self.start: tuple[Tensor, ...] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context that stores the random states before the segment, and whether it drew numbers."""
        start = self._states()
        yield
        if not all(map(torch.equal, start, self._states())):
            self.start = start

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the numbers of the first run inside the block; afterwards the generators are as they were before it."""
        if self.start is None:
            yield
            return
        with torch.random.fork_rng([] if self.device is None else [self.device]):
            torch.set_rng_state(self.start[0])
            if self.device is not None:
                torch.cuda.set_rng_state(self.start[1], self.device)
            yield

    def _states(self) -> tuple[Tensor, ...]:
        """Return the random states of the CPU and of the device."""
        cpu = torch.get_rng_state()
        return (cpu,) if self.device is None else (cpu, torch.cuda.get_rng_state(self.device))


def _copy(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the buffers, which a replay may write to."""
    return {name: buffer.clone() for name, buffer in buffers.items()}
