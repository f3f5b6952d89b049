"""Exported models: loops that stop sample by sample as the model's own solves do, in torch.export and in onnxruntime."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

import equilibria as eq
from equilibria.export import ONNX_TORCH, export, to_onnx
from equilibria.lab import data
from tests.problems import TORCH, AffineCell, NestedCell, TanhCell, generator, inputs, matrix

N = 6
STOP = eq.Stop(rtol=1e-8, atol=1e-12, max_steps=200, on_failure="ignore")
ROUNDING = 1e-12  # the graph adds up in another order: a few spacings of float64
TO_ONNX = pytest.mark.skipif(TORCH < ONNX_TORCH, reason="older versions cannot write loops")
PROMISED = 1e-5  # of ONNX beside PyTorch; float32 alone has 1e-6 of rounding in outputs of this size


class Both(nn.Module):
    """An affine equilibrium by Anderson, whose answer is known, and a nonlinear one on top of it by Picard."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = eq.DEQ(AffineCell(matrix("orthogonal", N, 0.9)), solver=eq.Anderson(history=4), stop=STOP)
        self.tanh = eq.DEQ(TanhCell(N), solver=eq.Picard(damping=0.9), stop=STOP, gradient=eq.JFB())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.affine(x)
        return z, self.tanh(z)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Both().eval()


@pytest.fixture(scope="module")
def program(model: nn.Module) -> ExportedProgram:
    return export(model, inputs(4, N), with_steps=True)


def solved(model: nn.Module, *given: Any) -> tuple[Any, list[eq.Stats]]:
    """Return the output of the model and the statistics of its solves."""
    with torch.no_grad(), eq.record(model) as solutions:
        output = model(*given)
    return output, [solution.stats for solution in solutions]


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same(model: nn.Module, program: ExportedProgram, *given: Any) -> None:
    expected, stats = solved(model, *given)
    output, steps, converged = program.module()(*given)
    assert_close(output, expected, ROUNDING)
    for each, taken, done in zip(stats, steps, converged, strict=True):
        assert torch.equal(taken, each.steps) and torch.equal(done, each.converged)


def hard(batch: int) -> Tensor:
    """Return samples of different difficulty; a saturated tanh contracts more."""
    return inputs(batch, N, seed=5) * torch.logspace(-2, 1, batch, dtype=torch.float64).unsqueeze(1)


@pytest.mark.parametrize("batch", [7, 4, 1, 0])
def test_the_same_answers_and_steps_for_batches_of_any_size(model: nn.Module, program: ExportedProgram, batch: int) -> None:
    assert_same(model, program, hard(batch))


def test_the_answer_is_the_equilibrium(program: ExportedProgram) -> None:
    x = inputs(5, N, seed=8)
    exact = torch.linalg.solve(torch.eye(N).double() - matrix("orthogonal", N, 0.9), x.T).T
    (z, _), _, converged = program.module()(x)
    assert_close(z, exact, 1e-6)
    assert bool(converged[0].all())


def test_a_sample_harder_than_the_example_takes_more_steps(model: nn.Module, program: ExportedProgram) -> None:
    example, harder = inputs(4, N), 1e-3 * inputs(4, N)
    _, (_, before), _ = program.module()(example)
    _, (_, after), (_, converged) = program.module()(harder)
    assert int(after.min()) > int(before.max()) and bool(converged.all())


def test_a_sample_does_not_depend_on_its_neighbours(program: ExportedProgram) -> None:
    x = hard(6)
    run = program.module()
    (_, together), (_, steps), _ = run(x)
    for row in range(6):
        (_, alone), (_, own), _ = run(x[row : row + 1])
        assert own.item() == steps[row].item()
        assert_close(alone[0], together[row], ROUNDING)


def test_failures_are_reported_and_change_no_other_sample(model: nn.Module, program: ExportedProgram) -> None:
    x = hard(5)
    x[2] = float("nan")
    assert_same(model, program, x)
    _, _, (converged, _) = program.module()(x)
    assert converged.tolist() == [True, True, False, True, True]


