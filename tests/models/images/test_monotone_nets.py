"""Monotone operator networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria.models.entries import parameters
from equilibria.models.images.monotone_nets import (
    MonotoneConfig,
    MonotoneConvConfig,
    MonotoneMLPConfig,
    MonotoneNet,
    MonotoneTiersConfig,
    SplittingConfig,
)

COLOUR = (3, 32, 32)
SMALL = {"image": (1, 4, 4), "classes": 4}
TINY: list[MonotoneConfig] = [
    MonotoneMLPConfig(**SMALL, width=10),  # type: ignore[arg-type]
    MonotoneConvConfig(**SMALL, channels=4, pool=2),  # type: ignore[arg-type]
    MonotoneTiersConfig(**SMALL, channels=(4, 6)),  # type: ignore[arg-type]
]
TIGHT = eq.Stop(rtol=1e-6, atol=1e-7, max_steps=3000)
FORWARD_BACKWARD = SplittingConfig(method="forward-backward", alpha=0.05)


def tiny(config: MonotoneConfig, **options: Any) -> MonotoneNet:
    torch.manual_seed(0)
    return MonotoneNet(config, **options)


def train(model: MonotoneNet, enough: float = 0.3, steps: int = 90) -> float:
    """Train until the loss is below `enough`, which takes about thirty steps."""
    x, y = batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    for _ in range(steps):
        if "Forward" in type(model.splitting).__name__:
            model.make_safe_()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < enough:
            break
    return loss.item()


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def smallest_eigenvalue(model: MonotoneNet) -> float:
    """Return the smallest eigenvalue of the symmetric part of I - W with W as a matrix."""
    cell = copy.deepcopy(model.splitting.cell).double()
    x = model.config.prepared(batch()[0][:1].double())
    leaves, structure = pytree.tree_flatten(cell.start(x))
    sizes = [leaf.numel() for leaf in leaves]
    operator = pytree.tree_map(Tensor.detach, cell.operator())

    def product(flat: Tensor) -> Tensor:
        parts = [part.view_as(leaf) for part, leaf in zip(flat.split(sizes), leaves, strict=True)]
        out = cell.multiply(pytree.tree_unflatten(parts, structure), operator)
        return torch.cat([part.flatten() for part in pytree.tree_leaves(out)])

    W = torch.func.jacrev(product)(torch.zeros(sum(sizes), dtype=torch.float64))
    rest = torch.eye(len(W), dtype=W.dtype) - W
    return float(torch.linalg.eigvalsh((rest + rest.mT) / 2).min())


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (MonotoneMLPConfig(), 84_313),
        (MonotoneConvConfig(), 79_500),
        (MonotoneConvConfig(image=COLOUR, channels=81), 172_218),
        (MonotoneConvConfig(image=COLOUR, channels=200), 853_612),
        (MonotoneTiersConfig(), 81_394),
        (MonotoneTiersConfig(image=COLOUR, channels=(16, 32, 60)), 170_194),
        (MonotoneTiersConfig(image=COLOUR, channels=(64, 128, 128)), 1_014_546),
    ],
)
def test_parameters_are_those_published(config: MonotoneConfig, count: int) -> None:
    with torch.device("meta"):
        assert parameters(MonotoneNet(config)) == count


@pytest.mark.parametrize("config", [MonotoneConvConfig(), MonotoneTiersConfig()], ids=lambda config: type(config).__name__)
def test_published_shapes_fit_their_heads(config: MonotoneConfig) -> None:
    model = MonotoneNet(config, stop=eq.Stop(rtol=0.5, max_steps=2, on_failure="ignore"))
    with torch.no_grad():
        assert model(torch.rand(1, *config.image)).shape == (1, 10)


@pytest.mark.parametrize("method", ["peaceman-rachford", "forward-backward"])
@pytest.mark.parametrize("config", TINY, ids=lambda config: type(config).__name__)
def test_a_model_learns_one_batch_stays_monotone_and_round_trips(config: MonotoneConfig, method: Any) -> None:
    # plain iteration needs fifty steps of forward-backward splitting in either direction, Anderson's a few
    options: dict[str, Any] = {"solver": eq.Picard() if method == "peaceman-rachford" else eq.Anderson()}
    model = tiny(config, splitting=SplittingConfig(method=method), **options)
    assert train(model) < 0.3
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert smallest_eigenvalue(model) >= config.m - 1e-6
    other = MonotoneNet(config, splitting=SplittingConfig(method=method, alpha=model.splitting.alpha), **options)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(batch()[0]), model(batch()[0]))


@pytest.mark.parametrize("config", TINY, ids=lambda config: type(config).__name__)
def test_both_splittings_give_the_same_answer_and_gradient(config: MonotoneConfig) -> None:
    one = tiny(config, stop=TIGHT)
    other = tiny(config, stop=TIGHT, splitting=FORWARD_BACKWARD)
    other.load_state_dict(one.state_dict())
    other.make_safe_()
    x, y = batch()
    for model in (one, other):
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(one(x), other(x), rtol=1e-3, atol=1e-4)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4)


def test_networks_stay_monotone_for_large_weights() -> None:
    model = tiny(TINY[0])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20.0)
    assert smallest_eigenvalue(model) >= 1 - 1e-6
    with eq.record(model) as solutions:
        model(batch()[0])
    assert solutions[0].stats.converged.all()


def test_the_step_is_tuned_to_the_fewest_steps() -> None:
    model = tiny(TINY[0], stop=TIGHT)
    x, _ = batch()

    def steps(alpha: float) -> int:
        model.splitting.alpha = alpha
        with eq.record(model) as solutions, torch.no_grad():
            model(x)
        return int(solutions[0].stats.steps.max())

    tuned = model.tune_alpha_(x)
    assert model.splitting.alpha == tuned
    assert steps(tuned) <= steps(1.0)


def test_other_solvers_and_gradients_are_used() -> None:
    model = tiny(TINY[0], solver=eq.Anderson(), gradient=eq.JFB())
    deq: Any = model.layer.deq
    assert deq.solver == eq.Anderson() and deq.gradient == eq.JFB()
    assert train(model) < 0.5


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="method must be one of peaceman-rachford, forward-backward, got 'douglas'"):
        SplittingConfig(method="douglas")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"share must lie in \(0, 1\)"):
        tiny(TINY[0]).make_safe_(1.0)
