"""Anderson acceleration, type II, per sample.

A state stores up to `limit` pairs (difference of residuals, difference of values) in a ring of slots, as one tensor
(batch, slots, 2 n).

Invariants. The residual parts of the stored pairs of a sample are orthonormal, or zero if a difference was linearly
dependent on the others; a linear combination that is applied to the residual part is applied to the value part too. The
least-squares problem is then solved by inner products. `trusted` is 0 for pairs from before a sample discarded its history,
and 1 for the others; it is used only if `doubted` is True. Rows never influence each other. Buffers are written in place,
unless autograd or a trace needs the old values (`differentiated`). A step does not wait for the device: whether residuals
grew is read from `Map.growth`, which the loop has on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.rowwise import (
    check_history,
    differentiated,
    grow,
    history_size,
    products,
    ridge,
    set_slot,
    subtract_combination,
)

GROWTH = 5.0  # a sample discards its history if its residual exceeds this many times the smallest one,
PATIENCE = 3  # or after this number of steps without a smaller residual


class Trust(NamedTuple):
    """The pairs of the history that each sample uses; see AndersonState."""

    shortest: Tensor
    waited: Tensor
    trusted: Tensor
    doubted: bool


@dataclass(frozen=True)
class AndersonState(Iterate):
    """An iterate with the differences of the last steps, of residuals and of values side by side, in a ring of slots."""

    pairs: Tensor  # (batch, slots, 2 n): differences of residuals, made orthonormal, and of the values that go with them
    last: Tensor  # (batch, 2 n), residual and value of the iterate before
    spare: tuple[Tensor, ...]  # a buffer of at least that size, in which `pair` is computed
    shortest: Tensor  # (batch, 1), smallest norm of the residual since the sample last discarded its history
    waited: Tensor  # (batch, 1), steps since then without a smaller one
    trusted: Tensor  # (batch, slots), 0 for differences from before the history was discarded, else 1
    doubted: bool  # False if `trusted` would be all ones and is not maintained
    limit: int  # largest number of slots
    count: int | Tensor  # number of iterates before this one

    @cached_property
    def pair(self) -> Tensor:
        """(batch, 2 n), residual and value."""
        if differentiated(self.z, self.fz):
            return torch.cat((self.fz - self.z, self.fz), dim=1)
        (rows, n), (spare,) = self.z.shape, self.spare
        pair = spare if len(spare) == rows else spare[:rows]
        torch.sub(self.fz, self.z, out=pair[:, :n])
        pair[:, n:] = self.fz
        return pair

    @cached_property
    def residual(self) -> Tensor:
        """f(z) - z, which is the first half of the newest pair."""
        return self.pair[:, : self.z.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[AndersonState]):
    """Mix the last steps so that the linearised residual is minimal (Anderson 1965; Walker and Ni 2011).

    With residuals g = f(z) - z and differences dg, df of residuals and values over the last `history` steps,

        weights = argmin |g - dg' weights|^2,   z <- f(z) - df' weights

    Each new difference is made orthonormal to the stored ones (truncated Gram-Schmidt, Tang et al. 2024), so that the least
    squares need inner products only. If the Jacobian is close to symmetric, differences that were dropped are orthogonal to
    the new one anyway, and a history of two does as well as a full one. A sample discards its history if its residual
    exceeds five times its smallest one, or has not decreased for three steps. One evaluation per step; memory of
    2 history + 6 states.

    history  number of differences stored; None stores 4, 3 for more than 1024 numbers, n for states of n <= 64 numbers
    damping  the share of the mixed residual that is added
    ridge    a difference is left out if less than this share of its norm is orthogonal to the stored ones; None uses the
             square root of the machine epsilon, below which the rest is mostly rounding
    budget   bytes for the differences of the whole batch; as many are stored as fit, at least one
    """

    history: int | None = None
    damping: float = 1.0
    ridge: float | None = None
    budget: int | None = None
    steps_finished_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_history("Anderson", "history", self.history, self.budget, "; for none use Picard()")
        require(0 < self.damping <= 1, f"Anderson's damping must lie in (0, 1], got {self.damping}.")
        require(self.ridge is None or self.ridge >= 0, f"Anderson's ridge must not be negative, got {self.ridge}.")

    def init(self, f: Map, z0: Tensor) -> AndersonState:
        """The start with an empty history."""
        batch, n = z0.shape
        limit = history_size(self.history, self.budget, z0, small=n, medium=4, large=3)
        start, last, spare = Iterate(z0, f(z0)), z0.new_empty(batch, 2 * n), z0.new_empty(batch, 2 * n)
        shortest, nothing = start.length.unsqueeze(1), z0.new_empty(batch, 0)
        pairs, waited = z0.new_empty(batch, 0, 2 * n), torch.zeros_like(shortest)
        return AndersonState(
            z0, start.fz, pairs, last, (spare,), shortest, waited, nothing, doubted=False, limit=limit, count=0
        )

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        """Store the last difference, and combine the history to the next iterate."""
        trust = self._judge(f, state)
        first = isinstance(state.count, int) and state.count == 0  # before a second iterate there is no difference
        pairs, trust = (state.pairs, trust) if first else self._insert(state, trust)
        z = self._next(state, pairs, trust)
        return AndersonState(
            z,
            f(z),
            pairs,
            last=state.pair,
            spare=(state.last,),  # not needed any more
            shortest=trust.shortest,
            waited=trust.waited,
            trusted=trust.trusted,
            doubted=trust.doubted,
            limit=state.limit,
            count=state.count + 1,
            active=state.active,
        )

    def fixed_shape_state(self, state: AndersonState) -> AndersonState:
        """The state with a full history, whose shapes no step changes."""
        limit, (batch, n) = state.limit, state.z.shape
        count = torch.full((), int(state.count), device=state.z.device)
        pairs, trusted = state.z.new_zeros(batch, limit, 2 * n), state.z.new_ones(batch, limit)
        return replace(state, pairs=pairs, trusted=trusted, doubted=True, count=count)

    def _judge(self, f: Map, state: AndersonState) -> Trust:
        """Discard the history of samples whose residual has grown or has not decreased for `PATIENCE` steps."""
        length = state.length.unsqueeze(1)
        if f.growth < 1:  # every residual is the smallest of its sample
            waited = torch.zeros_like(state.waited) if state.doubted else state.waited
            return Trust(length, waited, state.trusted, state.doubted)
        waited = (state.waited + 1) * (length >= state.shortest)
        # an affine map is determined by n differences, and the residual may not fall before all are known
        limit, n = state.limit, state.z.shape[1]
        usual = (length <= GROWTH * state.shortest) & (waited < (PATIENCE if limit < n else limit + PATIENCE))  # not nan
        trusted = state.trusted if state.doubted else length.new_ones(length.shape[0], state.pairs.shape[1])
        shortest = torch.where(usual, torch.minimum(length, state.shortest), length)
        if f.fell is not None:  # rows that fell are treated as if all had fallen, so that rows do not depend on each other
            fell = f.fell.unsqueeze(1)
            usual, waited, shortest = usual | fell, waited * ~fell, torch.where(fell, length, shortest)
        return Trust(shortest, waited * usual, trusted * usual, doubted=True)

    def _insert(self, state: AndersonState, trust: Trust) -> tuple[Tensor, Trust]:
        """The pairs and trust with the difference from the previous iterate in its slot."""
        limit, n = state.limit, state.z.shape[1]
        slot, k = (state.count - 1) % limit, limit
        pairs, trusted = state.pairs, trust.trusted
        if isinstance(state.count, int):
            k = min(state.count - 1, limit)
            pairs = grow(pairs, (state.count - 1) % limit, limit, blank=False)
            trusted = grow(trusted, (state.count - 1) % limit, limit) if trust.doubted else trusted
        followed = differentiated(state.pair, state.last, pairs)
        pair = torch.sub(state.pair, state.last, out=None if followed else state.last)
        size = torch.linalg.vector_norm(pair[:, :n], dim=1, keepdim=True)
        if k:
            kept = pairs[:, :k]
            pair = subtract_combination(pair, _weights(pair[:, :n], kept[:, :, :n], trust), kept, over=not followed)
        left = torch.linalg.vector_norm(pair[:, :n], dim=1, keepdim=True)
        # if a difference lies in the space of the others, the rest is rounding and is dropped
        empty = left <= ridge(self.ridge, left.dtype) * size
        scale = left.masked_fill(empty, 1.0).reciprocal().masked_fill(empty, 0.0)  # avoids 1 / 0, also in derivatives
        if followed:
            pairs = set_slot(pairs, slot, pair * scale)
        else:
            torch.mul(pair, scale, out=pairs[:, slot])
        if trust.doubted:
            trust = trust._replace(trusted=set_slot(trusted.clone(), slot, torch.ones_like(left[:, 0])))
        return pairs, trust

    def _next(self, state: AndersonState, pairs: Tensor, trust: Trust) -> Tensor:
        """The next iterate: the damped evaluation less the combination of the history."""
        k, n = state.limit, state.z.shape[1]
        k = min(state.count, k) if isinstance(state.count, int) else k
        if k == 0:
            return state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        residuals, values = pairs[:, :k, :n], pairs[:, :k, n:]
        weights = _weights(state.residual, residuals, trust)
        z = subtract_combination(state.fz, weights, values)
        return z if self.damping == 1 else z - (1 - self.damping) * subtract_combination(state.residual, weights, residuals)


def _weights(x: Tensor, residuals: Tensor, trust: Trust) -> Tensor:
    """(batch, k), inner products of x (batch, n) with the differences of residuals (batch, k, n) that are trusted."""
    weights = products(residuals, x)
    return weights * trust.trusted[:, : weights.shape[1]] if trust.doubted else weights
