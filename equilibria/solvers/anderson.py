"""Anderson acceleration, type II, per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.maps import Map
from equilibria.solvers.base import Iterate, Solver, combine, divide, memory, products, put, require, room, solve_small


@dataclass(frozen=True)
class AndersonState(Iterate):
    """With the last differences of residuals and of iterates, scaled so that each residual difference has length 1."""

    residuals: Tensor  # (batch, slots, n)
    iterates: Tensor  # (batch, slots, n)
    gram: Tensor  # (batch, slots, slots), inner products of `residuals`
    count: int  # differences seen so far; they lie in a ring


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[AndersonState]):
    """Mix the last steps so that the linearised residual is least (Anderson 1965; Walker and Ni 2011).

    With residuals g = f(z) - z and differences dg, dz over the last `history` steps,

        weights = argmin |g - dg' weights|^2 + ridge |weights|^2,   z <- z + damping g - (dz + damping dg)' weights

    One evaluation a step; 2 history + 2 states of memory.

    history  differences kept; None: 6, and for states of up to 64 numbers all
    damping  how much of the mixed residual is added
    ridge    relative to the length of the differences, so that the same setting serves at residual 1 and at 1e-8;
             None takes what the dtype needs for a stable solve
    """

    history: int | None = None
    damping: float = 1.0
    ridge: float | None = None

    def __post_init__(self) -> None:
        require(self.history is None or self.history >= 1, f"Anderson's history must be at least 1, got {self.history}; for none use Picard().")
        require(0 < self.damping <= 1, f"Anderson's damping must lie in (0, 1], got {self.damping}.")
        require(self.ridge is None or self.ridge >= 0, f"Anderson's ridge must not be negative, got {self.ridge}.")

    def init(self, f: Map, z0: Tensor) -> AndersonState:
        batch, n = z0.shape
        nothing = z0.new_zeros(batch, 0, n)
        return AndersonState(z0, f(z0), nothing, nothing, z0.new_zeros(batch, 0, 0), count=0)

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        residual = state.fz - state.z
        z = state.z + self.damping * residual
        if state.count:
            z = z - self._correction(state, residual)
        fz = f(z)
        return self._insert(state, z, fz, (fz - z) - residual)

    def _correction(self, state: AndersonState, residual: Tensor) -> Tensor:
        k = min(state.count, self._limit(residual))
        residuals, gram = state.residuals[:, :k], state.gram[:, :k, :k]
        ridge = 10 * torch.finfo(gram.dtype).eps if self.ridge is None else self.ridge
        eye = torch.eye(k, dtype=gram.dtype, device=gram.device)
        weights = solve_small(gram + ridge * eye, products(residuals, residual))
        return combine(weights, state.iterates[:, :k]) + self.damping * combine(weights, residuals)

    def _insert(self, state: AndersonState, z: Tensor, fz: Tensor, difference: Tensor) -> AndersonState:
        limit, active = self._limit(z), state.active
        slot = state.count % limit
        length = torch.linalg.vector_norm(difference, dim=1, keepdim=True)
        residuals = put(room(state.residuals, slot, limit), slot, divide(difference, length), active)
        iterates = put(room(state.iterates, slot, limit), slot, divide(z - state.z, length), active)
        row = products(residuals, residuals[:, slot])
        gram = put(room(state.gram, slot, limit, dims=(1, 2)), slot, row, active)
        gram = put(gram.transpose(1, 2), slot, row, active).transpose(1, 2)
        return AndersonState(z, fz, residuals, iterates, gram, state.count + 1, active=active)

    def _limit(self, z: Tensor) -> int:
        return memory(self.history, z.shape[1], small=z.shape[1], large=6)
