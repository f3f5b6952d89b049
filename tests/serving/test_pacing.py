"""The admission period computed from measured costs, and the choice between both admission modes."""

from __future__ import annotations

import math

import pytest

from equilibria.serving.admission import Admitting
from equilibria.serving.load import LoadReport, Reply, poisson
from equilibria.serving.pacing import KEPT, Pacing


def test_the_period_minimises_the_cost_of_entering_and_idle_rows() -> None:
    pacing = Pacing()
    for i in range(4 * KEPT):
        pacing.finished([50])
        pacing.stepped(4, 1.0 if i % 7 else 100.0)  # an occasional outlier
        rows = 4 + i % 5
        pacing.entered(rows, 4.0 + 0.5 * rows)
    assert pacing.enter_period == round(math.sqrt(2 * 4.0 * 50 / 1.0))


def test_a_row_of_few_steps_never_waits_longer_than_half_of_them() -> None:
    pacing = Pacing()
    pacing.finished([4])
    pacing.stepped(1, 1.0)
    pacing.entered(1, 1e6)
    assert pacing.enter_period == 2


@pytest.mark.parametrize(("longest", "grouped"), [(20, True), (200, False)])
def test_requests_enter_in_groups_where_steps_hardly_vary(longest: int, grouped: bool) -> None:
    """Steps of few rows cost 11, those of many 18, entering and answering 50 each."""
    pacing, admitting = Pacing(capacity=8), Admitting("auto", 8)
    for rows in (1, 8):
        pacing.stepped(rows, 10.0 + rows)
    for _ in range(10):
        steps = [18] * 7 + [longest]
        pacing.finished(steps)
        pacing.entered(8, 50.0)
        pacing.answered(8, 50.0)
        for number in steps:
            admitting.leave(admitting.enter(), number, pacing)
    assert (pacing.narrow_step, pacing.step) == (11.0, 18.0)
    assert admitting.grouped == grouped


def test_a_given_admission_mode_is_not_changed() -> None:
    pacing = Pacing(capacity=2)
    for mode, grouped in (("continuous", False), ("grouped", True)):
        admitting = Admitting(mode, 2)  # type: ignore[arg-type]
        for steps in (5, 500):
            admitting.leave(admitting.enter(), steps, pacing)
        assert admitting.grouped == grouped


def test_slow_rows_count_although_easy_ones_leave_before_them() -> None:
    """One request in eight takes 200 steps: two hundred easy ones of later cohorts leave before the first slow one."""
    pacing, admitting = Pacing(capacity=8), Admitting("auto", 8)
    for rows in (1, 8):
        pacing.stepped(rows, 10.0 + rows)
    pacing.finished([18] * 7 + [200])
    pacing.entered(8, 50.0)
    pacing.answered(8, 50.0)
    for number in [18] * 7 + [200]:
        admitting.leave(admitting.enter(), number, pacing)
    assert not admitting.grouped
    cohorts = [[admitting.enter() for _ in range(8)] for _ in range(30)]
    for cohort in cohorts:
        for number in cohort[:7]:
            admitting.leave(number, 18, pacing)
    assert not admitting.grouped
    for cohort in cohorts:
        admitting.leave(cohort[7], 200, pacing)
    assert not admitting.grouped and admitting.longest == 200


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
