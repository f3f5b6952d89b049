"""Equations F(z, *args) on matrices (batch, n), the maps z -> F(z) that solvers iterate, and their derivatives.

An `Equation` takes every tensor it depends on as an argument. Derivatives of any order need that: an autograd.Function
differentiates the tensors that are passed to it, never those in a closure. `bind` fixes the arguments and returns a `Map`,
which counts its evaluations, reuses known values and can be restricted to rows. `LinearMap` is a map M z + rhs that is given
by its products. `Linearisation` has the products with J = dF/dz at one point, which share one graph.

The adjoint of a cotangent v is the fixed point of g -> J'g + v. The tangent of a perturbation b is the fixed point of
t -> J t + b. Both are equations with the arguments (z, rhs, *args), so that the primitive that differentiates F also
differentiates them, to every order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.compaction import CellIdentity, remember_coupling

FlatMap = Callable[[Tensor], Tensor]  # (batch, n) -> (batch, n)

FALLEN = 0.999  # value of `Map.growth` if it is only known to be below 1
WORTH = 4096  # rows with fewer numbers in all are dropped only when they are half: small kernels take equally long


@dataclass
class Counter:
    """Evaluations of a map, the rows in all of them, and products with its derivative."""

    evaluations: int = 0
    rows: int = 0
    products: int = 0


class Map:
    """A function of z that counts its evaluations and reuses a value that is already known.

    raw             the function itself, which counts nothing
    equation, args  the equation whose args are bound in `raw`; None and () for a plain function
    growth          the largest ratio of a residual to the smallest one of its sample before, if the loop knows it
    fell            (batch,) rows for which that ratio is below 1, if growth is not
    latest          the value of the last evaluation
    any_rank        True if its argument is True on any rank; None for a single rank
    precision       machine epsilon of the numbers that the function computes with; 0 until a solve sets it
    """

    drop_at = 8  # rows are dropped when an eighth has stopped

    def __init__(self, raw: FlatMap, equation: Equation | None = None, args: Sequence[Tensor] = ()) -> None:
        self.raw, self.equation, self.args = raw, equation, args
        self.counter = Counter()
        self.any_rank: Callable[[bool], bool] | None = None
        self.precision = 0.0
        self.growth, self.fell = float("inf"), None  # type: float, Tensor | None
        self.latest: Tensor | None = None
        self.known: tuple[Tensor, Tensor] | None = None  # z and f(z), for `remember`
        self._derivative: tuple[Tensor, Linearisation] | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Return f(z), counted as an evaluation, or the value that `remember` stored for this z."""
        if self.known is not None and z is self.known[0]:  # the same object: comparing values would wait for the device
            return self.known[1]
        self.counter.evaluations += 1
        self.counter.rows += z.shape[0]
        self.latest = self.raw(z)
        return self.latest

    def remember(self, z: Tensor, fz: Tensor) -> Map:
        """Store f(z), so that the next call at `z` needs no evaluation; returns the map."""
        self.known = (z, fz)
        return self

    def any(self, mask: Tensor) -> bool:
        """Return True if `mask` holds for any sample on any rank; waits for the device.

        Inner loops of solvers use it, so that all ranks take the same number of steps.
        """
        return self.anywhere(bool(mask.any()))

    def anywhere(self, here: bool) -> bool:
        """Return True if `here` is on any rank: evaluations of sharded weights wait for all ranks."""
        return self.any_rank(here) if self.any_rank else here

    def take(self, index: Tensor) -> Map | None:
        """Return the map of the rows at `index`, with the same counter; None if rows cannot be taken."""
        if self.equation is not None:
            rowwise = zip(self.args, self.equation.rowwise, strict=True)
            args = [arg[index] if rows else arg for arg, rows in rowwise]  # args without rows are shared
            smaller = self.equation.bind(args) if self.equation.restrictable else None
        else:
            restrict = getattr(self.raw, "take", None)  # a plain function may have this method
            raw = None if restrict is None else restrict(index)
            smaller = None if raw is None else Map(raw)
        if smaller is not None:
            smaller.counter, smaller.any_rank, smaller.precision = self.counter, self.any_rank, self.precision
        return smaller

    def is_worth_restricting(self, stopped: int, shape: Sequence[int]) -> bool:
        """Return True if so many rows of a state have stopped that dropping them saves more time than `take` costs."""
        rows, n = shape
        share = self.drop_at if stopped * n >= WORTH else 2
        return 0 < stopped < rows and stopped * share >= rows

    def divided(self, unit: Tensor) -> Map:
        """Return the map y -> f(unit y) / unit with the same counter; unit is (batch, 1)."""
        raw = self.raw
        return self._share(Map(lambda y: raw(y * unit) / unit))

    def jacobian(self, z: Tensor) -> LinearMap | Linearisation:
        """Return the products with the derivative at `z`; repeated calls at one point return the same object."""
        if self._derivative is None or self._derivative[0] is not z:
            self._derivative = z, Linearisation(self.raw, z, counter=self.counter)
        return self._derivative[1]

    def _share(self, other: Map) -> Map:
        """Give `other` the counter, the ranks and the precision of this map."""
        other.counter, other.any_rank, other.precision = self.counter, self.any_rank, self.precision
        return other


