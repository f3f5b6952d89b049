from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equilibria.analysis.memory import peak_memory
from equilibria.models import ReversibleStack, RevNet


def stack(blocks: int) -> ReversibleStack:
    torch.manual_seed(0)
    return ReversibleStack([(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)) for _ in range(blocks)]).double()


def plain(model: ReversibleStack, x: Tensor) -> Tensor:
    """Return the output of the same blocks by plain autograd."""
    left, right = x.chunk(2, dim=1)
    for f, g in model.pairs():
        left = left + f(right)
        right = right + g(left)
    return torch.cat([left, right], dim=1)


def test_values_and_gradients_are_those_of_plain_backpropagation() -> None:
    model, x = stack(4), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(model(x), plain(model, x), rtol=0.0, atol=0.0)
    found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    expected = torch.autograd.grad(plain(model, x).square().sum(), [x, *model.parameters()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)  # undoing a block costs digits
    torch.testing.assert_close(model.inverse(model(x)), x, rtol=1e-10, atol=1e-11)


def test_weights_that_blocks_share_add_up() -> None:
    torch.manual_seed(0)
    pair = (nn.Linear(2, 2).double(), nn.Linear(2, 2).double())
    model, x = ReversibleStack([pair] * 3), torch.randn(4, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    found = [weight.grad for weight in model.parameters()]
    expected = torch.autograd.grad(plain(model, x).square().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_memory_does_not_grow_with_the_blocks() -> None:
    x = torch.randn(8, 3, 16, 16)

    def peak(depth: int) -> int:
        model = RevNet(depth=depth, tied=True)
        model(x).sum().backward()
        return peak_memory(lambda: model(x).sum().backward(), x.device)

    assert peak(16) < 1.1 * peak(4)


@pytest.mark.parametrize(("options", "why"), [({"width": 5}, "even"), ({"depth": 0}, "at least 1")])
def test_impossible_sizes_are_refused(options: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RevNet(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one block"):
        ReversibleStack([])
    with pytest.raises(ValueError, match="split in halves"):
        stack(1)(torch.zeros(2, 5, dtype=torch.float64))
