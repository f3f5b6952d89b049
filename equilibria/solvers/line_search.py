"""Backtracking on the length of the residual, per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria._core.maps import Map

SUFFICIENT = 1e-4  # Armijo's constant, the share of the predicted decrease that a step must achieve


def backtrack(
    f: Map, z: Tensor, fz: Tensor, direction: Tensor, halvings: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first z + t direction, t = 1, 1/2, 1/4, ..., whose residual decreases sufficiently, and f there.

    A sample without such a t gets the trial with the smallest residual; a sample without a finite trial gets the last one.
    """
    start = torch.linalg.vector_norm(fz - z, dim=1)
    best = torch.full_like(start, float("inf"))
    accepted = torch.zeros_like(start, dtype=torch.bool) if active is None else ~active
    best_z, best_fz = z, fz
    t = 1.0
    for _ in range(halvings + 1):
        trial = z + t * direction
        value = f(trial)
        length = torch.linalg.vector_norm(value - trial, dim=1)
        # nan compares false, so that a non-finite trial is never the best one, only the last one
        keep = ~accepted & ((length < best) | torch.isinf(best))
        best_z = torch.where(keep.unsqueeze(1), trial, best_z)
        best_fz = torch.where(keep.unsqueeze(1), value, best_fz)
        best = torch.where(keep & (length < best), length, best)
        accepted = accepted | (length <= (1 - SUFFICIENT * t) * start)
        if not f.any(~accepted):
            break
        t /= 2
    return best_z, best_fz
