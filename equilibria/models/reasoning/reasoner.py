"""Reasoners: models that map tokens to tokens by the equilibrium of a small two-state cell."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.phantom import JFB
from equilibria.looped.random_start import RandomStart
from equilibria.models.reasoning.blocks import initialize
from equilibria.models.reasoning.cell import Pair, PairStart, ReasonerCell
from equilibria.models.reasoning.configs import ReasonerConfig
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

HALT_BIAS = -5.0  # initial bias of the halting head: an untrained model halts no row


class Thought(NamedTuple):
    """The result of one supervised step of a reasoner."""

    logits: Tensor  # (batch, positions, tokens)
    halt: Tensor  # (batch,) value of the halting head: positive if it predicts that the answer is right
    state: Pair  # (z_H, z_L) without a graph, the start of the next step
    residual: Tensor  # (batch,) relative residual of the solver's state, before further steps of the gradient


class Reasoner(nn.Module):
    """A DEQ on (z_H, z_L) whose cell is one latent recursion: Tiny Recursive Model and Equilibrium Reasoners.

        model = eq.models.create("reasoner-nano")
        thought = model.think(tokens)  # one supervised step
        thought = model.think(tokens, thought.state)  # the next step, from the state of the first

    The published supervised step has h_cycles - 1 recursions without a gradient and one recursion with a gradient. With
    `stop=None` a step takes h_cycles - 1 plain recursions, and then a solve of zero steps with `gradient`; that solve
    measures the residual, and `JFB` adds the last recursion. With a `stop` the solver replaces the plain recursions, and
    its iterate with the smallest residual is kept.

    solver     solver of the equilibrium
    stop       stop of the solve in a supervised step; None: plain recursions instead of a solve
    gradient   gradient of a supervised step
    eval_stop  stop in eval mode; None: `stop`
    direct     True: in training mode the last recursion is applied without a solve around it. Values, residuals and
               gradients are those of `JFB`, with one evaluation less, and `eq.record` records no solution. Needs
               `stop=None` and `JFB()`
    """

    def __init__(
        self,
        config: ReasonerConfig,
        *,
        solver: AnySolver = Picard(),
        stop: Stop | None = None,
        gradient: Gradient = JFB(),
        eval_stop: Stop | None = None,
        direct: bool = False,
    ) -> None:
        super().__init__()
        require(
            not direct or (stop is None and gradient == JFB()),
            f"direct=True needs stop=None and gradient=JFB(), got stop={stop} and gradient={gradient}. Use direct=False.",
        )
        self.config, self.direct = config, direct
        self.embedding = nn.Embedding(config.tokens, config.width)
        self.registers = nn.Parameter(torch.zeros(config.registers, config.width)) if config.registers else None
        cell = ReasonerCell(dataclasses.replace(config, positions=config.positions + config.registers, registers=0))
        init = RandomStart(states=2) if config.start == "random" else PairStart(config.width, config.start == "learned")
        self.plain = config.h_cycles - 1 if stop is None else 0  # number of recursions before the solve, without a gradient
        self.layer = DEQ(cell, init, solver, recursions(0) if stop is None else stop, gradient, eval_stop)
        self.head = nn.Linear(config.width, config.tokens, bias=False)
        self.halt = nn.Linear(config.width, 1)
        initialize(self.head)
        nn.init.trunc_normal_(self.embedding.weight, std=config.width**-0.5)
        nn.init.zeros_(self.halt.weight)
        nn.init.constant_(self.halt.bias, HALT_BIAS)

    def forward(self, tokens: Tensor, state: Pair | None = None, *, with_thought: bool = False) -> Tensor | Thought:
        """Return the logits (batch, positions, tokens) of one supervised step; `with_thought` returns the `Thought`.

        state  state to continue from; None: a new start
        """
        x = self.embed(tokens)
        if self.plain:
            with torch.no_grad():
                state = WeightTied(self.layer.cell, self.plain, self.layer.init)(x, init=state)
        z, residual = self._recursed(x, state)
        logits, halt = self.read(z)
        if not with_thought:
            return logits
        answer, scratch = z
        return Thought(logits, halt, (answer.detach(), scratch.detach()), residual)

    def _recursed(self, x: Tensor, state: Pair | None) -> tuple[Pair, Tensor]:
        """Run the part of a supervised step that has a gradient; returns the state and the residual before that part."""
        if not (self.direct and self.training):
            s = self.layer.solve(x, init=state)
            return s.z, s.stats.residual
        path = WeightTied(self.layer.cell, 1, self._constant_start).trajectory(x, init=state)
        return path.states[-1], path.residuals[-1]

    @torch.no_grad()
    def _constant_start(self, x: Tensor) -> Pair:
        answer, scratch = self.layer.init(x)  # type: ignore[operator, misc]
        return answer, scratch

    def think(self, tokens: Tensor, state: Pair | None = None) -> Thought:
        """Run one supervised step and return its `Thought`; None for `state` starts anew."""
        thought = self(tokens, state, with_thought=True)
        assert isinstance(thought, Thought)
        return thought

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the cell, (batch, positions, width), with entries of about unit variance."""
        c = self.config
        if tokens.dim() != 2 or (c.mixer == "mlp" and tokens.shape[1] != c.positions):
            raise ValueError(
                f"Tokens must have the shape (batch, {c.positions}), got {tuple(tokens.shape)}. Flatten boards row by row. "
                "For boards of several sizes use a mixer other than 'mlp'."
            )
        x = self.embedding(tokens)
        if self.registers is not None:
            x = torch.cat([self.registers.expand(len(x), -1, -1), x], dim=1)
        return math.sqrt(c.width) * x

    def read(self, z: Pair) -> tuple[Tensor, Tensor]:
        """Return the logits and the value of the halting head for a state."""
        answer = z[0]
        return self.head(answer[:, self.config.registers :]), self.halt(answer[:, 0]).squeeze(-1)

    def start(self, tokens: Tensor) -> Pair:
        """Return a new start for these samples."""
        answer, scratch = self.layer.init(self.embed(tokens))  # type: ignore[operator, misc]
        return answer, scratch


def recursions(steps: int) -> Stop:
    """Return a Stop that takes a fixed number of steps and ignores the residual."""
    return Stop(rtol=0.0, atol=0.0, max_steps=steps, on_failure="ignore", compact=False)
