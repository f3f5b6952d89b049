"""Accuracy of a reasoner over depth and breadth, and how well its residual tells right answers from wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.analysis.diagnosis.attractors import area_under_curve
from equilibria.explicit import WeightTied
from equilibria.models.reasoning.reasoner import Reasoner

WINDOW = 3  # supervised steps whose mean change tells the best converged start, as published


@dataclass(frozen=True)
class Scaling:
    """Every start of every sample at every depth that was asked for; depths are counted in supervised steps."""

    depths: tuple[int, ...]
    right: Tensor  # (depths, starts, batch) bool, all positions right
    change: Tensor  # (depths, starts, batch) relative change of the state, mean of the last three steps

    def exact(self, depth: int, starts: int = 1) -> float:
        """Share of samples that are right at a depth; of the first `starts` starts the best converged one counts.

        With one start it is the mean over all that were run.
        """
        right, change = self.right[self.depths.index(depth)], self.change[self.depths.index(depth)]
        if starts == 1:
            return float(right.double().mean())
        winner = change[:starts].argmin(dim=0)
        return float(right[winner, torch.arange(right.shape[1], device=right.device)].double().mean())

    def auc(self, depth: int) -> float:
        """Probability that a wrong answer has a larger change than a right one; nan where all are right, or wrong."""
        i = self.depths.index(depth)
        return area_under_curve(self.change[i].flatten(), ~self.right[i].flatten())


@torch.no_grad()
def measure_scaling(model: Reasoner, x: Tensor, y: Tensor, depths: Sequence[int], starts: int) -> Scaling:
    """Run `starts` starts per sample side by side for the largest of `depths` supervised steps of plain recursions."""
    tokens, batch = x.repeat(starts, 1), len(x)
    embedded, state = model.embed(tokens), model.start(tokens)
    loop = WeightTied(model.layer.cell, model.config.h_cycles, model.layer.init)
    right: list[Tensor] = []
    change: list[Tensor] = []
    recent: list[Tensor] = []
    for step in range(1, max(depths) + 1):
        path = loop.trajectory(embedded, init=state)
        state = path.states[-1]
        recent = [*recent, path.residuals[-1].view(starts, batch)][-WINDOW:]
        if step in depths:
            answers = model.read(state)[0].argmax(dim=-1).view(starts, batch, -1)
            right.append((answers == y).all(dim=-1))
            change.append(torch.stack(recent).mean(dim=0))
    return Scaling(tuple(sorted(set(depths))), torch.stack(right), torch.stack(change))
