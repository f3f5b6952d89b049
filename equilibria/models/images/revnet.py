"""RevNet: invertible residual blocks whose backward needs no stored activations (Gomez, Ren, Urtasun and Grosse 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from equilibria._core.checks import require


class ReversibleStack(nn.Module):
    """y1 = x1 + F(x2), y2 = x2 + G(y1) per block, on the two halves of dimension 1.

    Backward inverts the blocks, x2 = y2 - G(y1) and x1 = y1 - F(x2), and stores only the last state: memory does not grow
    with the number of blocks, and every block runs twice. F and G must be deterministic and must not track batch statistics,
    since they run again in backward. Only first-order gradients are supported.

    blocks  pairs (F, G) of modules, each from one half of the state to the other
    """

    def __init__(self, blocks: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        super().__init__()
        require(len(blocks) > 0, "ReversibleStack needs at least one block, got none.")
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in blocks)

    def forward(self, x: Tensor) -> Tensor:
        require(x.shape[1] % 2 == 0, f"Dimension 1 must be even, since it is split in halves; got {x.shape[1]} entries.")
        left, right = x.chunk(2, dim=1)
        apply: Any = _ReversibleBlocks.apply
        halves: tuple[Tensor, Tensor] = apply(self, left, right, *self.parameters())
        return torch.cat(halves, dim=1)

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield (F, G) of every block."""
        for block in self.blocks:
            assert isinstance(block, nn.ModuleList)
            yield block[0], block[1]

    def inverse(self, y: Tensor) -> Tensor:
        """Return the input whose output is y."""
        left, right = y.chunk(2, dim=1)
        for f, g in reversed(list(self.pairs())):
            right = right - g(left)
            left = left - f(right)
        return torch.cat([left, right], dim=1)


class _ReversibleBlocks(Function):
    """The blocks as one function of both halves and the weights; only its output is saved."""

    @staticmethod
    def forward(ctx: Any, stack: ReversibleStack, left: Tensor, right: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        for f, g in stack.pairs():
            left = left + f(right)
            right = right + g(left)
        # positions by id: backward meets the weights again as parameters of the modules
        ctx.stack, ctx.names = stack, {id(weight): i for i, weight in enumerate(weights)}
        ctx.save_for_backward(left, right)
        return left, right

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Invert the blocks one by one and accumulate the gradients of their weights."""
        (left, right), (to_left, to_right) = ctx.saved_tensors, cotangents
        sums: list[Tensor | None] = [None] * len(ctx.names)

        def through(module: nn.Module, at: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
            """Return the module's value and the cotangent of its input; the gradients of its weights go into `sums`."""
            weights = [weight for weight in module.parameters() if weight.requires_grad]
            with torch.enable_grad():
                leaf = at.detach().requires_grad_()
                out = module(leaf)
            found = torch.autograd.grad(out, [leaf, *weights], cotangent, materialize_grads=True, allow_unused=True)
            for weight, gradient in zip(weights, found[1:], strict=True):
                place = ctx.names[id(weight)]
                before = sums[place]  # a weight may be used by several blocks
                sums[place] = gradient if before is None else before + gradient
            return out.detach(), found[0]

        # reverse order: y2 = x2 + G(y1) came last, so x2 is recovered first, and x1 = y1 - F(x2) needs it
        for f, g in reversed(list(ctx.stack.pairs())):
            value, cotangent = through(g, left, to_right)
            right, to_left = right - value, to_left + cotangent
            value, cotangent = through(f, right, to_left)
            left, to_right = left - value, to_right + cotangent
        return None, to_left, to_right, *sums


class RevNet(nn.Module):
    """An image classifier: a convolution, `depth` reversible blocks, a mean over pixels and a linear layer.

    A block has two convolutions.

    width  channels of the state, an even number
    tied   all blocks share their weights, like the steps of an equilibrium's solver
    """

    def __init__(
        self, channels: int = 3, classes: int = 10, *, width: int = 24, depth: int = 20, tied: bool = False
    ) -> None:
        super().__init__()
        require(width % 2 == 0 and width > 0, f"width must be even, since the state is split in halves, got {width}.")
        require(depth >= 1, f"depth must be at least 1, got {depth}.")
        first = (_half(width // 2), _half(width // 2))
        pairs = [first if tied or i == 0 else (_half(width // 2), _half(width // 2)) for i in range(depth)]
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.stack = ReversibleStack(pairs)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stack(self.stem(x)).mean(dim=(2, 3)))
        return scores


def _half(width: int) -> nn.Module:
    """Return one of the two functions of a block: norm, relu and a 3x3 convolution."""
    # group norm: batch norm would count a batch twice, since the blocks run again in backward
    return nn.Sequential(nn.GroupNorm(min(4, width), width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))
