"""Summaries: counts, statistics of solves, the table, and no side effects."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.analysis.summary import summary
from equilibria.analysis.summary_table import WIDTH, Summary, SummaryRow
from equilibria.models.entries import parameters
from equilibria.models.registry import create, names


class Half(nn.Module):
    """z = z / 2 + W x: with plain iteration from zero the residual is 2^-(k+1) / (1 - 2^-(k+1)) after k steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.W = nn.Linear(width, width, bias=False)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + self.W(x)


STOP = eq.Stop(rtol=1e-3, atol=0.0, max_steps=50)


def net(stop: eq.Stop = STOP, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layer = eq.DEQ(Half(4), solver=eq.Picard(), stop=stop, **options)
    stem = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return nn.Sequential(stem, layer, nn.Linear(4, 2)).double()


def batch(rows: int = 5) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def row(found: Summary, name: str) -> SummaryRow:
    return next(each for each in found.rows if each.name == name)


def assert_printable(found: Summary) -> None:
    text = str(found)
    assert all(len(line) <= WIDTH for line in text.splitlines()), text
    text.encode("ascii")


def test_parts_are_counted() -> None:
    model = net()
    model[2].requires_grad_(False)
    found = summary(model)
    assert [each.name for each in found.rows] == ["", "0", "0.0", "0.1", "0.2", "1", "1.cell", "2"]
    total = found.rows[0]
    assert (total.kind, total.trained, total.frozen, total.buffers) == ("Sequential", 16 + 8 + 16, 10, 9)
    assert (row(found, "0").trained, row(found, "0").buffers) == (16 + 8, 9)
    assert (row(found, "1").trained, row(found, "1.cell").trained) == (16, 16)
    assert (row(found, "2").trained, row(found, "2").frozen) == (0, 10)
    assert found.parameters == 50 and found.bytes == 8 * (50 + 8) + 8
    assert all(each.output is None for each in found.rows)
    assert "output" not in str(found) and "50 parameters, 40 of them trained; 9 numbers in buffers" in str(found)
    assert_printable(found)


def test_outputs_and_solves_are_those_of_a_run_in_eval_mode() -> None:
    model, x = net(), batch()
    found = summary(model, x)
    shapes = {"": (5, 2), "0": (5, 4), "0.0": (5, 4), "1": (5, 4), "1.cell": (5, 4), "2": (5, 2)}
    assert all(row(found, name).output == (shape,) for name, shape in shapes.items())
    with eq.record(model.eval()) as solutions, torch.no_grad():
        model(x)
    stats, solves = solutions[0].stats, found.equilibria["1"].solves
    assert solves is not None and solves.state == ((4,),) and solves.numbers == 4
    assert (solves.count, solves.samples, solves.failed) == (1, 5, 0)
    assert solves.evaluations == stats.evaluations
    assert (solves.mean_depth, solves.max_depth) == (float(stats.depth.double().mean()), int(stats.depth.max()))
    assert solves.residual == float(stats.residual.max())
    # the smallest k with 2^-(k+1) / (1 - 2^-(k+1)) <= 1e-3 is 9
    assert solves.max_depth == 9 and solves.residual == pytest.approx(2**-10 / (1 - 2**-10), rel=1e-9)
    settings = found.equilibria["1"]
    assert (settings.solver, settings.stop, settings.gradient) == (eq.Picard(), STOP, eq.Implicit())
    evaluations = f"5 samples, 0 failed: {stats.evaluations} evaluations"
    assert f"{evaluations}, depth 9.0 mean, 9 max, worst residual 9.8e-04" in str(found)
    assert_printable(found)


def test_failed_solves_are_counted_without_a_warning() -> None:
    model = net(eq.Stop(max_steps=3, on_failure="raise"), eval_stop=eq.Stop(max_steps=2, on_failure="raise"))
    found = summary(model, batch())
    solves = found.equilibria["1"].solves
    assert solves is not None and (solves.failed, solves.max_depth) == (5, 2)
    assert "eval stop" in str(found) and "at most 2 steps" in str(found)
    with pytest.raises(eq.ConvergenceError):
        model(batch())
    quiet = net(eq.Stop(max_steps=3))
    summary(quiet, batch())
    with pytest.warns(eq.ConvergenceWarning):  # the warning is still issued
        quiet(batch())


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in model.named_modules()}


def test_summary_has_no_side_effects() -> None:
    model, x = net(), batch().requires_grad_()
    model.get_submodule("0.2").eval()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    flags, stop = modes(model), model[1].stop
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    summary(model, x)
    assert torch.equal(torch.rand(3), expected)
    assert modes(model) == flags and model[1].stop is stop
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    assert {name: set(vars(part)) for name, part in model.named_modules()} == attributes
    assert not any(part._forward_hooks for part in model.modules())


def test_a_failing_run_has_no_side_effects() -> None:
    model = net()
    flags, stop = modes(model), model[1].stop
    with pytest.raises(RuntimeError):
        summary(model, torch.zeros(2, 7, dtype=torch.float64))
    assert modes(model) == flags and model[1].stop is stop
    assert not any(part._forward_hooks for part in model.modules())


