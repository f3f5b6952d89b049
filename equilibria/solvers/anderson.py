"""Anderson acceleration, type II, per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.maps import Map
from equilibria.solvers.base import (
    Iterate,
    Solver,
    combine,
    differentiated,
    memory,
    minus,
    products_of_two,
    put,
    put_difference,
    require,
    room,
    solve_small,
)

GROWTH = 5.0  # a residual this many times the shortest one: the history describes another place


@dataclass(frozen=True)
class AndersonState(Iterate):
    """With the last differences of residuals and of values, in a ring."""

    residuals: Tensor  # (batch, slots, n), differences of f(z) - z
    values: Tensor  # (batch, slots, n), differences of f(z)
    gram: Tensor  # (batch, slots, slots), inner products of `residuals`
    right: Tensor  # (batch, slots), inner products of `residuals` with the present f(z) - z
    trusted: Tensor  # (batch, slots), 1 for the differences since the sample last began anew, 0 for others
    shortest: Tensor  # (batch, 1), residual since then
    count: int  # differences seen so far


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[AndersonState]):
    """Mix the last steps so that the linearised residual is least (Anderson 1965; Walker and Ni 2011).

    With residuals g = f(z) - z and differences dg, dz over the last `history` steps,

        weights = argmin |g - dg' weights|^2 + ridge |weights|^2,   z <- z + damping g - (dz + damping dg)' weights

    A sample whose residual grows past five times its shortest forgets its history and begins anew with a plain step.
    One evaluation a step; 2 history + 2 states of memory.

    history  differences kept; None: 6, for states of up to 64 numbers all, of more than 1024 numbers 5
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
        nothing, gram, none = z0.new_empty(batch, 0, n), z0.new_empty(batch, 0, 0), z0.new_empty(batch, 0)
        start = Iterate(z0, f(z0))
        return AndersonState(z0, start.fz, nothing, nothing, gram, none, none, _length(start.residual), count=0)

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        z = self._next(state)
        return self._insert(state, Iterate(z, f(z)))

    def _next(self, state: AndersonState) -> Tensor:
        k = state.right.shape[1]
        if k == 0:
            return state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        weights = self._weights(state.gram[:, :k, :k], state.trusted[:, :k], state.right)
        value = minus(state.fz, combine(weights, state.values[:, :k]))
        if self.damping == 1:
            return value
        return value - (1 - self.damping) * (state.residual - combine(weights, state.residuals[:, :k]))

    def _weights(self, gram: Tensor, trusted: Tensor, right: Tensor) -> Tensor:
        """Of every difference, (batch, k): the system is scaled so that each has length 1, or 0 if it is not trusted."""
        limits = torch.finfo(gram.dtype)
        scale = gram.diagonal(dim1=1, dim2=2).clamp_min(limits.tiny).rsqrt() * trusted
        ridge = 10 * limits.eps if self.ridge is None else self.ridge
        matrix = gram * (scale.unsqueeze(1) * scale.unsqueeze(2))
        matrix.diagonal(dim1=1, dim2=2).add_(ridge)
        return scale * solve_small(matrix, scale * right)

    def _insert(self, state: AndersonState, new: Iterate) -> AndersonState:
        limit = self._limit(new.z)
        slot = state.count % limit
        residuals = put_difference(room(state.residuals, slot, limit, blank=False), slot, new.residual, state.residual)
        values = put_difference(room(state.values, slot, limit, blank=False), slot, new.fz, state.fz)
        past = residuals[:, : min(state.count + 1, limit)]
        row, right = products_of_two(past, residuals[:, slot], new.residual)
        gram = _with_row(room(state.gram, slot, limit, dims=(1, 2)), slot, row)
        length = _length(new.residual)
        usual = length <= GROWTH * state.shortest  # not where it is nan
        shortest = torch.where(usual, torch.minimum(length, state.shortest), length)
        trusted = room(state.trusted, slot, limit) * usual
        trusted[:, slot] = 1
        return AndersonState(
            new.z, new.fz, residuals, values, gram, right, trusted, shortest, state.count + 1, active=state.active
        )

    def _limit(self, z: Tensor) -> int:
        return memory(self.history, z.shape[1], small=z.shape[1], medium=6, large=5)


def _with_row(gram: Tensor, slot: int, row: Tensor) -> Tensor:
    """A symmetric matrix with `row` (batch, k) as the row and the column of a slot."""
    k = row.shape[1]
    if differentiated(gram, row):
        row = torch.nn.functional.pad(row, (0, gram.shape[1] - k))
        return put(put(gram, slot, row).transpose(1, 2), slot, row).transpose(1, 2)
    gram[:, slot, :k] = row
    gram[:, :k, slot] = row
    return gram


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, keepdim=True)
