"""Small models to serve, in float64."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.serving import engine, pool, tickets
from tests.problems import matrix

HOUR = 3600.0

STOP = eq.Stop(rtol=1e-7, atol=1e-9, max_steps=60, on_failure="ignore")
SOLVERS = [
    eq.Picard(),
    eq.Picard(damping=0.7),
    eq.Anderson(),
    eq.Anderson(history=3, damping=0.8),
    eq.Broyden(),
    eq.Broyden(history=4),
]


class Clock:
    """The engine's clock for deadlines, put forward by hand: no test depends on how busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0
        for module in (engine, pool, tickets):
            own = SimpleNamespace(monotonic=lambda: time.monotonic() + self.passed, perf_counter=time.perf_counter)
            monkeypatch.setattr(module, "time", own)


class GainCell(nn.Module):
    """tanh(gain(x) W z + x): larger inputs, up to a bound, converge more slowly."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix("orthogonal", n, 0.97, seed))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        gain = (0.2 + x.square().mean(dim=1, keepdim=True)).clamp(max=1.0)
        return torch.tanh(gain * (z @ self.weight.T) + x)


class Net(nn.Module):
    """A model with a module before the layer, one after it, and a skip connection around both."""

    def __init__(self, solver: Any = eq.Anderson(), n: int = 10, seed: int = 0, stop: eq.Stop = STOP) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Linear(4, n).double()
        self.layer = eq.DEQ(GainCell(n, seed), solver=solver, stop=stop)
        self.head = nn.Linear(n, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(0.3 * self.encoder(x))) + x[:, :3]
        return out


def requests(count: int, seed: int = 0) -> list[Tensor]:
    """Inputs of mixed difficulty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(count, generator=generator).double() * 4
    return [size * torch.randn(4, dtype=torch.float64, generator=generator) for size in sizes]


def alone(model: nn.Module, x: Any, **changes: Any) -> tuple[Any, eq.Stats]:
    """The model's own answer for one sample, and its statistics."""
    layer = next(module for module in model.modules() if isinstance(module, eq.DEQ))
    before = layer.stop
    layer.stop = eq.Stop(**{**vars(before), **changes})
    try:
        with torch.no_grad(), eq.record(model) as solutions:
            out = model.eval()(x.unsqueeze(0))
    finally:
        layer.stop = before
    return out, solutions[0].stats
