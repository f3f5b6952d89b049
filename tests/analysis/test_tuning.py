"""Tuning: recommended settings meet the requirements, others are rejected, and the model is not changed.

Times are never compared: only the accuracy of settings is certain.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.analysis.tuning import tune
from equilibria.analysis.tuning_settings import Candidates, Measurement, Setting, Tuning, Tunings
from tests.problems import NestedCell, TanhCell, generator, inputs, matrix

SEED = 7
ROUND: dict[str, Any] = {"rounds": 1}
LOOSE = eq.Stop(rtol=1e-1, max_steps=100)
FEW = Candidates(
    solvers=(eq.Picard(), eq.Anderson()),
    gradients=(eq.Implicit(), eq.Implicit(solver=eq.BiCGSTAB(), stop=LOOSE), eq.JFB()),
)
ONE = Candidates(solvers=(eq.Anderson(),), gradients=(eq.Implicit(),))


class BatchNormCell(nn.Module):
    """A cell that couples samples in training and draws masks from torch and from its own generator."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = TanhCell(n, norm=0.5)
        self.norm = nn.BatchNorm1d(n, dtype=torch.float64)
        self.generator = generator(4)

    def prepare(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=self.generator)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(z, x)) * 0.3
        return out


class Classifier(nn.Module):
    """A model with two equilibria in series, one of them called by `solve`, and a third that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = eq.DEQ(TanhCell(4, norm=0.7))
        self.blocks = nn.ModuleList([eq.DEQ(TanhCell(4, norm=0.5, seed=1)), eq.DEQ(TanhCell(4))])
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        solution = self.blocks[0].solve(scale * self.first(x))  # type: ignore[operator]
        out: Tensor = self.head(solution.z)
        return out


class Pair(nn.Module):
    """tanh(W z + a + b + c) with inputs in a dict and a tuple; c is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(matrix("orthogonal", 4, 0.6).contiguous())

    def forward(self, z: Tensor, parts: dict[str, Any]) -> Tensor:
        a, (b, c) = parts["a"], parts["rest"]
        return torch.tanh(z @ self.w.T + a + b + c)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one timed round per setting, since times are not checked here."""
    monkeypatch.setattr("equilibria.analysis.tuning.RETIME_ROUNDS", 1)


def only(model: nn.Module, batch: Any, **options: Any) -> Tuning:
    (tuning,) = tune(model, batch, **{"candidates": FEW, **ROUND, **options}).values()
    return tuning


def row(tuning: Tuning, solver: Any) -> Measurement:
    return next(m for m in tuning.measurements if m.setting.solver == solver and m.setting != tuning.present)


@pytest.mark.parametrize(("residual", "agreement"), [(1e-2, 0.6), (1e-3, 0.99), (1e-6, 0.99999)])
def test_recommendation_reaches_the_targets(residual: float, agreement: float) -> None:
    deq, x = eq.DEQ(TanhCell(5, norm=0.9)), inputs(6, 5)
    tuning = only(deq, x, residual=residual, agreement=agreement, generator=generator(SEED))
    assert tuning.reached
    tuning.best.apply(deq)
    assert float(deq.solve(x).stats.residual.max()) <= residual
    (found,) = eq.gradient_agreement(deq, x.requires_grad_(), [tuning.best.gradient], generator=generator(SEED))  # type: ignore[list-item]
    assert found.cosine >= agreement


def test_measurements_match_runs_of_their_settings() -> None:
    deq, x = eq.DEQ(TanhCell(5, norm=0.9), stop=eq.Stop(rtol=1e-8, max_steps=200)), inputs(6, 5)
    # one solver: of several, a slow one is not tried with all gradients
    tuning = only(deq, x, candidates=dataclasses.replace(FEW, solvers=(eq.Picard(),)), generator=generator(SEED))
    x.requires_grad_()
    assert any(m.setting == tuning.present for m in tuning.measurements)
    for m in tuning.measurements:
        assert m.setting.gradient is not None
        m.setting.apply(deq)
        (found,) = eq.gradient_agreement(deq, x, [m.setting.gradient], generator=generator(SEED))
        s = deq.solve(x)
        s.z.sum().backward()  # it measures the answer: statistics read before it would take an evaluation of their own
        assert m.residual == pytest.approx(float(s.stats.residual.max())) and m.evaluations == s.stats.evaluations
        assert m.seconds > 0 and m.cosine == pytest.approx(found.cosine)
        assert m.accepted == (m.residual <= 1e-3 and m.cosine >= 0.99)


def test_the_default_candidates_run() -> None:
    tuning = only(eq.DEQ(TanhCell(4, norm=0.6)), inputs(3, 4), candidates=None)
    tried = [m.setting for m in tuning.measurements]
    assert tuning.reached
    assert all(any(setting.solver == solver for setting in tried) for solver in Candidates().solvers)
    assert all(any(setting.gradient == gradient for setting in tried) for gradient in Candidates().gradients)


def test_a_divergent_solver_is_rejected() -> None:
    cell = TanhCell(6, norm=1.5, kind="rotation")
    tuning = only(eq.DEQ(cell, solver=eq.Picard()), inputs(4, 6))
    refused = row(tuning, eq.Picard())
    assert not refused.accepted and refused.reason is not None and refused.reason.startswith("residual ")
    assert refused.residual > 1e-3
    assert tuning.best.solver == eq.Anderson() and tuning.reached


def test_a_gradient_that_raises_stores_its_reason() -> None:
    candidates = Candidates(solvers=(eq.Anderson(),), gradients=(eq.Shine(), eq.Implicit()))
    tuning = only(eq.DEQ(TanhCell(4, norm=0.5)), inputs(3, 4), candidates=candidates)
    (reason,) = [m.reason for m in tuning.measurements if m.setting.gradient == eq.Shine()]
    assert tuning.reached and reason is not None and "take solver=eq.Broyden()" in reason


def test_a_far_slower_solver_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equilibria.analysis.tuning.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("equilibria.analysis.tuning.TIME_RATIO", 1e-9)  # the limit has passed, whatever another solver took
    deq = eq.DEQ(TanhCell(4), solver=eq.Broyden())
    tuning = only(deq, inputs(3, 4), candidates=ONE)
    refused = row(tuning, eq.Anderson())
    assert refused.reason is not None and "stopped after" in refused.reason
    assert tuning.best == tuning.present and not deq.cell._forward_pre_hooks  # type: ignore[attr-defined]


def test_nonfinite_samples_reject_a_setting() -> None:
    x = inputs(4, 4)
    x[1] = math.inf
    tuning = only(eq.DEQ(lambda z, x: 0.5 * z + x), x)
    assert not tuning.reached and {m.reason for m in tuning.measurements} == {"1 of 4 samples are not finite"}


def test_an_unavailable_exact_gradient_is_reported() -> None:
    """The cell rounds to three digits, so that it can be solved to 1e-2 but not further."""

    def coarse(z: Tensor, x: Tensor) -> Tensor:
        y = torch.cos(z) + x
        return y + ((y * 1000).round() / 1000 - y).detach() + 1e-3 * torch.sign(torch.sin(1e6 * z)).detach()

    tuning = only(eq.DEQ(coarse), 1 + inputs(3, 3).abs(), residual=1e-2, candidates=ONE)
    assert any("exact gradient" in (m.reason or "") for m in tuning.measurements)


def test_the_model_is_not_modified() -> None:
    cell = BatchNormCell(4)
    warmup = eq.Warmup(first=eq.Unrolled(depth=3), then=eq.Implicit(), until=5)
    stop, eval_stop = eq.Stop(rtol=1e-12, max_steps=2, on_failure="raise"), eq.Stop(on_failure="raise")
    deq = eq.DEQ(cell, gradient=warmup, stop=stop, eval_stop=eval_stop)
    model, x = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), deq, nn.Dropout()), inputs(5, 4)
    cell.inner.b.grad = torch.ones_like(cell.inner.b)
    cell.norm.eval()
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    parameters = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state, own, modes = torch.get_rng_state(), cell.generator.get_state(), [m.training for m in model.modules()]
    for backward in (True, False):
        tune(model, x, candidates=FEW, backward=backward, **ROUND)

    assert torch.equal(state, torch.get_rng_state()) and torch.equal(own, cell.generator.get_state())
    assert modes == [m.training for m in model.modules()]
    assert (deq.solver, deq.gradient, deq.stop, deq.eval_stop) == (eq.Anderson(), warmup, stop, eval_stop)
    assert "solve" not in vars(deq) and not cell._forward_hooks and not cell._forward_pre_hooks
    for name, (buffer, value, version) in buffers.items():
        assert dict(model.named_buffers())[name] is buffer and torch.equal(buffer, value) and buffer._version == version
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name])
        assert (parameter.grad is None) == (parameter is not cell.inner.b)
    assert torch.equal(cell.inner.b.grad, torch.ones_like(cell.inner.b)) and not x.requires_grad


def test_failing_candidates_do_not_consume_warnings() -> None:
    deq, x = eq.DEQ(TanhCell(6, norm=1.5, kind="rotation"), solver=eq.Picard()), inputs(4, 6)
    tune(deq, x, candidates=ONE, **ROUND)
    with pytest.warns(eq.ConvergenceWarning, match="forward solve did not converge"):
        deq(x)


def test_batch_statistics_are_tuned_as_one_problem() -> None:
    deq, x = eq.DEQ(BatchNormCell(4)), inputs(6, 4)
    tuning = only(deq, x, residual=1e-5, generator=generator(SEED))
    assert tuning.reached and len({m.residual for m in tuning.measurements}) > 1
    assert float(tuning.best.apply(deq).solve(x).stats.residual.max()) <= 1e-5


def test_every_layer_of_a_model_is_tuned() -> None:
    model, x = Classifier(), inputs(5, 4)
    tunings = tune(model, [x, 0.5], candidates=ONE, residual=1e-5, **ROUND)
    assert list(tunings) == ["first", "blocks.0"] and len(tunings) == 2
    assert [tuning.name for tuning in tunings.values()] == list(tunings)
    assert str(tunings) == "\n\n".join(str(tuning) for tuning in tunings.values())
    with pytest.raises(ValueError, match=r"2 DEQs, \['first', 'blocks\.0'\].*tunings\[name\]\.best"):
        _ = tunings.best
    unused = model.blocks[1].extra_repr()
    assert tunings.apply(model) is model
    for name, tuning in tunings.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, eq.DEQ)
        assert (layer.solver, layer.stop, layer.gradient) == (tuning.best.solver, tuning.best.stop, tuning.best.gradient)
    assert model.blocks[1].extra_repr() == unused


def test_nested_inputs_and_states_are_tuned() -> None:
    parts: dict[str, Any] = {"a": inputs(3, 4), "rest": (inputs(3, 4, seed=5), torch.tensor([[1], [0], [2]]))}
    deq = eq.DEQ(Pair(), eq.Zeros(4))
    tuning = only(deq, (parts,), candidates=ONE)
    assert tuning.reached and not parts["a"].requires_grad
    assert only(eq.DEQ(NestedCell(), NestedCell.zeros), inputs(3, 4), candidates=ONE).reached


def test_plain_functions_are_tuned() -> None:
    w = matrix("orthogonal", 4, 0.6).requires_grad_()
    tunings = tune(eq.DEQ(lambda z, x: torch.tanh(z @ w.T + x)), inputs(3, 4), candidates=ONE, **ROUND)
    assert tunings[""].reached and tunings.best == tunings[""].best and w.grad is None


def test_an_unreachable_residual_gives_the_nearest_setting() -> None:
    deq = eq.DEQ(TanhCell(24, dtype=torch.float32))
    tunings = tune(deq, inputs(8, 24, dtype=torch.float32), residual=1e-12, candidates=FEW, **ROUND)
    tuning = tunings[""]
    assert not tuning.reached and tuning.best.gradient == deq.gradient
    smallest = min(m.residual for m in tuning.measurements)
    assert smallest in [m.residual for m in tuning.measurements if m.setting.solver == tuning.best.solver]
    assert "No setting reaches the residual; this one ends at" in str(tuning) and "wider dtype" in str(tuning)
    tunings.apply(deq)
    assert deq.stop == eq.Stop()  # a setting that misses the target is not applied


def test_an_unreachable_agreement_gives_the_nearest_setting() -> None:
    cheap = Candidates(solvers=(eq.Anderson(),), gradients=(eq.JFB(), eq.NeumannPhantom(steps=2)))
    deq = eq.DEQ(TanhCell(4, norm=0.9), gradient=eq.JFB())
    tuning = only(deq, inputs(3, 4), agreement=0.999999, candidates=cheap)
    assert not tuning.reached
    nearest = max(m.cosine for m in tuning.measurements if m.residual <= 1e-3)
    assert next(m.cosine for m in tuning.measurements if m.setting == tuning.best) == nearest
    assert f"No setting reaches the cosine; this one has {nearest:.4f}" in str(tuning)


def test_inference_tunes_solver_and_eval_stop() -> None:
    deq, x = eq.DEQ(TanhCell(5, norm=0.9), solver=eq.Picard(), eval_stop=eq.Stop(rtol=1e-6)).eval(), inputs(6, 5)
    with torch.no_grad():
        tuning = only(deq, x, backward=False, residual=1e-4)
    assert tuning.present == Setting(eq.Picard(), eq.Stop(rtol=1e-6), None) and tuning.agreement is None
    assert all(m.setting.gradient is None and math.isnan(m.cosine) for m in tuning.measurements)
    assert tuning.reached and "cosine" not in str(tuning).splitlines()[0]
    tuning.best.apply(deq)
    assert (deq.stop, deq.gradient, deq.eval_stop) == (eq.Stop(), eq.Implicit(), tuning.best.stop)
    assert float(deq.solve(x).stats.residual.max()) <= 1e-4


def test_a_setting_that_misses_its_own_tolerance_is_not_recommended() -> None:
    """The setting reaches the required residual in 20 steps, but would warn at every solve."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.share = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.share * z + x

    short = eq.Stop(rtol=1e-12, atol=0.0, max_steps=20)
    deq, x = eq.DEQ(Halving(), solver=eq.Picard(), stop=short), inputs(6, 5)
    present = next(m for m in only(deq, x, residual=1e-3).measurements if m.setting.stop == short)
    deq.stop = dataclasses.replace(short, on_failure="ignore")
    missed = int(deq.solve(x).stats.failed.sum())
    assert missed == 6 and present.residual <= 1e-3 and f"would warn: {missed} of 6 samples" in str(present.reason)
    present = next(m for m in only(deq, x, residual=1e-3).measurements if m.setting.stop == deq.stop)
    assert present.reason is None


