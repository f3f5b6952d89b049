"""When rows are exchanged, by measured costs; the load generator's arrivals and report."""

from __future__ import annotations

import math

import pytest

from equilibria.serving.load import LoadReport, Reply, poisson
from equilibria.serving.pacing import KEPT, Admission, Pacing

STEP, ENTER, ANSWER = 1.0, 8.0, 4.0  # seconds


def measured(capacity: int, mode: Admission = "auto") -> Pacing:
    """Return a Pacing that has measured constant costs, with one measurement in seven that is far too long."""
    pacing = Pacing(capacity, mode)
    for i in range(4 * KEPT):
        slow = 1.0 if i % 7 else 100.0
        pacing.step.add(capacity, slow * STEP)
        rows = 1 + i % capacity
        pacing.enter.add(rows, slow * (ENTER + 0.5 * rows))
        pacing.answer.add(rows, slow * (ANSWER + 0.25 * rows))
        pacing.steps.add(1 if i % 3 else 300)  # steps vary widely
    return pacing


def test_measured_costs_are_split_into_a_fixed_part_and_one_per_row() -> None:
    pacing = measured(8)
    assert (pacing.step.whole, pacing.enter.fixed, pacing.answer.fixed) == pytest.approx((STEP, ENTER, ANSWER))


@pytest.mark.parametrize("rate", [1, 2, 5])
def test_rows_enter_at_the_period_that_minimises_the_sum_of_both_delays(rate: int) -> None:
    """Rows become free at a constant rate and a long queue waits: T = sqrt(2 capacity enter / (rate step))."""
    capacity, free, steps = 64, 0, 0
    pacing = measured(capacity)
    while not pacing.may_enter(capacity - free, 10 * capacity):
        free += rate
        steps += 1
        pacing.waited(idle=free, unanswered=0, empty=0)
    assert steps == pytest.approx(math.sqrt(2 * capacity * ENTER / (rate * STEP)), abs=1.0)


def test_an_empty_pool_is_filled_at_once_and_a_full_one_waits() -> None:
    pacing = measured(8)
    assert pacing.may_enter(0, 1) and not pacing.may_enter(4, 1)


@pytest.mark.parametrize(("steps", "apart"), [([18] * 8, False), ([3] * 7 + [300], True)])
def test_rows_enter_in_groups_where_steps_hardly_vary(steps: list[int], apart: bool) -> None:
    """Others wait beside a batch of eight; one enters before the whole batch has left only if steps vary."""
    pacing, active, entered = measured(8), 8, False
    for step in range(1, max(steps)):
        free = sum(own <= step for own in steps)
        active = 8 - free
        entered = entered or (free > 0 and pacing.may_enter(active, 100))
        pacing.waited(idle=free, unanswered=0, empty=0)
    assert entered == apart


def test_a_long_step_lets_a_request_enter_after_one_step() -> None:
    pacing = Pacing(8)
    for i in range(KEPT):
        pacing.step.add(8, 100.0)
        pacing.enter.add(1, 1.0)
        pacing.answer.add(1, 1.0)
        pacing.steps.add(1 if i % 3 else 300)
    pacing.waited(idle=1, unanswered=0, empty=0)
    assert pacing.may_enter(7, 1)


def test_rows_of_equal_steps_do_not_enter_beside_others_if_steps_grow_with_the_rows() -> None:
    """Steps of 2 and of 8 rows take 2 and 8 seconds: no part of a step is shared, so that nobody gains."""
    pacing = Pacing(8)
    for _ in range(KEPT):
        pacing.step.add(2, 2.0)
        pacing.step.add(8, 8.0)
        pacing.enter.add(1, 0.1)
        pacing.answer.add(1, 0.1)
        pacing.steps.add(4)
    pacing.waited(idle=100, unanswered=0, empty=0)
    assert (pacing.step.fixed, pacing.steps.squared) == (0.0, 0.0)
    assert not pacing.may_enter(4, 4)
    for _ in range(2000):
        pacing.steps.add(1)
    for _ in range(100):
        pacing.steps.add(100)
    assert pacing.steps.squared > 1.0 and pacing.may_enter(4, 4)


def test_a_given_admission_mode_is_not_changed() -> None:
    for mode, enters in (("continuous", True), ("grouped", False)):
        pacing = measured(8, mode)  # type: ignore[arg-type]
        for _ in range(1000):
            assert pacing.may_enter(4, 4) == enters
            pacing.waited(idle=4, unanswered=0, empty=0)


def test_answers_are_given_in_time_and_at_the_latest_when_a_pool_of_rows_waits_for_them() -> None:
    pacing = measured(8)
    assert pacing.may_answer(4, 10**6, left=8) and not pacing.may_answer(4, 10**6, left=7)
    assert not pacing.may_answer(4, 0, left=1)
    pacing.waited(idle=0, unanswered=math.ceil(ANSWER / STEP) * 4, empty=0)
    assert pacing.may_answer(4, 0, left=1)


def test_empty_rows_are_dropped_when_they_have_cost_as_much_as_moving_the_others() -> None:
    """A step of 8 rows takes 9 seconds and one of 2 rows takes 3, so that a row costs 1; dropping rows costs 10."""
    pacing = Pacing(8)
    for _ in range(KEPT):
        pacing.step.add(2, 3.0)
        pacing.step.add(8, 9.0)
        pacing.compact.add(4, 10.0)
    assert pacing.step.per_row == 1.0 and not pacing.may_compact()
    for _ in range(5):
        assert not pacing.may_compact()
        pacing.waited(idle=0, unanswered=0, empty=2)
    assert pacing.may_compact()


def test_rows_that_add_nothing_to_a_step_are_never_dropped() -> None:
    pacing = Pacing(8)
    for _ in range(KEPT):
        pacing.step.add(2, 5.0)
        pacing.step.add(8, 5.0)
        pacing.compact.add(4, 1.0)
        pacing.waited(idle=0, unanswered=0, empty=6)
    assert not pacing.may_compact()


def test_arrivals_are_bounded_in_count_and_time() -> None:
    assert len(poisson(100.0, 50, 1e9)) == 50
    assert all(0 < arrival <= 2.0 for arrival in poisson(100.0, 10**6, 2.0))
    assert poisson(5.0, 10, 100.0, seed=3) == poisson(5.0, 10, 100.0, seed=3)
    with pytest.raises(ValueError, match="must be positive"):
        poisson(0.0, 1, 1.0)


def test_a_load_report_separates_answers_and_failures() -> None:
    outcomes = [Reply(0.0, 0.1 * i, 200) for i in range(1, 11)] + [Reply(0.0, 9.0, 429), Reply(0.0, 9.0, 0)]
    report = LoadReport(outcomes, seconds=5.0)
    assert report.codes == {0: 1, 200: 10, 429: 1} and report.throughput == 2.0
    assert report.latency(0.5) == pytest.approx(0.6) and report.latency(0.99) == pytest.approx(1.0)
