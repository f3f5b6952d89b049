"""Implicit residual networks: counts, their equations, their twins, contraction control."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.implicit_resnet import (
    JACOBIAN,
    ChannelNorm,
    CIFARResNet,
    ImplicitResNet,
    ImplicitResNetConfig,
    LatentCell,
    MNISTResNet,
    SVHNResNet,
)

TIGHT = eq.Stop(rtol=1e-6, atol=1e-6, max_steps=300)


def tiny(kind: type[ImplicitResNetConfig], latent_norm: bool = True) -> ImplicitResNetConfig:
    if kind is MNISTResNet:
        return MNISTResNet(image=(1, 12, 12), channels=8, classes=4, latent_norm=latent_norm)
    if kind is SVHNResNet:
        gamma = 0.9 if latent_norm else 0.5  # without norms 0.9 needs hundreds of steps
        return SVHNResNet(image=(1, 12, 12), channels=8, classes=4, gamma=gamma, tolerance=1e-2, latent_norm=latent_norm)
    return CIFARResNet(image=(1, 8, 8), channels=6, layers=2, blocks=2, classes=4, latent_norm=latent_norm)


TWINS: dict[str, dict[str, Any]] = {"jfb": {}, "jacobian": {"gradient": JACOBIAN}, "explicit": {"depth": 1}}
KINDS = (MNISTResNet, SVHNResNet, CIFARResNet)


def cell_of(model: ImplicitResNet) -> LatentCell:
    cell = model.layer.cell
    assert isinstance(cell, LatentCell)
    return cell


def batch(config: ImplicitResNetConfig) -> tuple[Tensor, Tensor]:
    return torch.rand(8, *config.image), torch.arange(8) % 4


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("kind", "count"), [(MNISTResNet, 54_352), (SVHNResNet, 163_488), (CIFARResNet, 843_430)])
def test_parameters_are_those_of_the_paper_in_all_twins(kind: Any, count: int, twin: str) -> None:
    with torch.device("meta"):
        model = ImplicitResNet(kind(latent_norm=twin != "jacobian"), **TWINS[twin])
    assert parameters(model) == count


def test_the_released_svhn_model_has_two_norms_more_than_it_uses() -> None:
    with torch.device("meta"):
        assert parameters(ImplicitResNet(SVHNResNet())) + 2 * parameters(nn.BatchNorm2d(64)) == 163_744


@pytest.mark.parametrize(
    ("kind", "shape"), [(MNISTResNet, (32, 9, 9)), (SVHNResNet, (64, 8, 8)), (CIFARResNet, (35, 10, 10))]
)
def test_latent_spaces_are_those_of_the_paper(kind: Any, shape: tuple[int, ...]) -> None:
    config = kind()
    with torch.device("meta"):
        v = config.encoder()(torch.empty(1, *config.image))
    assert v.shape[1:] == shape == (config.channels, *config.latent_size)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_finds_the_equilibrium_of_the_paper_s_map(kind: Any) -> None:
    torch.manual_seed(0)
    model = ImplicitResNet(tiny(kind, latent_norm=False), stop=TIGHT).eval()
    with torch.no_grad():
        for conv in cell_of(model).convolutions():
            for p in conv.parameters():
                p.mul_(0.3)
        v = model.encoder(batch(model.config)[0])
        u = model.layer(v)
        gamma, act = model.config.gamma, nn.LeakyReLU(0.1)
        first, second = cell_of(model).first, cell_of(model).second
        w = v + (gamma if kind is CIFARResNet else 1) * u
        for a, b in zip(first, second, strict=True):
            w = act(w + b(act(a(w)))) if kind is CIFARResNet else w + act(act(b(act(a(w)))))
        expected = w if kind is CIFARResNet else gamma * w
    torch.testing.assert_close(u, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twin", TWINS)
def test_every_twin_learns_one_batch_and_round_trips(kind: Any, twin: str) -> None:
    torch.manual_seed(0)
    config = tiny(kind, latent_norm=twin != "jacobian")
    options = TWINS[twin]
    model, (x, y) = ImplicitResNet(config, **options), batch(config)
    # at 1e-2 the exact gradient takes cells without a norm out of contraction within a dozen steps
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss, steps = torch.tensor(torch.inf), 0
    while loss >= 0.5 and steps < 90:  # about thirty
        steps += 1
        with eq.record(model) as solutions:
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if solutions:
            model.contract_(solutions[0])
    assert loss < 0.5
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    other = ImplicitResNet(config, **options)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(x), model.eval()(x))


def test_the_explicit_twin_is_one_application_from_zero_with_the_same_weights() -> None:
    torch.manual_seed(0)
    model = ImplicitResNet(tiny(MNISTResNet)).eval()
    twin = ImplicitResNet(tiny(MNISTResNet), depth=1).eval()
    twin.load_state_dict(model.state_dict())
    x, _ = batch(model.config)
    v = model.encoder(x)
    torch.testing.assert_close(twin(x), model.head(cell_of(model)(torch.zeros_like(v), v)))


def test_conjugate_gradients_on_the_normal_equations_give_the_exact_gradient() -> None:
    torch.manual_seed(0)
    config = tiny(MNISTResNet, latent_norm=False)
    exact = eq.Implicit(solver=eq.NormalCG(), stop=eq.Stop(rtol=1e-6, atol=0.0, max_steps=300))
    model = ImplicitResNet(config, stop=TIGHT, gradient=exact).eval()
    unrolled = ImplicitResNet(config, depth=80).eval()
    with torch.no_grad():
        for conv in cell_of(model).convolutions():
            for p in conv.parameters():
                p.mul_(0.3)
    unrolled.load_state_dict(model.state_dict())
    x, y = batch(config)
    for network in (model, unrolled):
        F.cross_entropy(network(x), y).backward()
    for p, q in zip(model.parameters(), unrolled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("latent_norm", [True, False])
def test_a_batch_is_one_equation_only_while_its_statistics_are_used(latent_norm: bool) -> None:
    torch.manual_seed(0)
    model = ImplicitResNet(tiny(MNISTResNet, latent_norm))
    x, _ = batch(model.config)
    with eq.record(model) as solutions:
        model(x)
        model.eval()(x)
    assert [len(s.stats.status) for s in solutions] == [1 if latent_norm else 8, 8]
    torch.testing.assert_close(model(x[:3]), model(x)[:3], rtol=1e-4, atol=1e-4)


def grown(latent_norm: bool) -> tuple[ImplicitResNet, Tensor]:
    """Return a model with latent convolutions three times as large as initialised."""
    torch.manual_seed(0)
    model = ImplicitResNet(tiny(MNISTResNet, latent_norm))
    with torch.no_grad():
        for conv in cell_of(model).convolutions():
            for p in conv.parameters():
                p.mul_(3.0)
    return model, batch(model.config)[0]


def controlled(model: ImplicitResNet, x: Tensor, bound: float) -> float:
    with eq.record(model) as solutions, torch.no_grad():
        model(x)
    return model.contract_(solutions[0], bound, torch.Generator().manual_seed(0))


def test_contraction_control_brings_the_ratio_down_to_its_bound() -> None:
    model, x = grown(latent_norm=False)
    ratios = [controlled(model, x, bound=0.6) for _ in range(12)]
    assert ratios[0] > 0.9
    assert ratios == sorted(ratios, reverse=True)
    assert 0.6 <= ratios[-1] < 1.05 * 0.6


def test_contraction_control_does_not_change_a_contraction() -> None:
    model, x = grown(latent_norm=True)
    before = [p.clone() for p in cell_of(model).parameters()]
    assert controlled(model, x, bound=model.config.gamma) < model.config.gamma
    assert all(torch.equal(p, q) for p, q in zip(cell_of(model).parameters(), before, strict=True))


def test_the_published_norm_is_the_longest_vector_of_channels() -> None:
    x = torch.rand(4, 3, 5, 5)
    expected = x.norm(dim=1).amax(dim=(1, 2))
    norm = ChannelNorm(3, 25)
    torch.testing.assert_close(norm(x.flatten(1)), expected)
    torch.testing.assert_close(norm(x.reshape(1, -1)), expected.max().view(1))


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"gamma must lie in \(0, 1\)"):
        MNISTResNet(gamma=1.0)
    with pytest.raises(ValueError, match=r"leave \(2, 2\) pixels"):
        MNISTResNet(image=(1, 8, 8))
