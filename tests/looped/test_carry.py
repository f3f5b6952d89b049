"""Carry and Halting: rows that are kept over training steps, and the rules by which they halt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.models import Reasoner

HALF = eq.Stop(rtol=0.5)


def start(batch: Any) -> Tensor:
    return torch.zeros(len(batch[0]), 2)


def batch(values: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(values), torch.tensor(values) * 10


def test_rows_are_replaced_when_they_halt_and_other_rows_continue() -> None:
    carry = eq.looped.Carry()
    (x, y), state = carry.admit(batch([1, 2, 3]), start)
    assert x.tolist() == [1, 2, 3] and not state.any()
    carry.advance(state + 1, torch.tensor([False, True, False]))
    assert carry.steps.tolist() == [1, 1, 1]
    (x, y), state = carry.admit(batch([4, 5, 6]), start)
    assert x.tolist() == [1, 5, 3] and y.tolist() == [10, 50, 30]
    assert state[:, 0].tolist() == [1, 0, 1] and carry.steps.tolist() == [1, 0, 1]
    carry.advance(state.requires_grad_() + 1, torch.tensor([True, False, False]))
    (x, _), state = carry.admit(batch([7, 8, 9]), start)
    assert x.tolist() == [7, 5, 3] and not state.requires_grad
    assert state[:, 0].tolist() == [0, 1, 2]


def test_staggered_rows_reach_the_limit_at_different_times() -> None:
    torch.manual_seed(0)
    carry, limit, rows = eq.looped.Carry(stagger=4), 4, 64
    batch, replaced = torch.zeros(rows, 1), []
    for _ in range(2 * limit):
        _, state = carry.admit(batch, lambda fresh: torch.zeros(len(fresh), 2))
        carry.advance(state, carry.steps + 1 >= limit)
        replaced.append(int(carry.halted.sum()))
    assert all(0 < count < rows for count in replaced) and sum(replaced[:limit]) == sum(replaced[limit:]) == rows
    with pytest.raises(ValueError, match="stagger must be at least 1"):
        eq.looped.Carry(stagger=0)


def test_starts_are_drawn_only_for_new_samples() -> None:
    asked: list[list[float]] = []

    def noted(samples: Any) -> Tensor:
        asked.append(samples[0].tolist())
        return start(samples)

    carry = eq.looped.Carry()
    _, state = carry.admit(batch([1, 2, 3]), noted)
    carry.advance(state, torch.tensor([False, True, False]))
    first = carry.admit(batch([4, 5, 6]), noted)[1]
    carry.advance(state, torch.zeros(3, dtype=torch.bool))
    second = carry.admit(batch([7, 8, 9]), noted)[1]
    assert asked == [[1, 2, 3], [5]]
    assert first.shape == second.shape == (3, 2)


def test_a_row_that_is_not_finite_halts() -> None:
    carry = eq.looped.Carry()
    _, state = carry.admit(batch([1, 2]), start)
    carry.advance(torch.tensor([[1.0, 1.0], [1.0, torch.nan]]), torch.tensor([False, False]))
    assert carry.halted.tolist() == [False, True]
    (x, _), state = carry.admit(batch([3, 4]), start)
    assert x.tolist() == [1, 4] and bool(torch.isfinite(state).all())


def test_a_carry_is_restored_from_its_state_dict() -> None:
    carry, other = eq.looped.Carry(), eq.looped.Carry()
    like = (batch([0]), torch.zeros(1, 2))
    other.load_state_dict(carry.state_dict(), like)  # before the first batch there is nothing
    _, state = carry.admit(batch([1, 2]), start)
    carry.advance(state + 3, torch.tensor([True, False]))
    other.load_state_dict(carry.state_dict(), like)
    for each in (carry, other):
        (x, y), state = each.admit(batch([5, 6]), start)
        assert x.tolist() == [5, 2] and y.tolist() == [50, 20] and state[:, 0].tolist() == [0, 3]
    with pytest.raises(ValueError, match=r"holds 2 rows, but got a batch of 1.*drop_last=True"):
        carry.admit(batch([1]), start)
    with pytest.raises(RuntimeError, match="Call admit first"):
        eq.looped.Carry().advance(state, torch.tensor([True]))
    with pytest.raises(ValueError, match="has 3 tensors"):
        other.load_state_dict(carry.state_dict(), (torch.zeros(1), torch.zeros(1)))


def test_rows_halt_by_head_and_by_convergence() -> None:
    halt, residual = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0.1, 0.9, 0.1, 0.9])
    expected = {
        "head": [True, True, False, False],
        "convergence": [True, False, True, False],
        "both": [True, False, False, False],
        "either": [True, True, True, False],
        "limit": [False] * 4,
    }
    for by, wanted in expected.items():
        halting = eq.looped.Halting(by=by, stop=HALF, max_steps=3, explore=0.0)  # type: ignore[arg-type]
        assert halting.wants(halt, residual).tolist() == wanted
        assert halting.in_training(torch.full((4,), 2), halt, residual).tolist() == wanted
        assert halting.in_training(torch.full((4,), 3), halt, residual).all()
    with pytest.raises(ValueError, match="by must be one of"):
        eq.looped.Halting(by="luck")  # type: ignore[arg-type]


def test_exploring_rows_do_not_halt_early() -> None:
    torch.manual_seed(0)
    many = torch.ones(4000)
    halting = eq.looped.Halting(max_steps=4, explore=0.3)
    for steps, share in ((1, 0.7), (2, 0.8), (3, 0.9), (4, 1.0)):  # of those that explore, a third may halt at 2, two at 3
        halted = halting.in_training(torch.full((4000,), steps), many, many).double().mean()
        assert abs(float(halted) - share) < 0.04  # five standard deviations


def test_rows_leave_the_batch_in_evaluation() -> None:
    """Row i halts at step i + 1, so the cost is the sum of these steps."""
    sizes = []

    def step(x: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes.append(len(x))
        state = torch.zeros_like(x) if state is None else state
        state = state + 1
        return 100 * x + state, state - x, state, torch.ones_like(x)

    found = eq.looped.Halting(max_steps=4).run(step, torch.tensor([2.0, 0.0, 9.0, 1.0]))
    assert found.steps.tolist() == [3, 1, 4, 2]
    assert found.answer.tolist() == [203, 1, 904, 102] and found.state.tolist() == [3, 1, 4, 2]
    assert sizes == [4, 3, 2, 1] and found.row_steps == 10


def test_a_reasoner_halts_row_by_row_as_it_would_alone() -> None:
    torch.manual_seed(0)
    model = eq.models.create("reasoner-trm-nano").double().eval()
    assert isinstance(model, Reasoner)
    boards = torch.randint(5, (6, 16))
    halting = eq.looped.Halting(by="convergence", stop=eq.Stop(rtol=0.7), max_steps=12)
    found = halting.run(model.think, boards)
    assert len(set(found.steps.tolist())) > 1
    for i in range(6):
        alone = halting.run(model.think, boards[i : i + 1])
        assert alone.steps[0] == found.steps[i]
        torch.testing.assert_close(alone.answer[0], found.answer[i], rtol=1e-9, atol=1e-9)
