"""Compiled solves: the same answers, the same steps per sample, and an honest way out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import equilibria as eq
from equilibria._core.compile import Compiler
from equilibria._core.equation import CellEquation
from equilibria._core.program import split
from tests.problems import TIGHT, TORCH, TanhCell, inputs, matrix

LOOSE = eq.Stop(rtol=1e-6, max_steps=200)


class Seen:
    """A backend that runs the graph as it is, and keeps count."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        self.graphs.append(graph)
        return graph


def compiled(cell: Any, seen: Seen | None = None, **options: Any) -> eq.DEQ:
    deq = eq.DEQ(cell, compile=True, **options)
    deq._compiler = Compiler(seen or Seen(), trials=0)
    return deq


def gradients(deq: eq.DEQ, x: Tensor) -> tuple[eq.Solution, list[Tensor]]:
    x = x.clone().requires_grad_()
    s = deq.solve(x)
    return s, list(torch.autograd.grad(s.z.square().sum(), [x, *deq.parameters()]))


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Anderson(history=2, damping=0.8), eq.Picard()], ids=repr)
@pytest.mark.parametrize("n", [6, 80])
def test_the_same_answers_steps_and_gradients(solver: Any, n: int) -> None:
    cell, x, seen = TanhCell(n, norm=0.8), inputs(5, n), Seen()
    x[1] *= 3  # samples of different difficulty
    gradient = eq.Implicit(solver=eq.GMRES(restart=4))  # by default the plain loop keeps more when it is slow
    s, found = gradients(compiled(cell, seen, solver=solver, stop=LOOSE, gradient=gradient), x)
    plain, expected = gradients(eq.DEQ(cell, solver=solver, stop=LOOSE, gradient=gradient), x)
    assert len(seen.graphs) == 2  # forward and adjoint
    assert torch.equal(s.stats.steps, plain.stats.steps) and torch.equal(s.stats.best, plain.stats.best)
    assert torch.equal(s.stats.status, plain.stats.status)
    assert s.adjoint is not None and plain.adjoint is not None
    assert torch.equal(s.adjoint.steps, plain.adjoint.steps)
    torch.testing.assert_close(s.stats.residual, plain.stats.residual, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(s.z, plain.z, rtol=1e-10, atol=1e-10)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_failures_are_reported_as_by_the_plain_loop() -> None:
    class Mixed(nn.Module):
        def forward(self, z: Tensor, x: Tensor, a: Tensor) -> Tensor:
            return a * z + x

    x, a = torch.ones(3, 4).double(), torch.tensor([[0.5], [-1.0], [0.5]]).double()
    x[2] = float("nan")
    stop = eq.Stop(rtol=1e-8, max_steps=30, on_failure="ignore")
    s = compiled(Mixed(), solver=eq.Picard(), stop=stop).solve(x, a)
    plain = eq.DEQ(Mixed(), solver=eq.Picard(), stop=stop).solve(x, a)
    assert s.stats.status.tolist() == plain.stats.status.tolist()
    assert torch.equal(s.stats.steps, plain.stats.steps)
    torch.testing.assert_close(s.z, plain.z, equal_nan=True)


def test_one_program_per_shape_and_setting() -> None:
    cell, seen = TanhCell(5), Seen()
    deq = compiled(cell, seen, stop=LOOSE)
    with torch.no_grad():
        for _ in range(3):
            deq(inputs(4, 5))
        assert len(seen.graphs) == 1
        deq(inputs(5, 4).T)  # other strides
        deq(inputs(4, 5))
        assert len(seen.graphs) == 2
        cell.__dict__["scale"] = 2.0  # an attribute the trace may have taken for constant
        deq(inputs(4, 5))
        assert len(seen.graphs) == 3


def test_weights_are_inputs_of_the_program() -> None:
    cell, x = TanhCell(5), inputs(4, 5)
    deq = compiled(cell, stop=LOOSE)
    with torch.no_grad():
        deq(x)
        for parameter in cell.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(deq(x), eq.DEQ(cell, stop=LOOSE)(x))


def test_what_does_not_depend_on_the_state_is_computed_once() -> None:
    def f(z: Tensor, w: Tensor, u: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ w.T + torch.relu(x @ u.T))

    z, w, u, x = inputs(3, 4), matrix("orthogonal", 4, 0.5), matrix("orthogonal", 4, 1.0), inputs(3, 4, seed=1)
    from torch.fx.experimental.proxy_tensor import make_fx

    parts = split(make_fx(f)(z, w, u, x))
    saved = parts.prepare(w, u, x)
    torch.testing.assert_close(parts.apply(z, *saved), f(z, w, u, x))
    assert isinstance(parts.apply, fx.GraphModule)
    inside = [str(node.target) for node in parts.apply.graph.nodes if node.op == "call_function"]
    assert not any("relu" in name for name in inside) and sum("mm" in name for name in inside) == 1
    assert all(tensor._base is None for tensor in saved)  # a view would be freed with every turn of the loop


def test_in_place_cells_can_be_compiled() -> None:
    class InPlace(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            y = 0.5 * z
            y.add_(x).tanh_()
            return y

    x = inputs(3, 4)
    torch.testing.assert_close(compiled(InPlace(), stop=TIGHT)(x), eq.DEQ(InPlace(), stop=TIGHT)(x))


def test_a_function_is_not_compiled_and_says_so_once() -> None:
    deq = compiled(lambda z, x: 0.5 * torch.tanh(z) + x, stop=LOOSE)
    with pytest.warns(UserWarning, match="the cell is a function"):
        z = deq(inputs(3, 4))
    torch.testing.assert_close(deq(inputs(3, 4)), z)  # no second warning, which would be an error here


def test_control_flow_on_values_is_not_compiled_and_says_so() -> None:
    class Branching(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * z + x if bool((z > 100).all()) else 0.25 * z + x

    x = inputs(3, 4)
    with pytest.warns(UserWarning, match="without being compiled"):
        z = compiled(Branching(), stop=LOOSE)(x)
    torch.testing.assert_close(z, x / 0.75, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [float("nan"), 1.1], ids=["nan", "off"])
def test_wrong_machine_code_is_rejected(factor: float) -> None:
    class Wrong(Seen):
        def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
            return lambda *given: [out * factor if out.is_floating_point() else out for out in graph(*given)]

    cell, x = TanhCell(6, norm=0.8), inputs(5, 6)
    with pytest.warns(UserWarning, match="without being compiled: the machine code made of this cell gives other values"):
        s = compiled(cell, Wrong(), stop=LOOSE).solve(x)
    torch.testing.assert_close(s.z, eq.DEQ(cell, stop=LOOSE).solve(x).z, rtol=0, atol=0)


class Circular(nn.Module):
    """Its padding is taken apart into writing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular", dtype=torch.float64)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.add(x, 0.3 * self.conv(z), alpha=0.5))


@pytest.mark.parametrize("rows", [1, 3])
def test_writing_below_the_surface_is_part_of_the_program(rows: int) -> None:
    torch.manual_seed(0)
    cell, seen = Circular(), Seen()
    x = inputs(rows, 10).view(rows, 2, 5)
    s, found = gradients(compiled(cell, seen, stop=LOOSE), x)
    plain, expected = gradients(eq.DEQ(cell, stop=LOOSE), x)
    assert len(seen.graphs) == 2
    torch.testing.assert_close(s.z, plain.z, rtol=1e-6, atol=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["function", "list", "hook"])
def test_a_cell_that_was_changed_is_compiled_anew(change: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors, self.act = [0.5], torch.tanh

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.act(self.factors[0] * z + x)

    cell, x = Changing(), inputs(3, 4)
    deq = compiled(cell, stop=LOOSE)
    deq(x)
    if change == "function":
        cell.act = torch.sin
    elif change == "list":
        cell.factors[0] = 0.9
    else:
        cell.register_forward_hook(lambda module, args, out: 0.5 * out)
    torch.testing.assert_close(deq(x), eq.DEQ(cell, stop=LOOSE)(x), rtol=1e-5, atol=1e-5)


def test_solves_that_cannot_be_compiled_run_in_the_plain_loop() -> None:
    x, seen = inputs(3, 4), Seen()
    for options in (
        {"solver": eq.Broyden()},
        {"stop": eq.Stop(rtol=1e-8, trace=True)},
        {"stop": eq.Stop(norm=eq.stop.max_norm)},
    ):
        compiled(TanhCell(4), seen, **options)(x).sum()
    assert not seen.graphs


@pytest.mark.skipif(TORCH < (2, 8), reason="older versions cannot lower the loop")
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
def test_machine_code_gives_the_same_numbers() -> None:
    cell, x = TanhCell(80, norm=0.9, dtype=torch.float32), inputs(6, 80, dtype=torch.float32)
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5, max_steps=100), compile=True)
    deq._compiler = Compiler(trials=0)
    s, found = gradients(deq, x)
    plain, expected = gradients(eq.DEQ(cell, stop=deq.stop), x)
    assert len(deq._compiler._programs) == 2
    assert int((s.stats.steps - plain.stats.steps).abs().max()) <= 1
    # both stop at a residual of 1e-5, but not at the same point: machine code sums float32 in another order
    for a, b in zip([s.z, *found], [plain.z, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_torch_compile_does_not_trace_a_solve() -> None:
    """Around a solve `torch.compile` compiles; inside of it nothing, whether the layer has run before or not."""
    seen = Seen()

    class Cell(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            assert not torch.compiler.is_compiling()
            return 0.5 * torch.tanh(z) + x

    deq, x = eq.DEQ(Cell(), stop=TIGHT), inputs(3, 4)

    def net(x: Tensor) -> Tensor:
        return torch.tanh(deq(torch.tanh(x)))

    expected = net(x)
    torch.testing.assert_close(torch.compile(net, backend=seen)(x), expected)
    assert sum("tanh" in str(node.target) for graph in seen.graphs for node in graph.graph.nodes) == 2


def test_compiling_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="equilibria.compile")
    gradients(compiled(TanhCell(6), stop=LOOSE), inputs(5, 6))
    texts = [record.message for record in caplog.records]
    assert texts[0].startswith("compiling the forward solve for a batch of 5") and "is used" in texts[1]
    assert texts[2].startswith("compiling the adjoint solve for a batch of 5") and len(texts) == 4


class Gained(nn.Module):
    def forward(self, z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return gain * z + x


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(history=3)], ids=repr)
def test_samples_that_run_away_end_as_in_the_plain_loop(solver: eq.Solver[Any]) -> None:
    x, gain = torch.ones(4, 3), torch.tensor([[0.5], [1.5], [3.0], [0.9]])
    for max_steps in (30, 300):
        stop = eq.Stop(max_steps=max_steps, on_failure="ignore")
        with torch.no_grad():
            plain = eq.DEQ(Gained(), solver=solver, stop=stop).solve(x, gain)
            found = compiled(Gained(), solver=solver, stop=stop).solve(x, gain)
        assert torch.equal(found.stats.status, plain.stats.status) and torch.equal(found.stats.steps, plain.stats.steps)
        assert torch.equal(found.stats.best, plain.stats.best)
        torch.testing.assert_close(found.z, plain.z)
        torch.testing.assert_close(found.stats.residual, plain.stats.residual, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**80])
def test_starts_beyond_the_range_of_squares_take_the_plain_loop(scale: float) -> None:
    x, gain = inputs(4, 3, dtype=torch.float32), torch.full((4, 1), 0.5)
    deq = compiled(Gained(), solver=eq.Picard(), stop=eq.Stop(atol=0, on_failure="raise"))
    with torch.no_grad():
        usual, far = deq.solve(x, gain), deq.solve(x * scale, gain)
    assert torch.equal(usual.stats.steps, far.stats.steps)
    torch.testing.assert_close(far.z / scale, usual.z)


def test_the_key_of_a_program_can_be_hashed_whatever_the_inputs() -> None:
    """In torch 2.6 the structure of nested inputs cannot: it once ended the solve, past the plain loop."""

    class Cell(nn.Module):
        def forward(self, z: Tensor, x: dict[str, list[Tensor]]) -> Tensor:
            return 0.5 * torch.tanh(z) + x["a"][0]

    deq = compiled(Cell(), init=eq.Zeros(4), stop=TIGHT)
    x = {"a": [inputs(3, 4)]}
    z = deq(x)
    torch.testing.assert_close(z, 0.5 * torch.tanh(z) + x["a"][0])


def solve_sizes(deq: eq.DEQ, *sizes: int) -> None:
    """Solve batches of these sizes, and compare each with the plain loop."""
    plain = eq.DEQ(deq.cell, stop=deq.stop, solver=deq.solver, gradient=deq.gradient)
    for size in sizes:
        x = inputs(size, 5)
        found, expected = gradients(deq, x), gradients(plain, x)
        assert torch.equal(found[0].stats.steps, expected[0].stats.steps)
        assert torch.equal(found[0].stats.status, expected[0].stats.status)
        for a, b in zip([found[0].z, *found[1]], [expected[0].z, *expected[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_smaller_batch_is_padded_to_the_size_of_a_program() -> None:
    seen = Seen()
    deq = compiled(TanhCell(5), seen, stop=LOOSE)
    solve_sizes(deq, 8, 7, 4, 5)
    assert len(seen.graphs) == 2  # forward and adjoint, of the first size


def test_a_further_size_is_compiled_when_it_has_come_up_three_times() -> None:
    seen = Seen()
    deq = compiled(TanhCell(5), seen, stop=LOOSE)
    solve_sizes(deq, 8, 9, 3, 9, 3)
    assert len(seen.graphs) == 2
    solve_sizes(deq, 9)
    assert len(seen.graphs) == 4
    solve_sizes(deq, 8, 9, 6)
    assert len(seen.graphs) == 4


def test_forward_and_adjoint_programs_are_counted_apart() -> None:
    seen = Seen()
    deq = compiled(TanhCell(5), seen, stop=LOOSE)
    for steps in range(200, 210):  # ten settings, each of which needs a program of its own
        deq.stop = eq.Stop(rtol=1e-6, max_steps=steps)
        solve_sizes(deq, 3)
    assert len(seen.graphs) == 16  # eight of either kind


@pytest.mark.parametrize("where", ["backend", "program"])
def test_an_error_of_the_compiler_leads_to_the_plain_loop(where: str) -> None:
    class Broken:
        def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
            if where == "backend":
                raise TypeError("unhashable type: 'list'")

            def run(*inputs: Tensor) -> Any:
                raise NotImplementedError("complex numbers")

            return run

    deq = eq.DEQ(TanhCell(5), stop=LOOSE, compile=True)
    deq._compiler = Compiler(Broken(), trials=0)
    with pytest.warns(UserWarning, match="Solves run without being compiled: (TypeError|NotImplementedError)"):
        solve_sizes(deq, 4)
    solve_sizes(deq, 4, 3)  # it says so once


def test_a_key_that_cannot_be_hashed_leads_to_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the structure of nested inputs in torch 2.6."""
    monkeypatch.setattr(CellEquation, "fingerprint", lambda self: [])
    with pytest.warns(UserWarning, match="Solves run without being compiled: TypeError: unhashable"):
        solve_sizes(compiled(TanhCell(5), stop=LOOSE), 4)


class ComplexInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(matrix("orthogonal", 4, 0.7).to(torch.complex128))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((z.to(x.dtype) @ self.w + x).real)


@pytest.mark.filterwarnings("ignore:Solves run without being compiled")  # conjugate views have no graph
@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_inputs_and_weights_of_a_real_state(conjugate: bool) -> None:
    x = inputs(3, 4) * torch.tensor(1 + 1j).to(torch.complex128)
    cell, x = ComplexInput(), x.conj() if conjugate else x
    options: dict[str, Any] = {"init": lambda x: torch.zeros(len(x), 4, dtype=torch.float64), "stop": LOOSE}
    s, plain = compiled(cell, **options).solve(x), eq.DEQ(cell, **options).solve(x)
    torch.testing.assert_close(s.z, plain.z, rtol=1e-8, atol=1e-8)
    assert torch.equal(s.stats.steps, plain.stats.steps)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_states_are_solved_as_by_the_plain_loop(dtype: torch.dtype) -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(0.3j * torch.eye(4, dtype=dtype))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return z @ self.w + x

    cell, x = Rotation(), torch.complex(inputs(3, 4), inputs(3, 4)).to(dtype)
    s = compiled(cell, stop=LOOSE).solve(x)
    assert bool(s.stats.converged.all())
    torch.testing.assert_close(s.z, eq.DEQ(cell, stop=LOOSE)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Solves run without being compiled")  # buffers may move in training
@pytest.mark.parametrize("moves", [False, True])
def test_cells_with_buffers_in_training_mode_under_inference_mode(moves: bool) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs: Tensor
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            if moves:
                self.runs += 1
            return 0.5 * torch.tanh(z) + x

    cell, x = Buffered(), inputs(3, 4)
    with torch.inference_mode():
        z = compiled(cell, stop=LOOSE)(x)
    torch.testing.assert_close(z, 0.5 * torch.tanh(z) + x, rtol=1e-5, atol=1e-5)
    assert int(cell.runs) == int(moves)