def test_a_solve_is_exported_as_one_loop(program: ExportedProgram) -> None:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    assert sum(node.target is torch.ops.higher_order.while_loop for node in nodes) == 2
    # the start, the first step, which precedes the loop, and the step that JFB adds to the answer
    assert sum("tanh" in str(node.target) for node in nodes) == 3


@pytest.mark.skipif(TORCH < (2, 8), reason="torch.export.load of older versions gives loops a list of inputs and raises")
def test_a_program_can_be_saved_and_keeps_its_weights(model: nn.Module, program: ExportedProgram) -> None:
    file, x = io.BytesIO(), hard(3)
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert_same(model, loaded, x)
    own = {weight.data_ptr() for weight in model.parameters()}
    assert all(weight.data_ptr() not in own for weight in program.parameters())
    assert all(isinstance(layer.gradient, (eq.Implicit, eq.JFB)) for layer in model.modules() if isinstance(layer, eq.DEQ))


def test_without_steps_the_output_is_the_model_s() -> None:
    model = eq.DEQ(TanhCell(N), solver=eq.Picard(), stop=STOP).eval()
    program = export(model, inputs(3, N), dynamic_batch=False)
    x = inputs(3, N, seed=4)
    assert_close(program.module()(x), model(x).detach(), ROUNDING)


class Prepared(nn.Module):
    """A convolution with inputs that are computed once, normalized weights and a step in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 2, 3, padding=1))
        self.input = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1))
        self.norm = nn.BatchNorm2d(2)

    def prepare(self, x: Tensor) -> Tensor:
        return self.input(x)

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return self.norm(0.3 * torch.tanh_(self.state(z) + injected))


class Several(nn.Module):
    """An input with a row per sample, and one for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TanhCell(N)

    def forward(self, z: Tensor, x: Tensor, shared: Tensor) -> Tensor:
        return self.inner(z, x) + 0.01 * shared.sum(dim=0)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 2, 5, 5, dtype=torch.float64, generator=generator(1))


