"""Rows that enter a solve late get the same answer as alone, and do not affect the other rows."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria import native
from equilibria.serving import (
    Answer,
    DeadlineExceededError,
    Engine,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    Ticket,
    UnservableModelError,
)
from equilibria.serving.pacing import Admission
from tests.problems import name
from tests.serving.nets import HOUR, SOLVERS, STOP, Clock, Net, alone, requests

ROUNDING = 1e-11  # answers of about 1 in float64, after up to 60 steps of an ill-conditioned history


def same(answer: Answer, model: nn.Module, x: Tensor, **changes: Any) -> None:
    """Assert that the answer equals the model's own answer up to rounding."""
    output, stats = alone(model, x, **changes)
    assert (answer.status, answer.steps) == (int(stats.status[0]), int(stats.steps[0]))
    torch.testing.assert_close(answer.output, output[0], rtol=ROUNDING, atol=ROUNDING)
    assert answer.residual == pytest.approx(float(stats.residual[0]), rel=1e-3, abs=1e-12)


def run(engine: Engine, inputs: list[Tensor], arrivals: list[int]) -> list[Answer]:
    """Submit the requests with the given numbers of engine steps between them."""
    tickets = []
    for x, steps in zip(inputs, arrivals, strict=True):
        for _ in range(steps):
            engine.step()
        tickets.append(engine.submit(x))
    engine.run()
    return [ticket.result(0) for ticket in tickets]


REQUESTS = 14
ADMISSIONS: list[Admission] = ["continuous", "auto", "grouped"]
OPTIONS: list[dict[str, Any]] = [{}, {}, {"rtol": 1e-2}, {"rtol": 1e-10}, {"max_steps": 0}, {"max_steps": 5}]


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(st.integers(0, 7), min_size=REQUESTS, max_size=REQUESTS),
    rows=st.integers(1, 6),
    seed=st.integers(0, 99),
    admission=st.sampled_from(ADMISSIONS),
    order=st.permutations(range(REQUESTS)),
)
def test_late_rows_are_solved_as_if_alone(
    solver: Any, arrivals: list[int], rows: int, seed: int, admission: Admission, order: list[int]
) -> None:
    model, inputs = Net(solver, seed=seed), requests(REQUESTS, seed)
    inputs = [inputs[i] for i in order]
    answers = run(Engine(model, rows=rows, admission=admission), inputs, arrivals)
    for answer, x in zip(answers, inputs, strict=True):
        same(answer, model, x)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(st.integers(0, 5), min_size=REQUESTS, max_size=REQUESTS),
    options=st.lists(st.sampled_from(OPTIONS), min_size=REQUESTS, max_size=REQUESTS),
    fates=st.lists(st.sampled_from(["answered", "answered", "cancelled", "nan"]), min_size=REQUESTS, max_size=REQUESTS),
)
def test_late_rows_with_options_beside_cancelled_and_nan_requests_are_solved_as_if_alone(
    solver: Any, arrivals: list[int], options: list[dict[str, Any]], fates: list[str]
) -> None:
    model, inputs = Net(solver), requests(REQUESTS)
    engine = Engine(model, rows=4, admission="continuous")
    tickets: list[tuple[Ticket, Tensor, str, dict[str, Any]]] = []
    for x, steps, option, fate in zip(inputs, arrivals, options, fates, strict=True):
        for _ in range(steps):
            engine.step()
        for ticket, _, earlier, _ in tickets[-2:]:
            if earlier == "cancelled":
                ticket.cancel()
        tickets.append((engine.submit(x * float("nan") if fate == "nan" else x, **option), x, fate, option))
    engine.run()
    for ticket, x, fate, option in tickets:
        if ticket.cancelled():
            continue
        if fate == "nan":
            assert ticket.result(0).status == eq.Status.NONFINITE
        else:
            same(ticket.result(0), model, x, **option)


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_late_rows_are_solved_as_if_alone_without_native_steps(solver: Any) -> None:
    with native.disabled():
        model, inputs = Net(solver), requests(14)
        engine = Engine(model, rows=4, admission="continuous")
        answers = run(engine, inputs, [0, 0, 1, 3, 0, 2, 7, 0, 1, 1, 5, 0, 0, 2])
        for answer, x in zip(answers, inputs, strict=True):
            same(answer, model, x)


@pytest.mark.parametrize("n", [100, 1100])
@pytest.mark.parametrize("compiled", [True, False])
def test_histories_of_rows_grow_as_if_alone(n: int, compiled: bool) -> None:
    model, inputs = Net(eq.Anderson(), n=n, stop=replace(STOP, rtol=1e-5)), requests(8)
    with nullcontext() if compiled else native.disabled():
        answers = run(Engine(model, rows=3), inputs, [0, 0, 1, 3, 0, 2, 7, 0])
        for answer, x in zip(answers, inputs, strict=True):
            same(answer, model, x)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
