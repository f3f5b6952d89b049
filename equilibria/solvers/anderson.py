"""Anderson acceleration, type II, per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.maps import Map
from equilibria.solvers.base import Iterate, Solver, combine, differentiated, memory, minus, products, put, require, room

GROWTH = 5.0  # a residual this many times the shortest one: the history describes another place,
PATIENCE = 3  # and so it does after so many steps in which none was shorter


@dataclass(frozen=True)
class AndersonState(Iterate):
    """With differences of residuals, made orthonormal, and the differences of values that go with them, in a ring."""

    residuals: Tensor  # (batch, slots, n)
    values: Tensor  # (batch, slots, n)
    trusted: Tensor  # (batch, slots), 1 for the differences since the sample last began anew, 0 for others
    shortest: Tensor  # (batch, 1), residual since then
    waited: Tensor  # (batch, 1), steps since it was found
    count: int  # differences seen so far


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[AndersonState]):
    """Mix the last steps so that the linearised residual is least (Anderson 1965; Walker and Ni 2011).

    With residuals g = f(z) - z and differences dg, df of residuals and values over the last `history` steps,

        weights = argmin |g - dg' weights|^2,   z <- f(z) - df' weights

    The differences are made orthonormal one after the other, which solves the least squares by inner products alone. A new
    one is made orthogonal to those kept (Tang and others 2024, truncated Gram-Schmidt): where the Jacobian is close to
    symmetric those dropped were orthogonal to it anyway, and a history of two does as well as the whole. A sample whose
    residual grows past five times its shortest, or has not become shorter for three steps, forgets its history. One
    evaluation a step; 2 history + 3 states of memory.

    history  differences kept; None: 8, for states of up to 64 numbers all, of more than 1024 numbers 4
    damping  how much of the mixed residual is added
    ridge    a difference that lies within the others but for this share of its length is left out; None: the square root of
             the dtype's spacing, below which what is left of it is mostly rounding
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
        start, nothing = Iterate(z0, f(z0)), z0.new_empty(batch, 0, n)
        return AndersonState(
            z0, start.fz, nothing, nothing, z0.new_empty(batch, 0), _length(start.residual), z0.new_zeros(batch, 1), count=0
        )

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        z = self._next(state)
        return self._insert(state, Iterate(z, f(z)))

    def _next(self, state: AndersonState) -> Tensor:
        k = min(state.count, self._limit(state.z))
        if k == 0:
            return state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        residuals = state.residuals[:, :k]
        weights = products(residuals, state.residual) * state.trusted[:, :k]
        value = minus(state.fz, combine(weights, state.values[:, :k]))
        if self.damping == 1:
            return value
        return value - (1 - self.damping) * minus(state.residual, combine(weights, residuals))

    def _insert(self, state: AndersonState, new: Iterate) -> AndersonState:
        limit = self._limit(new.z)
        slot, k = state.count % limit, min(state.count, limit)
        length = _length(new.residual)
        waited = (state.waited + 1) * (length >= state.shortest)
        # all that an affine map can tell lies in n differences, and it may take as many until the residual falls
        patience = PATIENCE if limit < new.z.shape[1] else limit + PATIENCE
        usual = (length <= GROWTH * state.shortest) & (waited < patience)  # not where it is nan
        shortest = torch.where(usual, torch.minimum(length, state.shortest), length)
        waited = waited * usual
        trusted = room(state.trusted, slot, limit) * usual
        residuals, values = (room(part, slot, limit, blank=False) for part in (state.residuals, state.values))
        residual, value = new.residual - state.residual, new.fz - state.fz
        size = _length(residual)
        if k:
            weights = products(residuals[:, :k], residual) * trusted[:, :k]
            residual = minus(residual, combine(weights, residuals[:, :k]))
            value = minus(value, combine(weights, values[:, :k]))
        left = _length(residual)
        # what is left of a difference inside the space of the others is rounding, and says nothing
        empty = left <= self._threshold(left.dtype) * size
        scale = left.masked_fill(empty, 1.0).reciprocal().masked_fill(empty, 0.0)  # no 1 / 0 for a derivative to meet
        residuals = put(residuals, slot, residual * scale)
        values = put(values, slot, value * scale)
        trusted = trusted.clone() if differentiated(residual, value) else trusted
        trusted[:, slot].fill_(1)
        return AndersonState(
            new.z, new.fz, residuals, values, trusted, shortest, waited, state.count + 1, active=state.active
        )

    def _threshold(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps ** 0.5 if self.ridge is None else self.ridge

    def _limit(self, z: Tensor) -> int:
        return memory(self.history, z.shape[1], small=z.shape[1], medium=8, large=4)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, keepdim=True)
