"""The linear equations of implicit differentiation, as instances of `Equation`.

Let F(z, *args) = z and J = dF/dz. The adjoint of a cotangent v is the fixed point of g -> J'g + v. The tangent of a
perturbation b is the fixed point of t -> J t + b. Both are affine maps with explicit arguments (z, offset, *args), so
the primitive that differentiates F also differentiates them, which gives derivatives of every order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.maps import Affine, FlatMap
from equilibria._core.problem import BoundMap, Equation


class LinearEquation(Equation):
    """t -> M t + offset with M = J or J' of the equation `of`; args are (equilibrium, offset, *args of `of`)."""

    def __init__(self, of: Equation) -> None:
        self.of = of
        self.rowwise, self.linear = (True, True, *of.rowwise), True
        self.precision, self.identity, self.separable = of.precision, of.identity, of.separable

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

    @property
    def coupled(self) -> bool | None:
        return self.of.coupled

    def set_coupled(self, coupled: bool, *, warn: bool = True) -> None:
        self.of.set_coupled(coupled, warn=warn)

    @property
    def restrictable(self) -> bool:
        return self.of.restrictable


class AdjointEquation(LinearEquation):
    """The adjoint equation, g -> J'g + v."""

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        equilibrium, _, *rest = args
        return autodiff_modes.vjp(lambda y: self.of(y, *rest), equilibrium)(z)[0]

    def bind(self, args: Sequence[Tensor]) -> FlatMap:
        equilibrium, offset, *rest = args
        return self.bind_at(Linearisation(self.of, equilibrium, rest), offset)

    def bind_at(self, at: Linearisation, offset: Tensor) -> LinearMap:
        """As `bind`, on a given linearisation, so that its graph can be used for other products too."""
        return LinearMap(self, (at.z, offset, *at.args), at.transposed, at.product, offset)


class TangentEquation(LinearEquation):
    """The tangent equation, t -> J t + b."""

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        equilibrium, _, *rest = args
        return autodiff_modes.jvp(lambda y: self.of(y, *rest), [equilibrium], [z])

    def bind(self, args: Sequence[Tensor]) -> FlatMap:
        equilibrium, offset, *rest = args
        at = Linearisation(self.of, equilibrium, rest)
        return LinearMap(self, args, at.product, at.transposed, offset)


class LinearMap(BoundMap, Affine):
    """A bound linear equation that gives linear solvers its product, its transposed product and its offset."""

    drop_at = 2  # rows are dropped when half have stopped: the rest need a new linearisation, which runs the cell again

    def __init__(
        self, equation: Equation, args: Sequence[Tensor], product: FlatMap, transposed: FlatMap, offset: Tensor
    ) -> None:
        self.equation, self.args = equation, args
        self.product, self.transposed, self.offset = product, transposed, offset

    __call__ = Affine.__call__


class Linearisation:
    """An equation linearised at z: the cell is run once with a graph, which all products with J' share.

    `needs` marks the args whose gradients `pull` returns.
    """

    def __init__(self, equation: Equation, z: Tensor, args: Sequence[Tensor], needs: Sequence[bool] = ()) -> None:
        self.equation = equation
        self.z = z.detach()
        self.args = [arg.detach() for arg in args]
        self.needed = [i for i, need in enumerate(needs) if need]
        for i in self.needed:
            self.args[i].requires_grad_()
        self._graph: tuple[Tensor, Tensor] | None = None

    def value(self) -> Tensor:
        """F at the point."""
        return self._run()[1].detach()

    def transposed(self, u: Tensor) -> Tensor:
        """J'u."""
        leaf, out = self._run()
        (product,) = (
            torch.autograd.grad(out, leaf, u, retain_graph=True, allow_unused=True) if out.requires_grad else (None,)
        )
        return torch.zeros_like(u) if product is None else product

    def product(self, t: Tensor) -> Tensor:
        """J t."""
        args = [arg.detach() for arg in self.args]
        return autodiff_modes.jvp(lambda y: self.equation(y, *args), [self.z], [t])

    def pull(self, u: Tensor) -> tuple[list[Tensor | None], Tensor]:
        """(dF/d arg)'u for each arg in `needs`, None for the others; and J'u from the same pass. Consumes the graph."""
        leaf, out = self._run()
        grads: list[Tensor | None] = [None] * len(self.args)
        if not out.requires_grad:
            return grads, torch.zeros_like(u)
        inputs = [leaf, *[self.args[i] for i in self.needed]]
        product, *found = torch.autograd.grad(out, inputs, u, allow_unused=True)
        for i, grad in zip(self.needed, found, strict=True):
            grads[i] = grad
        return grads, torch.zeros_like(u) if product is None else product

    def forget(self) -> None:
        """Drop the graph after `pull` has consumed it; the next product runs the cell again."""
        self._graph = None

    def _run(self) -> tuple[Tensor, Tensor]:
        """The leaf z and F(z) with its graph, computed on the first call."""
        if self._graph is None:
            autodiff_modes.check_derivatives("A linearisation of the cell, as spectra and adjoints take it,", self.z)
            with torch.enable_grad():
                leaf = self.z.detach().requires_grad_()
                self._graph = (leaf, self.equation(leaf, *self.args))
        return self._graph
