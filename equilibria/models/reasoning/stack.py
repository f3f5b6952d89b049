"""The explicit network that reasoners are compared with: the same layers, each with its own weights."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.models.reasoning.blocks import initialize
from equilibria.models.reasoning.cell import ReasonerCell
from equilibria.models.reasoning.configs import ReasonerConfig


class ReasonerStack(nn.Module):
    """Tokens -> embedding -> `layers` layers -> logits (batch, positions, tokens).

    With `config.layers` layers it has as many parameters as the reasoner. With as many layers as a reasoner applies in a
    step, it has the same depth.
    """

    def __init__(self, config: ReasonerConfig, layers: int) -> None:
        super().__init__()
        require(layers >= 1, f"layers must be at least 1, got {layers}.")
        self.config = config
        self.embedding = nn.Embedding(config.tokens, config.width)
        self.layers = ReasonerCell(dataclasses.replace(config, layers=layers, registers=0)).layers
        self.head = nn.Linear(config.width, config.tokens, bias=False)
        initialize(self.head)
        nn.init.trunc_normal_(self.embedding.weight, std=config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(math.sqrt(self.config.width) * self.embedding(tokens)))
        return logits
