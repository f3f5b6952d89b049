"""The diagnosis names the cause of planted problems and does not modify the model."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.analysis.diagnosis import examine, example_models
from equilibria.analysis.diagnosis.findings import Severity, findings
from equilibria.analysis.measuring import brief, captured
from tests.problems import NestedCell, TanhCell, inputs


def causes(model: nn.Module, batch: Any) -> dict[str, eq.analysis.Severity]:
    return {finding.cause: finding.severity for finding in eq.diagnose(model, batch).findings}


@pytest.mark.recorded  # the documentation quotes these examples
@pytest.mark.parametrize(
    ("example", "cause"),
    [
        ("not-contractive", "cell not contractive"),
        ("tolerance-out-of-reach", "tolerance below the reach of the dtype"),
        ("free-dropout", "dropout without a fixed mask"),
        ("batch-statistics", "batch statistics couple samples"),
    ],
)
def test_planted_problems_are_named_and_no_others(example: str, cause: str) -> None:
    found = {
        name
        for name, severity in causes(*example_models.EXAMPLES[example]()).items()
        if severity is not eq.analysis.Severity.HINT
    }
    assert found == {cause}


def test_a_contractive_model_has_no_finding_worse_than_a_hint() -> None:
    diagnosis = eq.diagnose(*example_models.contractive())
    assert diagnosis.ok
    assert not diagnosis.findings or all(f.severity is eq.analysis.Severity.HINT for f in diagnosis.findings)


def test_eval_mode_has_no_dropout_or_batch_statistics_findings() -> None:
    for example in ("free-dropout", "batch-statistics"):
        model, batch = example_models.EXAMPLES[example]()
        assert not {name for name, s in causes(model.eval(), batch).items() if s is not eq.analysis.Severity.HINT}, example


def test_noise_other_than_dropout_is_found() -> None:
    class Noisy(example_models.TanhCell):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return super().forward(z, x) + 0.01 * torch.randn_like(z)

    model = eq.DEQ(Noisy(0.5))
    assert causes(model, inputs(8, example_models.WIDTH, dtype=torch.float32)).get("random cell") is Severity.ERROR


def test_data_hidden_in_the_cell_couples_samples() -> None:
    class Mean(example_models.TanhCell):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return super().forward(z, x + 0.1 * z.mean(dim=0))

    model = eq.DEQ(Mean(0.5), stop=eq.Stop(compact=False))
    found = causes(model, inputs(8, example_models.WIDTH, dtype=torch.float32))
    assert found.get("samples depend on each other") is eq.analysis.Severity.RISK


def test_too_few_steps_are_distinguished_from_divergence() -> None:
    gradient = eq.Implicit(stop=eq.Stop(rtol=1e-6))
    model = eq.DEQ(TanhCell(6, norm=0.9), solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=5), gradient=gradient)
    (finding,) = [f for f in eq.diagnose(model, inputs(4, 6)).findings if f.severity is eq.analysis.Severity.ERROR]
    assert finding.cause == "too few steps"
    assert "Stop(max_steps=" in finding.advice


def test_more_steps_are_not_advised_for_oscillating_samples() -> None:
    x = torch.tensor([[0.9], [0.9], [1.0]], dtype=torch.float64)  # the last one oscillates
    model = eq.DEQ(lambda z, x: 1 - x * z, solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=20))
    found = {finding.cause: finding for finding in eq.diagnose(model, x).findings}
    assert "with ten times as many 1 do" in found["too few steps"].seen
    assert found["too few steps"].advice.startswith("a stronger solver") and "helps 2 of 3" in found["too few steps"].advice


def test_more_steps_are_not_advised_where_they_help_few() -> None:
    x = torch.tensor([[0.9], [1.0], [1.0]], dtype=torch.float64)  # the last two oscillate
    model = eq.DEQ(lambda z, x: 1 - x * z, solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=20))
    assert "too few steps" not in {finding.cause for finding in eq.diagnose(model, x).findings}


def test_an_expansive_cell_that_is_solved_needs_no_other_solver() -> None:
    model = eq.DEQ(TanhCell(6, norm=1.6), solver=eq.Broyden(), stop=eq.Stop(max_steps=200))
    (finding,) = [f for f in eq.diagnose(model, inputs(4, 6)).findings if f.cause == "cell not contractive"]
    assert finding.severity is eq.analysis.Severity.RISK and "All converged with Broyden" in finding.seen
    assert "as it is" not in finding.advice


def test_nonfinite_samples_are_found() -> None:
    x = inputs(6, 6)
    x[2, 1] = float("nan")
    diagnosis = eq.diagnose(eq.DEQ(TanhCell(6)), x)
    (finding,) = [f for f in diagnosis.findings if f.severity is eq.analysis.Severity.ERROR]
    assert finding.cause == "samples that are not finite"
    assert "1 of 6" in finding.seen
    assert math.isnan(diagnosis.layers[0].examination.radius.radius[2])
    json.loads(diagnosis.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_poor_gradient_and_an_unsolved_adjoint_are_found() -> None:
    cell = TanhCell(16, norm=0.97, kind="symmetric")
    x = 0.1 * inputs(4, 16)
    stop = eq.Stop(rtol=1e-6, atol=0, max_steps=500)
    found = causes(eq.DEQ(cell, stop=stop, gradient=eq.JFB()), x)
    assert found.get("gradient far from the exact one") is eq.analysis.Severity.RISK
    short = eq.Implicit(solver=eq.Picard(), stop=eq.Stop(rtol=1e-6, max_steps=2))
    found = causes(eq.DEQ(cell, stop=stop, gradient=short), x)
    assert found.get("backward solve not converged") is eq.analysis.Severity.ERROR


class ResidualConvolution(nn.Module):
    """norm(relu(z + norm(x + conv(norm(relu(conv(z))))))), as in a multiscale DEQ; it does not contract."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = self.norms[0](torch.relu(self.first(z)))
        out: Tensor = self.norms[2](torch.relu(z + self.norms[1](x + self.second(inner))))
        return out