def test_parts_with_their_own_train_method_are_restored() -> None:
    model = nn.Sequential(create("jfb-resnet-mnist"), create("jfb-resnet-mnist").eval())
    deqs = [part for part in model.modules() if isinstance(part, eq.DEQ)]
    assert [deq.batched for deq in deqs] == [False, True]
    with pytest.raises(RuntimeError):  # the second module does not accept the first one's output
        summary(model, torch.rand(2, 1, 28, 28))
    assert [deq.batched for deq in deqs] == [False, True] and modes(model)["1.layer"] is False


class Twice(nn.Module):
    """A model with one equilibrium used twice, another inside its cell, and a third in a submodule that may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.layer = eq.DEQ(self.inner, solver=eq.Picard(), stop=STOP)
        self.nest = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.ModuleDict({"c": eq.DEQ(Half(4))})})})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.layer.solve(x).z
        return {"first": z, "second": self.layer.solve(z).z[:, :2]}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deq = eq.DEQ(Half(4), solver=eq.Picard(), stop=STOP)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + 0.1 * self.deq(x)


def test_solves_belong_to_their_layer() -> None:
    model = Twice()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    found = summary(model, x, depth=1)
    assert [each.name for each in found.rows] == ["", "inner", "inner.deq", "layer", "nest", "nest.a.b.c"]
    assert row(found, "").output == ((3, 4), (3, 2))
    with eq.record(model) as every, eq.record(model.inner) as inside, torch.no_grad():
        model.eval()(x)
    known = {id(s) for s in inside}
    outer = [s.stats for s in every if id(s) not in known]
    for name, stats in (("layer", outer), ("inner.deq", [s.stats for s in inside])):
        solves = found.equilibria[name].solves
        assert solves is not None and (solves.count, solves.samples) == (len(stats), sum(len(each.status) for each in stats))
        assert solves.evaluations == sum(each.evaluations for each in stats)
        assert solves.max_depth == max(int(each.depth.max()) for each in stats)
    assert len(outer) == 2
    assert found.equilibria["nest.a.b.c"].solves is None
    assert "2 solves of 6 samples" in str(found) and "a.b.c" in str(found)
    assert_printable(found)


def test_depth_limits_the_parts_shown() -> None:
    model = net()
    assert [each.name for each in summary(model, depth=0).rows] == ["", "1"]
    assert [each.name for each in summary(model, depth=1).rows] == ["", "0", "1", "2"]
    assert summary(model, depth=9).rows == summary(model, depth=2).rows  # the inside of a cell is not shown
    cell = summary(eq.DEQ(Half(4)), depth=5)
    assert [each.name for each in cell.rows] == ["", "cell"] and "DEQ: an equilibrium" in str(cell)


def test_tied_and_parametrized_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    eq.constraints.spectral_norm(model[2], bound=0.5)
    model.append(model[0])
    found = summary(model, torch.zeros(2, 3))
    assert found.parameters == 18 and [each.name for each in found.rows] == ["", "0", "1", "2"]


def test_models_without_an_equilibrium_or_parameters_have_a_summary() -> None:
    found = summary(nn.Sequential(nn.Flatten(), nn.ReLU()), torch.zeros(2, 3, 4))
    assert found.rows[0].output == ((2, 12),) and found.parameters == 0 and found.equilibria == {}
    assert "0 parameters" in str(found)


@pytest.mark.parametrize("name", [name for name in names() if "large" in name or "xl" in name])
def test_models_on_the_meta_device_have_a_summary(name: str) -> None:
    with torch.device("meta"):
        model = create(name)
    found = summary(model)
    assert found.parameters == found.rows[0].trained == parameters(model)
    assert_printable(found)
    if found.equilibria:
        with pytest.raises(ValueError, match="A model on the meta device cannot be solved"):
            summary(model, torch.zeros(1))


def test_a_model_without_solves_has_shapes_on_the_meta_device() -> None:
    with torch.device("meta"):
        found = summary(nn.Linear(3, 4), torch.zeros(1000, 3))
    assert found.rows[0].output == ((1000, 4),)


@pytest.mark.parametrize("name", ["mdeq-cifar-tiny", "skip-mlp-skip", "jfb-resnet-svhn", "mon-tiers-mnist", "node-mnist"])
def test_models_of_the_library_have_a_summary(name: str) -> None:
    torch.manual_seed(0)
    side, channels = (28, 1) if "cifar" not in name and "svhn" not in name else (32, 3)
    model = create(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summary(model, torch.rand(2, channels, side, side))
    assert found.rows[0].output == ((2, 10),)
    assert all(settings.solves is not None for settings in found.equilibria.values())
    assert_printable(found)


def test_long_names_are_cut_to_the_width() -> None:
    class AModuleWithAVeryLongNameThatNobodyWouldReadToItsEndInALog(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_part_with_a_very_long_name_that_nobody_would_read_to_its_end = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [x] * 20

    found = summary(AModuleWithAVeryLongNameThatNobodyWouldReadToItsEndInALog(), torch.zeros(12345, 2))
    assert_printable(found)
    assert "..." in str(found)


def test_an_empty_batch_has_a_summary() -> None:
    solves = summary(eq.DEQ(Half(4)), torch.zeros(0, 4)).equilibria[""].solves
    assert solves is not None and (solves.samples, solves.max_depth, solves.failed) == (0, 0, 0)


def test_invalid_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"summary takes an nn\.Module, got int"):
        summary(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more, got -1"):
        summary(nn.ReLU(), depth=-1)
    with pytest.raises(ValueError, match="run it once"):
        summary(nn.LazyLinear(2))
