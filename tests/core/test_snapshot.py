"""Modules run with other tensors, and left as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria._core.frozen_cell import Snapshot
from tests.problems import TIGHT, inputs


class Twice(nn.Module):
    """One layer under two names, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(3, 3).double()
        self.third = nn.Linear(3, 3, bias=False).double()
        self.third.weight = self.first.weight

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(0.3 * self.third(self.second(torch.tanh(self.first(z)))) + x)
        return out


class Counting(nn.Module):
    """A buffer that is rebound, not changed."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> Tensor:
        self.count = self.count + 1
        return self.count


def test_a_tensor_takes_the_place_of_another_wherever_it_is_used() -> None:
    module, x = Twice(), inputs(2, 3)
    weight, bias = module.first.weight, module.first.bias
    assert [name for name, _ in module.named_parameters()] == ["first.weight", "first.bias"]
    out = Snapshot(module).call({"first.weight": torch.eye(3).double(), "first.bias": torch.zeros(3).double()}, (x, x))
    torch.testing.assert_close(out, torch.tanh(0.3 * torch.tanh(x) + x))
    assert module.first.weight is weight and module.third.weight is weight and module.first.bias is bias
    assert isinstance(module.first.weight, nn.Parameter)


def test_after_an_error_the_module_has_its_own_tensors() -> None:
    module = Twice()
    weight = module.first.weight
    with pytest.raises(RuntimeError):
        Snapshot(module).call({"first.weight": torch.zeros(5, 5).double()}, (inputs(2, 3), inputs(2, 3)))
    assert module.first.weight is weight and module.third.weight is weight


def test_rebound_buffers_are_rebound_outside() -> None:
    module, tensors = Counting(), {"count": torch.tensor(5.0)}
    assert [float(Snapshot(module).call(tensors, ())) for _ in range(2)] == [6, 7]
    assert float(tensors["count"]) == 7 and float(module.count) == 0


def test_a_deq_leaves_a_cell_with_a_shared_layer_whole() -> None:
    cell, x = Twice(), inputs(4, 3).requires_grad_()
    weight = cell.first.weight
    z = eq.DEQ(cell, stop=TIGHT)(x)
    ours = torch.autograd.grad(z.square().sum(), [x, *cell.parameters()], create_graph=True)
    assert cell.first.weight is weight and cell.third.weight is weight
    reference = torch.zeros_like(x)
    for _ in range(200):
        reference = cell(reference, x)
    expected = torch.autograd.grad(reference.square().sum(), [x, *cell.parameters()])
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
