"""The explicit network beside a reasoner: the same layers, each with weights of its own."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.models.reasoning.blocks import initialize
from equilibria.models.reasoning.cell import ReasonerCell
from equilibria.models.reasoning.configs import ReasonerConfig


class ReasonerStack(nn.Module):
    """Tokens -> embedding -> `layers` layers, applied once -> logits (batch, positions, tokens).

    With `config.layers` layers it has the parameters of the reasoner; with as many as a reasoner applies, its depth.
    """

    def __init__(self, config: ReasonerConfig, layers: int) -> None:
        super().__init__()
        require(layers >= 1, f"A stack needs at least one layer, got {layers}.")
        self.config = config
        self.embedding = nn.Embedding(config.tokens, config.width)
        self.layers = ReasonerCell(dataclasses.replace(config, layers=layers, registers=0)).layers
        self.head = nn.Linear(config.width, config.tokens, bias=False)
        initialize(self.head)
        nn.init.trunc_normal_(self.embedding.weight, std=config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(math.sqrt(self.config.width) * self.embedding(tokens)))
        return logits
