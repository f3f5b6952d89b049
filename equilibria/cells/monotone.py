"""Monotone operator cells, whose equilibrium exists, is unique, and is found by operator splitting.

If the symmetric part of I - W is at least m I with m > 0, then z = relu(W z + U x + b) has exactly one solution for every x,
however large W is. W = (1 - m) I - A'A + B - B' parametrises exactly these matrices, so A and B are trained without
constraints (Winston and Kolter, Monotone operator equilibrium networks, 2020).

Plain iteration diverges where |W| is large; the maps of `equilibria.cells.splitting` have the same solution and converge.
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
    """Bounds that prove the equilibrium unique, computed from the current weights of a cell."""

    monotonicity: float  # the smallest eigenvalue of the symmetric part of I - W: at least m, up to rounding
    norm: float  # |I - W|

    @property
    def alpha(self) -> float:
        """The step 2 m / |I - W|^2 below which forward-backward splitting converges."""
        return 2 * self.monotonicity / self.norm**2


class MonotoneCell(nn.Module, ABC):
    """z = s(W z + c) with I - W >= m I, c computed from the inputs, and s the projection onto the allowed states.

    Here s is relu, the projection onto z >= 0. A solve gets c (`source`) and W (`operator`) from `prepare`, which computes
    them once. Start it with `init=cell.start`.
    """

    def __init__(self, m: float) -> None:
        super().__init__()
        if not m > 0:
            raise ValueError(
                f"m must be positive, got {m}: I - W >= m I makes the equilibrium unique. Leave it at 1.0, or lower it for "
                "a larger set of W and slower solves."
            )
        self.m = float(m)
        self._known: _Inverse | None = None

    @abstractmethod
    def source(self, *inputs: Any) -> Tensors:
        """Return c in the form that `affine` and `project` expect."""

    @abstractmethod
    def operator(self) -> Tensors:
        """Return W, assembled from the parameters.

        Its tensors have a leading dimension of 1: a tensor as long as the batch would be taken for one row per sample.
        """

    @abstractmethod
    def multiply(self, z: State, operator: Tensors) -> State:
        """Return W z."""

    @abstractmethod
    def multiply_transposed(self, z: State, operator: Tensors) -> State:
        """Return W'z."""

    @abstractmethod
    def invert(self, operator: Tensors, alpha: float) -> Tensors:
        """Return the form of ((1 + alpha) I - alpha W)^{-1} that `solve` takes, also with a leading dimension of 1."""

    @abstractmethod
    def solve(self, y: State, inverse: Tensors) -> State:
        """Return ((1 + alpha) I - alpha W)^{-1} y."""

    @abstractmethod
    def solve_transposed(self, y: State, inverse: Tensors) -> State:
        """Return ((1 + alpha) I - alpha W')^{-1} y."""

    @abstractmethod
    def certificate(self) -> Certificate:
        """Return the monotonicity and the norm of I - W for the current weights."""

    @abstractmethod
    def start(self, *inputs: Any) -> State:
        """Return zeros of the shape of the state; the `init` of a DEQ."""

    def prepare(self, *inputs: Any) -> tuple[Tensors, Tensors]:
        """Return source and operator, computed once per solve."""
        return self.source(*inputs), self.operator()

    def forward(self, z: State, source: Tensors, operator: Tensors) -> State:
        return self.project(self.affine(z, source, operator), source)

    def affine(self, z: State, source: Tensors, operator: Tensors) -> State:
        """Return W z + c."""
        self.check_state(z)
        return each(torch.add, self.multiply(z, operator), self.injection(source))

    def injection(self, source: Tensors) -> State:
        """Return c, of the shape of the state."""
        return source

    def project(self, u: State, source: Tensors) -> State:
        """Return s(u)."""
        return each(F.relu, u)

    def readout(self, u: State, *inputs: Any) -> State:
        """Return s(u), which is z for u = z; `inputs` are those of the solve, for cells whose s depends on them."""
        return self.project(u, None)

    def active(self, z: State) -> State:
        """Return a mask of the shape of z: where the derivative of s at the equilibrium z is 1 rather than 0."""
        return each(lambda part: part > 0, z)

    def inverse(self, alpha: float) -> Tensors:
        """Return ((1 + alpha) I - alpha W)^{-1} in the form that `solve` takes.

        Without gradients the last inverse is reused while W and alpha stay the same. W is compared by value: parameters can
        change without their version counters (`weight.data.copy_`), and addresses are reused.
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
        """Raise ValueError if `z` is not a state of this cell."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # copies and pickles compute their own inverse


