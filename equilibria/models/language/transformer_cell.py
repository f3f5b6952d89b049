"""A transformer block, and the cell of a DEQ that consists of such blocks (Bai, Kolter and Koltun 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.models.language.relative_attention import Around, RelativeAttention, out_of_sight, sinusoids
from equilibria.models.language.sequence import Memory
from equilibria.models.language.sequence_layers import linear
from equilibria.models.language.transformer_configs import TransformerConfig
from equilibria.nn import VariationalDropout


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, both with a residual connection.

    norm="post"  h = LN(z + attention(z)),       out = LN(h + W2 relu(W1 h))
    norm="pre"   h = z + attention(LN(z)),       out = h + W2 relu(W1 LN(h)), or LN(h) + ... with skip_from_norm

    With norm="pre" the states of the memory are normalised too.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.attention = RelativeAttention(
            width,
            config.heads,
            config.head_width,
            norm=config.weight_norm,
            bias=config.output_bias,
            out_norm=config.attention_norm,
            dropout=config.attention_dropout,
            fused=config.fused,
        )
        self.W1 = linear(width, config.inner, norm=config.weight_norm)
        self.W2 = linear(config.inner, width, norm=config.weight_norm)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=config.affine)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=config.affine)
        self.attention_dropout = VariationalDropout(config.dropout, shared=(1,))
        self.inner_dropout = VariationalDropout(config.dropout, shared=(1,))
        self.dropout = VariationalDropout(config.dropout, shared=(1,))

    def around(self, positions: Tensor, hidden: Tensor, memory: Tensor | None, injected: Tensor | None) -> Around:
        """Return the tensors that are constant during a solve; memory and injected belong to earlier positions."""
        if memory is not None and self.config.norm == "pre":
            memory = self.norm1(memory)  # like the states of the current positions, see `forward`
        return self.attention.around(positions, hidden, memory, injected)

    def forward(self, z: Tensor, injected: Tensor | None, around: Around) -> Tensor:
        """Return the state after this block, (batch, q, width) -> (batch, q, width)."""
        if self.config.norm == "post":
            h = self.norm1(z + self._attend(z, injected, around))
            return self.norm2(h + self._feed(h))
        h = z + self._attend(self.norm1(z), injected, around)
        a = self.norm2(h)
        return (a if self.config.skip_from_norm else h) + self._feed(a)

    def _attend(self, c: Tensor, injected: Tensor | None, around: Around) -> Tensor:
        return self.attention_dropout(self.attention(c, injected, around))

    def _feed(self, h: Tensor) -> Tensor:
        return self.dropout(self.W2(self.inner_dropout(torch.relu(self.W1(h)))))


class Positions(nn.Module):
    """Returns sinusoids of all distances, (1, m + q, width), and the mask, (1, 1, q, m + q), for q positions after m."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.width, self.reach = config.width, config.reach
        self.dropout = VariationalDropout(config.dropout, shared=(1,))

    def forward(self, q: int, m: int, like: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.dropout(sinusoids(m + q, self.width, like=like))
        return positions, out_of_sight(q, m, self.reach, like.device)


class TransformerCell(nn.Module):
    """f(z, u, memory): the blocks of a configuration in series, each with the injection u.

    z       (batch, q, width)
    u       (batch, q, 3 heads e), added to queries, keys and values
    memory  () or (injection of earlier positions, their states at the input of block 1, at that of block 2, ...), each
            (batch, m, ...)

    The keys and values of the memory do not depend on z and are computed once per solve.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.blocks))
        self.positions = Positions(config)
        # a list, which copies of this cell share: a solve runs a copy that was made before `watched` was entered
        self._seen: list[dict[int, Tensor]] = []

    def prepare(self, u: Tensor, memory: Memory) -> tuple[Any, ...]:
        earlier, *states = memory if memory else (None, *[None] * len(self.blocks))
        positions, hidden = self.positions(u.shape[1], 0 if earlier is None else earlier.shape[1], u)
        blocks = zip(self._blocks(), states, strict=True)
        return u, tuple(block.around(positions, hidden, state, earlier) for block, state in blocks)

    def forward(self, z: Tensor, u: Tensor, around: tuple[Around, ...]) -> Tensor:
        for i, (block, known) in enumerate(zip(self._blocks(), around, strict=True)):
            for seen in self._seen:
                seen[i] = z.detach()  # without its graph, which would keep all runs of a solve alive
            z = block(z, u, known)
        return z

    @contextmanager
    def watched(self) -> Iterator[dict[int, Tensor]]:
        """Yield a dict that holds, by the number of the block, its input state in the last run inside the context."""
        seen: dict[int, Tensor] = {}
        self._seen.append(seen)
        try:
            yield seen
        finally:
            self._seen[:] = [other for other in self._seen if other is not seen]

    def _blocks(self) -> list[TransformerBlock]:
        return [block for block in self.blocks if isinstance(block, TransformerBlock)]
