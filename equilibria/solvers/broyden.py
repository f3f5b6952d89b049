"""Broyden's method ("good", limited memory), per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.line_search import backtrack
from equilibria.solvers.rowwise import (
    check_history,
    grow,
    history_size,
    products,
    set_slot,
    solve_small,
    subtract_combination,
)

HALVINGS = 6  # most halvings of a step, to 1/64 of its length


@dataclass(frozen=True)
class BroydenState(Iterate):
    """An iterate with the last steps s and differences y of the residual, scaled so that each s has length 1."""

    steps: Tensor  # (batch, slots, n), s
    sums: Tensor  # (batch, slots, n), s + y
    core: Tensor  # (batch, slots, slots), s_i . y_j, and for i later than j s_i . (s_j + y_j)
    limit: int  # largest number of slots
    count: int  # number of pairs so far; slots are reused in turn


@dataclass(frozen=True, kw_only=True)
class Broyden(Solver[BroydenState]):
    """Newton's method on g(z) = f(z) - z with an estimate of the Jacobian from the steps (Broyden 1965).

    The estimate starts from -I and has a rank-one update for every stored pair (s, y). Its inverse has a closed form
    (Byrd, Nocedal and Schnabel 1994), so that a pair that is dropped does not influence later updates:

        step = g - (S + Y)' core^{-1} S g

    One evaluation per step (more with `line_search`). The pairs take the memory of 2 history states, independent of
    `max_steps`, and a step that of ten more; while their buffers grow, up to 3.5 history + 12 states are in memory at once.

    history      number of pairs stored; None stores 20, and for states of up to 64 numbers as many as an affine map needs
    line_search  shorten steps that do not reduce the residual
    budget       bytes for the pairs of the whole batch; as many pairs are stored as fit, at least one
    """

    history: int | None = None
    line_search: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        check_history("Broyden", "history", self.history, self.budget, "; for none use Picard()")

    def init(self, f: Map, z0: Tensor) -> BroydenState:
        """Evaluate the start; the history is empty."""
        batch, n = z0.shape
        nothing = z0.new_zeros(batch, 0, n)
        limit = history_size(self.history, self.budget, z0, small=2 * n, medium=20, large=20)
        return BroydenState(z0, f(z0), nothing, nothing, z0.new_zeros(batch, 0, 0), limit, count=0)

    @property
    def steps_finished_rows(self) -> bool:  # type: ignore[override]  # a line search would go on for rows that are done
        """True without a line search, which would evaluate finished rows more often."""
        return not self.line_search

    def step(self, f: Map, state: BroydenState) -> BroydenState:
        """Take a quasi-Newton step by the stored pairs, and store the pair of this step."""
        direction = state.residual
        if state.count:
            k = min(state.count, state.limit)
            weights = solve_small(state.core[:, :k, :k], products(state.steps[:, :k], direction))
            direction = subtract_combination(direction, weights, state.sums[:, :k])
        if self.line_search:
            z, fz = backtrack(f, state.z, state.fz, direction, HALVINGS, state.active)
            return self._insert(state, z, fz, z - state.z)
        z = state.z + direction
        return self._insert(state, z, f(z), direction)

    def _insert(self, state: BroydenState, z: Tensor, fz: Tensor, step: Tensor) -> BroydenState:
        """Return the state after a step, with the pair of the step in its slot of the history."""
        limit, active = state.limit, state.active
        slot = state.count % limit
        length = torch.linalg.vector_norm(step, dim=1, keepdim=True)
        still = length == 0
        if active is not None and state.count < limit:
            # a new slot: finished samples get an empty pair, as their core must stay invertible
            still, active = still | ~active.unsqueeze(1), None
        scale = length.masked_fill(still, 1.0).reciprocal().masked_fill(still, 0.0)  # avoids 1 / 0, also in derivatives
        s, sums = step * scale, (fz - state.fz) * scale  # s + y is the change of f
        if state.active is not None:
            s, sums = s.masked_fill(still, 0.0), sums.masked_fill(still, 0.0)  # 0 * nan is nan
        steps = set_slot(grow(state.steps, slot, limit), slot, s, active)
        kept = set_slot(grow(state.sums, slot, limit), slot, sums, active)
        core = grow(state.core, slot, limit, dims=(1, 2))
        # the new step is later than all others; a sample that did not move gets 1 on the diagonal of its empty pair
        row, column = products(kept, s), products(steps, sums - s)
        column = torch.cat([column[:, :slot], column[:, slot : slot + 1] + still, column[:, slot + 1 :]], dim=1)
        core = set_slot(core, slot, row, active)
        core = set_slot(core.transpose(1, 2), slot, column, active).transpose(1, 2)
        return BroydenState(z, fz, steps, kept, core, limit, state.count + 1, active=state.active)
