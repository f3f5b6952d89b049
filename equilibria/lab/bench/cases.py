"""The ten problems that every library solves, from a dense layer of 128 numbers to convolutions and attention.

Weights are drawn in float64 from a seed of the case and rounded to float32, so that they are the same in every run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init
from torch.utils import _pytree as pytree

from equilibria._core.packing import State

WIDTH = 128  # numbers per sample of the dense cases
GROUPS = 8  # of every GroupNorm, which divides all numbers of channels used here
HEADS = 4  # of the attention


@dataclass(frozen=True, eq=False)
class Case:
    """An equation z = cell(z, *inputs) and the loss <cotangent, z> of its solution.

    inputs     computed before the solve; like the cell's weights they ask for gradients
    start      zeros, as `cotangent` with the structure of the state
    rtol       what |f(z) - z| / |f(z)| of the worst sample must come down to
    max_steps  of every solver, forward and backward
    """

    name: str
    cell: nn.Module
    inputs: tuple[Tensor, ...]
    start: State
    cotangent: State
    rtol: float = 1e-3
    max_steps: int = 80
    note: str = ""

    @property
    def batch(self) -> int:
        return int(self.inputs[0].shape[0])

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that gradients are computed for: all weights, then the inputs."""
        return (*self.cell.parameters(), *self.inputs)

    def loss(self, z: State) -> Tensor:
        pairs = zip(pytree.tree_leaves(self.cotangent), pytree.tree_leaves(z), strict=True)
        return torch.stack([(v * part).sum() for v, part in pairs]).sum()

    def double(self) -> Case:
        """The same numbers in float64."""
        cell = copy.deepcopy(self.cell).double()
        inputs = tuple(x.detach().double().requires_grad_() for x in self.inputs)
        start, cotangent = (pytree.tree_map(Tensor.double, state) for state in (self.start, self.cotangent))
        return replace(self, cell=cell, inputs=inputs, start=start, cotangent=cotangent)


def make(name: str, batch: int | None = None) -> Case:
    """Build the case `name`; `batch` overrides its usual batch size."""
    if name not in CASES:
        raise ValueError(f"There is no case {name!r}; there are {', '.join(CASES)}.")
    build, usual = CASES[name]
    return replace(build(usual if batch is None else batch), name=name)


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
    """Two convolutions in a residual block, the input added before the second normalization."""

    def __init__(self, generator: Generator, channels: int, gain: float) -> None:
        super().__init__()
        self.first = _conv(generator, channels, 3)
        self.second = _conv(generator, channels, 3, gain)
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, channels) for _ in range(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(z).relu())
        return self.norms[2]((z + self.norms[1](x + self.second(y))).relu())


class Branch(ConvCell):
    """The residual block of one resolution: it normalizes before its nonlinearity."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(z)).relu()
        return self.norms[2]((z + self.norms[1](x + self.second(y))).relu())


class TwoScaleCell(nn.Module):
    """A multiscale cell of two resolutions: a block on each, then each resolution adds the features of the other."""

    def __init__(self, generator: Generator, channels: int, gain: float, crossing: float) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(generator, channels, gain) for _ in range(2))
        self.up = nn.Sequential(_conv(generator, channels, 1), _norm(channels, crossing))
        self.down = nn.Sequential(_conv(generator, channels, 3, stride=2), _norm(channels, crossing))
        self.outs = nn.ModuleList(
            nn.Sequential(_near_identity(generator, channels), nn.GroupNorm(GROUPS, channels)) for _ in range(2)
        )

    def forward(self, z: tuple[Tensor, Tensor], fine: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.branches[0](z[0], fine), self.branches[1](z[1], coarse)
        up = F.interpolate(self.up(b), scale_factor=2.0, mode="nearest")
        return self.outs[0]((a + up).relu()), self.outs[1]((b + self.down(a)).relu())


class AttentionCell(nn.Module):
    """A transformer block, normalized after each sum, with the input added to the residual stream."""

    def __init__(self, generator: Generator, width: int, gain: float) -> None:
        super().__init__()
        self.split = _linear(generator, width, 3 * width, bias=False)
        self.join = _linear(generator, width, width, gain, bias=False)
        self.widen = _linear(generator, width, 4 * width)
        self.narrow = _linear(generator, 4 * width, width, gain)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        query, key, value = self.split(z).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value)
        y = self.norms[0](z + x + self.join(heads.transpose(1, 2).flatten(2)))
        return self.norms[1](y + self.narrow(self.widen(y).relu()))


def contraction(batch: int, norm: float, seed: int = 1000, **limits: float) -> Case:
    """W symmetric with eigenvalues evenly over [-norm, norm]: a contraction by `norm` whose slow directions are there.

    A Gaussian W of the same norm has a spectral radius of half of that and is much easier.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = _symmetric(generator, torch.linspace(-norm, norm, WIDTH, dtype=torch.float64))
    scale = 0.05 if norm < 0.95 else 0.01  # small enough that tanh stays steep, or the hard case would be an easy one
    return _dense(generator, AffineTanhCell(weight), batch, scale, f"{norm}-contraction, batch {batch}", **limits)


