"""Carry: the samples and states that a looped model keeps from one training step to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.checks import require
from equilibria._core.packing import State


class Carry:
    """The rows of a batch in deep supervision; every row keeps its sample and its state until it halts.

        carry = eq.looped.Carry()
        for batch in loader:  # all batches have the same size
            (x, y), state = carry.admit(batch, lambda batch: model.start(batch[0]))
            answer, halt, state, residual = model.think(x, state)
            loss = ...
            carry.advance(state, halting.in_training(carry.steps + 1, halt, residual))

    A row that has halted takes the sample in the same row of the next batch. The other samples of that batch are not used.
    States are kept without their graphs. A row whose state is not finite halts. `state_dict` holds all samples and states,
    so that a run resumes bit by bit. Every process carries its own rows.

    stagger  the step counts of the first samples are drawn from 0 to stagger - 1. Rows that run to a limit are then
             replaced in different training steps; with 1 all counts begin at 0, and all rows are replaced together
    """

    def __init__(self, stagger: int = 1) -> None:
        require(stagger >= 1, f"stagger must be at least 1, got {stagger}.")
        self.stagger = stagger
        self._rows: tuple[Any, Any] | None = None  # samples and states
        self.steps = torch.zeros(0, dtype=torch.int64)  # (batch,) number of supervised steps that each row has taken
        self.halted = torch.zeros(0, dtype=torch.bool)  # (batch,) rows that take a new sample in the next step

    def admit(self, batch: Any, start: Callable[[Any], State]) -> tuple[Any, State]:
        """Return samples and states to train on: new ones of `batch` in free rows, the others unchanged.

        batch  tensors in any nesting, batch first
        start  function from samples to their starting states; called with the samples that are taken, if there are any
        """
        leaves = pytree.tree_leaves(batch)
        rows, device = len(leaves[0]), leaves[0].device
        if self._rows is None:
            self._rows = batch, pytree.tree_map(torch.Tensor.detach, start(batch))
            self.steps = torch.randint(self.stagger, (rows,)).to(device)
            self.halted = torch.zeros(rows, dtype=torch.bool, device=device)
            return self._rows
        if rows != len(self.halted):
            raise ValueError(
                f"Carry holds {len(self.halted)} rows, but got a batch of {rows}. Every batch must have the same size: use "
                "drop_last=True."
            )
        free = self.halted.to(device)  # a restored state may be on another device
        held = pytree.tree_map(lambda leaf: leaf.to(device), self._rows)
        self._rows = _replaced(held, batch, free.nonzero().squeeze(1), start)
        self.steps = torch.where(free, 0, self.steps.to(device))
        self.halted = torch.zeros_like(free)
        return self._rows

    def advance(self, state: State, halted: Tensor) -> None:
        """Store the states after a supervised step, and mark the rows that halted in it."""
        if self._rows is None:
            raise RuntimeError("Carry.advance was called before Carry.admit, so there are no samples. Call admit first.")
        state = pytree.tree_map(torch.Tensor.detach, state)
        finite = torch.stack([torch.isfinite(leaf).flatten(1).all(dim=1) for leaf in pytree.tree_leaves(state)]).all(dim=0)
        self._rows = self._rows[0], state
        self.steps = self.steps + 1
        self.halted = halted | ~finite  # a state that is not finite would never recover

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and lists of tensors, for a checkpoint."""
        if self._rows is None:
            return {"leaves": [], "steps": self.steps, "halted": self.halted}
        return {"leaves": pytree.tree_leaves(self._rows), "steps": self.steps, "halted": self.halted}

    def load_state_dict(self, saved: Mapping[str, Any], like: Any) -> None:
        """Restore what `state_dict` returned; `like` is a (batch, state) with the structure of what was carried."""
        self.steps, self.halted = saved["steps"], saved["halted"]
        leaves, structure = list(saved["leaves"]), pytree.tree_structure(like)
        if leaves and len(leaves) != structure.num_leaves:
            raise ValueError(
                f"The saved state has {len(leaves)} tensors, but batch and state have {structure.num_leaves}. Pass `like` "
                "with the structure that was saved."
            )
        self._rows = pytree.tree_unflatten(leaves, structure) if leaves else None


def _replaced(held: tuple[Any, Any], batch: Any, free: Tensor, start: Callable[[Any], State]) -> tuple[Any, Any]:
    """Return samples and states with those of `batch` in the rows `free`; `held` is not changed."""
    if not len(free):
        return held
    taken = pytree.tree_map(lambda leaf: leaf.index_select(0, free), batch)
    fresh = taken, pytree.tree_map(torch.Tensor.detach, start(taken))
    # under autocast the dtype of a new state may differ from that of the held ones
    return pytree.tree_map(lambda old, new: old.to(new.dtype).index_copy(0, free, new), held, fresh)
