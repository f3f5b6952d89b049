"""Monotone operator cells: equilibria that exist, are unique, and that a splitting always finds.

If the symmetric part of I - W is at least m I with m > 0, then z = relu(W z + U x + b) has exactly one solution for every
x, however large W is. W = (1 - m) I - A'A + B - B' gives all such matrices and nothing else, so that A and B train
freely (Winston and Kolter, Monotone operator equilibrium networks, 2020).

The plain map diverges where |W| is large; `equilibria.cells.splitting` has maps with the same answer that do not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

State = Any  # a tensor with the batch first, or a tuple of them
Tensors = Any  # a tensor, or tuples of tensors


@dataclass(frozen=True)
class Certificate:
    """What makes an equilibrium unique, as computed from the weights a cell has now."""

    monotonicity: float  # the smallest eigenvalue of the symmetric part of I - W: at least m, up to rounding
    norm: float  # |I - W|

    @property
    def alpha(self) -> float:
        """Forward-backward splitting converges below this step, 2 m / |I - W|^2."""
        return 2 * self.monotonicity / self.norm**2


class MonotoneCell(nn.Module, ABC):
    """z = s(W z + c), with I - W >= m I, c from the inputs, and s the projection onto what a state may be.

    Here s is relu, the projection onto z >= 0. A solve takes c (`source`) and W (`operator`) from `prepare`, so that
    they are computed once. Start it with `init=cell.start`.
    """

    def __init__(self, m: float) -> None:
        super().__init__()
        if not m > 0:
            raise ValueError(
                f"m must be positive, got {m}: I - W >= m I is what makes the equilibrium unique. Leave it at 1.0, or "
                "take it smaller for a larger choice of W and slower solves."
            )
        self.m = float(m)
        self._known: _Inverse | None = None

    @abstractmethod
    def source(self, *inputs: Any) -> Tensors:
        """c, as `affine` and `project` want it."""

    @abstractmethod
    def operator(self) -> Tensors:
        """W, assembled from the parameters.

        Its tensors have a leading dimension of 1: one of the length of the batch would pass for rows of samples.
        """

    @abstractmethod
    def multiply(self, z: State, operator: Tensors) -> State:
        """W z."""

    @abstractmethod
    def multiply_transposed(self, z: State, operator: Tensors) -> State:
        """W'z."""

    @abstractmethod
    def invert(self, operator: Tensors, alpha: float) -> Tensors:
        """What `solve` needs to know of ((1 + alpha) I - alpha W)^{-1}, with a leading dimension of 1 as well."""

    @abstractmethod
    def solve(self, y: State, inverse: Tensors) -> State:
        """((1 + alpha) I - alpha W)^{-1} y."""

    @abstractmethod
    def solve_transposed(self, y: State, inverse: Tensors) -> State:
        """((1 + alpha) I - alpha W')^{-1} y."""

    @abstractmethod
    def certificate(self) -> Certificate:
        """How monotone I - W is and how large, computed from the weights."""

    @abstractmethod
    def start(self, *inputs: Any) -> State:
        """Zeros of the shape of the state: the `init` of a DEQ."""

    def prepare(self, *inputs: Any) -> tuple[Tensors, Tensors]:
        """Source and operator, once per solve."""
        return self.source(*inputs), self.operator()

    def forward(self, z: State, source: Tensors, operator: Tensors) -> State:
        return self.project(self.affine(z, source, operator), source)

    def affine(self, z: State, source: Tensors, operator: Tensors) -> State:
        """W z + c."""
        self.check_state(z)
        return each(torch.add, self.multiply(z, operator), self.injection(source))

    def injection(self, source: Tensors) -> State:
        """c alone, of the shape of the state."""
        return source

    def project(self, u: State, source: Tensors) -> State:
        """s(u)."""
        return each(F.relu, u)

    def readout(self, u: State, *inputs: Any) -> State:
        """s(u), which is z for u = z; the inputs of the solve are needed only where s depends on them."""
        return self.project(u, None)

    def active(self, z: State) -> State:
        """Where s has the derivative 1 at the equilibrium z, and not 0."""
        return each(lambda part: part > 0, z)

    def inverse(self, alpha: float) -> Tensors:
        """((1 + alpha) I - alpha W)^{-1} for `solve`; kept, and taken again for the same W, where nothing is differentiated.

        W is compared by value: parameters can change behind their version counters (`weight.data.copy_`), and their
        addresses are used again.
        """
        operator = self.operator()
        tensors = pytree.tree_leaves(operator)
        wide = pytree.tree_map(widened, operator)
        if any(_is_followed(tensor) for tensor in tensors):
            return self.invert(wide, alpha)
        if self._known is None or not self._known.fits(tensors, alpha):
            self._known = _Inverse(alpha, tensors, self.invert(wide, alpha))
        return self._known.value

    def check_state(self, z: State) -> None:
        """Raise ValueError for what is not a state of this cell."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}


class MonotoneLinear(MonotoneCell):
    """z = relu(W z + U x + b), W = (1 - m) I - A'A + B - B'.

    inputs  length of x, (batch, inputs)
    width   length of z, (batch, width)
    m       how monotone: I - W >= m I
    """

    def __init__(self, inputs: int, width: int, m: float = 1.0) -> None:
        super().__init__(m)
        check_sizes(inputs=inputs, width=width)
        self.U = nn.Linear(inputs, width)
        bound = 1 / math.sqrt(width)  # as torch.nn.Linear
        self.A = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound))

    def source(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.U.in_features:
            raise ValueError(
                f"MonotoneLinear takes x of shape (batch, {self.U.in_features}), got {tuple(x.shape)}. Flatten what "
                f"belongs to a sample, or make the cell with inputs={x.shape[-1] if x.dim() else 1}."
            )
        return self.U(x)

    def operator(self) -> Tensor:
        with full_precision(self.A):
            identity = torch.eye(len(self.A), dtype=self.A.dtype, device=self.A.device)
            W = (1 - self.m) * identity - self.A.mT @ self.A + self.B - self.B.mT
        return W.unsqueeze(0)

    def multiply(self, z: Tensor, operator: Tensor) -> Tensor:
        return z @ operator[0].mT

    def multiply_transposed(self, z: Tensor, operator: Tensor) -> Tensor:
        return z @ operator[0]

    def invert(self, operator: Tensor, alpha: float) -> Tensor:
        identity = torch.eye(operator.shape[-1], dtype=operator.dtype, device=operator.device)
        return torch.linalg.inv((1 + alpha) * identity - alpha * operator)

    def solve(self, y: Tensor, inverse: Tensor) -> Tensor:
        return y @ inverse[0].mT

    def solve_transposed(self, y: Tensor, inverse: Tensor) -> Tensor:
        return y @ inverse[0]

    @torch.no_grad()
    def certificate(self) -> Certificate:
        return bounds(self.operator())

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], len(self.A))

    def check_state(self, z: State) -> None:
        check_shape(z, (len(self.A),))

    def extra_repr(self) -> str:
        return f"inputs={self.U.in_features}, width={len(self.A)}, m={self.m}"


def each(f: Any, *states: State) -> State:
    """`f` on states of one shape, part by part."""
    if isinstance(states[0], Tensor):
        return f(*states)
    return tuple(f(*parts) for parts in zip(*states, strict=True))


def widened(x: Any) -> Any:
    """A tensor in at least float32: torch has no inverse, eigenvalues or Fourier transform in half precision."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def bounds(W: Tensor) -> Certificate:
    """The certificate of a W that falls into independent blocks, (..., n, n), real or complex."""
    W = widened(W)
    identity = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
    rest = identity - W
    smallest = torch.linalg.eigvalsh((rest + rest.mH) / 2).min()
    return Certificate(smallest.item(), torch.linalg.matrix_norm(rest, 2).max().item())


def full_precision(like: Tensor) -> torch.autocast:
    """Autocast off: W and its inverse are computed once, and an error in them is one in every step."""
    return torch.autocast(like.device.type, enabled=False)


def check_shape(z: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(z, Tensor) or tuple(z.shape[1:]) != shape:
        seen = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        expected = ", ".join(map(str, ("batch", *shape)))
        raise ValueError(f"The state of this cell has the shape ({expected}), got {seen}. Start with init=cell.start.")


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")


@dataclass(frozen=True)
class _Inverse:
    """An inverse, and what it is the inverse of."""

    alpha: float
    operator: list[Tensor]
    value: Tensors

    def fits(self, operator: list[Tensor], alpha: float) -> bool:
        return alpha == self.alpha and all(_same(a, b) for a, b in zip(operator, self.operator, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    # what was computed in inference mode cannot be used in a graph outside it
    alike = a.dtype == b.dtype and a.device == b.device and a.is_inference() == b.is_inference()
    return alike and torch.equal(a, b)


def _is_followed(x: Tensor) -> bool:
    """True if it is differentiated or mapped over: a cached value would drop the derivative silently."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.requires_grad or wrapped or forward_ad.unpack_dual(x).tangent is not None