def nonnormal(batch: int, norm: float = 1.5, radius: float = 0.92) -> Case:
    """|W| > 1 > spectral radius: errors grow before they decay."""
    generator = torch.Generator().manual_seed(1000)
    basis = _orthogonal(generator)
    angles = 2 * torch.pi * torch.rand(WIDTH // 2, generator=generator, dtype=torch.float64)
    radii = torch.linspace(0.1, radius, WIDTH // 2, dtype=torch.float64)
    turns = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], 1).view(-1, 2, 2)
    diagonal = torch.block_diag(*(radii.view(-1, 1, 1) * turns))
    upper = _normal(generator, WIDTH, WIDTH).triu(2)
    weight = basis @ (diagonal + _share(diagonal, upper, norm) * upper) @ basis.T
    return _dense(generator, AffineTanhCell(weight), batch, 0.1, f"|W| = {norm}, spectral radius {radius}")


def oscillating(batch: int, lowest: float = -1.5) -> Case:
    """A few eigenvalues below -1: plain iteration falls into a cycle of two."""
    generator = torch.Generator().manual_seed(1000)
    eigenvalues = torch.linspace(-0.9, 0.9, WIDTH, dtype=torch.float64)
    eigenvalues[:4] = lowest * torch.tensor([1.0, 0.97, 0.93, 0.9], dtype=torch.float64)
    weight = _symmetric(generator, eigenvalues)
    note = f"eigenvalues down to {lowest}: Picard does not converge"
    return _dense(generator, AffineTanhCell(weight), batch, 0.1, note)


def mixed(batch: int) -> Case:
    """A tenth of the samples is hard, the others are done after a few steps."""
    generator = torch.Generator().manual_seed(1005)
    weight = _symmetric(generator, torch.linspace(-1, 1, WIDTH, dtype=torch.float64))
    gains = torch.full((batch, 1), 0.25)
    gains[torch.randperm(batch, generator=generator)[: round(0.1 * batch)]] = 0.965
    case = _dense(generator, GainCell(weight), batch, 0.1, "90 % of the samples with gain 0.25, 10 % with 0.965")
    return replace(case, inputs=(*case.inputs, gains.requires_grad_()))


def conv(batch: int, channels: int = 48, size: int = 16) -> Case:
    generator = torch.Generator().manual_seed(1002)
    cell = ConvCell(generator, channels, gain=0.4)
    return _case(generator, cell, [(batch, channels, size, size)], note=f"residual block, {channels} x {size} x {size}")


