"""Linear solvers: GMRES, BiCGSTAB and conjugate gradients on the normal equations, all per sample.

They solve z = M z + b, that is A z = b with A = I - M. As adjoint solvers they get the products with M. On a plain map
they use its derivative at the starting point, which is exact if the map is affine. They update f(z) by a recurrence
(f(z) = z + r with r = b - A z); the loop verifies the result with one evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria._core.maps import FALLEN, LinearMap, Map
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.rowwise import (
    SMALL_STATE,
    check_history,
    divide,
    dot,
    grow,
    history_size,
    products,
    set_slot,
    subtract_combination,
)


@dataclass(frozen=True)
class _Carried(Iterate):
    """A state whose residual is updated by a recurrence; f(z) = z + residual."""

    base: Tensor  # (batch, n), where the derivative is taken
    remaining: Tensor  # (batch, n), b - A z

    @property
    def residual(self) -> Tensor:
        """The residual that the recurrence updates."""
        return self.remaining


@dataclass(frozen=True)
class GMRESState(_Carried):
    """Directions p with orthonormal images q = A p; every step adds a pair."""

    pairs: Tensor  # (batch, slots, 2 n), q and p side by side
    image: Tensor  # (batch, n), the last q
    before: Tensor  # (batch,), length of the residual a step earlier
    limit: int  # current number of slots
    most: int  # largest number of slots
    count: int | Tensor  # number of pairs so far
    taken: int = 0  # steps since the residual was last computed without the recurrence
    order: tuple[int, ...] = ()  # slots in use, the oldest pair first
    window: Tensor | None = None  # (batch, 1), pairs that a row may keep; None: `limit`
    held: Tensor | None = None  # (batch, 1), pairs that it keeps: the last ones


STAGNATION = 0.9  # if a step leaves more of the residual than this, the last image is added to the space as well
SLOW = 0.8  # if a step leaves more of the residual than this, the window grows instead of dropping a direction
FEW = 4  # directions stored as long as steps are not slow
ANEW = 100  # steps after which directions are dropped and the residual is recomputed, because errors of images accumulate


@dataclass(frozen=True, kw_only=True)
class GMRES(Solver[GMRESState]):
    """Minimize the residual over the Krylov space of A (Saad and Schultz 1986); one product per step.

    This is the form of Jiranek and Rozloznik (2010), which needs no Hessenberg matrix. The residual extends the space in
    every step. If it has hardly decreased, the last image is added as well, so that the space always grows. Memory of
    2 restart + 6 states.

    restart  number of directions stored. Then the oldest one is dropped instead of a restart, which loses nothing if A is
             close to symmetric. None stores 4, and one more with every slow step, up to 20; for states of up to 64 numbers
             their dimension
    budget   bytes for the directions of the whole batch; as many are stored as fit, at least one
    """

    restart: int | None = None
    budget: int | None = None
    evaluates_residual: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False
    steps_finished_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_history("GMRES", "restart", self.restart, self.budget)

    def init(self, f: Map, z0: Tensor) -> GMRESState:
        """Evaluate the start; the Krylov space is empty."""
        fz, nothing = f(z0), z0.new_empty(z0.shape[0], 0, 2 * z0.shape[1])
        start = Iterate(z0, fz)
        most = history_size(self.restart, self.budget, z0, small=z0.shape[1], medium=20, large=20)
        limit = most if self.restart is not None or z0.shape[1] <= SMALL_STATE else min(FEW, most)
        return GMRESState(z0, fz, z0, start.residual, nothing, start.residual, start.length, limit, most, count=0)

    def step(self, f: Map, state: GMRESState) -> GMRESState:
        """Extend the space by one direction, and minimize the residual along it."""
        if isinstance(state.count, int) and state.taken == ANEW:
            state = self._anew(f, state)
        n, length, traced = state.z.shape[1], state.length, autodiff_modes.is_tracing()
        state = _roomier(f, state)
        pairs, pair = self._extend(f, state)
        q, p = pair[:, :n], pair[:, n:]
        share = dot(q, state.remaining)
        z = torch.addcmul(state.z, share, p)
        # the tensors overwritten here belong to this state alone
        remaining = torch.addcmul(state.remaining, share, q, value=-1, out=None if traced else state.remaining)
        fz = torch.add(z, remaining, out=None if traced or state.count == 0 else state.fz)
        limits = (state.limit, state.most, state.count + 1, state.taken + 1)
        held = state.held if state.held is None or state.window is None else torch.minimum(state.held + 1, state.window)
        rows = (_following(state), state.window, held)
        return GMRESState(z, fz, state.base, remaining, pairs, q, length, *limits, *rows, active=state.active)

    def _anew(self, f: Map, state: GMRESState) -> GMRESState:
        """Drop the directions and recompute the residual r = f(base) - base - A (z - base)."""
        away = state.z - state.base
        remaining = f(state.base) - state.base - away + f.jacobian(state.base).product(away)
        nothing = remaining.new_empty(len(remaining), 0, 2 * remaining.shape[1])
        held = None if state.held is None else torch.zeros_like(state.held)
        state = replace(state, remaining=remaining, fz=state.z + remaining, pairs=nothing, image=remaining)
        return replace(state, count=0, taken=0, order=(), held=held)

    def fixed_shape_state(self, state: GMRESState) -> GMRESState:
        """Return the state with a fixed number of slots, whose shapes no step changes."""
        batch, n = state.z.shape
        limit = min(2 * FEW, state.most)  # of fixed shape it cannot grow, and is carried whole from step to step
        pairs = torch.cat((state.pairs[:, :1], state.z.new_zeros(batch, limit - 1, 2 * n)), dim=1)
        return replace(state, pairs=pairs, limit=limit, count=torch.full((), int(state.count), device=state.z.device))

    def _extend(self, f: Map, state: GMRESState) -> tuple[Tensor, Tensor]:
        """Return the pairs with a new one in its slot, (batch, slots, 2 n), and the new pair, (batch, 2 n)."""
        n, p, pairs = state.z.shape[1], state.remaining, state.pairs
        limit = k = state.limit
        slot: int | Tensor
        if isinstance(state.count, int):
            k = len(state.order)
            slot = k if k < limit else state.order[0]
            pairs = grow(pairs, slot, limit, blank=False)
        else:
            slot = state.count % limit
        if k and not f.growth < STAGNATION:
            stagnant = state.length * (state.length > STAGNATION * state.before)
            p = torch.addcmul(p, stagnant.unsqueeze(1), state.image)
        q = p - f.jacobian(state.base).product(p)
        size = torch.linalg.vector_norm(q, dim=1)
        pair = torch.cat((q, p), dim=1)
        if k:
            pair = subtract_combination(pair, _weights(state, products(pairs[:, :k, :n], q)), pairs[:, :k], over=True)
        length = torch.linalg.vector_norm(pair[:, :n], dim=1)
        # if only rounding remains of an image after projection, the space is complete and the new pair is zero
        complete = length <= 10 * torch.finfo(q.dtype).eps * size
        scale = length.reciprocal().masked_fill(complete, 0.0).unsqueeze(1)
        if isinstance(slot, Tensor):
            return set_slot(pairs, slot, pair * scale), pair * scale
        return pairs, torch.mul(pair, scale, out=pairs[:, slot])


def _roomier(f: Map, state: GMRESState) -> GMRESState:
    """Return the state with a larger window for rows that have filled theirs and whose last step was slow."""
    if isinstance(state.count, Tensor) or len(state.order) < FEW or (state.limit == state.most and state.window is None):
        return state
    if isinstance(f, LinearMap) and f.growth < SLOW and f.growth != FALLEN:  # FALLEN does not say how far
        return state  # no row was slow: linear systems have a fixed scale, so that this is about residuals alone
    full = len(state.order) == state.limit
    window = state.window
    if window is None:
        if not full:
            return state
        window = torch.full_like(state.before, state.limit, dtype=torch.int64).unsqueeze(1)
    held = window if state.held is None else state.held
    slow = ~(state.length < SLOW * state.before).unsqueeze(1)
    larger = window + (slow & (held == window) & (window < state.most))
    limit = min(state.limit + 1, state.most) if full else state.limit  # whether a row needs the slot is known to it alone
    return replace(state, limit=limit, window=larger, held=held)


def _following(state: GMRESState) -> tuple[int, ...]:
    """Return the indices of the slots in use after a step, the oldest first."""
    if len(state.order) < state.limit:
        return (*state.order, len(state.order))
    return (*state.order[1:], state.order[0])


def _weights(state: GMRESState, weights: Tensor) -> Tensor:
    """Return (batch, k), zero for pairs that a row no longer keeps."""
    if state.held is None:
        return weights
    newer = [0] * len(state.order)  # pairs after that of a slot
    for age, slot in enumerate(reversed(state.order)):
        newer[slot] = age
    return weights * (torch.tensor(newer, device=weights.device) < state.held)


@dataclass(frozen=True)
class BiCGSTABState(_Carried):
    shadow: Tensor  # (batch, n), the fixed left vector
    direction: Tensor  # (batch, n)
    image: Tensor  # (batch, n), A direction
    rho: Tensor  # (batch, 1)
    alpha: Tensor  # (batch, 1)
    omega: Tensor  # (batch, 1)


@dataclass(frozen=True, kw_only=True)
class BiCGSTAB(Solver[BiCGSTABState]):
    """BiCGSTAB, with short recurrences instead of a basis (van der Vorst 1992); two products per step, nine states."""

    evaluates_residual: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False

    def init(self, f: Map, z0: Tensor) -> BiCGSTABState:
        """Evaluate the start; its residual is the fixed left vector."""
        fz = f(z0)
        residual = fz - z0
        one, zero = residual.new_ones(z0.shape[0], 1), torch.zeros_like(residual)
        return BiCGSTABState(z0, fz, z0, residual, residual, zero, zero, one, one, one)

    def step(self, f: Map, state: BiCGSTABState) -> BiCGSTABState:
        """Take a step along the direction, then one that minimizes the residual."""
        jacobian = f.jacobian(state.base)
        rho = dot(state.shadow, state.remaining)
        beta = divide(rho, state.rho) * divide(state.alpha, state.omega)
        direction = state.remaining + beta * (state.direction - state.omega * state.image)
        # restart if the left vector is orthogonal to the residual up to rounding, where coefficients are meaningless
        broken = rho.abs() <= torch.finfo(rho.dtype).eps * dot(state.remaining, state.remaining)
        shadow = torch.where(broken, state.remaining, state.shadow)
        direction = torch.where(broken, state.remaining, direction)
        rho = torch.where(broken, dot(state.remaining, state.remaining), rho)
        image = direction - jacobian.product(direction)
        alpha = divide(rho, dot(shadow, image))
        half = state.remaining - alpha * image
        image_half = half - jacobian.product(half)
        omega = divide(dot(image_half, half), dot(image_half, image_half))
        z = state.z + alpha * direction + omega * half
        residual = half - omega * image_half
        return BiCGSTABState(
            z, z + residual, state.base, residual, shadow, direction, image, rho, alpha, omega, active=state.active
        )


@dataclass(frozen=True)
class NormalCGState(_Carried):
    gradient: Tensor  # (batch, n), A' residual - shift z
    direction: Tensor  # (batch, n)


@dataclass(frozen=True, kw_only=True)
class NormalCG(Solver[NormalCGState]):
    """Conjugate gradients on (A'A + shift) z = A'b (Hestenes and Stiefel 1952, "CGLS"): every A is allowed.

    A plain and a transposed product per step; memory of six states. The condition number is squared, so use it where the
    other solvers stall.

    shift  Tikhonov regularisation; with shift > 0 the result is not the fixed point, as its residual shows
    """

    shift: float = 0.0
    evaluates_residual: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.shift >= 0, f"NormalCG's shift must not be negative, got {self.shift}.")

    def init(self, f: Map, z0: Tensor) -> NormalCGState:
        """Evaluate the start; the direction is the gradient of the normal equations."""
        fz = f(z0)
        residual = fz - z0
        gradient = residual - f.jacobian(z0).transposed(residual) - self.shift * z0
        return NormalCGState(z0, fz, z0, residual, gradient, gradient)

    def step(self, f: Map, state: NormalCGState) -> NormalCGState:
        """Minimize along the direction, and make the next one conjugate to it."""
        jacobian = f.jacobian(state.base)
        direction, size = state.direction, dot(state.gradient, state.gradient)
        image = direction - jacobian.product(direction)
        alpha = divide(size, dot(image, image) + self.shift * dot(direction, direction))
        z = state.z + alpha * direction
        residual = state.remaining - alpha * image
        gradient = residual - jacobian.transposed(residual) - self.shift * z
        direction = gradient + divide(dot(gradient, gradient), size) * direction
        return NormalCGState(z, z + residual, state.base, residual, gradient, direction, active=state.active)