def test_inference_needs_nothing_to_differentiate() -> None:
    deq, x = eq.DEQ(lambda z, x: torch.cos(z), eq.Zeros(3)), torch.ones(2, 3, dtype=torch.int64)
    assert only(deq, x, backward=False).reached
    with pytest.raises(ValueError, match="Neither a parameter of the DEQ nor an input requires a gradient"):
        tune(deq, x)


def test_apply_sets_solver_stop_and_gradient() -> None:
    deq = eq.DEQ(TanhCell(4))
    setting = Setting(eq.Broyden(), eq.Stop(rtol=1e-5), eq.JFB())
    assert setting.apply(deq) is deq
    assert (deq.solver, deq.stop, deq.gradient) == (setting.solver, setting.stop, setting.gradient)
    Setting(eq.Anderson(), eq.Stop(), eq.Warmup(first=eq.Unrolled(depth=2), until=1)).apply(deq)
    deq(inputs(2, 4))
    assert deq.solves is not None and int(deq.solves) == 1


def test_settings_of_the_layer_are_kept() -> None:
    given = eq.Stop(norm=eq.stop.max_norm, on_failure="raise", check_every=2, max_steps=300)
    tuning = only(eq.DEQ(TanhCell(4), stop=given), inputs(3, 4), candidates=ONE, residual=1e-5)
    assert row(tuning, eq.Anderson()).setting.stop == dataclasses.replace(given, rtol=1e-5, atol=0.0)


