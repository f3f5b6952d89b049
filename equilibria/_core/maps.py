"""Maps (batch, n) -> (batch, n) for solvers, with counted evaluations, cached values and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from equilibria._core import autodiff_modes

FlatMap = Callable[[Tensor], Tensor]  # (batch, n) -> (batch, n)

FALLEN = 0.999  # value of `Map.growth` if it is only known to be below 1


@runtime_checkable
class Restrictable(Protocol):
    """A map that can be evaluated on a subset of its rows."""

    def take(self, index: Tensor) -> FlatMap | None:
        """The map of the rows at `index`; None if rows depend on each other."""


class Affine:
    """z -> M z + offset, with M given by its products, for linear solvers.

    product, transposed: t -> M t and t -> M' t, each (batch, n) -> (batch, n).
    """

    def __init__(self, product: FlatMap, transposed: FlatMap, offset: Tensor) -> None:
        self.product = product
        self.transposed = transposed
        self.offset = offset

    def __call__(self, z: Tensor) -> Tensor:
        return self.product(z) + self.offset


@dataclass
class Counter:
    """Evaluations of a map, the rows in all of them, and products with its derivative."""

    evaluations: int = 0
    rows: int = 0
    products: int = 0

    def count(self, rows: int, *, evaluations: int = 1, products: int = 0) -> None:
        self.evaluations += evaluations
        self.rows += evaluations * rows
        self.products += products


class Map:
    """A FlatMap that counts its evaluations and reuses a value that is already known; the loop passes it to solvers."""

    def __init__(self, raw: FlatMap, counter: Counter | None = None, any_rank: Callable[[bool], bool] | None = None) -> None:
        self.raw = raw
        self.counter = counter or Counter()
        self.any_rank = any_rank
        self.growth = float("inf")  # the largest ratio of a residual to the least of its sample before, where that is known
        self.fell: Tensor | None = None  # (batch,) rows for which that ratio is below 1, where growth is not
        self.latest: Tensor | None = None  # the value of the last evaluation
        self._known: tuple[Tensor, Tensor] | None = None
        self._jacobian: Jacobian | None = None

    def __call__(self, z: Tensor) -> Tensor:
        if self._known is not None and z is self._known[0]:
            return self._known[1]
        self.counter.count(z.shape[0])
        self.latest = self.raw(z)
        return self.latest

    def remember(self, z: Tensor, fz: Tensor) -> Map:
        """Store f(z), so that the next call at `z` needs no evaluation; returns the map."""
        self._known = (z, fz)
        return self

    def any(self, mask: Tensor) -> bool:
        """True if `mask` holds for any sample on any rank. Inner loops of solvers use it, so that all ranks take as many
        steps. Waits for the device."""
        here = bool(mask.any())
        return self.any_rank(here) if self.any_rank else here

    def take(self, index: Tensor) -> Map | None:
        """The map of the rows at `index`, with the same counter; None if rows cannot be taken."""
        if not isinstance(self.raw, Restrictable):
            return None
        raw = self.raw.take(index)
        return None if raw is None else Map(raw, self.counter, self.any_rank)

    def jacobian(self, z: Tensor) -> Jacobian:
        """The derivative at `z`; the same object, with its cached graph, for repeated calls at the same point."""
        if self._jacobian is None or self._jacobian.z is not z:
            self._jacobian = Jacobian(self.raw, self.counter, z)
        return self._jacobian


class Jacobian:
    """The derivative of a map at `z`, given by its products; that of an affine map does not depend on `z`."""

    def __init__(self, raw: FlatMap, counter: Counter, z: Tensor) -> None:
        self.raw, self.counter, self.z = raw, counter, z  # not the Map, because a reference cycle delays freeing memory
        self._graph: tuple[Tensor, Tensor] | None = None

    def product(self, t: Tensor) -> Tensor:
        """J t, by forward mode; one evaluation of the map."""
        self.counter.count(t.shape[0], products=1)
        if isinstance(self.raw, Affine):
            return self.raw.product(t)
        return autodiff_modes.jvp(self.raw, [self.z], [t])

    def transposed(self, t: Tensor) -> Tensor:
        """J' t, by reverse mode; the map is evaluated once with a graph for all products at this point."""
        if isinstance(self.raw, Affine):
            self.counter.count(t.shape[0], products=1)
            return self.raw.transposed(t)
        if self._graph is None:
            autodiff_modes.check_derivatives("A transposed product, as NormalCG and TrustRegion take,", self.z)
            self.counter.count(t.shape[0])
            with torch.enable_grad():
                leaf = self.z.detach().requires_grad_()
                self._graph = (leaf, self.raw(leaf))
        self.counter.count(t.shape[0], evaluations=0, products=1)
        leaf, out = self._graph
        if not out.requires_grad:  # a map that does not depend on z
            return torch.zeros_like(t)
        return torch.autograd.grad(out, leaf, t, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