CASES: dict[str, tuple[Any, Any]] = {
    "nested": (lambda: eq.DEQ(NestedCell(), init=NestedCell.zeros, stop=STOP), lambda b: (inputs(b, 4),)),
    "prepared": (lambda: eq.DEQ(Prepared().double(), stop=STOP), lambda b: (images(b),)),
    "several": (lambda: eq.DEQ(Several(), init=eq.FirstStep(), stop=STOP), lambda b: (inputs(b, N), inputs(3, N))),
    "phantom": (lambda: eq.DEQ(TanhCell(N), stop=STOP, gradient=eq.UnrolledPhantom()), lambda b: (inputs(b, N),)),
    "warmup": (lambda: eq.DEQ(TanhCell(N), stop=STOP, gradient=eq.Warmup(until=0)), lambda b: (inputs(b, N),)),
    "start only": (lambda: eq.DEQ(TanhCell(N), stop=eq.Stop(max_steps=0)), lambda b: (inputs(b, N),)),
    "few steps": (lambda: eq.DEQ(TanhCell(N), stop=eq.Stop(max_steps=2, norm=eq.stop.max_norm)), lambda b: (inputs(b, N),)),
    "patience": (lambda: eq.DEQ(TanhCell(N), stop=eq.Stop(patience=5, keep_every=2)), lambda b: (inputs(b, N),)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_layer_is_exported(case: str) -> None:
    make, given = CASES[case]
    model = make().eval()
    program = export(model, given(4), with_steps=True)
    for batch in (5, 1):
        assert_same(model, program, *given(batch))


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model is in training mode.*model.eval"):
        export(Both(), inputs(4, N))
    model = Both().eval()
    model.get_submodule("tanh.cell").train()
    with pytest.raises(ValueError, match=r"its part 'tanh.cell' is in training mode"):
        export(model, inputs(4, N))


class Normalized(TanhCell):
    def __init__(self) -> None:
        super().__init__(N)
        self.norm = nn.BatchNorm1d(N, track_running_stats=False)


class Outer(TanhCell):
    def __init__(self) -> None:
        super().__init__(N)
        self.inner = eq.DEQ(TanhCell(N))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": eq.Broyden()}, r"The layer '0' has solver=Broyden.*eq.Picard and eq.Anderson"),
        ({"solver": eq.Fallback(eq.Picard(), eq.Anderson())}, "can be exported"),
        ({"solver": eq.Restart(eq.Anderson())}, "can be exported"),
        ({"init": eq.Remember()}, "a graph stores none"),
        ({"init": eq.FirstStep(eq.Remember())}, "a graph stores none"),
        ({"cell": torch.add}, "Make the cell an nn.Module"),
        ({"cell": Outer()}, "another DEQ inside its cell"),
        ({"cell": Normalized()}, "normalizes over the batch"),
        ({"gradient": eq.Reversible(), "solver": eq.Picard()}, "takes its own steps"),
        ({"gradient": eq.Unrolled(depth=3)}, "takes its own steps"),
        ({"gradient": eq.Warmup()}, r"Unrolled\(.*depth=10"),
        ({"batched": False}, "dynamic_batch=False"),
        ({"solver": eq.Anderson(budget=10**6)}, "Set `history` instead of `budget`"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_layers_that_cannot_be_exported_raise_with_the_cause(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(eq.DEQ(**{"cell": TanhCell(N), **options})).eval()
    with pytest.raises((TypeError, ValueError), match=message):
        export(model, inputs(4, N))


def test_invalid_examples_raise_with_the_cause(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"holds 1 samples.*two samples or more"):
        export(model, inputs(1, N))
    with pytest.raises(ValueError, match="has no tensor with a batch dimension"):
        export(model, (3.0,))
    with pytest.raises(ValueError, match="Autocast is on"), torch.autocast("cpu", dtype=torch.bfloat16):
        export(model, inputs(4, N))


@TO_ONNX
def test_onnx_says_what_to_install(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'equilibria\[export\]'"):
        to_onnx(model, inputs(4, N), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Cell(nn.Module):
    """tanh(W z + x), with |W| fixed to a norm if one is given."""

    def __init__(self, norm: float | None) -> None:
        super().__init__()
        linear = nn.Linear(32, 32)
        self.linear = linear if norm is None else nn.utils.parametrizations.spectral_norm(linear)
        self.factor = 1.0 if norm is None else norm

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.factor * self.linear(z) + x)


def digits_model(solver: Any, norm: float | None, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a model trained on digits for a few epochs, and the test images."""
    torch.manual_seed(0)
    digits = data.load("digits")
    layer = eq.DEQ(Cell(norm), solver=solver, stop=eq.Stop(rtol=1e-4, max_steps=100, on_failure="ignore"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), layer, nn.Linear(32, 10)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        for x, y in data.Batches(digits.train, 64, seed=epoch, transform=digits.normalize):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(dtype)), y).backward()
            optimizer.step()
    return model.eval(), digits.normalize(digits.test.x).to(dtype)


def run_onnx(path: Path, *given: Tensor) -> dict[str, Tensor]:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    feeds = {place.name: tensor.numpy() for place, tensor in zip(session.get_inputs(), given, strict=True)}
    names = [place.name for place in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(names, feeds)), strict=True))


# Not free in float32: Anderson amplifies rounding where a cell hardly contracts, and two runtimes that add up in another
# order part ways on the hardest images, as PyTorch parts from itself in float64.
@TO_ONNX
@pytest.mark.parametrize(
    ("solver", "norm", "dtype"),
    [
        pytest.param(eq.Picard(), 0.9, torch.float32, id="Picard-contracting"),
        pytest.param(eq.Picard(), None, torch.float64, id="Picard-free", marks=pytest.mark.slow),
        pytest.param(eq.Anderson(), 0.9, torch.float32, id="Anderson-contracting", marks=pytest.mark.slow),
        pytest.param(eq.Anderson(), None, torch.float64, id="Anderson-free"),
    ],
)
def test_onnxruntime_matches_the_model_on_all_test_digits(
    solver: Any, norm: float | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = digits_model(solver, norm, dtype)
    path = tmp_path / "digits.onnx"
    to_onnx(model, x[:2], path, with_steps=True)
    assert [file.name for file in tmp_path.iterdir()] == ["digits.onnx"]
    expected, (stats,) = solved(model, x)
    found = run_onnx(path, x)
    assert list(found) == ["output", "steps_0", "converged_0"] and len(x) > 300
    solved_ones = stats.converged  # the iterates of an image that does not converge amplify rounding
    assert solved_ones.double().mean() > 0.95
    assert_close(found["output"][solved_ones], expected[solved_ones], PROMISED)
    assert torch.equal(found["steps_0"], stats.steps) and torch.equal(found["converged_0"], stats.converged)
    assert len(stats.steps.unique()) > 2  # samples of different difficulty
    example, hardest = run_onnx(path, x[:2])["steps_0"], int(stats.steps.argmax())
    alone = run_onnx(path, x[hardest : hardest + 1])["steps_0"]
    assert int(alone) == int(stats.steps.max()) > int(example.max())


@TO_ONNX
@pytest.mark.slow
def test_onnx_supports_several_inputs_outputs_and_layers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, path = Both().eval(), tmp_path / "deeper" / "both.onnx"
    to_onnx(model, inputs(4, N), path, with_steps=True)
    x = hard(6)
    x[2] = float("nan")
    (first, second), stats = solved(model, x)
    found = run_onnx(path, x)
    assert list(found) == ["output_0", "output_1", "steps_0", "steps_1", "converged_0", "converged_1"]
    assert_close(found["output_0"], first, ROUNDING)
    assert_close(found["output_1"], second, ROUNDING)
    for i, each in enumerate(stats):
        assert torch.equal(found[f"steps_{i}"], each.steps) and torch.equal(found[f"converged_{i}"], each.converged)


def test_an_old_torch_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(RuntimeError, match=r"This is torch 2\.10\.1\+cpu, but.* need torch 2\.11 or newer.*use eq\.export"):
        to_onnx(nn.Linear(2, 2), torch.zeros(2, 2), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [1e-35, 1e-24, 1e-16, 1e22])
def test_states_whose_squares_leave_the_dtype_are_not_marked_converged(scale: float) -> None:
    class Cell(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.7 * z + x

    layer = eq.DEQ(Cell(), solver=eq.Picard(), stop=eq.Stop(atol=0.0, max_steps=60)).eval()
    program = eq.export(layer, torch.randn(3, 4), with_steps=True).module()
    _, _, (converged,) = program(torch.full((2, 4), scale))
    assert not bool(converged.any())
    z, _, (converged,) = program(torch.ones(2, 4))
    assert bool(converged.all()) and bool(((0.7 * z + 1 - z).abs() <= 1.01e-3 * (0.7 * z + 1)).all())


@pytest.mark.parametrize(
    "export",
    [
        pytest.param(lambda model, x: torch.export.export(model, (x,)), id="export"),
        pytest.param(lambda model, x: torch.jit.trace(model, (x,)), id="jit"),
    ],
)
def test_exporters_of_torch_are_refused_with_an_alternative(export: Any) -> None:
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch does not tell that it exports")
    model = nn.Sequential(nn.Linear(4, 8), eq.DEQ(lambda z, x: torch.tanh(0.3 * z + x)), nn.Linear(8, 2)).eval()
    with pytest.raises(RuntimeError, match=r"eq\.export\(model, inputs\)"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that jit.trace is deprecated
        export(model, torch.randn(3, 4))