def test_findings_on_a_residual_convolution_match_the_measurements() -> None:
    torch.manual_seed(0)
    stop = eq.Stop(rtol=1e-2, max_steps=60, on_failure="ignore")
    short = eq.Implicit(solver=eq.Picard(), stop=eq.Stop(max_steps=3, on_failure="ignore"))
    model = eq.DEQ(ResidualConvolution(), stop=stop, gradient=short)
    diagnosis = eq.diagnose(model, torch.randn(3, 4, 5, 5))
    found, e = {finding.cause: finding for finding in diagnosis.findings}, diagnosis.layers[0].examination
    own = e.agreements[0]
    assert own.cosine < 0.9 and f"cosine of {own.cosine:.3f}" in found["gradient far from the exact one"].seen
    assert f"cosine of {own.cosine:.3f}" in found["backward solve not converged"].seen
    assert not any("..." in finding.advice or "about as much" in finding.seen for finding in diagnosis.findings)


def test_a_measured_gradient_is_reported_where_samples_fail() -> None:
    """The backward solve ends at a residual of 0.03 and the gradient has a cosine of 0.34."""
    (layer,) = eq.diagnose(*example_models.contractive()).layers
    e = layer.examination
    failed = {"converged": 24, "max_steps": 8}
    adjoint = dataclasses.replace(e.forward, status=failed, residual=[0.03] * 32, steps=[40] * 32)
    poor = dataclasses.replace(e.agreements[0], cosine=0.34, norm_ratio=2.0, relative_error=1.9)
    forward = dataclasses.replace(e.forward, status=failed)
    e = dataclasses.replace(e, forward=forward, adjoint=adjoint, agreements=[poor], reference_problem="Not exact.")
    found = {finding.cause: finding for finding in findings(e)}
    far, unsolved = found["gradient far from the exact one"], found["backward solve not converged"]
    assert "0.340" in far.seen and "8 of 32 samples did not converge" in far.seen and "Not exact." in far.seen
    assert "3.0e-02. The gradient as measured has a cosine of 0.340" in unsolved.seen
    assert "max_steps=200)" in unsolved.advice and unsolved.severity is Severity.ERROR
    good = dataclasses.replace(e.agreements[0], cosine=0.99999, relative_error=2e-3)
    found = {finding.cause: finding for finding in findings(dataclasses.replace(e, agreements=[good]))}
    assert found["backward solve not converged"].severity is Severity.HINT
    found = {finding.cause: finding for finding in findings(dataclasses.replace(e, agreements=[]))}
    assert "was not measured" in found["backward solve not converged"].seen
    assert "gradient far from the exact one" not in found