class LinearMap(Map):
    """z -> M z + rhs, for linear solvers; `product` and `transposed` are t -> M t and t -> M' t, on (batch, n)."""

    drop_at = 2  # rows are dropped when half have stopped: the rest need a new linearisation, which runs the cell again

    def __init__(
        self,
        product: FlatMap,
        transposed: FlatMap,
        rhs: Tensor,
        equation: Equation | None = None,
        args: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(lambda z: product(z) + rhs, equation, args)
        self.rhs, self._products = rhs, (product, transposed)
        self.known_size: tuple[FlatMap, Tensor] | None = None  # a norm and that of `rhs`

    def product(self, t: Tensor) -> Tensor:
        """Return M t, which counts as an evaluation."""
        self.counter.evaluations += 1
        self.counter.rows += t.shape[0]
        self.counter.products += 1
        return self._products[0](t)

    def transposed(self, t: Tensor) -> Tensor:
        """Return M' t, which counts as an evaluation."""
        self.counter.evaluations += 1
        self.counter.rows += t.shape[0]
        self.counter.products += 1
        return self._products[1](t)

    def size(self, norm: FlatMap) -> Tensor:
        """Return (batch,), the norm of the right-hand side, computed once."""
        if self.known_size is None or self.known_size[0] is not norm:
            self.known_size = norm, norm(self.rhs)
        return self.known_size[1]

    def with_rhs(self, rhs: Tensor) -> LinearMap:
        """Return the map z -> M z + rhs of the same M, as a plain one: its rows cannot be taken."""
        return LinearMap(*self._products, rhs)

    def divided(self, unit: Tensor) -> Map:
        """Return the map with rhs / unit; M is the same."""
        return self._share(self.with_rhs(self.rhs / unit))

    def jacobian(self, z: Tensor) -> LinearMap:
        """Return self: the derivative is M at every z."""
        return self


# `torch.autograd.grad` checks shapes and subclasses in Python at every call, 15 us: as long as a product of a small cell
_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)


def pull_back(out: Tensor, inputs: Sequence[Tensor], v: Tensor, *, retain: bool) -> Sequence[Tensor | None]:
    """Return the cotangents of `inputs` for the cotangent v of `out`; None for inputs that `out` does not use.

    retain  keep the graph for another call
    """
    if _engine is None or type(v) is not Tensor or type(out) is not Tensor:
        return torch.autograd.grad(out, inputs, v, retain_graph=retain, allow_unused=True)
    found: Sequence[Tensor | None] = _engine((out,), (v,), retain, False, tuple(inputs), True, accumulate_grad=False)
    return found


class Linearisation:
    """A function f(z, *args) linearised at z: it is run once with a graph, which all products with J' share.

    needs    marks the args whose gradients `pull` returns
    counter  counts the evaluations and products; None: they are not counted
    """

    def __init__(
        self,
        f: Callable[..., Tensor],
        z: Tensor,
        args: Sequence[Tensor] = (),
        needs: Sequence[bool] = (),
        counter: Counter | None = None,
    ) -> None:
        self.f, self.counter = f, counter
        self.z = z.detach() if z.requires_grad else z
        self.args = [arg.detach() for arg in args]
        self.needed = [i for i, need in enumerate(needs) if need]
        for i in self.needed:  # only these: a graph through all args would cost memory
            self.args[i].requires_grad_()
        self._graph: tuple[Tensor, Tensor] | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the leaf z and f(z) with its graph, computed on the first call."""
        if self._graph is None:
            if torch.is_inference_mode_enabled() or self.z.is_inference():
                what = "A transposed product, as adjoints, spectra, NormalCG and TrustRegion take,"
                autodiff_modes.check_derivatives(what, self.z)
            if self.counter is not None:
                self.counter.evaluations += 1
                self.counter.rows += self.z.shape[0]
            with torch.enable_grad():
                leaf = self.z.detach().requires_grad_()
                self._graph = (leaf, self.f(leaf, *self.args))
        return self._graph

    def transposed(self, u: Tensor) -> Tensor:
        """Return J'u, by reverse mode."""
        leaf, out = self.run()
        if self.counter is not None:
            self.counter.products += 1
        if not out.requires_grad:  # f does not depend on z
            return torch.zeros_like(u)
        (product,) = pull_back(out, (leaf,), u, retain=True)
        return torch.zeros_like(u) if product is None else product

    def product(self, t: Tensor) -> Tensor:
        """Return J t, by forward mode, which evaluates the function once."""
        if self.counter is not None:
            self.counter.evaluations += 1
            self.counter.rows += t.shape[0]
            self.counter.products += 1
        args = [arg.detach() for arg in self.args]  # else the jvp would record a graph as well
        return autodiff_modes.jvp(lambda y: self.f(y, *args), [self.z], [t])

    def pull(self, u: Tensor) -> tuple[list[Tensor | None], Tensor]:
        """Return (df/d arg)'u for each arg in `needs`, None for the others; and J'u from the same pass. Frees the graph."""
        leaf, out = self.run()
        self._graph = None  # this is the last product: memory is freed while gradients are computed
        grads: list[Tensor | None] = [None] * len(self.args)
        if not out.requires_grad:
            return grads, torch.zeros_like(u)
        inputs = [leaf, *[self.args[i] for i in self.needed]]
        product, *found = pull_back(out, inputs, u, retain=False)
        for i, grad in zip(self.needed, found, strict=True):
            grads[i] = grad
        return grads, torch.zeros_like(u) if product is None else product