def two_scales(batch: int, channels: int = 24, size: int = 32) -> Case:
    generator = torch.Generator().manual_seed(1003)
    cell = TwoScaleCell(generator, channels, gain=0.3, crossing=0.3)
    shapes = [(batch, channels, width, width) for width in (size, size // 2)]
    return _case(generator, cell, shapes, note=f"two resolutions, {size} and {size // 2}, {channels} channels")


def transformer(batch: int, length: int = 64, width: int = 128) -> Case:
    generator = torch.Generator().manual_seed(1004)
    cell = AttentionCell(generator, width, gain=0.8)
    return _case(generator, cell, [(batch, length, width)], note=f"attention block, {length} tokens of {width}")


CASES: dict[str, tuple[Callable[[int], Case], int]] = {  # with the usual batch
    "mlp-b32": (lambda batch: contraction(batch, 0.9, max_steps=200), 32),
    "mlp-b512": (lambda batch: contraction(batch, 0.9, max_steps=200), 512),
    "mlp-b512-tight": (lambda batch: contraction(batch, 0.9, max_steps=200, rtol=1e-5), 512),
    "mlp-hard": (lambda batch: contraction(batch, 0.99, max_steps=400), 32),
    "mlp-nonnormal": (nonnormal, 32),
    "mlp-osc": (oscillating, 32),
    "mixed": (mixed, 512),
    "conv": (conv, 32),
    "mdeq2": (two_scales, 16),
    "transformer": (transformer, 16),
}


def _dense(
    generator: Generator, cell: nn.Module, batch: int, scale: float, note: str, rtol: float = 1e-3, max_steps: float = 200
) -> Case:
    case = _case(generator, cell, [(batch, WIDTH)], scale, note)
    return replace(case, rtol=rtol, max_steps=int(max_steps))


def _case(
    generator: Generator, cell: nn.Module, shapes: Sequence[tuple[int, ...]], scale: float = 1.0, note: str = ""
) -> Case:
    """A state of one tensor per shape, and an input for each."""
    inputs = tuple((scale * _normal(generator, *shape)).float().requires_grad_() for shape in shapes)
    cotangents = tuple((_normal(generator, *shape) / shape[0] ** 0.5).float() for shape in shapes)
    starts = tuple(torch.zeros(shape) for shape in shapes)
    single = len(shapes) == 1
    return Case("", cell, inputs, starts[0] if single else starts, cotangents[0] if single else cotangents, note=note)


def _normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _orthogonal(generator: Generator) -> Tensor:
    q, r = torch.linalg.qr(_normal(generator, WIDTH, WIDTH))
    return q * r.diagonal().sign()  # uniformly distributed; as QR leaves them, the signs are LAPACK's choice


def _symmetric(generator: Generator, eigenvalues: Tensor) -> Tensor:
    basis = _orthogonal(generator)
    return (basis * eigenvalues) @ basis.T


def _share(diagonal: Tensor, upper: Tensor, norm: float) -> float:
    """s with |diagonal + s upper| = norm, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        too_large = float(torch.linalg.matrix_norm(diagonal + middle * upper, 2)) > norm
        low, high = (low, middle) if too_large else (middle, high)
    return low


def _linear(generator: Generator, inputs: int, outputs: int, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=bias)
    layer.weight.data.copy_(gain * _normal(generator, outputs, inputs) / inputs**0.5)
    if bias:
        layer.bias.data.zero_()
    return layer


def _conv(generator: Generator, channels: int, size: int, gain: float = 1.0, stride: int = 1) -> nn.Conv2d:
    layer: nn.Conv2d = skip_init(nn.Conv2d, channels, channels, size, stride=stride, padding=size // 2, bias=False)
    drawn = _normal(generator, channels, channels, size, size)
    layer.weight.data.copy_(gain * drawn / (channels * size * size) ** 0.5)
    return layer


def _near_identity(generator: Generator, channels: int) -> nn.Conv2d:
    layer = _conv(generator, channels, 1, gain=0.1)
    layer.weight.data += torch.eye(channels)[:, :, None, None]
    return layer


def _norm(channels: int, weight: float) -> nn.GroupNorm:
    norm = nn.GroupNorm(GROUPS, channels)
    nn.init.constant_(norm.weight, weight)
    return norm
