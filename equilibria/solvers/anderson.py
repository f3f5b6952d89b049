"""Anderson acceleration, type II, per sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from equilibria._core.maps import Map
from equilibria.solvers.base import (
    Iterate,
    Solver,
    check_memory,
    differentiated,
    memory,
    products,
    put,
    require,
    room,
    without,
)

GROWTH = 5.0  # a residual this many times the shortest one: the history describes another place,
PATIENCE = 3  # and so it does after so many steps in which none was shorter


class Trust(NamedTuple):
    """What samples make of their history; see AndersonState."""

    shortest: Tensor
    waited: Tensor
    trusted: Tensor
    doubted: bool


@dataclass(frozen=True)
class AndersonState(Iterate):
    """With the differences of the last steps in a ring, those of residuals and of values side by side."""

    pairs: Tensor  # (batch, slots, 2 n): differences of residuals, made orthonormal, and of the values that go with them
    last: Tensor  # (batch, 2 n), residual and value of the iterate before
    spare: tuple[Tensor, ...]  # of that size or more, memory for `pair`; none where nothing may be written over
    shortest: Tensor  # (batch, 1), residual before this one, since the sample last began anew
    waited: Tensor  # (batch, 1), steps since it was found
    trusted: Tensor  # (batch, slots), 0 for the differences from before the sample began anew, else 1
    doubted: bool  # is there anything but ones to be kept in `trusted`?
    limit: int  # slots at most
    count: int | Tensor  # iterates before this one

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
        return self.pair[:, : self.z.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[AndersonState]):
    """Mix the last steps so that the linearised residual is least (Anderson 1965; Walker and Ni 2011).

    With residuals g = f(z) - z and differences dg, df of residuals and values over the last `history` steps,

        weights = argmin |g - dg' weights|^2,   z <- f(z) - df' weights

    The differences are made orthonormal one after the other, which solves the least squares by inner products alone. A new
    one is made orthogonal to those kept (Tang and others 2024, truncated Gram-Schmidt): where the Jacobian is close to
    symmetric those dropped were orthogonal to it anyway, and a history of two does as well as the whole. A sample whose
    residual grows past five times its shortest, or has not become shorter for three steps, forgets its history. One
    evaluation a step; 2 history + 6 states of memory.

    history  differences kept; None: 4, for states of up to 64 numbers all, of more than 1024 numbers 3
    damping  how much of the mixed residual is added
    ridge    a difference that lies within the others but for this share of its length is left out; None: the square root of
             the dtype's spacing, below which what is left of it is mostly rounding
    budget   bytes for the differences of a whole batch: as many are kept as fit, and one
    """

    history: int | None = None
    damping: float = 1.0
    ridge: float | None = None
    budget: int | None = None
    runs_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_memory("Anderson", "history", self.history, self.budget, "; for none use Picard()")
        require(0 < self.damping <= 1, f"Anderson's damping must lie in (0, 1], got {self.damping}.")
        require(self.ridge is None or self.ridge >= 0, f"Anderson's ridge must not be negative, got {self.ridge}.")

    def init(self, f: Map, z0: Tensor) -> AndersonState:
        batch, n = z0.shape
        limit = memory(self.history, self.budget, z0, small=n, medium=4, large=3)
        start, last, spare = Iterate(z0, f(z0)), z0.new_empty(batch, 2 * n), z0.new_empty(batch, 2 * n)
        shortest, nothing = start.length.unsqueeze(1), z0.new_empty(batch, 0)
        pairs, waited = z0.new_empty(batch, 0, 2 * n), torch.zeros_like(shortest)
        return AndersonState(
            z0, start.fz, pairs, last, (spare,), shortest, waited, nothing, doubted=False, limit=limit, count=0
        )

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        trust = self._judge(f, state)
        first = isinstance(state.count, int) and state.count == 0
        pairs, trust = (state.pairs, trust) if first else self._insert(state, trust)
        z = self._next(state, pairs, trust)
        return AndersonState(
            z,
            f(z),
            pairs,
            last=state.pair,
            spare=(state.last,),  # free now
            shortest=trust.shortest,
            waited=trust.waited,
            trusted=trust.trusted,
            doubted=trust.doubted,
            limit=state.limit,
            count=state.count + 1,
            active=state.active,
        )

    def settled(self, state: AndersonState) -> AndersonState:
        limit, (batch, n) = state.limit, state.z.shape
        count = torch.full((), int(state.count), device=state.z.device)
        pairs, trusted = state.z.new_zeros(batch, limit, 2 * n), state.z.new_ones(batch, limit)
        return replace(state, pairs=pairs, trusted=trusted, doubted=True, count=count)

    def _judge(self, f: Map, state: AndersonState) -> Trust:
        """Samples that were led astray trust nothing of what led them there."""
        length = state.length.unsqueeze(1)
        if f.growth < 1:  # every residual is its shortest
            waited = torch.zeros_like(state.waited) if state.doubted else state.waited
            return Trust(length, waited, state.trusted, state.doubted)
        waited = (state.waited + 1) * (length >= state.shortest)
        # all that an affine map can tell lies in n differences, and it may take as many until the residual falls
        limit, n = state.limit, state.z.shape[1]
        usual = (length <= GROWTH * state.shortest) & (waited < (PATIENCE if limit < n else limit + PATIENCE))  # not nan
        trusted = state.trusted if state.doubted else length.new_ones(length.shape[0], state.pairs.shape[1])
        shortest = torch.where(usual, torch.minimum(length, state.shortest), length)
        if f.fell is not None:  # these are judged as if all had fallen: a row does not depend on others
            fell = f.fell.unsqueeze(1)
            usual, waited, shortest = usual | fell, waited * ~fell, torch.where(fell, length, shortest)
        return Trust(shortest, waited * usual, trusted * usual, doubted=True)

    def _insert(self, state: AndersonState, trust: Trust) -> tuple[Tensor, Trust]:
        """Pairs and trust, with the difference from the iterate before in its slot."""
        limit, n = state.limit, state.z.shape[1]
        slot, k = (state.count - 1) % limit, limit
        pairs, trusted = state.pairs, trust.trusted
        if isinstance(state.count, int):
            k = min(state.count - 1, limit)
            pairs = room(pairs, (state.count - 1) % limit, limit, blank=False)
            trusted = room(trusted, (state.count - 1) % limit, limit) if trust.doubted else trusted
        followed = differentiated(state.pair, state.last, pairs)
        pair = torch.sub(state.pair, state.last, out=None if followed else state.last)
        size = torch.linalg.vector_norm(pair[:, :n], dim=1, keepdim=True)
        if k:
            kept = pairs[:, :k]
            pair = without(pair, _weights(pair[:, :n], kept[:, :, :n], trust), kept, over=not followed)
        left = torch.linalg.vector_norm(pair[:, :n], dim=1, keepdim=True)
        # what is left of a difference inside the space of the others is rounding, and says nothing
        empty = left <= self._threshold(left.dtype) * size
        scale = left.masked_fill(empty, 1.0).reciprocal().masked_fill(empty, 0.0)  # no 1 / 0 for a derivative to meet
        if followed:
            pairs = put(pairs, slot, pair * scale)
        else:
            torch.mul(pair, scale, out=pairs[:, slot])
        if trust.doubted:
            trust = trust._replace(trusted=put(trusted.clone(), slot, torch.ones_like(left[:, 0])))
        return pairs, trust

    def _next(self, state: AndersonState, pairs: Tensor, trust: Trust) -> Tensor:
        k, n = state.limit, state.z.shape[1]
        k = min(state.count, k) if isinstance(state.count, int) else k
        if k == 0:
            return state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        residuals, values = pairs[:, :k, :n], pairs[:, :k, n:]
        weights = _weights(state.residual, residuals, trust)
        z = without(state.fz, weights, values)
        return z if self.damping == 1 else z - (1 - self.damping) * without(state.residual, weights, residuals)

    def _threshold(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps ** 0.5 if self.ridge is None else self.ridge


def _weights(x: Tensor, residuals: Tensor, trust: Trust) -> Tensor:
    """(batch, k), inner products of x (batch, n) with the differences of residuals (batch, k, n) that are trusted."""
    weights = products(residuals, x)
    return weights * trust.trusted[:, : weights.shape[1]] if trust.doubted else weights