class MonotoneLinear(MonotoneCell):
    """z = relu(W z + U x + b), W = (1 - m) I - A'A + B - B'.

    inputs  length of x, (batch, inputs)
    width   length of z, (batch, width)
    m       monotonicity: I - W >= m I
    """

    def __init__(self, inputs: int, width: int, m: float = 1.0) -> None:
        super().__init__(m)
        check_sizes(inputs=inputs, width=width)
        self.U = nn.Linear(inputs, width)
        bound = 1 / math.sqrt(width)  # as torch.nn.Linear
        self.A = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.empty(width, width).uniform_(-bound, bound))

    def source(self, x: Tensor) -> Tensor:
        """Return U x + b, (batch, width); raises ValueError unless x is (batch, inputs)."""
        if x.dim() != 2 or x.shape[1] != self.U.in_features:
            raise ValueError(
                f"MonotoneLinear takes x of shape (batch, {self.U.in_features}), got {tuple(x.shape)}. Flatten each sample, "
                f"or make the cell with inputs={x.shape[-1] if x.dim() else 1}."
            )
        return self.U(x)

    def operator(self) -> Tensor:
        with full_precision(self.A):
            identity = torch.eye(len(self.A), dtype=self.A.dtype, device=self.A.device)
            # the symmetric part of I - W is m I + A'A; the skew part B - B' does not affect it
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
    """Apply `f` to states of one structure, part by part, and return a state of that structure."""
    if isinstance(states[0], Tensor):
        return f(*states)
    return tuple(f(*parts) for parts in zip(*states, strict=True))


def widened(x: Any) -> Any:
    """Cast a tensor to at least float32: torch has no inverse, eigenvalues or Fourier transform in half precision."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def bounds(W: Tensor) -> Certificate:
    """Return the certificate of a block-diagonal W given by its blocks, (..., n, n), real or complex."""
    W = widened(W)
    identity = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
    rest = identity - W
    smallest = torch.linalg.eigvalsh((rest + rest.mH) / 2).min()
    return Certificate(smallest.item(), torch.linalg.matrix_norm(rest, 2).max().item())


def full_precision(like: Tensor) -> torch.autocast:
    """Return a context that turns autocast off: an error in W or its inverse would affect every step."""
    return torch.autocast(like.device.type, enabled=False)


def check_shape(z: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `z` is a tensor of shape (batch, *shape)."""
    if not isinstance(z, Tensor) or tuple(z.shape[1:]) != shape:
        seen = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        expected = ", ".join(map(str, ("batch", *shape)))
        raise ValueError(f"The state of this cell must have shape ({expected}), got {seen}. Start with init=cell.start.")


def check_sizes(**sizes: int) -> None:
    """Raise ValueError with the name of the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")


@dataclass(frozen=True)
class _Inverse:
    """An inverse with the operator and the alpha it was computed from."""

    alpha: float
    operator: list[Tensor]
    value: Tensors

    def fits(self, operator: list[Tensor], alpha: float) -> bool:
        """Return True if this is the inverse for `operator` and `alpha`."""
        return alpha == self.alpha and all(_same(a, b) for a, b in zip(operator, self.operator, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal in value and interchangeable in use."""
    # tensors made in inference mode cannot be used in a graph outside it
    alike = a.dtype == b.dtype and a.device == b.device and a.is_inference() == b.is_inference()
    return alike and torch.equal(a, b)


def _is_followed(x: Tensor) -> bool:
    """Return True if `x` is differentiated or vmapped: a cached value would silently drop the derivative."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.requires_grad or wrapped or forward_ad.unpack_dual(x).tangent is not None
