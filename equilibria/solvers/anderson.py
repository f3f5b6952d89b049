"""Anderson acceleration, type II, per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.maps import Map
from equilibria.solvers.base import Iterate, Solver, combine, divide, memory, products, put, require, room, solve_small

GROWTH = 5.0  # a residual this many times the shortest one: the history describes another place


@dataclass(frozen=True)
class AndersonState(Iterate):
    """With the last differences of residuals and of iterates, scaled so that each residual difference has length 1."""

    residuals: Tensor  # (batch, slots, n)
    iterates: Tensor  # (batch, slots, n)
    gram: Tensor  # (batch, slots, slots), inner products of `residuals`
    trusted: Tensor  # (batch, slots), 1 for the differences since the sample last began anew, 0 for others
    shortest: Tensor  # (batch, 1), residual since then
    count: int  # differences seen so far; they lie in a ring


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[AndersonState]):
    """Mix the last steps so that the linearised residual is least (Anderson 1965; Walker and Ni 2011).

    With residuals g = f(z) - z and differences dg, dz over the last `history` steps,

        weights = argmin |g - dg' weights|^2 + ridge |weights|^2,   z <- z + damping g - (dz + damping dg)' weights

    A sample whose residual grows past five times its shortest forgets its history and begins anew with a plain step.
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
        require(
            self.history is None or self.history >= 1,
            f"Anderson's history must be at least 1, got {self.history}; for none use Picard().",
        )
        require(0 < self.damping <= 1, f"Anderson's damping must lie in (0, 1], got {self.damping}.")
        require(self.ridge is None or self.ridge >= 0, f"Anderson's ridge must not be negative, got {self.ridge}.")

    def init(self, f: Map, z0: Tensor) -> AndersonState:
        batch, n = z0.shape
        fz, nothing = f(z0), z0.new_zeros(batch, 0, n)
        gram, trusted = z0.new_zeros(batch, 0, 0), z0.new_zeros(batch, 0)
        return AndersonState(z0, fz, nothing, nothing, gram, trusted, _length(fz - z0), count=0)

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        residual = state.fz - state.z
        z = state.z + self.damping * residual
        if state.count:
            z = z - self._correction(state, residual)
        fz = f(z)
        return self._insert(state, z, fz, residual)

    def _correction(self, state: AndersonState, residual: Tensor) -> Tensor:
        k = min(state.count, self._limit(residual))
        residuals, trusted = state.residuals[:, :k], state.trusted[:, :k]
        ridge = 10 * torch.finfo(residual.dtype).eps if self.ridge is None else self.ridge
        # what is not trusted is cut out of the system: zero beside the diagonal and on the right
        gram = state.gram[:, :k, :k] * (trusted.unsqueeze(1) * trusted.unsqueeze(2))
        gram = gram + torch.diag_embed(1 - trusted + ridge)
        weights = solve_small(gram, trusted * products(residuals, residual))
        return combine(weights, state.iterates[:, :k]) + self.damping * combine(weights, residuals)

    def _insert(self, state: AndersonState, z: Tensor, fz: Tensor, before: Tensor) -> AndersonState:
        limit, active = self._limit(z), state.active
        slot = state.count % limit
        residual = fz - z
        length, difference = _length(residual), residual - before
        size = _length(difference)
        residuals = put(room(state.residuals, slot, limit), slot, divide(difference, size), active)
        iterates = put(room(state.iterates, slot, limit), slot, divide(z - state.z, size), active)
        row = products(residuals, residuals[:, slot])
        gram = put(room(state.gram, slot, limit, dims=(1, 2)), slot, row, active)
        gram = put(gram.transpose(1, 2), slot, row, active).transpose(1, 2)
        trusted = room(state.trusted, slot, limit)
        plain = ~trusted.any(dim=1, keepdim=True)  # growth in a plain step is the map's own and worth knowing
        anew = ~(length <= GROWTH * state.shortest)  # also where it is nan
        trusted = put(trusted * ~anew, slot, (plain | ~anew).squeeze(1).to(trusted.dtype), active)
        shortest = torch.where(anew, length, torch.minimum(length, state.shortest))
        return AndersonState(z, fz, residuals, iterates, gram, trusted, shortest, state.count + 1, active=active)

    def _limit(self, z: Tensor) -> int:
        return memory(self.history, z.shape[1], small=z.shape[1], large=6)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, keepdim=True)
