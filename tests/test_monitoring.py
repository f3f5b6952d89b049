"""What a user sees of a solve: monitors, summaries, short reprs, warnings that point at the caller."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq


class Cell(nn.Module):
    def __init__(self, p: float | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Identity() if p is None else nn.Dropout(p)
        nn.init.orthogonal_(self.linear.weight, 0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.dropout(self.linear(z)) + x)
        return out


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), eq.DEQ(Cell()), nn.Linear(6, 2))


def steps(net: nn.Module, times: int) -> None:
    for _ in range(times):
        net(torch.randn(5, 4)).sum().backward()


def test_a_monitor_keeps_a_row_per_forward_pass_with_its_adjoint() -> None:
    net = model()
    with eq.monitor(net) as monitor:
        steps(net, 3)
        assert len(monitor.rows) == 2  # the last pass is logged when the block ends
    assert len(monitor.rows) == 3 and monitor.passes == 3
    row = monitor.rows[0]
    assert row["deq/1/samples"] == 5 and row["deq/1/converged"] == 1.0
    assert row["deq/1/adjoint/converged"] == 1.0 and row["deq/1/adjoint/evaluations"] >= 1
    assert all(isinstance(value, float) for value in row.values())
    steps(net, 1)
    assert len(monitor.rows) == 3  # nothing is left on the model


class Logger:
    def __init__(self) -> None:
        self.rows: list[Any] = []


class WithLog(Logger):
    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


class WithLogDict(Logger):
    def log_dict(self, row: dict[str, float]) -> None:
        self.rows.append(row)


class WithBoth(WithLogDict):
    """An object with `log` and `log_dict`, like a LightningModule."""

    def log(self, name: str, value: float) -> None:
        raise AssertionError("log_dict takes the row")


class Writer(Logger):
    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name.endswith("steps_max"):
            self.rows.append((name, value, step))


@pytest.mark.parametrize("logger", [WithLog(), WithLogDict(), WithBoth(), Writer()], ids=lambda each: type(each).__name__)
def test_a_monitor_logs_to_common_loggers(logger: Logger) -> None:
    net = model()
    with eq.monitor(net, to=logger, every=2, prefix="layers/"):
        steps(net, 4)
    assert len(logger.rows) == (4 if isinstance(logger, Writer) else 2)  # a writer gets forward and adjoint apart
    if isinstance(logger, Writer):
        assert [step for _, _, step in logger.rows] == [0, 0, 2, 2]
        assert logger.rows[0][0] == "layers/1/steps_max"


def test_a_monitor_accepts_a_function_and_refuses_other_objects() -> None:
    net, rows = model(), list[dict[str, float]]()
    with eq.monitor(net, to=rows.append):
        steps(net, 1)
    assert len(rows) == 1
    with pytest.raises(TypeError, match=r"cannot log to an object of type int.*add_scalar\(name, value, step\)"):
        eq.monitor(net, to=3)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        eq.monitor(net, every=0)
    with pytest.raises(ValueError, match=r"steps_mean.*: got stepz"):
        eq.monitor(net, quantities=["stepz"])


def test_a_manual_monitor_logs_all_solves_of_a_training_step_in_one_row() -> None:
    net, numbers = model(), list[int]()
    monitor: eq.monitoring.Monitor = eq.monitor(net, to=lambda row: numbers.append(monitor.step), manual=True, first_step=7)
    with monitor:
        steps(net, 2)
        assert numbers == []
        monitor.flush()
        steps(net, 1)
        monitor.discard()
        monitor.flush()
    assert numbers == [7] and monitor.passes == 8
    with eq.monitor(net, manual=True, quantities=["converged", "steps_max"]) as monitor:
        steps(net, 2)
    (row,) = monitor.rows
    names = {
        f"deq/{layer}/{key}" for layer in ("1", "1/adjoint", "1.2", "1.2/adjoint") for key in ("converged", "steps_max")
    }
    assert set(row) == names


def test_a_layer_that_is_solved_twice_in_a_pass_has_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = eq.DEQ(Cell())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.layer(x))
            return out

    net = Twice()
    with eq.monitor(net) as monitor:
        net(torch.randn(3, 6))
    assert {"deq/layer/samples", "deq/layer.2/samples"} <= set(monitor.rows[0])


def test_reprs_are_short_whatever_the_batch() -> None:
    net = model()
    with eq.record(net) as solutions:
        net(torch.randn(64, 4)).sum().backward()
    (s,) = solutions
    assert s.layer == "1"
    for text in (repr(s), repr(s.stats), str(s.stats)):
        assert len(text) < 400 and "64 converged" in text and "0x" not in text
    assert "(64, 6) float32" in repr(s) and "adjoint" in repr(s)
    html = s._repr_html_()
    assert "forward" in html and "adjoint" in html and "nonfinite" not in html
    alone = s.adjoint._repr_html_() if s.adjoint is not None else ""
    assert alone.count("<tr>") == html.count("<tr>") - 1 and "forward" not in alone  # statistics do not know of which solve


def test_reprs_have_no_addresses() -> None:
    assert repr(eq.Stop()) == "Stop(rtol=0.001, atol=1e-06, max_steps=40)"
    assert repr(eq.Stop(norm=eq.stop.max_norm, trace=True)).endswith("max_steps=40, norm=max_norm, trace=True)")
    assert "0x" not in repr(model()) and repr(eq.monitor(model())) == "Monitor(0 rows, next pass 0)"


def test_summaries_cover_failures_and_empty_batches() -> None:
    stop = eq.Stop(max_steps=3, rtol=1e-9, on_failure="ignore")
    s = eq.fixed_point(lambda z: torch.cos(z), torch.zeros(4, 2), stop=stop, solver=eq.Picard())
    summary = s.stats.summary()
    assert summary["max_steps"] == 1.0 and summary["steps_max"] == 3.0 and summary["converged"] == 0.0
    empty = eq.fixed_point(lambda z: torch.cos(z), torch.zeros(0, 2)).stats.summary()
    assert empty["samples"] == 0.0 and empty["residual_max"] == 0.0


def test_warnings_point_at_the_callers_line_and_name_dropout() -> None:
    layer = eq.DEQ(Cell(p=0.5), stop=eq.Stop(rtol=1e-6))
    with pytest.warns(eq.ConvergenceWarning, match=r"Dropout in training mode.*eq.freeze_dropout\(cell\)") as caught:
        layer(torch.randn(8, 6))
    assert {warning.filename for warning in caught} == {__file__}


def test_frozen_dropout_has_an_equilibrium_and_keeps_its_share() -> None:
    torch.manual_seed(0)
    cell = eq.freeze_dropout(Cell(p=0.5))
    assert isinstance(cell.dropout, eq.nn.VariationalDropout) and cell.dropout.p == 0.5
    layer = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5, max_steps=100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = layer.solve(torch.randn(8, 6))
    assert bool(s.stats.converged.all())
    layer.eval()
    assert torch.equal(layer(torch.ones(2, 6)), layer(torch.ones(2, 6)))


def test_channels_and_a_bare_dropout_can_be_frozen() -> None:
    frozen = eq.freeze_dropout(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Dropout2d(0.25)).eval())
    assert isinstance(frozen[1], eq.nn.VariationalDropout)  # type: ignore[index]
    assert frozen[1].shared == (2, 3) and not frozen[1].training  # type: ignore[index]
    assert isinstance(eq.freeze_dropout(nn.Dropout(0.1)), eq.nn.VariationalDropout)
    with pytest.raises(TypeError, match="AlphaDropout changes kept values"):
        eq.freeze_dropout(nn.Sequential(nn.AlphaDropout(0.1)))
