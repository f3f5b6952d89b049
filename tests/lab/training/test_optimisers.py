from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from equilibria.lab.training import Optimizer, Schedule
from equilibria.lab.training.optimisers import Average, lr_factor, make_optimizer, momentum_at, set_momentum

STEPS = 100


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (Schedule(), 0, 1.0),
        (Schedule(), 99, 1.0),
        (Schedule(warmup_steps=10), 0, 0.1),
        (Schedule(warmup_steps=10), 9, 1.0),
        (Schedule(name="cosine"), 0, 1.0),
        (Schedule(name="cosine"), 50, 0.5),
        (Schedule(name="cosine"), 99, (1 + math.cos(math.pi * 0.99)) / 2),
        (Schedule(name="cosine", warmup_steps=20, final=0.1), 60, 0.1 + 0.9 * 0.5),
        (Schedule(name="linear", final=0.2), 25, 0.8),
        (Schedule(name="linear", warmup_steps=50), 75, 0.5),
        (Schedule(name="step", milestones=(0.5, 0.75)), 49, 1.0),
        (Schedule(name="step", milestones=(0.5, 0.75)), 50, 0.1),
        (Schedule(name="step", milestones=(0.5, 0.75), factor=0.5), 75, 0.25),
        (Schedule(name="inverse-sqrt", warmup_steps=4), 3, 1.0),
        (Schedule(name="inverse-sqrt", warmup_steps=4), 15, 0.5),
        (Schedule(name="inverse-sqrt"), 24, 0.2),
    ],
)
def test_learning_rates_follow_their_formulas(schedule: Schedule, step: int, factor: float) -> None:
    assert lr_factor(schedule, step, STEPS) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        (Optimizer(name="sgd", lr=0.1), 0.1 * 2.0),
        (Optimizer(name="sgd", lr=0.1, weight_decay=0.5), 0.1 * (2.0 + 0.5 * 3.0)),
        (Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=True), 0.1 * (2.0 + 0.9 * 2.0)),
        (Optimizer(name="adam", lr=0.1), 0.1),  # the first step of Adam is lr · sign
        (Optimizer(name="adamw", lr=0.1, weight_decay=0.5), 0.1 + 0.1 * 0.5 * 3.0),  # decay beside the gradient
        (Optimizer(name="rmsprop", lr=0.1), 0.1 / math.sqrt(0.01)),
    ],
)
def test_the_first_step_of_every_optimiser_matches_its_formula(settings: Optimizer, moved: float) -> None:
    weight = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    optimizer = make_optimizer(settings, [weight])
    weight.grad = torch.tensor([2.0], dtype=torch.float64)
    optimizer.step()
    assert 3.0 - weight.item() == pytest.approx(moved, rel=1e-6)  # Adam and RMSprop divide by |g| + 1e-8


def test_the_average_follows_its_recursion() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    average, expected = Average(model, 0.5), model.weight.item()
    for n, value in enumerate((1.0, 4.0, -2.0, 7.0, 3.0, 8.0, 1.0, 5.0, 6.0, 2.0)):
        nn.init.constant_(model.weight, value)
        average.update(model)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value
    assert average.means["weight"].item() == pytest.approx(expected, rel=1e-12)
    with average.in_place(model):
        assert model.weight.item() == average.means["weight"].item()
    assert model.weight.item() == 2.0


@pytest.mark.parametrize("settings", [Optimizer(lr=0.01), Optimizer(name="sgd", lr=0.05, momentum=0.9)])
def test_one_cycle_equals_the_schedule_of_torch(settings: Optimizer) -> None:
    weight, schedule = nn.Parameter(torch.zeros(1)), Schedule(name="one-cycle")
    ours, theirs = make_optimizer(settings, [weight]), make_optimizer(settings, [weight])
    cycle = torch.optim.lr_scheduler.OneCycleLR(theirs, settings.lr, total_steps=STEPS)
    for step in range(STEPS):
        momentum = momentum_at(schedule, step, STEPS)
        assert momentum is not None
        set_momentum(ours, momentum)
        group, expected = ours.param_groups[0], theirs.param_groups[0]
        assert settings.lr * lr_factor(schedule, step, STEPS) == pytest.approx(expected["lr"], rel=1e-6)
        assert group.get("betas", group.get("momentum")) == pytest.approx(
            expected.get("betas", expected.get("momentum")), rel=1e-9
        )
        theirs.step()
        if step < STEPS - 1:
            cycle.step()
    assert momentum_at(Schedule(), 0, STEPS) is None
