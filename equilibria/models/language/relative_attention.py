"""Attention by content and by distance, with a memory of earlier positions (Dai and others 2019, "Transformer-XL")."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria._core import autodiff_modes
from equilibria.models.language.sequence_layers import SPREAD, linear
from equilibria.nn import VariationalDropout

# From this many pairs of positions on, torch's fused attention is faster without a graph. Measured: half the time at
# 64 x 128, a quarter more at 32 x 64. With a graph it is slower at every size, since the bias needs a gradient too.
FUSED_FROM = 4096


class Around(NamedTuple):
    """The inputs of a block's attention apart from its state. Tensors without a batch have a first dimension of 1."""

    distances: Tensor  # (1, heads, k, e) r for distances k - 1 ... 0
    hidden: Tensor  # (1, 1, q, k) bool, True for positions that are masked
    keys: Tensor | None  # (batch, heads, m, e) keys of the memory; None: there is no memory
    values: Tensor | None  # (batch, heads, m, e) values of the memory


class RelativeAttention(nn.Module):
    """out_i = W_o sum_j softmax_j(((q_i + b_w) . k_j + (q_i + b_r) . r_{i-j}) / √e) v_j.

    q, k, v = W_qkv c + u at the current positions and at those of the memory before them; r = W_r P with sinusoids P of the
    distance. r and the keys and values of the memory do not depend on the state; `around` computes them once per solve.

    width       width of the state
    heads       number of heads, each `head_width` (e) wide
    norm        weight norm on all matrices
    bias        W_o has a bias
    out_norm    a layer norm before W_o
    dropout     dropout of the attention weights, with one mask per solve
    fused       use torch's fused attention where it is faster, which is in solves without a graph; False: never. Derivatives
                of all orders always come from the plain formula
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        *,
        norm: bool = True,
        bias: bool = True,
        out_norm: bool = False,
        dropout: float = 0.0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        inner = heads * head_width
        self.heads, self.head_width, self.fused = heads, head_width, fused
        self.qkv = linear(width, 3 * inner, bias=False, norm=norm)
        self.position = linear(width, inner, bias=False, norm=norm)
        self.out = linear(inner, width, bias=bias, norm=norm)
        self.out_norm = nn.LayerNorm(inner, elementwise_affine=False) if out_norm else nn.Identity()
        self.content_bias = nn.Parameter(SPREAD * torch.randn(heads, head_width))  # b_w
        self.distance_bias = nn.Parameter(SPREAD * torch.randn(heads, head_width))  # b_r
        self.dropout = VariationalDropout(dropout)

    def around(self, positions: Tensor, hidden: Tensor, memory: Tensor | None, injected: Tensor | None) -> Around:
        """Return the tensors that are constant during a solve.

        positions  (1, k, width) sinusoids
        memory     (batch, m, width) states of earlier positions, from which keys and values are computed; None: no memory
        injected   (batch, m, 3 heads e) injection of earlier positions, which is added to them
        """
        distances = self._split(self.position(positions))
        if memory is None:
            return Around(distances, hidden, None, None)
        inner = self.heads * self.head_width
        keys_values = F.linear(memory, self.qkv.weight[inner:])  # no queries: earlier positions have their outputs already
        keys_values = keys_values if injected is None else keys_values + injected[..., inner:]
        keys, values = keys_values.chunk(2, dim=-1)
        return Around(distances, hidden, self._split(keys), self._split(values))

    def forward(self, c: Tensor, injected: Tensor | None, around: Around) -> Tensor:
        """Return the attention output for c, (batch, q, width) -> (batch, q, width)."""
        qkv = self.qkv(c) if injected is None else self.qkv(c) + injected
        query, keys, values = (self._split(part) for part in qkv.chunk(3, dim=-1))
        if around.keys is not None and around.values is not None:
            keys = torch.cat([around.keys, keys], dim=2)
            values = torch.cat([around.values, values], dim=2)
        mixed = self._mix(query, keys, values, around)
        return self.out(self.out_norm(mixed.transpose(1, 2).flatten(2)))

    def _mix(self, query: Tensor, keys: Tensor, values: Tensor, around: Around) -> Tensor:
        """Return the attention output, (batch, heads, q, e), by the fused kernel where that is faster."""
        scaled = (query + self.distance_bias.unsqueeze(1)) * self.head_width**-0.5
        bias = relative_shift(scaled @ around.distances.mT).masked_fill(around.hidden, -math.inf)
        query = query + self.content_bias.unsqueeze(1)
        differentiated = torch.is_grad_enabled() or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level()
        large = bias.shape[-2] * bias.shape[-1] >= FUSED_FROM
        if self.fused and large and not differentiated and not self.dropout.active:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)  # it scales the products itself
        scores = torch.softmax((query * self.head_width**-0.5) @ keys.mT + bias, dim=-1)
        return self.dropout(scores) @ values

    def _split(self, x: Tensor) -> Tensor:
        """Split into heads, (batch, time, heads e) -> (batch, heads, time, e)."""
        return x.unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)


def sinusoids(length: int, width: int, *, like: Tensor) -> Tensor:
    """Return [sin | cos] of the distances length - 1 ... 0 at frequencies 10000^(-2l / width), (1, length, width).

    `like` gives dtype and device; the angles are computed in float64.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length - 1, -1, -1, dtype=torch.float64).unsqueeze(1) * frequencies
    both = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]  # an odd width gives one column too many
    return both.to(like).unsqueeze(0)


def relative_shift(x: Tensor) -> Tensor:
    """Turn scores by distance into scores by position, (..., q, k) -> (..., q, k).

    Column l of the argument belongs to the distance k - 1 - l, column j of the result to position j. Row i is therefore
    shifted to the left by q - 1 - i. The entries that enter at its right end belong to future positions and must be masked.
    """
    q, k = x.shape[-2:]
    # padding one column and reading the rows with another length shifts every row by one more than the row below it
    return F.pad(x, (1, 0)).flatten(-2).unflatten(-1, (k + 1, q))[..., 1:, :].reshape(x.shape)


def out_of_sight(queries: int, memory: int, reach: int | None, device: torch.device) -> Tensor:
    """Return a mask (1, 1, q, m + q), True for future positions and those `reach` or more back."""
    now = torch.arange(memory, memory + queries, device=device).unsqueeze(1)
    back = now - torch.arange(memory + queries, device=device)
    hidden = back < 0 if reach is None else (back < 0) | (back >= reach)
    return hidden[None, None]
