"""The cells of inverse problems: each fixed point is a reconstruction x of measurements y = A x + noise."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.models.images.inverse.operators import Operator

Pair = tuple[Tensor, Tensor]


class ReconstructionCell(Protocol):
    """A cell whose state starts at `start(y)` and whose reconstruction is `image(z)`."""

    operator: Operator

    def start(self, y: Tensor) -> Tensor | Pair:
        """The state to begin with."""
        ...

    def image(self, z: Tensor | Pair) -> Tensor:
        """The reconstruction of a state."""
        ...


class ProximalGradient(nn.Module):
    """x <- R(x - step A'(A x - y)): proximal gradient with a regularizer R in place of the proximal map (Gilton 2021).

    The step is learned, within (0, 2 / |A|²), so that the gradient step does not expand. If R has a Lipschitz constant
    c < 1, as `ContractiveDenoiser` has, so has the cell: there is one equilibrium, and plain iteration finds it.
    """

    def __init__(self, operator: Operator, regularizer: nn.Module, *, step: float = 0.5) -> None:
        super().__init__()
        require(0 < step < 1, f"step is a share of 2 / |A|² between 0 and 1, got {step}.")
        self.operator, self.regularizer = operator, regularizer
        self.logit = nn.Parameter(torch.tensor(math.log(step / (1 - step))))
        self.longest = 2 / operator.squared_norm()

    @property
    def step(self) -> Tensor:
        """The length of the gradient step."""
        return self.longest * torch.sigmoid(self.logit)

    def start(self, y: Tensor) -> Tensor:
        return self.operator.adjoint(y).detach()

    def image(self, z: Tensor | Pair) -> Tensor:
        assert isinstance(z, Tensor)
        return z

    def prepare(self, y: Tensor) -> Tensor:
        """step A' y."""
        return self.step * self.operator.adjoint(y)

    def forward(self, x: Tensor, injected: Tensor) -> Tensor:
        moved = x - self.step * self.operator.adjoint(self.operator(x)) + injected
        found: Tensor = self.regularizer(moved)
        return found


class HQS(nn.Module):
    """x <- (I + weight A'A)^-1 (R(x) + weight A' y): half-quadratic splitting, the data term solved exactly.

    The inverse does not expand. With a regularizer of Lipschitz constant c < 1 the cell contracts by c.
    """

    def __init__(self, operator: Operator, regularizer: nn.Module, *, weight: float = 5.0) -> None:
        super().__init__()
        require(weight > 0, f"weight must be positive, got {weight}.")
        self.operator, self.regularizer = operator, regularizer
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))

    def start(self, y: Tensor) -> Tensor:
        return self.operator.adjoint(y).detach()

    def image(self, z: Tensor | Pair) -> Tensor:
        assert isinstance(z, Tensor)
        return z

    def prepare(self, y: Tensor) -> Tensor:
        """weight A' y."""
        return self.log_weight.exp() * self.operator.adjoint(y)

    def forward(self, x: Tensor, injected: Tensor) -> Tensor:
        return self.operator.regularized_inverse(self.regularizer(x) + injected, self.log_weight.exp())


class ADMM(nn.Module):
    """The state is a pair (z, u) of the regularized image and the scaled multiplier:

        x  = argmin weight / 2 |A x - y|² + 1/2 |x - (z - u)|²
        z' = R(x + u),   u' = u + x - z'

    Contraction is not certified: u is not bounded by R. Solvers with memory help where plain iteration is slow.
    """

    def __init__(self, operator: Operator, regularizer: nn.Module, *, weight: float = 5.0) -> None:
        super().__init__()
        require(weight > 0, f"weight must be positive, got {weight}.")
        self.operator, self.regularizer = operator, regularizer
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))

    def start(self, y: Tensor) -> Pair:
        x = self.operator.adjoint(y).detach()
        return x, torch.zeros_like(x)

    def image(self, z: Tensor | Pair) -> Tensor:
        return z[0]

    def prepare(self, y: Tensor) -> Tensor:
        """weight A' y."""
        return self.log_weight.exp() * self.operator.adjoint(y)

    def forward(self, state: Pair, injected: Tensor) -> Pair:
        z, u = state
        x = self.operator.regularized_inverse(z - u + injected, self.log_weight.exp())
        after: Tensor = self.regularizer(x + u)
        return after, u + x - after


class TotalVariation(nn.Module):
    """argmin over x of 1/2 |A x - y|² + weight sum |grad x|, by the steps of Condat and Vu on (x, p), p the dual variable:

        x' = x - t (A'(A x - y) + D' p),   p' = project(p + s D (2 x' - x)), onto |p| <= weight at every pixel

    D takes differences to the next pixel, periodic; its squared norm is at most 8. The weight is learned.
    """

    def __init__(self, operator: Operator, *, weight: float = 0.01) -> None:
        super().__init__()
        require(weight > 0, f"weight must be positive, got {weight}.")
        self.operator = operator
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))
        # 1 / t - 8 s >= |A|² / 2 makes the steps converge
        self.dual = 1 / math.sqrt(8)
        self.primal = 1 / (operator.squared_norm() / 2 + 8 * self.dual)

    def start(self, y: Tensor) -> Pair:
        x = self.operator.adjoint(y).detach()
        return x, differences(torch.zeros_like(x))

    def image(self, z: Tensor | Pair) -> Tensor:
        return z[0]

    def prepare(self, y: Tensor) -> Tensor:
        """A' y."""
        return self.operator.adjoint(y)

    def forward(self, state: Pair, backprojected: Tensor) -> Pair:
        x, p = state
        gradient = self.operator.adjoint(self.operator(x)) - backprojected + differences_adjoint(p)
        after = x - self.primal * gradient
        return after, _project(p + self.dual * differences(2 * after - x), self.log_weight.exp())


def differences(x: Tensor) -> Tensor:
    """(..., height, width) -> (..., height, width, 2): differences to the next row and column, periodic."""
    return torch.stack([x.roll(-1, -2) - x, x.roll(-1, -1) - x], dim=-1)


def differences_adjoint(p: Tensor) -> Tensor:
    """The adjoint of `differences`."""
    rows, columns = p.unbind(-1)
    return rows.roll(1, -2) - rows + columns.roll(1, -1) - columns


def _project(p: Tensor, radius: Tensor) -> Tensor:
    """Shorten each pair of differences to at most `radius`."""
    # bounded away from 0, where the root has no slope
    length = p.square().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny).sqrt()
    return p * (radius / torch.maximum(length, radius))
