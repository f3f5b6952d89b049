"""Training steps of models beside TorchDEQ: the parts, on a model of one small layer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.lab.bench import training
from equilibria.lab.bench.methods import TorchDEQ
from tests.problems import TanhCell, generator

STOP = eq.Stop(rtol=1e-4, atol=0.0, max_steps=60, on_failure="ignore")
PICARD = TorchDEQ("TorchDEQ Picard", "fixed_point_iter")
HOOK = TorchDEQ("TorchDEQ Anderson, hook", "anderson", hook=True)

peers = pytest.mark.skipif(importlib.util.find_spec("torchdeq") is None, reason="TorchDEQ is not installed")


class Cell(TanhCell):
    """The test cell with the injection computed once per solve."""

    def prepare(self, x: Tensor) -> Tensor:
        return x @ self.u.T

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.w.T + x + self.b)


class Model(nn.Module):
    def __init__(self, gradient: eq.Gradient) -> None:
        super().__init__()
        cell = Cell(8, norm=0.6, dtype=torch.float32)
        nn.utils.parametrizations.weight_norm(cell, "w")
        self.layer: nn.Module = eq.DEQ(cell, stop=STOP, gradient=gradient)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def task(gradient: eq.Gradient | None = None) -> training.Task:
    x = torch.randn(4, 8, generator=generator(0))
    model = Model(eq.Implicit() if gradient is None else gradient)
    return training.Task(model, lambda model: model(x).square().sum())


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model), list(model.parameters())))


@peers
@pytest.mark.parametrize("method", [PICARD, HOOK], ids=lambda method: method.name)
@pytest.mark.parametrize("gradient", [eq.Implicit(), eq.JFB()], ids=repr)
def test_the_copy_with_another_solver_has_the_same_loss_and_gradients(method: TorchDEQ, gradient: eq.Gradient) -> None:
    given = task(gradient)
    model, excess = training.peer(given, method)
    assert excess <= 1
    torch.testing.assert_close(given.loss(model), given.loss(given.model), rtol=1e-2, atol=0)
    ours, theirs = gradients(given.model, given.loss), gradients(model, given.loss)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)  # both solve to about 1e-4 of a norm


@peers
def test_the_tolerance_is_the_loosest_that_meets_the_stop() -> None:
    given = task()
    model, excess = training.peer(given, PICARD)
    layer: Any = model.layer
    assert excess <= 1 and layer.deq.f_tol in [factor * STOP.rtol for factor in training.FACTORS]
    looser: Any = training.PeerLayer(given.model.layer, PICARD, 10 * layer.deq.f_tol)  # type: ignore[arg-type]
    model.layer = looser
    assert training._excess(model, given, STOP) > 1


@peers
def test_with_equal_limits_the_tolerance_is_ours() -> None:
    model, _ = training.peer(task(), PICARD, factors=(1.0,))
    layer: Any = model.layer
    assert layer.deq.f_tol == STOP.rtol


@peers
def test_a_solver_that_runs_out_of_steps_gets_our_tolerance() -> None:
    given = task()
    ours: Any = given.model.layer
    ours.stop = eq.Stop(rtol=1e-6, atol=0.0, max_steps=3, on_failure="ignore")
    model, excess = training.peer(given, PICARD)
    layer: Any = model.layer
    assert excess > 1 and layer.deq.f_tol == 1e-6 and layer.deq.f_max_iter == 3


@peers
def test_a_run_names_the_fastest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.TASKS, "small", task)
    result = training.run("small", updates=1, rounds=2, methods=[PICARD, HOOK])
    assert result.fastest in (PICARD.name, HOOK.name) and result.ratio is not None and result.ratio > 0
    assert set(result.residuals) == {training.OURS, PICARD.name, HOOK.name}
    assert result.fastest in training.table([result])


def test_a_run_without_torchdeq_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.TASKS, "small", task)
    result = training.run("small", updates=1, rounds=2, methods=[])
    assert result.ratio is None and result.ours > 0 and result.residuals[training.OURS] <= 1
    assert training.table([result]).splitlines()[-1].count("–") == 3
