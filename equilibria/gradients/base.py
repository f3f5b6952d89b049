"""The base class of gradients: a gradient runs the forward solve and returns a differentiable equilibrium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.problem import Problem


class Gradient(ABC):
    """A method to differentiate an equilibrium. It stores nothing between calls, so a DEQ may be solved many times before
    `backward()`."""

    follows_start: ClassVar[bool] = False
    """True if gradients reach the starting point: an equilibrium does not depend on it, the steps of a solver do."""

    exports_loop: ClassVar[bool] = False
    """True for the one that `eq.export` uses, which records the solve as a loop."""

    @abstractmethod
    def __call__(self, problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Solve the problem from z0 and return the differentiable equilibrium, (batch, n); fills in `problem.result`."""


def check_first_order(name: str, *, differentiable: bool = False) -> None:
    """Raise under torch.func, forward mode and double backward, for gradients that are not differentiable themselves."""
    if differentiable or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level():
        raise RuntimeError(
            f"{name} gives only first-order gradients, by plain backward(). For torch.func, forward mode or second "
            "derivatives, take eq.Implicit()."
        )


def with_zero_gradient(z: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Return `z` with a graph of zero gradients for the args: backward() raises for a tensor without a graph."""
    followed = [arg for arg in args if arg.requires_grad]
    if z.requires_grad or not followed or not torch.is_grad_enabled():
        return z
    zeros = [arg.reshape(-1)[:0].sum().real.to(z.dtype) for arg in followed]  # empty sums, which no nan enters
    return z + torch.stack(zeros).sum()
