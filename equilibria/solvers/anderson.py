"""Anderson acceleration, type II, per sample.

A state stores pairs (difference of residuals, difference of values) in a ring of slots, as one tensor (batch, slots, 2 n).
A sample uses the last `held` of them, at most `window`. The window grows while steps gain little; the ring is as long as the
longest window. When the ring grows, its oldest pair is moved to the front, so that counters alone tell the age of a slot
and a replay of the steps (`Unrolled`) follows the history.

Two forms solve the least-squares problem. Up to `MEDIUM_STATE` numbers, residual parts are kept orthonormal (truncated
Gram-Schmidt): a pair still contains the directions that were dropped before it, which is all that is needed if the Jacobian
is close to symmetric, and a short history does as well as a full one. Beyond, the differences are kept as they are, with
their Gram matrix: a step reads the history twice instead of three times, and no direction is older than the window, which
takes fewer steps on trained attention blocks.

Rows never influence each other. Buffers are written in place, unless autograd or a trace needs the old values
(`differentiated`). Whether residuals grew is read from `Map.growth`, which the loop has on the host. On the CPU the ring
grows only if a sample needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria._core.maps import Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.rowwise import (
    MEDIUM_STATE,
    SMALL_STATE,
    check_history,
    differentiated,
    grow,
    history_size,
    products,
    ridge,
    set_slot,
    solve_small,
    subtract_combination,
)

GROWTH = 5.0  # a sample discards its history if its residual exceeds this many times the smallest one,
PATIENCE = 3  # or after this number of steps without a smaller residual
SLOW = 0.8  # a full history grows after a step that leaves more than this share of the smallest residual
FEW, MANY = 4, 20  # pairs stored at first, and at most
ROUNDING = 10  # machine epsilons added to the diagonal of a Gram matrix, whose products are rounded
COMPILED_SLOTS = 8  # pairs of a compiled solve, which carries all slots from step to step


class Judged(NamedTuple):
    """What each sample keeps of its history before a step; see AndersonState."""

    shortest: Tensor
    waited: Tensor
    held: Tensor
    partial: bool
    slow: Tensor | None  # (batch, 1), True for samples whose last step gained little; None if no history may grow


@dataclass(frozen=True)
class AndersonState(Iterate):
    """An iterate with the differences of the last steps, of residuals and of values side by side, in a ring of slots."""

    pairs: Tensor  # (batch, slots, 2 n): differences of residuals, orthonormal in the first form, and of values
    gram: Tensor  # (batch, slots, slots): inner products of the differences of residuals; no slots in the first form
    last: Tensor  # (batch, 2 n), residual and value of the iterate before
    spare: tuple[Tensor, ...]  # a buffer of at least that size, in which `pair` is computed
    shortest: Tensor  # (batch, 1), smallest norm of the residual since the sample last discarded its history
    waited: Tensor  # (batch, 1), steps since then without a smaller one
    window: Tensor  # (batch, 1), pairs that the sample may use
    held: Tensor  # (batch, 1), pairs that it uses: the last ones
    partial: bool  # False if every sample uses all pairs in the ring, so that no mask is needed
    few: int  # slots of the ring at first
    limit: int  # slots of the ring
    most: int  # slots that it may grow to
    filled: int  # pairs in the ring
    count: int | Tensor  # number of iterates before this one
    slot: int | Tensor  # where the next pair goes

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

    With residuals g = f(z) - z and differences dg, df of residuals and values over the last steps,

        weights = argmin |g - dg' weights|^2,   z <- f(z) - df' weights

    Up to 1024 numbers, each new difference is made orthonormal to the stored ones (truncated Gram-Schmidt, Tang et al.
    2024), so that the least squares need inner products only. Beyond, the normal equations of the last differences are
    solved. A sample discards its history if its residual exceeds five times its smallest one, or has not decreased for
    three steps. One evaluation per step; memory of 2 history + 6 states.

    history  number of differences stored; None stores 4, and one more with every step that reduces the residual by less than
             a fifth, up to 20; for states of n <= 64 numbers n
    damping  the share of the mixed residual that is added
    ridge    a difference is left out if less than this share of its norm is orthogonal to the stored ones; beyond 1024
             numbers its square is added to the diagonal of the normal equations of normalised differences. None uses the
             square root of the machine epsilon, and of ten of them, below which the rest is mostly rounding
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

    def history_range(self, z: Tensor) -> tuple[int, int]:
        """Return the number of pairs stored at first and at most, for a state of the shape and dtype of `z`, (batch, n)."""
        n = z.shape[1]
        most = history_size(self.history, self.budget, z, small=n, medium=MANY, large=MANY)
        return most if self.history is not None or n <= SMALL_STATE else min(FEW, most), most

    def threshold(self, n: int, dtype: torch.dtype) -> float:
        """Return the ridge for `n` numbers: a share of a norm, or for large states a term of the Gram matrix."""
        if n <= MEDIUM_STATE:
            return ridge(self.ridge, dtype)
        return ROUNDING * torch.finfo(dtype).eps if self.ridge is None else self.ridge**2

    def init(self, f: Map, z0: Tensor) -> AndersonState:
        """Evaluate the start; the history is empty."""
        batch, n = z0.shape
        limit, most = self.history_range(z0)
        start, last, spare = Iterate(z0, f(z0)), z0.new_empty(batch, 2 * n), z0.new_empty(batch, 2 * n)
        shortest = start.length.unsqueeze(1)
        pairs, gram, none = z0.new_empty(batch, 0, 2 * n), z0.new_empty(batch, 0, 0), torch.zeros_like(shortest)
        rows = (shortest, none, torch.full_like(shortest, limit), none)
        return AndersonState(z0, start.fz, pairs, gram, last, (spare,), *rows, False, limit, limit, most, 0, 0, 0)

    def step(self, f: Map, state: AndersonState) -> AndersonState:
        """Store the last difference, and combine the history to the next iterate."""
        judged, window, n = self._judge(f, state), state.window, state.z.shape[1]
        ring, held, partial = (
            Ring(state.pairs, state.gram, state.limit, state.filled, state.slot),
            judged.held,
            judged.partial,
        )
        if isinstance(state.count, int) and state.count == 0:  # before a second iterate there is no difference
            z = state.fz if self.damping == 1 else torch.lerp(state.z, state.fz, self.damping)
        else:
            before, held = held, torch.minimum(held + 1, window)
            damping, threshold = self.damping, self.threshold(n, state.z.dtype)
            if fused is not None and state.z.device.type in fused.devices and not differentiated(state.z, state.fz):
                z, ring = fused.step(ring, state.pair, state.last, before, window, damping, threshold)
            else:
                ring = insert(ring, state.pair, state.last, mask_of(ring, before) if partial else None, threshold)
                mask = mask_of(ring, held) if partial else None
                z = combine(ring, state.fz, state.residual, mask, damping, threshold)
        if judged.slow is not None:
            window = window + (judged.slow & (held == window) & (window < state.most))
            if ring.limit < state.most and _is_needed(window, ring):
                ring, partial = ring.longer(min(ring.limit + 1, state.most)), True
        return AndersonState(
            z,
            f(z),
            ring.pairs,
            ring.gram,
            last=state.pair,
            spare=(state.last,),  # not needed any more
            shortest=judged.shortest,
            waited=judged.waited,
            window=window,
            held=held,
            partial=partial,
            few=state.few,
            limit=ring.limit,
            most=state.most,
            filled=ring.filled,
            count=state.count + 1,
            slot=ring.slot,
            active=state.active,
        )

    def fixed_shape_state(self, state: AndersonState) -> AndersonState:
        """Return the state with all slots a compiled solve may use, whose shapes no step changes."""
        limit, (batch, n) = state.limit if state.few == state.most else min(COMPILED_SLOTS, state.most), state.z.shape
        count, slot = (torch.full((), int(each), device=state.z.device) for each in (state.count, state.slot))
        pairs, squares = state.z.new_zeros(batch, limit, 2 * n), state.z.new_zeros(batch, limit, limit)
        gram = squares if n > MEDIUM_STATE else state.gram
        changed = replace(state, pairs=pairs, gram=gram, partial=True, limit=limit, most=limit, filled=limit)
        return replace(changed, count=count, slot=slot)

    def _judge(self, f: Map, state: AndersonState) -> Judged:
        """Discard the history of samples whose residual has grown or has not decreased for `PATIENCE` steps."""
        length = state.length.unsqueeze(1)
        growing = state.few < state.most and (isinstance(state.count, Tensor) or state.filled + 1 >= state.few)
        slow = ~(length < SLOW * state.shortest) if growing else None
        if f.growth < 1:  # every residual is the smallest of its sample
            waited = torch.zeros_like(state.waited) if state.partial else state.waited
            return Judged(length, waited, state.held, state.partial, slow)
        waited = (state.waited + 1) * (length >= state.shortest)
        # an affine map is determined by n differences, and the residual may not fall before all are known
        most, n = state.most, state.z.shape[1]
        usual = (length <= GROWTH * state.shortest) & (waited < (PATIENCE if most < n else most + PATIENCE))  # not nan
        shortest = torch.where(usual, torch.minimum(length, state.shortest), length)
        if f.fell is not None:  # rows that fell are treated as if all had fallen, so that rows do not depend on each other
            fell = f.fell.unsqueeze(1)
            usual, waited, shortest = usual | fell, waited * ~fell, torch.where(fell, length, shortest)
        return Judged(shortest, waited * usual, state.held * usual, True, slow)


class Ring(NamedTuple):
    """The stored pairs of all samples in a ring of slots, with their Gram matrix; fields as in AndersonState."""

    pairs: Tensor
    gram: Tensor
    limit: int
    filled: int
    slot: int | Tensor

    def with_pair(self, pair: Tensor, n: int, followed: bool, scale: Tensor | None = None) -> Ring:
        """Return the ring with `pair` times `scale` in the next slot; without a scale, the Gram matrix is updated."""
        slot, fixed = self.slot, isinstance(self.slot, Tensor)
        pairs = self.pairs if isinstance(slot, Tensor) else grow(self.pairs, slot, self.limit, blank=False)
        filled = self.limit if fixed else min(self.filled + 1, self.limit)
        if followed:
            pairs = set_slot(pairs, slot, pair if scale is None else pair * scale)
        elif scale is None:
            pairs[:, slot] = pair
        else:
            torch.mul(pair, scale, out=pairs[:, slot])
        gram = self.gram
        if scale is None:
            kept = pairs[:, :filled, :n]
            if followed:
                gram = kept @ kept.transpose(1, 2)
            else:
                assert isinstance(slot, int)
                gram = grow(gram, slot, self.limit, dims=(1, 2))
                gram[:, slot, :filled] = gram[:, :filled, slot] = products(kept, pairs[:, slot, :n])
        return Ring(pairs, gram, self.limit, filled, (slot + 1) % self.limit)

    def longer(self, limit: int) -> Ring:
        """Return a ring with more slots from a full one, its oldest pair in the first slot."""
        assert isinstance(self.slot, int)
        oldest, gram = self.slot, self.gram
        pairs = torch.cat((self.pairs[:, oldest : self.limit], self.pairs[:, :oldest]), dim=1) if oldest else self.pairs
        if oldest and gram.shape[1]:
            place = [*range(oldest, self.limit), *range(oldest)]
            gram = gram[:, place][:, :, place]
        return Ring(pairs, gram, limit, self.filled, self.limit)


class Fused(NamedTuple):
    """A function that does `insert` and `combine` in one call, and the types of device it supports."""

    step: Callable[[Ring, Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Ring]]
    devices: tuple[str, ...]


fused: Fused | None = None  # set inside `native.gpu.fused()`


def insert(ring: Ring, pair: Tensor, last: Tensor, mask: Tensor | None, threshold: float) -> Ring:
    """Return the ring with the difference of `pair` and `last`, (batch, 2 n); `mask` marks the stored pairs in use.

    Overwrites `last`, unless it is differentiated.
    """
    n, followed = pair.shape[1] // 2, differentiated(pair, last, ring.pairs)
    pair = torch.sub(pair, last, out=None if followed else last)
    if n > MEDIUM_STATE:
        return ring.with_pair(pair, n, followed)
    size = torch.linalg.vector_norm(pair[:, :n], dim=1, keepdim=True)
    if ring.filled:
        kept = ring.pairs[:, : ring.filled]
        weights = _masked(products(kept[:, :, :n], pair[:, :n]), mask)
        pair = subtract_combination(pair, weights, kept, over=not followed)
    left = torch.linalg.vector_norm(pair[:, :n], dim=1, keepdim=True)
    # if a difference lies in the space of the others, the rest is rounding and is dropped
    empty = left <= threshold * size
    if followed:  # the second derivative of a norm is nan at zero
        left = torch.linalg.vector_norm(pair[:, :n].masked_fill(empty, 1.0), dim=1, keepdim=True)
    scale = left.masked_fill(empty, 1.0).reciprocal().masked_fill(empty, 0.0)  # avoids 1 / 0, also in derivatives
    return ring.with_pair(pair, n, followed, scale)


def combine(ring: Ring, fz: Tensor, residual: Tensor, mask: Tensor | None, damping: float, threshold: float) -> Tensor:
    """Return the next iterate: the damped evaluation minus the combination of the history."""
    k, n = ring.filled, fz.shape[1]
    residuals, values = ring.pairs[:, :k, :n], ring.pairs[:, :k, n:]
    weights = _masked(products(residuals, residual), mask)
    if n > MEDIUM_STATE:
        weights = least_squares(ring.gram[:, :k, :k], weights, mask, threshold)
    z = subtract_combination(fz, weights, values)
    return z if damping == 1 else z - (1 - damping) * subtract_combination(residual, weights, residuals)


def least_squares(gram: Tensor, right: Tensor, mask: Tensor | None, threshold: float) -> Tensor:
    """Return (batch, k), the minimizer of |g - sum of weights dg|; `gram` has the products of the dg, `right` with g.

    Differences are normalised, so that `threshold`, which is added to the diagonal, is relative. Pairs that are masked or
    zero get the weight zero.
    """
    wide = gram.dtype if gram.device.type == "mps" else torch.float64
    gram, b = gram.to(wide), right.to(wide)
    squares = gram.diagonal(dim1=1, dim2=2)
    used = squares > 0 if mask is None else (squares > 0) & (mask > 0)
    scale = torch.where(used, squares, 1.0).rsqrt() * used
    matrix = gram * scale.unsqueeze(1) * scale.unsqueeze(2) + torch.diag_embed(threshold + (~used).to(wide))
    return (solve_small(matrix, b * scale) * scale).to(right.dtype)


def mask_of(ring: Ring, held: Tensor) -> Tensor:
    """Return (batch, filled), 1 for the last `held` pairs of each sample, else 0."""
    place = torch.arange(ring.filled, device=held.device)
    return ((ring.slot - 1 - place) % ring.limit < held).to(held.dtype)


def _masked(weights: Tensor, mask: Tensor | None) -> Tensor:
    return weights if mask is None else weights * mask


def _is_needed(window: Tensor, ring: Ring) -> bool:
    """Return True if a full ring must grow: a window is longer, or reading the windows would wait for a device."""
    if isinstance(ring.slot, Tensor) or ring.filled < ring.limit:
        return False
    return not _reads_at_once(window) or bool((window > ring.limit).any())


def _reads_at_once(x: Tensor) -> bool:
    """Return True if a number of `x` is in memory already, so that reading it waits for no device."""
    return x.device.type == "cpu" and not autodiff_modes.inside_transform()