def test_every_request_has_its_own_tolerance_and_steps(solver: Any) -> None:
    model, inputs = Net(solver), requests(9)
    engine = Engine(model, rows=3, admission="continuous")
    options: list[dict[str, Any]] = [{"rtol": 1e-2}, {"rtol": 1e-10}, {"max_steps": 3}, {"max_steps": 0}, {}]
    tickets = [(x, option, engine.submit(x, **option)) for x in inputs for option in options]
    engine.run()
    for x, option, ticket in tickets:
        same(ticket.result(0), model, x, **option)


@pytest.mark.parametrize("kind", ["diverging", "nan", "stalling", "tiny", "huge"])
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
def test_failures_have_the_status_of_a_solve_alone(solver: Any, kind: str) -> None:
    model = Net(solver)
    if kind == "diverging":
        with torch.no_grad():
            model.layer.cell = Growing()
    if kind == "stalling":
        model.layer.stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=60, on_failure="ignore")
    scale = {"tiny": 1e-250, "huge": 1e250, "nan": float("nan")}.get(kind, 1.0)
    inputs = [scale * x if i % 2 else x for i, x in enumerate(requests(6))]
    answers = run(Engine(model, rows=4, admission="continuous"), inputs, [0, 0, 2, 3, 1, 0])
    for answer, x in zip(answers, inputs, strict=True):
        output, stats = alone(model, x)
        if kind == "stalling":  # below the spacing of the numbers a residual may be exactly zero
            assert answer.status in (eq.Status.STALLED, eq.Status.CONVERGED)
        elif kind == "diverging" and not isinstance(solver, eq.Picard):
            assert answer.status in (eq.Status.DIVERGED, eq.Status.MAX_STEPS)
            continue  # a divergent history amplifies rounding until iterates share no digits
        else:
            assert answer.status == int(stats.status[0])
        torch.testing.assert_close(answer.output, output[0], rtol=1e-9, atol=1e-9, equal_nan=True)


class Growing(nn.Module):
    """2 z + x."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 2.0 * z.abs() ** 1.2 + x + 1


class Oscillating(nn.Module):
    """x - z: plain iteration oscillates with period two."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return x - z


class Picky(nn.Module):
    """Raises for states or inputs above a bound."""

    def __init__(self, inner: nn.Module, bound: float) -> None:
        super().__init__()
        self.inner, self.bound = inner, bound

    def forward(self, *values: Tensor) -> Tensor:
        if float(values[-1].abs().max()) > self.bound:
            raise ValueError("too large")
        out: Tensor = self.inner(*values)
        return out


def harmful(kind: str, solver: Any) -> tuple[Net, Tensor]:
    """Return a model and a request that fails in the given way."""
    model = Net(solver)
    if kind == "raises before":
        model.encoder = Picky(model.encoder, 50.0)  # type: ignore[assignment]
    if kind == "raises in the cell":
        model.layer.cell = Picky(model.layer.cell, 20.0)  # type: ignore[arg-type]
    if kind == "raises after":
        model.head = Picky(model.head, 1.5)  # type: ignore[assignment]
        with torch.no_grad():
            model.layer.cell = Twice(model.layer.cell)
    return model, torch.full((4,), float("nan") if kind == "nan" else 100.0, dtype=torch.float64)


class Twice(nn.Module):
    """Leaves the range of tanh for large inputs."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.inner(z, x) + (x.abs() > 10) * 10.0
        return out


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
@pytest.mark.parametrize("kind", ["nan", "cancelled", "raises before", "raises in the cell", "raises after"])
def test_a_bad_request_changes_no_bit_of_the_other_answers_of_a_full_engine(kind: str, solver: Any) -> None:
    model, bad = harmful(kind, solver)
    inputs = [0.3 * x for x in requests(9)]

    def answers(with_bad: bool) -> list[Answer]:
        engine = Engine(model, rows=8, full=True, admission="continuous")
        tickets = [engine.submit(x) for x in inputs[:4]]
        wrong = engine.submit(bad) if with_bad else None
        for _ in range(3):
            engine.step()
        if wrong is not None and kind == "cancelled":
            assert wrong.cancel()
        tickets += [engine.submit(x) for x in inputs[4:]]
        engine.run()
        if wrong is not None and kind.startswith("raises"):
            with pytest.raises(InvalidRequestError, match="too large"):
                wrong.result(0)
        elif wrong is not None and kind == "nan":
            assert wrong.result(0).status == eq.Status.NONFINITE
        return [ticket.result(0) for ticket in tickets]

    for ours, theirs in zip(answers(True), answers(False), strict=True):
        assert torch.equal(ours.output, theirs.output)
        assert (ours.status, ours.steps, ours.residual) == (theirs.status, theirs.steps, theirs.residual)


class Elementwise(nn.Module):
    """tanh(0.9 z + x): no kernel whose rounding depends on the number of rows."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.9 * z + x)


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=name)
def test_native_steps_of_a_row_do_not_depend_on_other_requests(solver: Any) -> None:
    if not native.available():
        pytest.skip(native.reason())
    model = eq.DEQ(Elementwise(), solver=solver, stop=STOP)
    inputs = requests(9)
    together = run(Engine(model, rows=4, admission="continuous"), inputs, [0, 0, 1, 2, 0, 3, 0, 1, 1])
    for answer, x in zip(together, inputs, strict=True):
        (single,) = run(Engine(model, rows=4), [x], [0])
        assert torch.equal(answer.output, single.output)
        assert (answer.status, answer.steps, answer.residual) == (single.status, single.steps, single.residual)


