"""Random starts of a solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.checks import require


@dataclass(frozen=True, kw_only=True)
class RandomStart:
    """An `init` that draws every entry of the state from a truncated normal distribution, with new draws in every solve.

    Training from random starts widens the attractors of a cell. `eq.looped.breadth` compares the results of several starts.
    The draws come from torch's own generator.

    std     standard deviation before truncation
    cut     largest absolute value of a draw, in units of std
    shape   shape of the state of a sample; None: that of the first input
    states  number of tensors in the state; with more than one the state is a tuple
    """

    std: float = 1.0
    cut: float = 2.0
    shape: tuple[int, ...] | None = None
    states: int = 1

    def __post_init__(self) -> None:
        require(self.std > 0 and self.cut > 0, f"std and cut must be positive, got std={self.std}, cut={self.cut}.")
        require(self.states >= 1, f"states must be at least 1, got {self.states}.")

    def __call__(self, *inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Draw a start for a batch of the size, dtype and device of `inputs`."""
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        require(
            bool(tensors),
            "RandomStart takes batch size and device from the inputs, but there is no tensor among them. Pass one.",
        )
        first = tensors[0]
        real = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())
        shape = first.shape if self.shape is None else (len(first), *self.shape)
        limit = self.cut * self.std
        draws = tuple(
            nn.init.trunc_normal_(torch.empty(shape, dtype=real, device=first.device), std=self.std, a=-limit, b=limit)
            for _ in range(self.states)
        )
        return draws if self.states > 1 else draws[0]
