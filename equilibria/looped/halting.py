"""Halting: the rule by which a sample of a looped model takes no further steps, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.checks import require
from equilibria._core.packing import State
from equilibria.stop import FLOOR, RECURRENCE, Stop

By = Literal["head", "convergence", "both", "either", "limit"]
SupervisedStep = Callable[[Any, State | None], tuple[Any, Tensor, State, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Halting:
    """The rule by which a row of a looped model halts: by a learned head, by convergence, or after `max_steps` steps.

        found = eq.looped.Halting(by="both", max_steps=16).run(model.think, boards)

    by         "head": the halting head is positive. "convergence": the residual meets the rtol of `stop`. "both": both
               conditions hold. "either": one of them holds. "limit": only `max_steps` counts
    stop       the Stop whose rtol the residual must meet
    max_steps  largest number of supervised steps of a row
    explore    share of the rows of a training step that may not halt before a number of steps drawn from 2 to max_steps.
               Without it the head is never trained on states after its first positive value
    """

    by: By = "head"
    stop: Stop = Stop(rtol=0.05)
    max_steps: int = 16
    explore: float = 0.1

    def __post_init__(self) -> None:
        choices = get_args(By)
        require(self.by in choices, f"by must be one of {', '.join(choices)}, got {self.by!r}.")
        require(self.max_steps >= 1, f"max_steps must be at least 1, got {self.max_steps}.")
        require(0 <= self.explore <= 1, f"explore is a share of the rows, in [0, 1], got {self.explore}.")

    def wants(self, halt: Tensor, residual: Tensor) -> Tensor:
        """Return (batch,) bool, True for rows that halt by the rule, without regard to the number of steps.

        halt      (batch,) the value of the halting head
        residual  (batch,) the relative residual
        """
        rtol, eps = self.stop.rtol, torch.finfo(residual.dtype).eps
        sure, settled = halt > 0, residual <= rtol + min(FLOOR * eps, RECURRENCE * rtol)
        match self.by:
            case "head":
                return sure
            case "convergence":
                return settled
            case "both":
                return sure & settled
            case "either":
                return sure | settled
            case _:
                return torch.zeros_like(sure)

    def in_training(self, steps: Tensor, halt: Tensor, residual: Tensor) -> Tensor:
        """Return (batch,) bool, True for rows to replace after `steps` steps; `explore` draws from torch's generator."""
        with torch.no_grad():
            exploring = torch.rand(steps.shape, device=steps.device) < self.explore
            least = torch.randint(2, max(self.max_steps, 2) + 1, steps.shape, device=steps.device)
            allowed = ~exploring | (steps >= least)
            return (self.wants(halt, residual) & allowed) | (steps >= self.max_steps)

    @torch.no_grad()
    def run(self, step: SupervisedStep, inputs: Any, state: State | None = None) -> Halted:
        """Take supervised steps until every row has halted; rows that have halted leave the batch.

        step    function (inputs, state or None) -> (answer, halt, state, residual), such as `Reasoner.think`, in which no
                row depends on other rows
        inputs  tensors in any nesting, batch first
        state   state to start from; None: the model's own start
        """
        device: torch.device = pytree.tree_leaves(inputs)[0].device
        rows = torch.arange(_batch(inputs), device=device)
        parts: list[tuple[Tensor, Any]] = []
        evaluated = 0
        for count in range(1, self.max_steps + 1):
            answer, halt, state, residual = step(inputs, state)
            evaluated += len(rows)
            done = self.wants(halt, residual) if count < self.max_steps else torch.ones_like(rows, dtype=torch.bool)
            leaving, staying = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
            taken = torch.full_like(rows, count)
            parts.append((rows[leaving], _take((answer, halt, state, residual, taken), leaving)))
            rows = rows[staying]
            if len(rows) == 0:
                break
            inputs, state = _take((inputs, state), staying)  # the next steps run on the other rows only
        return _joined(parts, evaluated)


@dataclass(frozen=True)
class Halted:
    """The states of rows when they halted, in the order of the batch."""

    answer: Any  # what the last step of each row returned
    halt: Tensor  # (batch,) value of the halting head
    state: State
    residual: Tensor  # (batch,)
    steps: Tensor  # (batch,) number of supervised steps
    row_steps: int  # sum of `steps`: the cost, because rows that have halted leave the batch


def _joined(parts: list[tuple[Tensor, Any]], evaluated: int) -> Halted:
    """Join the rows that left the batch at different steps, in the order of the batch."""
    order = torch.cat([rows for rows, _ in parts]).argsort()
    leaves = [pytree.tree_flatten(part) for _, part in parts]
    joined = [torch.cat(group)[order] for group in zip(*[flat for flat, _ in leaves], strict=True)]
    answer, halt, state, residual, steps = pytree.tree_unflatten(joined, leaves[0][1])
    return Halted(answer, halt, state, residual, steps, evaluated)


def _take(tree: Any, rows: Tensor) -> Any:
    return pytree.tree_map(lambda leaf: leaf.index_select(0, rows), tree)


def _batch(tree: Any) -> int:
    leaves = pytree.tree_leaves(tree)
    require(
        bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves),
        "Inputs must be tensors whose first dimension is the batch.",
    )
    return len(leaves[0])