def test_an_adjoint_at_no_equilibrium_is_not_named_beside_the_failure_of_the_forward_solve() -> None:
    """Plain iteration on an expansive cell ends anywhere; the adjoint there sometimes narrowly misses its tolerance."""
    e = eq.diagnose(*example_models.not_contractive()).layers[0].examination
    assert e.forward.failed == e.samples and e.adjoint is not None
    missed = dataclasses.replace(e.adjoint, status={"converged": 31, "max_steps": 1}, residual=[1.1e-3] * 32)
    assert {finding.cause for finding in findings(dataclasses.replace(e, adjoint=missed))} == {"cell not contractive"}
    one_converged = dataclasses.replace(e.forward, status={"converged": 1, "max_steps": 31})
    found = findings(dataclasses.replace(e, adjoint=missed, forward=one_converged))
    assert "backward solve not converged" in {finding.cause for finding in found}


@pytest.mark.parametrize("function", [False, True])
def test_slow_measurements_are_stopped_and_reported(function: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "SECONDS", 0.0)
    monkeypatch.setattr(examine, "GRADIENT_SECONDS", 0.0)
    cell = TanhCell(6)
    layer = eq.DEQ((lambda z, x: cell(z, x)) if function else cell, stop=eq.Stop(max_steps=2, on_failure="ignore"))
    diagnosis = eq.diagnose(layer, inputs(4, 6))
    e = diagnosis.layers[0].examination
    stopped = [result.solver for result in e.solvers if result.out_of_time]
    assert stopped == ["Picard()", "Broyden()", "Newton()"] and not e.solvers[0].out_of_time
    assert e.out_of_time == [*stopped, "ten times the steps"] and e.more_steps is None and e.agreements == []
    assert "Newton()                     stopped after 0 s" in str(diagnosis)
    assert "too long: Picard(), Broyden(), Newton(), ten times the steps." in str(diagnosis)
    assert not cell._forward_hooks and not cell._forward_pre_hooks
    pytest.importorskip("matplotlib")
    assert "stopped after 0 s" in diagnosis.save(tmp_path).read_text()


def test_a_slow_comparison_of_gradients_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "GRADIENT_SECONDS", 0.0)
    e = eq.diagnose(eq.DEQ(TanhCell(6)), inputs(4, 6)).layers[0].examination
    assert e.out_of_time == ["the comparison of gradients"] and e.agreements == []


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return 0.5 * z

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Tensor:
        raise RuntimeError("no way back")


def test_a_cell_that_cannot_be_differentiated_is_found() -> None:
    model = eq.DEQ(lambda z, x: OneWay.apply(z) + x)  # type: ignore[no-untyped-call]
    diagnosis = eq.diagnose(model, inputs(4, 6))
    (finding,) = [f for f in diagnosis.findings if f.cause == "backward fails"]
    assert "no way back" in finding.seen


def test_several_layers_and_nested_states_are_examined() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = eq.DEQ(TanhCell(4), stop=eq.Stop(rtol=1e-4))
            cell = NestedCell()
            self.second = eq.DEQ(cell, init=cell.zeros)
            self.unused = eq.DEQ(TanhCell(4))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            nested = self.second.solve(self.first(x * scale)).z  # models may call solve directly
            return nested["a"]

    diagnosis = eq.diagnose(Two(), (inputs(3, 4), torch.ones(1, dtype=torch.float64)))
    assert [layer.name for layer in diagnosis.layers] == ["layer first", "layer second"]
    assert diagnosis.layers[1].examination.size == 4 + 6 + 1


def test_an_inner_equilibrium_is_not_examined_separately() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = eq.DEQ(TanhCell(4, norm=0.3), stop=eq.Stop(rtol=1e-10, atol=0, max_steps=100))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.inner(0.3 * z + x)
            return out

    assert list(captured(eq.DEQ(Outer()), inputs(3, 4))) == [""]


