"""Linear solvers: GMRES, BiCGSTAB and conjugate gradients on the normal equations, all per sample.

They solve z = M z + b, that is A z = b with A = I - M. As adjoint solvers they get M by its products; on a plain map
they take its derivative at the starting point, which is exact where the map is affine. They carry f(z) by
recurrence (f(z) = z + r with r = b - A z); the loop verifies the answer with one evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from equilibria.maps import Jacobian, Map
from equilibria.solvers.base import Iterate, Solver, combine, divide, dot, memory, products, require, room


@dataclass(frozen=True)
class GMRESState(Iterate):
    """An Arnoldi basis with the QR factors of its Hessenberg matrix, grown by one column a step."""

    base: Tensor  # (batch, n), where this cycle began
    length: Tensor  # (batch, 1), of the residual there
    basis: Tensor  # (batch, slots, n)
    rotation: Tensor  # (batch, slots, slots), Q' of H = Q R
    upper: Tensor  # (batch, slots, slots), R
    count: int  # columns in this cycle


@dataclass(frozen=True, kw_only=True)
class GMRES(Solver[GMRESState]):
    """The least residual over the Krylov space of A (Saad and Schultz 1986); one product a step.

    Memory restart + 4 states.

    restart  size of the space after which a new one is begun at the current iterate; None: 20, and for states of
             up to 64 numbers their dimension
    """

    restart: int | None = None
    exact: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.restart is None or self.restart >= 1, f"GMRES's restart must be at least 1, got {self.restart}.")

    def init(self, f: Map, z0: Tensor) -> GMRESState:
        return self._begin(z0, f(z0))

    def step(self, f: Map, state: GMRESState) -> GMRESState:
        limit = memory(self.restart, state.z.shape[1], small=state.z.shape[1], large=20)
        if state.count == limit:
            state = replace(self._begin(state.z, f(state.z)), active=state.active)
        k = state.count
        state = self._grow(state, limit)
        pivot, subdiagonal = self._extend(f.jacobian(state.base), state)
        self._rotate(state, pivot, subdiagonal)
        first = state.length * state.rotation[:, :, 0]  # Q' (length e_1)
        upper = state.upper[:, : k + 1, : k + 1]
        weights = torch.linalg.solve_triangular(upper, first[:, : k + 1, None], upper=True).squeeze(2)
        z = state.base + combine(weights, state.basis[:, : k + 1])
        leftover = first[:, k + 1, None] * state.rotation[:, k + 1, : k + 2]
        fz = z + combine(leftover, state.basis[:, : k + 2])
        return replace(state, z=z, fz=fz, count=k + 1)

    def _begin(self, z: Tensor, fz: Tensor) -> GMRESState:
        residual = fz - z
        length = torch.linalg.vector_norm(residual, dim=1, keepdim=True)
        batch = z.shape[0]
        basis = divide(residual, length).unsqueeze(1)
        rotation = residual.new_ones(batch, 1, 1)
        return GMRESState(z, fz, z, length, basis, rotation, residual.new_zeros(batch, 1, 1), count=0)

    def _grow(self, state: GMRESState, limit: int) -> GMRESState:
        """Room for one more vector; the rotation of what is not there yet is the identity."""
        slot, old = state.count + 1, state.basis.shape[1]
        if slot < old:
            return state
        rotation = room(state.rotation, slot, limit + 1, dims=(1, 2))
        rotation.diagonal(dim1=1, dim2=2)[:, old:] = 1
        basis, upper = room(state.basis, slot, limit + 1), room(state.upper, slot, limit + 1, dims=(1, 2))
        return replace(state, basis=basis, rotation=rotation, upper=upper)

    def _extend(self, jacobian: Jacobian, state: GMRESState) -> tuple[Tensor, Tensor]:
        """Put A v_k, made orthogonal to the basis, into it; the new column of H, rotated, and its subdiagonal."""
        k = state.count
        basis, last = state.basis[:, : k + 1], state.basis[:, k]
        vector = last - jacobian.product(last)
        size = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
        column = products(basis, vector)
        vector = vector - combine(column, basis)
        again = products(basis, vector)  # twice is enough (Giraud and others 2005): orthogonal to rounding
        vector, column = vector - combine(again, basis), column + again
        subdiagonal = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
        # what is left of a vector inside the space is rounding: the space is complete and nothing is to be added
        complete = subdiagonal <= 10 * torch.finfo(vector.dtype).eps * size
        subdiagonal = torch.where(complete, torch.zeros_like(subdiagonal), subdiagonal)
        state.basis[:, k + 1] = divide(vector, subdiagonal)
        return products(state.rotation[:, : k + 1, : k + 1], column), subdiagonal

    def _rotate(self, state: GMRESState, column: Tensor, subdiagonal: Tensor) -> None:
        """One more Givens rotation makes the extended Hessenberg matrix upper triangular again."""
        k = state.count
        pivot = column[:, k, None]
        diagonal = torch.hypot(pivot, subdiagonal)
        empty = diagonal == 0
        cosine = torch.where(empty, torch.ones_like(diagonal), divide(pivot, diagonal))
        sine = divide(subdiagonal, diagonal)
        upper_row, lower_row = state.rotation[:, k].clone(), state.rotation[:, k + 1].clone()
        state.rotation[:, k] = cosine * upper_row + sine * lower_row
        state.rotation[:, k + 1] = cosine * lower_row - sine * upper_row
        state.upper[:, :k, k] = column[:, :k]
        state.upper[:, k, k] = torch.where(empty, torch.ones_like(diagonal), diagonal).squeeze(1)


@dataclass(frozen=True)
class BiCGSTABState(Iterate):
    base: Tensor  # (batch, n), where the derivative is taken
    remaining: Tensor  # (batch, n), b - A z
    shadow: Tensor  # (batch, n), the fixed left vector
    direction: Tensor  # (batch, n)
    image: Tensor  # (batch, n), A direction
    rho: Tensor  # (batch, 1)
    alpha: Tensor  # (batch, 1)
    omega: Tensor  # (batch, 1)


@dataclass(frozen=True, kw_only=True)
class BiCGSTAB(Solver[BiCGSTABState]):
    """Short recurrences instead of a basis (van der Vorst 1992): two products a step, nine states of memory."""

    exact: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False

    def init(self, f: Map, z0: Tensor) -> BiCGSTABState:
        fz = f(z0)
        residual = fz - z0
        one, zero = residual.new_ones(z0.shape[0], 1), torch.zeros_like(residual)
        return BiCGSTABState(z0, fz, z0, residual, residual, zero, zero, one, one, one)

    def step(self, f: Map, state: BiCGSTABState) -> BiCGSTABState:
        jacobian = f.jacobian(state.base)
        rho = dot(state.shadow, state.remaining)
        beta = divide(rho, state.rho) * divide(state.alpha, state.omega)
        direction = state.remaining + beta * (state.direction - state.omega * state.image)
        # the left vector has become orthogonal to the residual: begin anew, or every coefficient is noise
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
class NormalCGState(Iterate):
    base: Tensor  # (batch, n), where the derivative is taken
    remaining: Tensor  # (batch, n), b - A z
    gradient: Tensor  # (batch, n), A' residual - shift z
    direction: Tensor  # (batch, n)


@dataclass(frozen=True, kw_only=True)
class NormalCG(Solver[NormalCGState]):
    """Conjugate gradients on (A'A + shift) z = A'b (Hestenes and Stiefel 1952, "CGLS"): every A is allowed.

    A plain and a transposed product a step; six states of memory. The condition number is squared, so use it where
    the others stall.

    shift  Tikhonov regularisation; with shift > 0 the answer is not the fixed point, and the residual says how far
    """

    shift: float = 0.0
    exact: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.shift >= 0, f"NormalCG's shift must not be negative, got {self.shift}.")

    def init(self, f: Map, z0: Tensor) -> NormalCGState:
        fz = f(z0)
        residual = fz - z0
        gradient = residual - f.jacobian(z0).transposed(residual) - self.shift * z0
        return NormalCGState(z0, fz, z0, residual, gradient, gradient)

    def step(self, f: Map, state: NormalCGState) -> NormalCGState:
        jacobian = f.jacobian(state.base)
        direction, size = state.direction, dot(state.gradient, state.gradient)
        image = direction - jacobian.product(direction)
        alpha = divide(size, dot(image, image) + self.shift * dot(direction, direction))
        z = state.z + alpha * direction
        residual = state.remaining - alpha * image
        gradient = residual - jacobian.transposed(residual) - self.shift * z
        direction = gradient + divide(dot(gradient, gradient), size) * direction
        return NormalCGState(z, z + residual, state.base, residual, gradient, direction, active=state.active)
