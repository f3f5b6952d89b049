"""The linear equations of implicit differentiation, as instances of `Equation`.

Let F(z, *args) = z and J = dF/dz. The adjoint of a cotangent v is the fixed point of g -> J'g + v. The tangent of a
perturbation b is the fixed point of t -> J t + b. Both are affine maps with explicit arguments (z, rhs, *args), so
the primitive that differentiates F also differentiates them, which gives derivatives of every order.

Under vmap, an equation with a mapped dimension becomes a `FoldedEquation` with more rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.equation import Equation
from equilibria._core.maps import Linearisation, LinearMap, Map


class LinearEquation(Equation):
    """t -> M t + rhs with M = J or J' of the equation `of`; args are (equilibrium, rhs, *args of `of`)."""

    def __init__(self, of: Equation) -> None:
        self.of = of
        self.rowwise, self.linear = (True, True, *of.rowwise), True
        self.precision, self.identity = of.precision, of.identity
        self.restrictable, self.separable = of.restrictable, of.separable

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        return self.product(z, *args) + args[1]

    @abstractmethod
    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        """M z."""

    def right(self, *args: Tensor) -> Tensor:
        return args[1]

    def untraceable(self) -> str | None:
        return self.of.untraceable()

    def fingerprint(self) -> Hashable:
        return self.of.fingerprint()


class AdjointEquation(LinearEquation):
    """The adjoint equation, g -> J'g + v."""

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        equilibrium, _, *rest = args
        return autodiff_modes.vjp(lambda y: self.of(y, *rest), equilibrium)(z)[0]

    def bind(self, args: Sequence[Tensor]) -> LinearMap:
        equilibrium, rhs, *rest = args
        return self.bind_at(Linearisation(self.of, equilibrium, rest), rhs)

    def bind_at(self, at: Linearisation, rhs: Tensor) -> LinearMap:
        """As `bind`, on a given linearisation, so that its graph can be used for other products too."""
        return LinearMap(at.transposed, at.product, rhs, self, (at.z, rhs, *at.args))


class TangentEquation(LinearEquation):
    """The tangent equation, t -> J t + b."""

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        equilibrium, _, *rest = args
        return autodiff_modes.jvp(lambda y: self.of(y, *rest), [equilibrium], [z])

    def bind(self, args: Sequence[Tensor]) -> LinearMap:
        equilibrium, rhs, *rest = args
        at = Linearisation(self.of, equilibrium, rest)
        return LinearMap(at.product, at.transposed, rhs, self, args)


@dataclass(frozen=True)
class Fold:
    """A mapped dimension of size `size` that is folded into the batch."""

    size: int
    batch: int
    dims: tuple[int | None, ...]  # position of the mapped dimension in each arg; None for args that are not mapped
    randomness: str

    def unfold(self, x: Tensor) -> Tensor:
        """(size * batch, ...) -> (size, batch, ...)."""
        return x.unflatten(0, (self.size, self.batch))


class FoldedEquation(Equation):
    """An equation under vmap as an equation over size * batch rows.

    Rows cannot be taken, because the mapped dimension need not be the first one of an arg.
    """

    def __init__(self, of: Equation, fold: Fold) -> None:
        self.of, self.fold = of, fold
        self.rowwise, self.linear = (False,) * len(fold.dims), of.linear
        self.precision, self.identity = of.precision, of.identity

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        mapped = torch.func.vmap(self.of, in_dims=(0, *self.fold.dims), randomness=self.fold.randomness)
        out: Tensor = mapped(self.fold.unfold(z), *args)
        return out.flatten(0, 1)

    def bind(self, args: Sequence[Tensor]) -> Map:
        right = self.right(*args)
        return super().bind(args) if right is None else self._linear_map(args, right)

    def _linear_map(self, args: Sequence[Tensor], right: Tensor) -> Map:
        def product(t: Tensor) -> Tensor:
            return self(t, *args) - right

        def transposed(t: Tensor) -> Tensor:
            return autodiff_modes.vjp(product, torch.zeros_like(t))(t)[0]

        return LinearMap(product, transposed, right, self, args)

    def right(self, *args: Tensor) -> Tensor | None:
        if not self.linear:
            return None
        mapped: Any = torch.func.vmap(self.of.right, in_dims=self.fold.dims)(*args)
        return mapped.flatten(0, 1)

    def set_coupled(self, coupled: bool, *, warn: bool = True) -> None:
        if coupled:  # False is not stored: with a batch of one, the rows compared are different mapped samples
            super().set_coupled(coupled, warn=warn)
