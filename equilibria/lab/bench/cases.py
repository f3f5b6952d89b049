"""The problems that every library solves, from a dense layer of 96 numbers to convolutions and attention.

Weights are drawn in float64 from a seed of the case and rounded to float32, so that they are the same in every run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.packing import State
from equilibria.lab.bench.cells import (
    AffineTanhCell,
    AttentionCell,
    ConvCell,
    GainCell,
    GateCell,
    GraphCell,
    TwoScaleCell,
    normal,
    orthogonal,
    ring_with_chords,
)
from equilibria.lab.bench.trained import LENGTH, TRAINED_WIDTH, trained_transformer

WIDTH = 128  # numbers per sample in most dense cases


@dataclass(frozen=True, eq=False)
class Case:
    """An equation z = cell(z, *inputs) and the loss <cotangent, z> of its solution.

    inputs     inputs of the cell; like the cell's weights they require gradients
    start      zeros in the structure of the state; `cotangent` has the same structure
    rtol       a method counts as converged if |f(z) - z| / |f(z)| is at most this for every sample
    max_steps  step limit of every solver, forward and backward
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
        """The tensors whose gradients are computed: all weights, then the inputs."""
        return (*self.cell.parameters(), *self.inputs)

    def loss(self, z: State) -> Tensor:
        pairs = zip(pytree.tree_leaves(self.cotangent), pytree.tree_leaves(z), strict=True)
        return torch.stack([(v * part).sum() for v, part in pairs]).sum()

    def double(self) -> Case:
        """Return a copy of the case in float64."""
        cell = copy.deepcopy(self.cell).double()
        inputs = tuple(x.detach().double().requires_grad_() for x in self.inputs)
        start, cotangent = (pytree.tree_map(Tensor.double, state) for state in (self.start, self.cotangent))
        return replace(self, cell=cell, inputs=inputs, start=start, cotangent=cotangent)


def make(name: str, batch: int | None = None) -> Case:
    """Build the case `name`; `batch` overrides its usual batch size."""
    if name not in CASES:
        raise ValueError(f"There is no case {name!r}. Choose one of {', '.join(CASES)}.")
    build, usual = CASES[name]
    return replace(build(usual if batch is None else batch), name=name)


