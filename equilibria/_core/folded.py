"""vmap: an equation with a mapped dimension becomes an equation with more rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.linear import LinearMap
from equilibria._core.maps import FlatMap
from equilibria._core.problem import BoundMap, Equation


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
    """An equation under vmap as an equation over size * batch rows."""

    def __init__(self, of: Equation, fold: Fold) -> None:
        self.of, self.fold = of, fold
        self.rowwise, self.linear = (False,) * len(fold.dims), of.linear
        self.precision, self.identity = of.precision, of.identity

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        mapped = torch.func.vmap(self.of, in_dims=(0, *self.fold.dims), randomness=self.fold.randomness)
        out: Tensor = mapped(self.fold.unfold(z), *args)
        return out.flatten(0, 1)

    def bind(self, args: Sequence[Tensor]) -> FlatMap:
        right = self.right(*args)
        return BoundMap(self, args) if right is None else self._linear_map(args, right)

    def _linear_map(self, args: Sequence[Tensor], right: Tensor) -> FlatMap:
        def product(t: Tensor) -> Tensor:
            return self(t, *args) - right

        def transposed(t: Tensor) -> Tensor:
            return autodiff_modes.vjp(product, torch.zeros_like(t))(t)[0]

        return LinearMap(self, args, product, transposed, right)

    def right(self, *args: Tensor) -> Tensor | None:
        if not self.linear:
            return None
        mapped: Any = torch.func.vmap(self.of.right, in_dims=self.fold.dims)(*args)
        return mapped.flatten(0, 1)

    @property
    def coupled(self) -> bool | None:
        return self.of.coupled

    def set_coupled(self, coupled: bool, *, warn: bool = True) -> None:
        if coupled:  # False is not stored: with a batch of one, the rows compared are different mapped samples
            self.of.set_coupled(coupled, warn=warn)

    @property
    def restrictable(self) -> bool:
        return False  # the mapped dimension need not be the first one of an arg, so that rows cannot be indexed
