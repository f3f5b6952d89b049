"""The two-state cell of recursive reasoners, and a fixed start of its states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibria.models.reasoning.blocks import NeighbourConvolution, PositionMLP, ReasonerLayer, RotaryAttention, initialize
from equilibria.models.reasoning.configs import ReasonerConfig

Pair = tuple[Tensor, Tensor]


class ReasonerCell(nn.Module):
    """One latent recursion on the pair (answer z_H, scratch pad z_L), each (batch, positions, width).

        z_L <- R(z_L, B(z_L + z_H + x))  l_cycles times,  then  z_H <- R(z_H, B(z_H + z_L)),
        R(h, b) = (1 - relaxation) h + relaxation b + noise e,  e standard normal

    B is one stack of layers, used for both states. The Tiny Recursive Model has relaxation 1 and noise 0, Equilibrium
    Reasoners have 0.95 and 0.01. With `noise_per="solve"` the noise is drawn once per solve: the cell is then one function
    with an equilibrium, and any solver can be used. With "call" the noise is drawn at every call, as in the published code.
    The cell then has no equilibrium, and must be iterated plainly for a fixed number of steps.
    """

    def __init__(self, config: ReasonerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.Sequential(*[_layer(config) for _ in range(config.layers)])
        initialize(self)

    @property
    def _noisy(self) -> bool:
        return self.config.noise > 0 and (self.training or self.config.eval_noise)

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the input and, if noise is drawn once per solve, the noise, (batch, l_cycles + 1, positions, width)."""
        c = self.config
        if not self._noisy or c.noise_per == "call":
            return (x,)
        return x, torch.randn(x.shape[0], c.l_cycles + 1, *x.shape[1:], dtype=x.dtype, device=x.device)

    def forward(self, z: Pair, x: Tensor, noise: Tensor | None = None) -> Pair:
        answer, scratch = z
        for cycle in range(self.config.l_cycles):
            scratch = self._relaxed(scratch, answer + x, noise, cycle)
        return self._relaxed(answer, scratch, noise, self.config.l_cycles), scratch

    def _relaxed(self, h: Tensor, inject: Tensor, noise: Tensor | None, place: int) -> Tensor:
        """Return R(h, B(h + inject)) with the noise of update number `place`."""
        c = self.config
        out = self.layers(h + inject)
        out = out if c.relaxation == 1 else torch.lerp(h.to(out.dtype), out, c.relaxation)
        if not self._noisy:
            return out
        return torch.add(out, torch.randn_like(out) if noise is None else noise[:, place], alpha=c.noise)


def _layer(c: ReasonerConfig) -> ReasonerLayer:
    mixer: nn.Module
    if c.mixer == "mlp":
        mixer = PositionMLP(c.positions, c.expansion, c.multiple)
    elif c.mixer == "attention":
        mixer = RotaryAttention(c.width, c.heads)
    else:
        mixer = NeighbourConvolution(c.width, dimensions=1 if c.mixer == "line" else 2)
    return ReasonerLayer(mixer, c.width, c.expansion, c.multiple)


class PairStart(nn.Module):
    """The start of both states of a reasoner: one vector per state, equal at all positions of all samples.

    learned  True: the vectors are parameters. A solve treats its start as a constant, so only `Unrolled` or `skip_penalty`
             train them. False: the vectors are drawn once and stored as a buffer
    """

    def __init__(self, width: int, learned: bool) -> None:
        super().__init__()
        vectors = nn.init.trunc_normal_(torch.empty(2, width), std=1.0, a=-2.0, b=2.0)
        if learned:
            self.vectors = nn.Parameter(vectors)
        else:
            self.register_buffer("vectors", vectors)

    def forward(self, x: Tensor) -> Pair:
        answer, scratch = self.vectors.to(x.dtype).unbind()
        return answer.expand_as(x), scratch.expand_as(x)
