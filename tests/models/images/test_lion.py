"""Equilibrium prompts around a frozen backbone, and their pruning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.lion import CONTRACTION, Lion, LionConfig, Pruning, PruningConfig

CONFIG = LionConfig(features=6, classes=4, image_channels=1, image_hidden=4, feature_hidden=8, groups=2)


class Tokens(nn.Module):
    """A backbone that returns (batch, tokens, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 6, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).transpose(1, 2)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5))


BACKBONES = [convolutional, Tokens, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6))]


def tiny(backbone: nn.Module | None = None, **options: Any) -> Lion:
    torch.manual_seed(0)
    return Lion(backbone or convolutional(), CONFIG, **options)


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def train(model: Lion, pruning: Pruning | None = None, steps: int = 50) -> float:
    x, y = batch()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if pruning is None:
            optimizer.step()
        else:
            pruning.step(optimizer)
    return loss.item()


@pytest.mark.parametrize("build", BACKBONES)
@pytest.mark.parametrize("gradient", [eq.Implicit(), eq.JFB()], ids=repr)
def test_prompts_fit_one_batch_around_any_backbone_and_do_not_change_it(build: Any, gradient: eq.Gradient) -> None:
    torch.manual_seed(0)
    backbone = build()
    model = tiny(backbone, gradient=gradient)
    model.train()
    assert train(model) < 0.7
    assert all(torch.equal(v, backbone.state_dict()[k]) for k, v in model.backbone.state_dict().items())
    assert all(p.grad is None for p in model.backbone.parameters())
    assert all(p.requires_grad for p in backbone.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


def test_a_model_round_trips() -> None:
    model = tiny()
    train(model, steps=3)
    other = Lion(convolutional(), CONFIG)
    other.load_state_dict(model.state_dict())
    x, _ = batch()
    torch.testing.assert_close(other(x), model(x))


def test_trained_parameters_are_counted() -> None:
    model = tiny()
    before, behind = 2 * 4 * 9 + 4 + 2 * 4 + 4 * 9, 2 * 6 * 8 + 8 + 2 * 8 + 8 * 6
    assert parameters(model) == before + behind + 6 * 4 + 4
    frozen = parameters(convolutional())
    assert model.trained_share() == pytest.approx(parameters(model) / (parameters(model) + frozen))
    assert sum(p.numel() for p in model.prunable().values()) == 3 * 4 * 9 + 3 * 6 * 8


def test_the_prompts_are_equilibria_added_to_image_and_features() -> None:
    model = tiny(stop=eq.Stop(rtol=1e-5))
    x, _ = batch()
    with eq.record(model) as solutions:
        out = model(x)
    first, second = solutions
    assert isinstance(first.z, Tensor) and isinstance(second.z, Tensor)
    torch.testing.assert_close(first.f(first.z), first.z, rtol=1e-3, atol=1e-4)
    h = model.backbone(x + first.z).mean(dim=(2, 3))
    torch.testing.assert_close(out, model.head(h + second.z))


def test_prompts_contract_however_large_their_weights() -> None:
    model = tiny()
    with torch.no_grad():
        for p in model.prunable().values():
            p.mul_(50.0)
    x, _ = batch()
    for layer, inputs in ((model.before, x), (model.behind, torch.rand(8, 6))):
        solution = layer.solve(inputs)
        assert solution.stats.converged.all()
        assert eq.analysis.largest_singular_value(solution).value.max() <= CONTRACTION + 1e-3


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_pruning_removes_the_share_of_its_settings(keep: float) -> None:
    model = tiny()
    pruning = Pruning(model.prunable(), PruningConfig(keep=keep))
    total = sum(p.numel() for p in model.prunable().values())
    for _ in range(3):
        train(model, pruning, steps=5)
        pruning.select()
    removed = pruning.remove_()
    assert removed == total - round(keep * total)
    assert sum(int((p == 0).sum()) for p in model.prunable().values()) == removed
    losses = [train(model, pruning, steps=40) for _ in range(3)]  # one round is enough for most seeds
    assert sum(int((p == 0).sum()) for p in model.prunable().values()) == removed
    assert min(losses) < 0.7


def test_the_largest_scores_are_critical_and_the_rest_decays() -> None:
    w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 4.0]))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.1)
    pruning = Pruning({"w": w}, PruningConfig(keep=0.5, decay=0.5))
    w.grad = torch.tensor([5.0, 0.1, 1.0, -0.5])  # |w g|: 5, 0.2, 3, 2
    pruning.step(optimizer)
    assert pruning.scores["w"].tolist() == pytest.approx([5.0, 0.2, 3.0, 2.0])
    pruning.select()
    assert pruning.critical["w"].tolist() == [True, False, True, False]
    before = w.detach().clone()
    w.grad = torch.ones(4)
    pruning.step(optimizer)
    torch.testing.assert_close(w.detach()[[1, 3]], 0.5 * before[[1, 3]])
    assert (w.detach()[[0, 2]] < before[[0, 2]]).all()
    assert pruning.remove_() == 2 and w.detach()[[1, 3]].tolist() == [0.0, 0.0]


def test_pruning_resumes_from_a_checkpoint() -> None:
    model = tiny()
    pruning = Pruning(model.prunable())
    train(model, pruning, steps=2)
    pruning.select()
    train(model, pruning, steps=1)
    other = Pruning(model.prunable())
    other.load_state_dict(pruning.state_dict())
    for name in model.prunable():
        assert torch.equal(other.critical[name], pruning.critical[name])
        assert torch.equal(other.scores[name], pruning.scores[name])
    with pytest.raises(ValueError, match="Load the state that was saved with this model"):
        Pruning({"w": nn.Parameter(torch.ones(2))}).load_state_dict(pruning.state_dict())


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"returned shape \(8, 5\), but 6 features per image"):
        tiny(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))(batch()[0])
    with pytest.raises(ValueError, match=r"keep must lie in"):
        PruningConfig(keep=0.0)
    with pytest.raises(ValueError, match="is not divisible by groups=3"):
        LionConfig(features=6, groups=3)
    pruning = Pruning(tiny().prunable())
    pruning.remove_()
    with pytest.raises(RuntimeError, match="select cannot be called after remove_"):
        pruning.select()
