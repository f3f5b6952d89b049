"""The maps solvers work on: (batch, n) -> (batch, n), run, counted and linearised in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from equilibria._core import autodiff_modes

FlatMap = Callable[[Tensor], Tensor]  # (batch, n) -> (batch, n)

FALLEN = 0.999  # for `Map.growth`: any ratio below 1, where that is all that is known


@runtime_checkable
class Restrictable(Protocol):
    """A map that can be run on some of its rows alone."""

    def take(self, index: Tensor) -> FlatMap | None:
        """The map on these rows, or None where a row's value depends on the others."""


class Affine:
    """z -> M z + offset, with M known by its products: what linear solvers ask for.

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
    evaluations: int = 0
    rows: int = 0
    products: int = 0

    def evaluation(self, z: Tensor) -> None:
        self.evaluations += 1
        self.rows += z.shape[0]


class Map:
    """A FlatMap as the loop hands it to a solver: every run is counted, none is repeated where the value is known."""

    def __init__(self, raw: FlatMap, counter: Counter | None = None, any_rank: Callable[[bool], bool] | None = None) -> None:
        self.raw = raw
        self.counter = counter or Counter()
        self.any_rank = any_rank
        self.growth = float("inf")  # the largest ratio of a residual to the least of its sample before, where that is known
        self.fell: Tensor | None = None  # (batch,) rows for which that ratio is below 1, where growth is not
        self._known: tuple[Tensor, Tensor] | None = None
        self._jacobian: Jacobian | None = None

    def __call__(self, z: Tensor) -> Tensor:
        if self._known is not None and z is self._known[0]:
            return self._known[1]
        self.counter.evaluation(z)
        return self.raw(z)

    def remember(self, z: Tensor, fz: Tensor) -> Map:
        """This map, which needs no evaluation at `z`."""
        self._known = (z, fz)
        return self

    def any(self, mask: Tensor) -> bool:
        """Does it hold for any sample, on any rank? Solvers with an inner loop ask here, so that ranks stay in step."""
        here = bool(mask.any())
        return self.any_rank(here) if self.any_rank else here

    def take(self, index: Tensor) -> Map | None:
        """The same map on some rows, counted on the same counter; None where that is impossible."""
        if not isinstance(self.raw, Restrictable):
            return None
        raw = self.raw.take(index)
        return None if raw is None else Map(raw, self.counter, self.any_rank)

    def jacobian(self, z: Tensor) -> Jacobian:
        """Its derivative at `z`; asked again for the same point, the same object, with what it has computed."""
        if self._jacobian is None or self._jacobian.z is not z:
            self._jacobian = Jacobian(self.raw, self.counter, z)
        return self._jacobian


class Jacobian:
    """The derivative of a map at `z` by its products; an affine map has the same one everywhere."""

    def __init__(self, raw: FlatMap, counter: Counter, z: Tensor) -> None:
        self.raw, self.counter, self.z = raw, counter, z  # not the Map: a cycle would keep memory until it is collected
        self._graph: tuple[Tensor, Tensor] | None = None

    def product(self, t: Tensor) -> Tensor:
        """J t, by forward mode: one run of the map."""
        self._count(t, runs=True)
        if isinstance(self.raw, Affine):
            return self.raw.product(t)
        return autodiff_modes.jvp(self.raw, [self.z], [t])

    def transposed(self, t: Tensor) -> Tensor:
        """J' t, by reverse mode: the map is run once with a graph for all products at this point."""
        if isinstance(self.raw, Affine):
            self._count(t, runs=True)
            return self.raw.transposed(t)
        if self._graph is None:
            autodiff_modes.check_derivatives("A transposed product, as NormalCG and TrustRegion take,", self.z)
            self.counter.evaluation(t)
            with torch.enable_grad():
                leaf = self.z.detach().requires_grad_()
                self._graph = (leaf, self.raw(leaf))
        self._count(t, runs=False)
        leaf, out = self._graph
        if not out.requires_grad:  # a map that does not depend on z
            return torch.zeros_like(t)
        return torch.autograd.grad(out, leaf, t, retain_graph=True, allow_unused=True, materialize_grads=True)[0]

    def _count(self, t: Tensor, *, runs: bool) -> None:
        self.counter.products += 1
        if runs:
            self.counter.evaluation(t)
