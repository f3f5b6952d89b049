"""Explicit networks beside equilibria."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.explicit_nets import (
    BasicBlock,
    ResNet,
    ResNetConfig,
    UntiedStack,
    matched_width,
    untied,
    weight_tied,
)

TINY = ResNetConfig(depth=8, channels=(4, 8, 8), classes=4)


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.state.weight, gain=0.4)

    def prepare(self, x: Tensor) -> Tensor:
        return 2 * x

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.state(z) + x)


def model(width: int = 6) -> nn.Module:
    layer = eq.DEQ(Cell(width), stop=eq.Stop(rtol=1e-5))
    return nn.Sequential(nn.Linear(5, width), layer, nn.Linear(width, 3))


@pytest.mark.parametrize(("depth", "count"), [(20, 269_722), (56, 853_018)])
def test_residual_networks_have_the_known_number_of_parameters(depth: int, count: int) -> None:
    with torch.device("meta"):
        assert parameters(ResNet(ResNetConfig(depth=depth))) == count


def test_the_depth_of_a_residual_network_counts_its_layers_with_weights() -> None:
    with torch.device("meta"):
        net = ResNet()
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == net.config.depth == 56


def test_a_shortcut_takes_every_other_pixel_and_adds_channels_of_zeros() -> None:
    block = BasicBlock(2, 4, stride=2).eval()
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(3, 2, 6, 6)
    out = block(x)
    assert out.shape == (3, 4, 3, 3)
    torch.testing.assert_close(out[:, 1:3], x[:, :, ::2, ::2])
    assert not out[:, [0, 3]].any()


def test_a_residual_network_learns_one_batch_and_round_trips() -> None:
    torch.manual_seed(0)
    net, x, y = ResNet(TINY), torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(30):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    other = ResNet(TINY)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other.eval()(x), net.eval()(x))


def test_the_weight_tied_twin_has_the_same_weights_and_reaches_the_same_answer() -> None:
    torch.manual_seed(0)
    implicit, x = model(), torch.rand(4, 5)
    twin = weight_tied(implicit, depth=30)
    assert parameters(twin) == parameters(implicit)
    torch.testing.assert_close(twin(x), implicit(x), rtol=1e-4, atol=1e-4)
    weight_tied(implicit, depth=2).load_state_dict(implicit.state_dict())
    assert not torch.allclose(weight_tied(implicit, depth=1)(x), implicit(x), atol=1e-3)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_untied_twin_has_a_cell_for_every_step_and_begins_as_the_tied_one(depth: int) -> None:
    torch.manual_seed(0)
    implicit, x = model(), torch.rand(4, 5)
    twin = untied(implicit, depth)
    assert parameters(twin) == parameters(implicit) + (depth - 1) * 36
    torch.testing.assert_close(twin(x), weight_tied(implicit, depth)(x))
    twin(x).square().sum().backward()
    gradients = [p.grad for name, p in twin.named_parameters() if "state" in name]
    assert len(gradients) == depth and all(g is not None for g in gradients)


def test_the_original_model_is_not_modified() -> None:
    implicit = model()
    untied(implicit, 2)
    weight_tied(implicit, 2)
    assert isinstance(implicit[1], eq.DEQ)  # type: ignore[index]


def test_a_layer_alone_has_twins_too_and_starts_at_its_init() -> None:
    layer = eq.DEQ(Cell(3), init=eq.FirstStep())
    stack, x = untied(layer, 2), torch.rand(2, 3)
    assert isinstance(stack, UntiedStack)
    torch.testing.assert_close(stack(x), weight_tied(layer, 3)(x, init=torch.zeros_like(x)))
    torch.testing.assert_close(stack(x, init=torch.zeros_like(x)), weight_tied(layer, 2)(x, init=torch.zeros_like(x)))


@pytest.mark.parametrize("count", [100, 500, 5_000])
def test_widths_are_matched_to_a_count(count: int) -> None:
    def size(width: int) -> int:
        return parameters(untied(model(width), 3))

    width = matched_width(lambda width: untied(model(width), 3), count, largest=64)
    distances = {other: abs(size(other) - count) for other in range(1, 65)}
    assert distances[width] == min(distances.values())


def test_a_model_without_an_equilibrium_has_no_twin() -> None:
    with pytest.raises(ValueError, match=r"This Linear contains no eq\.DEQ"):
        weight_tied(nn.Linear(2, 2), 3)
    with pytest.raises(TypeError, match="can be untied"):
        untied(eq.DEQ(lambda z, x: 0.5 * z + x), 2)
    with pytest.raises(ValueError, match="depth must be 6 n"):
        ResNetConfig(depth=18)
    with pytest.raises(ValueError, match="impossible from 4 to 7"):
        BasicBlock(4, 7)
