"""A small DEQ transformer after a short training, whose cell has the Jacobian of a trained model.

The task is to predict the next token of a Markov chain. The training uses plain iteration and no solver of this library, so
changes of the solvers do not change the case.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from equilibria.lab.bench.cells import InjectedAttentionCell, linear, normal

TOKENS, LENGTH, TRAINED_WIDTH = 48, 32, 64
UPDATES, BATCH, RATE = 100, 16, 2e-3
FREE, FOLLOWED = 12, 4  # number of plain steps without a graph, and of the steps with a graph after them


@dataclass(frozen=True, eq=False)
class TrainedTransformer:
    """A trained cell, its embedding of tokens and positions, and the Markov chain that generates its sequences."""

    cell: InjectedAttentionCell
    embedding: Tensor
    positions: Tensor
    inject: nn.Linear
    chain: Tensor
    seed: int

    def injected(self, batch: int) -> Tensor:
        """Return inputs of the cell, (batch, LENGTH, 3 TRAINED_WIDTH), for sequences outside of the training data."""
        tokens = _sequences(self.chain, batch, torch.Generator().manual_seed(5000 + self.seed))
        with torch.no_grad():
            return self.inject(self.embedding[tokens[:, :-1]] + self.positions)


def trained_transformer(seed: int) -> TrainedTransformer:
    """Return a copy of the model of this seed, which is trained at the first call."""
    return copy.deepcopy(_train(seed))


@cache
def _train(seed: int) -> TrainedTransformer:
    generator = torch.Generator().manual_seed(4000 + seed)
    chain = (2.0 * normal(generator, TOKENS, TOKENS)).softmax(dim=1)
    cell = InjectedAttentionCell(generator, TRAINED_WIDTH, gain=0.8)
    embedding = nn.Parameter(normal(generator, TOKENS, TRAINED_WIDTH).float())
    positions = nn.Parameter(normal(generator, LENGTH, TRAINED_WIDTH).float())
    inject = linear(generator, TRAINED_WIDTH, 3 * TRAINED_WIDTH)
    head = linear(generator, TRAINED_WIDTH, TOKENS)
    parameters = [*cell.parameters(), embedding, positions, *inject.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    with torch.enable_grad():
        for _ in range(UPDATES):
            tokens = _sequences(chain, BATCH, generator)
            z = _unrolled(cell, inject(embedding[tokens[:, :-1]] + positions))
            loss = F.cross_entropy(head(z).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return TrainedTransformer(cell, embedding.detach(), positions.detach(), inject, chain, seed)


def _unrolled(cell: InjectedAttentionCell, u: Tensor) -> Tensor:
    z = u.new_zeros(*u.shape[:-1], TRAINED_WIDTH)
    with torch.no_grad():
        for _ in range(FREE):
            z = cell(z, u)
    for _ in range(FOLLOWED):
        z = cell(z, u)
    return z


def _sequences(chain: Tensor, batch: int, generator: Generator) -> Tensor:
    """Draw sequences of the Markov chain, (batch, LENGTH + 1) tokens."""
    tokens = [torch.randint(TOKENS, (batch,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(tokens, dim=1)
