"""WeightTied: a cell applied a fixed number of times, the explicit counterpart of a DEQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.autodiff_modes import Autocast
from equilibria._core.checkpointing import Buffers, Checkpoint, Tensors, check_checkpoint, repeat
from equilibria._core.frozen_cell import FrozenCell, Snapshot
from equilibria._core.packing import Layout, State
from equilibria.starts import Init, check_cell, check_init, prepared, start_of
from equilibria.stop import rms_norm, scaled_norm

__all__ = ["Trajectory", "WeightTied"]


@dataclass(frozen=True)
class Trajectory:
    """Every state of a weight-tied network, with its residual."""

    states: tuple[State, ...]  # z_0 ... z_depth
    residuals: Tensor  # (depth, batch) |z_{i+1} - z_i| / |z_{i+1}|, as `Stats.residual` of plain iteration at z_i


class WeightTied(nn.Module):
    """z_{i+1} = cell(z_i, *inputs) for i = 0 ... depth - 1, differentiated by backpropagation through all steps.

    This is the usual baseline: a DEQ truncated after `depth` plain steps. Cell, init and the names of the weights are those
    of a DEQ, so that `load_state_dict` works in both directions. Every application of the cell updates its buffers.

    cell        nn.Module or callable, cell(z, *inputs) -> z of the same structure. If it has `prepare(*inputs)`, that
                is called once per forward and its result replaces the inputs
    depth       number of applications of the cell
    init        as in DEQ: None (zeros like the first input), Zeros(*shape), FirstStep() (one more application), or
                init(*inputs) -> z0, which is trained with the cell
    injected    False if the inputs enter through the start only, z_{i+1} = cell(z_i); init=None then starts from the input
    checkpoint  activations kept for backward: None keeps all, "sqrt" O(√depth) with one replay of the cell, "recursive"
                O(log depth) with log2(depth) / 2 replays. The gradients are bitwise equal
    batched     False if the state is one problem without a batch dimension
    """

    def __init__(
        self,
        cell: Callable[..., State],
        depth: int,
        init: Init = None,
        *,
        injected: bool = True,
        checkpoint: Checkpoint = None,
        batched: bool = True,
    ) -> None:
        super().__init__()
        check_cell(cell)
        check_init(init)
        _check_depth(depth)
        check_checkpoint(checkpoint)
        self.cell = cell
        self.depth = depth
        self.init = init
        self.injected = injected
        self.checkpoint: Checkpoint = checkpoint
        self.batched = batched

    def forward(self, *inputs: Any, init: State | None = None) -> State:
        """Return the state after `depth` steps. `init` is a state to start from instead, which gets gradients."""
        step, start = self._begin(inputs, init)
        return step.state(repeat(step, step.tensors(start), self.depth, self.checkpoint))

    def trajectory(self, *inputs: Any, init: State | None = None, depth: int | None = None) -> Trajectory:
        """Return every state from the start on, differentiable; `depth` replaces the depth of the network."""
        depth = self.depth if depth is None else depth
        _check_depth(depth)
        step, start = self._begin(inputs, init)
        states = [step.tensors(start)]
        for _ in range(depth):
            states.append(step(states[-1], None))
        return Trajectory(tuple(step.state(z) for z in states), step.residuals(states))

    def _begin(self, inputs: Sequence[Any], init: State | None) -> tuple[_CellStep, State]:
        cell = FrozenCell(self.cell)
        with cell.in_place():
            given = prepared(cell.cell, inputs) if self.injected else ()
            start = self._start(cell.cell, given, inputs) if init is None else init
        layout = Layout.of(start, batched=self.batched)
        return _CellStep(cell, given, layout), start

    def _start(self, cell: Callable[..., State], given: Sequence[Any], inputs: Sequence[Any]) -> State:
        if self.init is None and not self.injected:
            if len(inputs) != 1:
                raise ValueError(
                    f"injected=False with init=None starts from the only input, got {len(inputs)} inputs; "
                    "combine them by a callable init(*inputs) -> z0."
                )
            return inputs[0]
        return start_of(self.init, cell, lambda z: cell(z, *given), inputs, batched=self.batched)

    def extra_repr(self) -> str:
        shown = [f"depth={self.depth}"]
        shown += [] if self.injected else ["injected=False"]
        shown += [f"checkpoint={self.checkpoint!r}"] if self.checkpoint else []
        return ", ".join(shown)


class _CellStep:
    """One application of a cell to the tensors of its state, whose dtypes are kept under autocast."""

    def __init__(self, cell: FrozenCell, inputs: Sequence[Any], layout: Layout) -> None:
        self.cell, self.inputs, self.layout = cell, inputs, layout
        self.cast = Autocast.current(layout.device).enabled
        self.first: Snapshot | None = None  # the cell at the first step with copies of its buffers, for all later ones

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the cell may move in training, as they are now."""
        snapshot = self.cell.snapshot() if self.cell.training else None
        return {} if snapshot is None else snapshot.tensors.buffers

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors:
        arguments = (self.state(z), *self.inputs)
        with self.cell.in_place():
            if buffers:
                self.first = self.first or self.cell.snapshot()
            if buffers and self.first is not None:
                out = self.first.call(buffers, arguments)
            else:
                out = self.cell.cell(*arguments)
        tensors = self.layout.check_output(out, self.layout.batch, cast=self.cast)
        return tuple(tensor.to(leaf.dtype) for tensor, leaf in zip(tensors, self.layout.leaves, strict=True))

    def tensors(self, state: State) -> Tensors:
        return tuple(pytree.tree_leaves(state))

    def state(self, z: Tensors) -> State:
        return pytree.tree_unflatten(z, self.layout.structure)

    def residuals(self, states: Sequence[Tensors]) -> Tensor:
        """Return (depth, batch), detached."""
        with torch.no_grad():
            packed = torch.stack([self.layout.pack(self.state(z)) for z in states])  # (depth + 1, batch, n)
            length, size = _rows(packed[1:] - packed[:-1]), _rows(packed[1:])
            return length / size.clamp_min(torch.finfo(size.dtype).tiny)


def _rows(x: Tensor) -> Tensor:
    """Return (depth, batch), the norm of every sample at every depth, from states (depth, batch, n)."""
    return scaled_norm(rms_norm, x.flatten(0, 1)).unflatten(0, x.shape[:2])


def _check_depth(depth: Any) -> None:
    if not isinstance(depth, int) or isinstance(depth, bool):
        raise TypeError(f"depth must be the number of applications of the cell, an int, got {depth!r}.")
    if depth < 0:
        raise ValueError(f"depth must not be negative, got {depth}; 0 returns the start itself.")