def test_tunings_print_a_table() -> None:
    present = Setting(eq.Picard(), eq.Stop(), eq.Implicit())
    best = Setting(eq.Anderson(history=3), eq.Stop(atol=0.0), eq.Implicit(solver=eq.BiCGSTAB()))
    rows = (
        Measurement(best, 0.001, 9e-4, 0.9999, 10, None),
        Measurement(present, 0.02, 0.01, math.nan, 50, "residual 1.000e-02"),
    )
    tuning = Tuning("body", 1e-3, 0.99, present, best, rows)
    assert repr(tuning) == (
        "Tuning(body: 2 settings, best: Anderson(history=3), Stop(atol=0.0), Implicit(solver=BiCGSTAB()))"
    )
    html = Tunings({"body": tuning})._repr_html_()
    assert html.count("<tr>") == 3 and "residual &lt;= 1.0e-03" in html and "refused: residual" in html
    assert str(tuning).splitlines() == [
        "body: residual <= 1.0e-03, cosine >= 0.99",
        "best: Anderson(history=3), Stop(atol=0.0), Implicit(solver=BiCGSTAB())",
        "step     ms  residual  cosine  setting",
        "0.05   1.00   9.0e-04  0.9999  Anderson(history=3), Implicit(solver=BiCGSTAB())",
        "1.00  20.00   1.0e-02       -  present: Picard(), Implicit(), Stop(); refused: residual 1.000e-02",
    ]


def test_invalid_arguments_raise() -> None:
    deq, x = eq.DEQ(TanhCell(4)), inputs(3, 4)
    with pytest.raises(ValueError, match="residual to reach must be positive, got 0"):
        tune(deq, x, residual=0)
    with pytest.raises(ValueError, match=r"agreement to reach is a cosine, in \(0, 1\], got 2"):
        tune(deq, x, agreement=2)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        tune(deq, x, rounds=0)
    with pytest.raises(TypeError, match=r"such as eq\.JFB\(\), got <class"):
        Candidates(gradients=(eq.JFB,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="A solver is an object"):
        Candidates(solvers=(eq.Anderson,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no eq\.DEQ"):
        tune(nn.Linear(2, 2), x)


def test_a_model_that_solves_nothing_raises() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deq = eq.DEQ(TanhCell(4))

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="solves none of them"):
        tune(Idle(), inputs(3, 4))
