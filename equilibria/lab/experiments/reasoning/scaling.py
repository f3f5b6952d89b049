"""Accuracy of a reasoner over depth and breadth, and the separation of right and wrong answers by the state's change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.analysis.diagnosis.attractors import area_under_curve
from equilibria.explicit import WeightTied
from equilibria.models.reasoning.reasoner import Reasoner, Thought

ROWS = 64  # number of rows, samples times starts, that are run at once
WINDOW = 3  # number of last supervised steps whose mean change selects the best converged start, as published


@dataclass(frozen=True)
class Scaling:
    """Results of every start of every sample at every measured depth; depths are numbers of supervised steps."""

    depths: tuple[int, ...]
    right: Tensor  # (depths, starts, batch) bool, all positions right
    change: Tensor  # (depths, starts, batch) relative change of the state, mean over the last WINDOW steps

    def exact(self, depth: int, starts: int = 1) -> float:
        """Return the share of right samples at a depth, where the best converged of the first `starts` starts counts.

        With starts=1 it is the mean over all starts that were run.
        """
        right, change = self.right[self.depths.index(depth)], self.change[self.depths.index(depth)]
        if starts == 1:
            return float(right.double().mean())
        winner = change[:starts].argmin(dim=0)
        return float(right[winner, torch.arange(right.shape[1], device=right.device)].double().mean())

    def auc(self, depth: int) -> float:
        """Return the probability that a wrong answer has a larger change than a right one; nan without both kinds."""
        i = self.depths.index(depth)
        return area_under_curve(self.change[i].flatten(), ~self.right[i].flatten())


def measure_scaling(model: Reasoner, x: Tensor, y: Tensor, depths: Sequence[int], starts: int) -> Scaling:
    """Run plain recursions from `starts` starts per sample, and return the results at every depth.

    Samples are run in groups of `ROWS` rows, which fit into the cache of a processor: three times faster than all at once.
    """
    size = max(1, ROWS // starts)
    parts = [_measured(model, *group, depths, starts) for group in zip(x.split(size), y.split(size), strict=True)]
    right, change = (torch.cat([getattr(part, name) for part in parts], dim=2) for name in ("right", "change"))
    return Scaling(parts[0].depths, right, change)


@torch.no_grad()
def _measured(model: Reasoner, x: Tensor, y: Tensor, depths: Sequence[int], starts: int) -> Scaling:
    tokens, batch = x.repeat(starts, 1), len(x)
    take, state = plain_steps(model), None
    right: list[Tensor] = []
    change: list[Tensor] = []
    recent: list[Tensor] = []
    for step in range(1, max(depths) + 1):
        logits, _, state, residual = take(tokens, state)
        recent = [*recent, residual.view(starts, batch)][-WINDOW:]
        if step in depths:
            right.append((logits.argmax(dim=-1).view(starts, batch, -1) == y).all(dim=-1))
            change.append(torch.stack(recent).mean(dim=0))
    return Scaling(tuple(sorted(set(depths))), torch.stack(right), torch.stack(change))


def plain_steps(model: Reasoner) -> Callable[[Tensor, Any], Thought]:
    """Return a replacement of `model.think` that runs h_cycles plain recursions without a solve, unseen by `eq.record`."""
    loop = WeightTied(model.layer.cell, model.config.h_cycles, model.layer.init)

    def take(tokens: Tensor, state: Any = None) -> Thought:
        path = loop.trajectory(model.embed(tokens), init=state)
        return Thought(*model.read(path.states[-1]), path.states[-1], path.residuals[-1])

    return take