def test_a_passed_deadline_returns_the_best_iterate_flagged_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    model = Net(eq.Picard(), stop=eq.Stop(max_steps=10**9, on_failure="ignore"))
    model.layer.cell = Oscillating()
    engine = Engine(model, rows=1)
    x = requests(1)[0]
    ticket, behind = engine.submit(x, deadline=2 * HOUR), engine.submit(x, deadline=HOUR)
    for passed in (0.0, HOUR, 2 * HOUR):
        clock.passed = passed
        assert not ticket.done()
        for _ in range(5):
            engine.step()
    answer = ticket.result(0)
    assert answer.late and answer.steps > 0 and not answer.converged
    with pytest.raises(DeadlineExceededError, match="before a row was free"):
        behind.result(0)


def test_threads_submit_and_cancel_while_the_engine_steps() -> None:
    model, inputs = Net(eq.Anderson()), requests(40)
    expected = [alone(model, x)[0][0] for x in inputs]
    with Engine(model, rows=5) as engine:

        def client(first: int) -> None:
            for i in range(first, len(inputs), 4):
                ticket = engine.submit(inputs[i])
                if i % 7 == 3 and ticket.cancel():
                    continue
                torch.testing.assert_close(ticket.result(600).output, expected[i], rtol=ROUNDING, atol=ROUNDING)

        failures: list[BaseException] = []
        threads = [threading.Thread(target=caught, args=(client, i, failures)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert engine.drain(60)
        with pytest.raises(EngineClosedError):
            engine.submit(inputs[0])


def caught(work: Any, argument: int, failures: list[BaseException]) -> None:
    try:
        work(argument)
    except BaseException as error:
        failures.append(error)


def test_the_queue_is_bounded_and_closing_fails_unanswered_requests() -> None:
    engine = Engine(Net(), rows=2, queue=3)
    tickets = [engine.submit(x) for x in requests(3)]
    with pytest.raises(QueueFullError, match="limit is 3"):
        engine.submit(requests(1)[0])
    engine.step()
    engine.close()
    for ticket in tickets:
        with pytest.raises(EngineClosedError):
            ticket.result(0)


def test_every_shape_gets_a_pool_and_invalid_shapes_raise() -> None:
    class Sized(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :4] + x.mean(dim=1, keepdim=True))

    model = Sized()
    engine = Engine(model, rows=4, pools=2)
    inputs = [torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (4, 6, 9, 4, 6, 9, 5)]
    tickets = [engine.submit(x) for x in inputs]
    wrong = engine.submit(torch.ones(2, dtype=torch.float64))
    engine.run()
    for x, ticket in zip(inputs, tickets, strict=True):
        same(ticket.result(0), model, x)
    with pytest.raises(InvalidRequestError, match=r"inputs of shape \[\(2,\)\]"):
        wrong.result(0)
    assert len(engine.pools) <= 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rtol": -1.0}, "rtol"),
    ({"max_steps": -1}, "max_steps"),
    ({"deadline": 0.0}, "deadline"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_invalid_options_raise_in_submit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        Engine(Net()).submit(requests(1)[0], **options)


def test_answered_requests_free_rows_and_memory() -> None:
    """Pools evaluate no more rows than are in use, and keep nothing of requests that are answered."""
    engine = Engine(Net(eq.Broyden()), rows=16)
    run(engine, requests(40), [0] * 20 + [1] * 20)
    (pool,) = engine.pools.values()
    assert pool.active == 0 and not any(pool.rows) and not pool.tickets() and not engine.waiting
    assert pool.counts.answered == 40 and pool.counts.row_steps <= pool.counts.evaluated


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: Tensor) -> Any:
        return self.first(x) + self.second(x)


class BatchStatistics(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.net, self.norm = Net(), nn.BatchNorm1d(3 if where == "after" else 4, track_running_stats=False).double()
        self.where = where

    def forward(self, x: Tensor) -> Any:
        return self.net(self.norm(x)) if self.where == "before" else self.norm(self.net(x))


UNSERVABLE: list[tuple[Any, str]] = [
    (lambda: nn.Linear(4, 3).double(), "no equilibrium layer"),
    (TwoLayers, r"ran 2 solves \(first.layer, second.layer\)"),
    (lambda: Net(eq.Newton()), "Picard, Anderson and Broyden"),
    (lambda: Net(eq.Broyden(line_search=True)), "line_search=False"),
    (lambda: BatchStatistics("before"), "changes for a sample with the other samples"),
    (lambda: BatchStatistics("after"), "changes for a sample with the other samples"),
]


@pytest.mark.parametrize(("build", "said"), UNSERVABLE, ids=[said for _, said in UNSERVABLE])
def test_an_unservable_model_raises_with_the_reason(build: Any, said: str) -> None:
    with pytest.raises(UnservableModelError, match=said):
        engine = Engine(build(), rows=2)
        ticket = engine.submit(requests(1)[0])
        engine.run()
        ticket.result(0)


def test_unbatched_and_unrolled_layers_are_rejected() -> None:
    for change, said in (({"batched": False}, "batched=False"), ({"gradient": eq.Unrolled(depth=3)}, "Unrolled")):
        model = Net()
        for key, value in change.items():
            setattr(model.layer, key, value)
        engine = Engine(model, rows=2)
        ticket = engine.submit(requests(1)[0])
        engine.run()
        with pytest.raises(UnservableModelError, match=said):
            ticket.result(0)


STEPPING = [eq.JFB(), eq.UnrolledPhantom(steps=2), eq.Warmup(first=eq.JFB(), then=eq.Implicit(), until=3)]


@pytest.mark.parametrize("gradient", STEPPING, ids=name)
def test_steps_of_a_gradient_after_the_equilibrium_are_taken(gradient: eq.Gradient) -> None:
    model, inputs = Net(), requests(5)
    model.layer = eq.DEQ(model.layer.cell, stop=STOP, gradient=gradient)
    answers = run(Engine(model, rows=2), inputs, [0] * 5)
    for answer, x in zip(answers, inputs, strict=True):
        same(answer, model, x)


def test_the_served_model_is_not_modified() -> None:
    model = Net().train()
    nn.utils.parametrizations.weight_norm(model.head)
    before = dict(vars(model.layer)), dict(vars(model.encoder)), {n: p.clone() for n, p in model.named_parameters()}
    expected, _ = alone(model, requests(1)[0])
    model.train()
    engine = Engine(model, rows=2)
    answer = run(engine, requests(1), [0])[0]
    assert model.training and vars(model.layer) == before[0] and vars(model.encoder) == before[1]
    assert all(torch.equal(p, before[2][n]) for n, p in model.named_parameters())
    torch.testing.assert_close(answer.output, expected[0], rtol=ROUNDING, atol=ROUNDING)


def test_requests_enter_beside_others_and_leave_before_them() -> None:
    """An easy request that comes when hard ones have begun is answered before them."""
    model = Net(eq.Picard(), stop=eq.Stop(max_steps=500, on_failure="ignore"))
    model.layer.cell = Oscillating()
    hard, easy = requests(4)[:3], requests(4)[3]
    engine = Engine(model, rows=4, admission="continuous")
    tickets = [engine.submit(x, max_steps=400) for x in hard]
    engine.step()
    first = engine.submit(easy, max_steps=3)
    while not first.done():
        engine.step()
    assert not any(ticket.done() for ticket in tickets)
    engine.run()
    assert (first.result(0).steps, [ticket.result(0).steps for ticket in tickets]) == (3, [400] * 3)


def test_the_page_shows_no_residual_of_an_earlier_request() -> None:
    """A row at its start may still have the residual of the request before it in its place."""
    engine = Engine(Net(eq.Picard()), rows=1)
    engine.submit(requests(1)[0])
    engine.step()
    assert engine.residuals() == []
    engine.step()
    ((row, steps, excess),) = engine.residuals()
    assert (row, steps) == (0, 1) and excess > 1


def test_an_unknown_admission_is_an_error() -> None:
    with pytest.raises(ValueError, match="admission must be one of auto, continuous, grouped"):
        Engine(Net(), admission="never")  # type: ignore[arg-type]


def test_answers_report_waiting_and_total_time() -> None:
    engine = Engine(Net(), rows=1)
    begin = time.monotonic()
    tickets = [engine.submit(x) for x in requests(3)]
    engine.run()
    answers = [ticket.result(0) for ticket in tickets]
    assert all(0 <= answer.waited <= answer.seconds <= time.monotonic() - begin for answer in answers)