def test_the_model_is_not_modified() -> None:
    model, batch = example_models.batch_statistics()
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[index]
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    settings = brief(model[1].stop), brief(model[1].solver)  # type: ignore[index]
    eq.diagnose(model, batch)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random, torch.get_rng_state())
    assert settings == (brief(model[1].stop), brief(model[1].solver))  # type: ignore[index]
    assert "solve" not in vars(model[1])  # type: ignore[index]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))  # type: ignore[index]
    assert model[1].cell.linear.weight.grad is None  # type: ignore[index]


def test_the_same_layer_and_inputs_give_the_same_measurements() -> None:
    """Cotangents drawn from torch's own random state once made findings differ from process to process."""
    model, batch = example_models.not_contractive()
    torch.manual_seed(1)
    first = eq.diagnose(model, batch, restarts=2).layers[0].examination
    torch.manual_seed(2)
    second = eq.diagnose(model, batch, restarts=2).layers[0].examination
    assert first.adjoint == second.adjoint and first.radius == second.radius
    assert repr(first.attractors) == repr(second.attractors)  # it may hold nan, which does not equal itself


def test_the_text_has_the_numbers_and_the_advice() -> None:
    found = eq.diagnose(*example_models.not_contractive())
    text = str(found)
    for part in (
        "layer 1",
        "32 max_steps",
        "spectral radius",
        "Picard() (present)",
        "eq.jacobian_penalty",
        "kept for backward",
    ):
        assert part in text
    assert len(repr(found)) < 200 and repr(found).startswith("Diagnosis(LayerDiagnosis(layer 1: cell not contractive")
    html = found._repr_html_()
    assert "Error: cell not contractive" in html and "<td>Picard() (present)</td>" in html and "<img" not in html


def test_models_without_an_equilibrium_raise() -> None:
    with pytest.raises(ValueError, match=r"Linear contains no eq\.DEQ"):
        eq.diagnose(nn.Linear(2, 2), torch.ones(1, 2))

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = eq.DEQ(TanhCell(2))

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="did not call them"):
        eq.diagnose(Idle(), torch.ones(1, 2))


def test_all_files_are_saved_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    diagnosis = eq.diagnose(*example_models.contractive())
    page = diagnosis.save(tmp_path / "new" / "folder")
    names = sorted(path.name for path in page.parent.iterdir())
    plots = [f"1-{what}.png" for what in ("convergence", "gradients", "radius", "solvers", "steps")]
    assert names == [*plots, "diagnosis.html", "diagnosis.json"]
    assert all((page.parent / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    numbers = json.loads((page.parent / "diagnosis.json").read_text())
    assert numbers["layers"][0]["examination"]["forward"]["status"] == {"converged": 32}
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 5
    assert "http" not in text  # no external resources

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        diagnosis.save(tmp_path / "broken")
    assert list((tmp_path / "broken").iterdir()) == []


def test_settings_are_shown_as_source_text() -> None:
    assert brief(eq.Anderson()) == "Anderson()"
    assert brief(eq.Newton(linear=eq.GMRES(restart=5))) == "Newton(linear=GMRES(restart=5))"
    assert brief(eq.Stop(rtol=1e-5)) == "Stop(rtol=1e-05)"
    assert brief((eq.Picard(), 3)) == "(Picard(), 3)"


def test_an_init_passed_to_solve_is_used() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = eq.DEQ(TanhCell(4, norm=0.5), init=nn.Linear(7, 4))  # for other inputs than those it gets

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.layer(x, init=torch.ones_like(x))
            return z

    model = Started()
    (call,) = captured(model, inputs(3, 4)).values()
    assert torch.equal(call.deq.solve(*call.inputs).z0, torch.ones(3, 4, dtype=torch.float64))
    assert call.deq is not model.layer and call.deq.cell is model.layer.cell
    assert isinstance(model.layer.init, nn.Linear)
    assert eq.diagnose(model, inputs(3, 4)).layers[0].examination.forward.failed == 0


@pytest.mark.parametrize("name", ["deq-transformer-nano", "deq-trellisnet-nano"])
def test_models_of_sequences_can_be_examined_and_tuned(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = eq.models.create(name, tokens=20), torch.randint(0, 20, (2, 5))
    assert eq.diagnose(model, tokens).layers[0].examination.samples == 2
    few = eq.analysis.Candidates(solvers=(eq.Picard(),), gradients=(eq.JFB(),))
    assert list(eq.tune(model, tokens, candidates=few, rounds=1).layers) == ["layer"]
