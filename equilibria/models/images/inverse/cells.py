"""The cells of inverse problems: each fixed point is a reconstruction x of measurements y = A x + noise."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.models.images.inverse.operators import Operator

StatePair = tuple[Tensor, Tensor]


class ReconstructionCell(Protocol):
    """A cell whose state starts at `start(y)` and whose reconstruction is `image(z)`."""

    operator: Operator

    def start(self, y: Tensor) -> Tensor | StatePair:
        """Return the state from which the solve starts."""
        ...

    def image(self, z: Tensor | StatePair) -> Tensor:
        """Return the reconstructed image in a state."""
        ...


class ProximalGradient(nn.Module):
    """x <- R(x - step A'(A x - y)): proximal gradient, R replacing a proximal map (Gilton and others 2021).

    The learned step stays in (0, 2 / |A|²), so the gradient step does not expand. If R has a Lipschitz constant c < 1, like
    `ContractiveDenoiser`, the cell has it too: the equilibrium is unique and plain iteration finds it.
    """

    def __init__(self, operator: Operator, regularizer: nn.Module, *, step: float = 0.5) -> None:
        super().__init__()
        require(0 < step < 1, f"step is a fraction of 2 / |A|² and must lie in (0, 1), got {step}.")
        self.operator, self.regularizer = operator, regularizer
        self.logit = nn.Parameter(torch.tensor(math.log(step / (1 - step))))
        self.longest = 2 / operator.squared_norm()

    @property
    def step(self) -> Tensor:
        """The learned length of the gradient step."""
        return self.longest * torch.sigmoid(self.logit)

    def start(self, y: Tensor) -> Tensor:
        return self.operator.adjoint(y).detach()

    def image(self, z: Tensor | StatePair) -> Tensor:
        assert isinstance(z, Tensor)
        return z

    def prepare(self, y: Tensor) -> Tensor:
        """Return step A' y, which does not depend on x."""
        return self.step * self.operator.adjoint(y)

    def forward(self, x: Tensor, injected: Tensor) -> Tensor:
        moved = x - self.step * self.operator.adjoint(self.operator(x)) + injected
        found: Tensor = self.regularizer(moved)
        return found


class HQS(nn.Module):
    """x <- (I + weight A'A)^-1 (R(x) + weight A' y): half-quadratic splitting, which solves for the data term exactly.

    The inverse does not expand. If the regularizer R has a Lipschitz constant c < 1, the cell contracts by c.
    """

    def __init__(self, operator: Operator, regularizer: nn.Module, *, weight: float = 5.0) -> None:
        super().__init__()
        require(weight > 0, f"weight must be positive, got {weight}.")
        self.operator, self.regularizer = operator, regularizer
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))

    def start(self, y: Tensor) -> Tensor:
        return self.operator.adjoint(y).detach()

    def image(self, z: Tensor | StatePair) -> Tensor:
        assert isinstance(z, Tensor)
        return z

    def prepare(self, y: Tensor) -> Tensor:
        """Return weight A' y, which does not depend on the state."""
        return self.log_weight.exp() * self.operator.adjoint(y)

    def forward(self, x: Tensor, injected: Tensor) -> Tensor:
        return self.operator.regularized_inverse(self.regularizer(x) + injected, self.log_weight.exp())


class ADMM(nn.Module):
    """The alternating direction method of multipliers on a pair (z, u) of the regularized image and the scaled multiplier:

        x  = argmin weight / 2 |A x - y|² + 1/2 |x - (z - u)|²
        z' = R(x + u),   u' = u + x - z'

    The cell need not contract, because a contractive R does not bound u. If plain iteration is slow, use a solver with a
    history.
    """

    def __init__(self, operator: Operator, regularizer: nn.Module, *, weight: float = 5.0) -> None:
        super().__init__()
        require(weight > 0, f"weight must be positive, got {weight}.")
        self.operator, self.regularizer = operator, regularizer
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))

    def start(self, y: Tensor) -> StatePair:
        x = self.operator.adjoint(y).detach()
        return x, torch.zeros_like(x)

    def image(self, z: Tensor | StatePair) -> Tensor:
        return z[0]

    def prepare(self, y: Tensor) -> Tensor:
        """Return weight A' y, which does not depend on the state."""
        return self.log_weight.exp() * self.operator.adjoint(y)

    def forward(self, state: StatePair, injected: Tensor) -> StatePair:
        z, u = state
        x = self.operator.regularized_inverse(z - u + injected, self.log_weight.exp())
        after: Tensor = self.regularizer(x + u)
        return after, u + x - after


class TotalVariation(nn.Module):
    """A step of Condat and Vu for the argmin over x of 1/2 |A x - y|² + weight sum |D x|, where p is the dual variable:

        x' = x - t (A'(A x - y) + D' p),   p' = project(p + s D (2 x' - x)), onto |p| <= weight at every pixel

    D takes periodic differences to the next pixel; its squared norm is at most 8. The weight is learned.
    """

    def __init__(self, operator: Operator, *, weight: float = 0.01) -> None:
        super().__init__()
        require(weight > 0, f"weight must be positive, got {weight}.")
        self.operator = operator
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))
        # the iteration converges if 1 / t - 8 s >= |A|² / 2
        self.dual = 1 / math.sqrt(8)
        self.primal = 1 / (operator.squared_norm() / 2 + 8 * self.dual)

    def start(self, y: Tensor) -> StatePair:
        x = self.operator.adjoint(y).detach()
        return x, differences(torch.zeros_like(x))

    def image(self, z: Tensor | StatePair) -> Tensor:
        return z[0]

    def prepare(self, y: Tensor) -> Tensor:
        """Return A' y, which does not depend on the state."""
        return self.operator.adjoint(y)

    def forward(self, state: StatePair, backprojected: Tensor) -> StatePair:
        x, p = state
        gradient = self.operator.adjoint(self.operator(x)) - backprojected + differences_adjoint(p)
        after = x - self.primal * gradient
        return after, _project(p + self.dual * differences(2 * after - x), self.log_weight.exp())


def differences(x: Tensor) -> Tensor:
    """Return periodic differences to the next row and column, (..., height, width) -> (..., height, width, 2)."""
    return torch.stack([x.roll(-1, -2) - x, x.roll(-1, -1) - x], dim=-1)


def differences_adjoint(p: Tensor) -> Tensor:
    """Return the adjoint of `differences` applied to p, (..., height, width, 2) -> (..., height, width)."""
    rows, columns = p.unbind(-1)
    return rows.roll(1, -2) - rows + columns.roll(1, -1) - columns


def _project(p: Tensor, radius: Tensor) -> Tensor:
    """Shorten every pair of differences to a norm of at most `radius`."""
    # the lower limit avoids nan gradients: the derivative of the root is infinite at 0
    length = p.square().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny).sqrt()
    return p * (radius / torch.maximum(length, radius))
