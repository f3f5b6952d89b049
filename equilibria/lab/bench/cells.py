"""The cells of the cases, and the distributions of their weights.

Weights are drawn in float64 and rounded to float32, so that they are the same in every run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init

GROUPS = 8  # number of groups of every GroupNorm; it divides all numbers of channels used here
HEADS = 4  # number of attention heads


class AffineTanhCell(nn.Module):
    """tanh(W z + u)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float())

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        return torch.addmm(u, z, self.weight.T).tanh()


class GainCell(AffineTanhCell):
    """tanh(g W z + u) with a gain g per sample."""

    def forward(self, z: Tensor, u: Tensor, gain: Tensor) -> Tensor:  # type: ignore[override]
        return torch.addcmul(u, gain, z @ self.weight.T).tanh()


class ConvCell(nn.Module):
    """Two convolutions in a residual block; the input is added before the second normalization."""

    def __init__(self, generator: Generator, channels: int, gain: float) -> None:
        super().__init__()
        self.first = conv(generator, channels, 3)
        self.second = conv(generator, channels, 3, gain)
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, channels) for _ in range(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(z).relu())
        return self.norms[2]((z + self.norms[1](x + self.second(y))).relu())


class Branch(ConvCell):
    """The residual block of one resolution, which normalizes before its nonlinearity."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(z)).relu()
        return self.norms[2]((z + self.norms[1](x + self.second(y))).relu())


class TwoScaleCell(nn.Module):
    """A multiscale cell: a residual block per resolution, then each of the two resolutions adds the other's features."""

    def __init__(self, generator: Generator, channels: int, gain: float, crossing: float) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(generator, channels, gain) for _ in range(2))
        self.up = nn.Sequential(conv(generator, channels, 1), norm(channels, crossing))
        self.down = nn.Sequential(conv(generator, channels, 3, stride=2), norm(channels, crossing))
        self.outs = nn.ModuleList(
            nn.Sequential(near_identity(generator, channels), nn.GroupNorm(GROUPS, channels)) for _ in range(2)
        )

    def forward(self, z: tuple[Tensor, Tensor], fine: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.branches[0](z[0], fine), self.branches[1](z[1], coarse)
        up = F.interpolate(self.up(b), scale_factor=2.0, mode="nearest")
        return self.outs[0]((a + up).relu()), self.outs[1]((b + self.down(a)).relu())


class AttentionCell(nn.Module):
    """A transformer block that normalizes after each sum; the input is added to the residual stream."""

    def __init__(self, generator: Generator, width: int, gain: float) -> None:
        super().__init__()
        self.split = linear(generator, width, 3 * width, bias=False)
        self.join = linear(generator, width, width, gain, bias=False)
        self.widen = linear(generator, width, 4 * width)
        self.narrow = linear(generator, 4 * width, width, gain)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        query, key, value = self.split(z).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value)
        y = self.norms[0](z + x + self.join(heads.transpose(1, 2).flatten(2)))
        return self.norms[1](y + self.narrow(self.widen(y).relu()))


class InjectedAttentionCell(AttentionCell):
    """A causal transformer block whose input is added to queries, keys and values, as in DEQ transformers."""

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        query, key, value = (self.split(z) + u).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = self.norms[0](z + self.join(heads.transpose(1, 2).flatten(2)))
        return self.norms[1](y + self.narrow(self.widen(y).relu()))


class GateCell(nn.Module):
    """The gates of an LSTM with a constant input; the state is its output and its memory."""

    def __init__(self, generator: Generator, width: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter((gain * normal(generator, 4 * width, width) / width**0.5).float())

    def forward(self, z: tuple[Tensor, Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
        h, memory = z
        keep, renew, show, new = torch.addmm(u, h, self.weight.T).chunk(4, dim=1)
        memory = keep.sigmoid() * memory + renew.sigmoid() * new.tanh()
        return show.sigmoid() * memory.tanh(), memory


class GraphCell(nn.Module):
    """tanh(A z W + x) with a sparse A, the same for all samples."""

    adjacency: Tensor

    def __init__(self, generator: Generator, adjacency: Tensor, width: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter((gain * orthogonal(generator, width)).float())
        self.register_buffer("adjacency", adjacency.float())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        batch, nodes, width = z.shape
        mixed = (z @ self.weight).transpose(0, 1).reshape(nodes, batch * width)
        spread = torch.sparse.mm(self.adjacency, mixed).view(nodes, batch, width)
        return torch.tanh(spread.transpose(0, 1) + x)


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def orthogonal(generator: Generator, width: int) -> Tensor:
    q, r = torch.linalg.qr(normal(generator, width, width))
    return q * r.diagonal().sign()  # the signs of QR depend on LAPACK; with these signs the matrix is uniformly distributed


def ring_with_chords(generator: Generator, nodes: int, chords: int = 2) -> Tensor:
    """Return the sparse D^-1/2 A D^-1/2 of a ring in which every node has `chords` further edges to random nodes."""
    here = torch.arange(nodes).repeat(chords + 1)
    there = torch.cat([torch.arange(1, nodes + 1) % nodes, torch.randint(nodes, (chords * nodes,), generator=generator)])
    dense = torch.zeros(nodes, nodes, dtype=torch.float64)
    dense[here, there] = dense[there, here] = 1.0
    scale = dense.sum(dim=1).rsqrt()
    return (scale.unsqueeze(1) * dense * scale).to_sparse()


def linear(generator: Generator, inputs: int, outputs: int, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=bias)
    layer.weight.data.copy_(gain * normal(generator, outputs, inputs) / inputs**0.5)
    if bias:
        layer.bias.data.zero_()
    return layer


def conv(generator: Generator, channels: int, size: int, gain: float = 1.0, stride: int = 1) -> nn.Conv2d:
    layer: nn.Conv2d = skip_init(nn.Conv2d, channels, channels, size, stride=stride, padding=size // 2, bias=False)
    drawn = normal(generator, channels, channels, size, size)
    layer.weight.data.copy_(gain * drawn / (channels * size * size) ** 0.5)
    return layer


def near_identity(generator: Generator, channels: int) -> nn.Conv2d:
    layer = conv(generator, channels, 1, gain=0.1)
    layer.weight.data += torch.eye(channels)[:, :, None, None]
    return layer


def norm(channels: int, weight: float) -> nn.GroupNorm:
    norm = nn.GroupNorm(GROUPS, channels)
    nn.init.constant_(norm.weight, weight)
    return norm
