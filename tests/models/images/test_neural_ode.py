"""Neural ODEs: the integrators on equations with known answers, and the models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.models.entries import parameters
from equilibria.models.images.neural_ode import (
    ANODE_CIFAR10,
    ANODE_MNIST,
    NODE_CIFAR10,
    NODE_MNIST,
    AdaptiveSteps,
    FixedSteps,
    Integrator,
    NeuralODE,
    NeuralODEConfig,
)
from equilibria.solvers.tableaus import TABLEAUS

METHODS = tuple(TABLEAUS)
TINY = NeuralODEConfig(image=(1, 6, 6), filters=6, augment=2, classes=4)


def falling(t: float, h: Tensor) -> Tensor:
    """h' = -h^2 (1 + t), hence 1 / h(1) = 1 / h(0) + 3 / 2."""
    return -(h**2) * (1 + t)


def swinging(t: float, h: Tensor) -> Tensor:
    """h' = h cos 5t, hence h(1) = h(0) exp(sin(5) / 5)."""
    return h * math.cos(5 * t)


EXACT = math.exp(math.sin(5) / 5)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (NODE_MNIST, 85_316),
        (ANODE_MNIST, 85_462),
        (NODE_CIFAR10, 171_352),
        (NeuralODEConfig(image=(3, 32, 32), filters=125), 173_611),
        (ANODE_CIFAR10, 172_452),
    ],
)
def test_parameters_are_those_published(config: NeuralODEConfig, count: int) -> None:
    with torch.device("meta"):
        assert parameters(NeuralODE(config)) == count


@pytest.mark.parametrize("method", METHODS)
def test_equal_steps_have_the_order_of_their_method(method: Any) -> None:
    h = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    exact = 1 / (1 / h + 1.5)
    errors = [float((FixedSteps(method=method, steps=n).integrate(falling, h).h - exact).abs().max()) for n in (20, 40)]
    assert math.log2(errors[0] / errors[1]) > TABLEAUS[method].order - 0.5  # more is luck, with steps this long


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
def test_adaptive_steps_keep_the_tolerance(method: Any, tolerance: float) -> None:
    h = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    flow = AdaptiveSteps(method=method, rtol=tolerance, atol=tolerance, max_steps=5000).integrate(swinging, h)
    assert float((flow.h - EXACT * h).abs().max()) < 10 * tolerance
    stages = len(TABLEAUS[method].rows)
    assert flow.evaluations == 1 + stages * (flow.steps + flow.rejected)


def test_a_first_step_that_is_too_long_is_rejected() -> None:
    h = torch.ones(1, 1, dtype=torch.float64)
    flow = AdaptiveSteps(method="bs3", rtol=1e-8, atol=1e-8, first_step=1.0).integrate(swinging, h)
    assert flow.rejected >= 1 and float(flow.h) == pytest.approx(EXACT, rel=1e-6)


@pytest.mark.parametrize("integrator", [FixedSteps(steps=3), AdaptiveSteps()], ids=repr)
def test_gradients_are_those_of_the_steps(integrator: Integrator) -> None:
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    h = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)

    def end(h: Tensor, rate: Tensor) -> Tensor:
        return integrator.integrate(lambda t, h: torch.tanh(rate * h) + t, h).h

    assert torch.autograd.gradcheck(end, (h, rate), atol=1e-6)


def test_equal_steps_count_their_evaluations() -> None:
    assert FixedSteps(steps=4).integrate(swinging, torch.ones(1, 1)).evaluations == 24
    assert FixedSteps(method="heun", steps=4).integrate(swinging, torch.ones(1, 1)).evaluations == 8


def test_a_diverging_flow_raises() -> None:
    with pytest.raises(RuntimeError, match=r"stopped at t = 0\.\d+ of 1"):
        AdaptiveSteps().integrate(lambda t, h: h**3, torch.full((1, 1), 3.0))


def test_the_state_is_the_image_with_channels_of_zeros() -> None:
    model = NeuralODE(TINY)
    for p in model.field.parameters():
        torch.nn.init.zeros_(p)
    images = torch.rand(2, 1, 6, 6)
    h = model.flow(images).h
    assert h.shape == (2, 3, 6, 6)
    torch.testing.assert_close(h[:, :1], images)
    assert not h[:, 1:].any()


@pytest.mark.parametrize("integrator", [FixedSteps(method="tsit5", steps=3), AdaptiveSteps(method="bs3")], ids=repr)
@pytest.mark.parametrize("augment", [0, 2])
def test_a_model_learns_one_batch_and_round_trips(augment: int, integrator: Integrator) -> None:
    torch.manual_seed(0)
    config = NeuralODEConfig(image=(1, 6, 6), filters=6, augment=augment, classes=4)
    model, x, y = NeuralODE(config, integrator=integrator), torch.rand(8, 1, 6, 6), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(40):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    assert all(p.grad is not None for p in model.parameters())
    other = NeuralODE(config, integrator=integrator)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="method must be one of tsit5, bs3, dopri5, heun, got 'rk4'"):
        FixedSteps(method="rk4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"takes images of shape \(batch, 1, 6, 6\), got \(2, 1, 8, 8\)"):
        NeuralODE(TINY)(torch.rand(2, 1, 8, 8))
    with pytest.raises(ValueError, match="augment must not be negative"):
        NeuralODEConfig(augment=-1)