class Equation(ABC):
    """A function F(z, *args), (rows, n) -> (rows, n), that solves iterate and derivatives refer to."""

    linear: bool = False  # True if F is affine in z and its right-hand side is one of the args
    rowwise: tuple[bool, ...]  # True for each arg that has a row per sample
    precision: float  # machine epsilon of the dtype F computes in
    identity: CellIdentity  # of the cell, shared by the linear equations of its derivatives
    restrictable: bool = False  # True if `Map.take` works; before rows are dropped, it is verified that they give the same
    separable: bool = False  # True if a solve ran rows without the others, and they gave the same

    @abstractmethod
    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return F(z, *args), differentiable in z and in every arg."""

    def bind(self, args: Sequence[Tensor]) -> Map:
        """Return the map z -> F(z, *args) for the solver loop, which does not differentiate it."""
        return Map(lambda z: self(z, *args), self, args)

    def right(self, *args: Tensor) -> Tensor | None:
        """Return the right-hand side of a linear equation, to which its tolerance is relative; None for other equations."""
        return None

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return M z for a linear equation F(z) = M z + right; TypeError for other equations."""
        raise TypeError(f"{type(self).__name__} is not linear.")

    def untraceable(self) -> str | None:
        """Return the reason why F cannot be traced; None if a trace is valid until `fingerprint` changes."""
        return "it is not a function of tensors alone"

    def fingerprint(self) -> Hashable:
        """Return a key of everything F depends on besides its args."""
        return self.identity.mode

    def set_coupled(self, coupled: bool, *, warn: bool = True) -> None:
        """Store whether rows depend on each other, for the backward pass and for later solves of the cell."""
        known = self.identity.coupled
        if coupled is not known and not self.identity.statistics:
            self.identity.coupled = coupled
            if coupled or known:
                remember_coupling(self.identity, coupled, warn=warn)


class LinearEquation(Equation):
    """t -> M t + rhs with M = J or J' of the equation `of`; args are (equilibrium, rhs, *args of `of`)."""

    what: Literal["adjoint", "tangent"]

    def __init__(self, of: Equation) -> None:
        self.of = of
        self.rowwise, self.linear = (True, True, *of.rowwise), True
        self.precision, self.identity = of.precision, of.identity
        self.restrictable, self.separable = of.restrictable, of.separable

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return M z + rhs."""
        return self.product(z, *args) + args[1]

    @abstractmethod
    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return M z."""

    def right(self, *args: Tensor) -> Tensor:
        """Return the right-hand side, which is the second arg."""
        return args[1]

    def untraceable(self) -> str | None:
        """Return why the equation that this one is derived from cannot be traced; None if it can."""
        return self.of.untraceable()

    def fingerprint(self) -> Hashable:
        """Return the fingerprint of the equation that this one is derived from."""
        return self.of.fingerprint()


class AdjointEquation(LinearEquation):
    """The adjoint equation, g -> J'g + v."""

    what = "adjoint"

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return J'z, by reverse mode, differentiable in all args."""
        equilibrium, _, *rest = args
        return autodiff_modes.vjp(lambda y: self.of(y, *rest), equilibrium)(z)[0]

    def bind(self, args: Sequence[Tensor]) -> LinearMap:
        """Return the map g -> J'g + rhs on a linearisation of its own."""
        equilibrium, rhs, *rest = args
        at = Linearisation(self.of, equilibrium, rest)
        return LinearMap(at.transposed, at.product, rhs, self, args)


class TangentEquation(LinearEquation):
    """The tangent equation, t -> J t + b."""

    what = "tangent"

    def product(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return J z, by forward mode, differentiable in all args."""
        equilibrium, _, *rest = args
        return autodiff_modes.jvp(lambda y: self.of(y, *rest), [equilibrium], [z])

    def bind(self, args: Sequence[Tensor]) -> LinearMap:
        """Return the map t -> J t + rhs on a linearisation of its own."""
        equilibrium, rhs, *rest = args
        at = Linearisation(self.of, equilibrium, rest)
        return LinearMap(at.product, at.transposed, rhs, self, args)