def contraction(batch: int, norm: float, seed: int = 1000, width: int = WIDTH, **limits: float) -> Case:
    """Return a case with a symmetric W whose eigenvalues are evenly spaced over [-norm, norm].

    The cell then contracts by exactly `norm`. A Gaussian W with the same norm has half the spectral radius and is easier.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = _symmetric(generator, torch.linspace(-norm, norm, width, dtype=torch.float64))
    scale = 0.05 if norm < 0.95 else 0.01  # larger inputs would saturate tanh and make the hard case easy
    return _dense(generator, AffineTanhCell(weight), batch, scale, f"{norm}-contraction, batch {batch}", **limits)


def easy(batch: int, width: int) -> Case:
    """Return a case with 0.9 times an orthogonal W. Inputs of size one saturate tanh, so Picard needs few steps."""
    generator = torch.Generator().manual_seed(1006)
    cell = AffineTanhCell(0.9 * orthogonal(generator, width))
    return _dense(generator, cell, batch, 1.0, f"0.9 times an orthogonal matrix, {width} numbers, batch {batch}")


def nonnormal(batch: int, norm: float = 1.5, radius: float = 0.92) -> Case:
    """Return a case with |W| > 1 and a spectral radius below 1: errors grow before they decay."""
    generator = torch.Generator().manual_seed(1000)
    basis = orthogonal(generator, WIDTH)
    angles = 2 * torch.pi * torch.rand(WIDTH // 2, generator=generator, dtype=torch.float64)
    radii = torch.linspace(0.1, radius, WIDTH // 2, dtype=torch.float64)
    turns = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], 1).view(-1, 2, 2)
    diagonal = torch.block_diag(*(radii.view(-1, 1, 1) * turns))
    upper = normal(generator, WIDTH, WIDTH).triu(2)
    weight = basis @ (diagonal + _share(diagonal, upper, norm) * upper) @ basis.T
    return _dense(generator, AffineTanhCell(weight), batch, 0.1, f"|W| = {norm}, spectral radius {radius}")


def oscillating(batch: int, lowest: float = -1.5) -> Case:
    """Return a case with a few eigenvalues below -1, for which Picard ends in a cycle of two states."""
    generator = torch.Generator().manual_seed(1000)
    eigenvalues = torch.linspace(-0.9, 0.9, WIDTH, dtype=torch.float64)
    eigenvalues[:4] = lowest * torch.tensor([1.0, 0.97, 0.93, 0.9], dtype=torch.float64)
    weight = _symmetric(generator, eigenvalues)
    note = f"eigenvalues down to {lowest}: Picard does not converge"
    return _dense(generator, AffineTanhCell(weight), batch, 0.1, note)


def mixed(batch: int) -> Case:
    """Return a case in which a tenth of the samples is hard, and the others converge in a few steps."""
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


def gates(batch: int, width: int = WIDTH) -> Case:
    """Return a case with the cell of an LSTM, whose state has two tensors, with one input for all gates."""
    generator = torch.Generator().manual_seed(1007)
    cell = GateCell(generator, width, gain=1.4)
    case = _case(generator, cell, [(batch, width)] * 2, note=f"gates of an LSTM, {width} numbers and as many in its memory")
    u = normal(generator, batch, 4 * width).float().requires_grad_()
    return replace(case, inputs=(u,), max_steps=200)


def graph(batch: int, nodes: int = 400, width: int = 16) -> Case:
    """Return a case of signals on one sparse graph, which the cell averages over neighbours and mixes over channels."""
    generator = torch.Generator().manual_seed(1008)
    cell = GraphCell(generator, ring_with_chords(generator, nodes), width, gain=0.9)
    case = _case(generator, cell, [(batch, nodes, width)], 0.1, f"sparse graph of {nodes} nodes with {width} numbers each")
    return replace(case, max_steps=200)


def trained(batch: int, seed: int) -> Case:
    """Return a case with the cell of a DEQ transformer after a short training, on sequences outside of the training data."""
    model = trained_transformer(seed)
    generator = torch.Generator().manual_seed(1009)
    case = _case(generator, model.cell, [(batch, LENGTH, TRAINED_WIDTH)], note=f"attention block, trained, seed {seed}")
    return replace(case, inputs=(model.injected(batch).requires_grad_(),), max_steps=200)


def transformer(batch: int, length: int = 64, width: int = 128) -> Case:
    generator = torch.Generator().manual_seed(1004)
    cell = AttentionCell(generator, width, gain=0.8)
    return _case(generator, cell, [(batch, length, width)], note=f"attention block, {length} tokens of {width}")


CASES: dict[str, tuple[Callable[[int], Case], int]] = {  # name: (builder, usual batch size)
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
    "mlp-b1": (lambda batch: contraction(batch, 0.9, max_steps=200), 1),
    "mlp-1024": (lambda batch: contraction(batch, 0.9, width=1024, max_steps=200), 32),
    "lstm": (gates, 128),
    "graph": (graph, 16),
    "conv64": (lambda batch: conv(batch, channels=64), 16),
    "trained-0": (lambda batch: trained(batch, 0), 16),
    "trained-1": (lambda batch: trained(batch, 1), 16),
    "trained-2": (lambda batch: trained(batch, 2), 16),
    "easy-b48": (lambda batch: easy(batch, 96), 48),
    "easy-b512": (lambda batch: easy(batch, 128), 512),
}


def _dense(
    generator: Generator,
    cell: AffineTanhCell,
    batch: int,
    scale: float,
    note: str,
    rtol: float = 1e-3,
    max_steps: float = 200,
) -> Case:
    case = _case(generator, cell, [(batch, cell.weight.shape[0])], scale, note)
    return replace(case, rtol=rtol, max_steps=int(max_steps))


def _case(
    generator: Generator, cell: nn.Module, shapes: Sequence[tuple[int, ...]], scale: float = 1.0, note: str = ""
) -> Case:
    """Return a case whose state has one tensor per shape, with an input for each."""
    inputs = tuple((scale * normal(generator, *shape)).float().requires_grad_() for shape in shapes)
    cotangents = tuple((normal(generator, *shape) / shape[0] ** 0.5).float() for shape in shapes)
    starts = tuple(torch.zeros(shape) for shape in shapes)
    single = len(shapes) == 1
    return Case("", cell, inputs, starts[0] if single else starts, cotangents[0] if single else cotangents, note=note)


def _symmetric(generator: Generator, eigenvalues: Tensor) -> Tensor:
    basis = orthogonal(generator, len(eigenvalues))
    return (basis * eigenvalues) @ basis.T


def _share(diagonal: Tensor, upper: Tensor, norm: float) -> float:
    """Return the s for which |diagonal + s upper| = norm, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        too_large = float(torch.linalg.matrix_norm(diagonal + middle * upper, 2)) > norm
        low, high = (low, middle) if too_large else (middle, high)
    return low
