"""One module solved and differentiated by several threads, and a module changed between forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq

STOP = eq.Stop(rtol=1e-10, atol=0.0, max_steps=200, on_failure="raise")
THREADS = 4


class Cell(nn.Module):
    """tanh(gain (W z + x)), where gain is a plain attribute; eval mode ignores it."""

    def __init__(self, n: int = 4, gain: Any = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(n, n).double()
        self.gain = gain
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((self.gain if self.training else 1.0) * (self.linear(z) + x))


def gradient(deq: eq.DEQ, weight: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(deq(x).square().sum(), weight)
    return grad


def in_threads(work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Newton()])
def test_threads_on_one_module_get_right_gradients(solver: Any) -> None:
    torch.manual_seed(0)
    cell = Cell()
    deq, weight = eq.DEQ(cell, solver=solver, stop=STOP), cell.linear.weight
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(THREADS)]
    expected = [gradient(deq, weight, x) for x in inputs]

    def work(index: int) -> None:
        for _ in range(15):
            torch.testing.assert_close(gradient(deq, weight, inputs[index]), expected[index])

    in_threads(work)
    assert cell.linear.weight is weight


def test_threads_have_their_own_norms_and_masks() -> None:
    """Every thread's dropout mask has the shape of its own batch, and its gradient is that of its own mask."""
    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4).double())
            self.dropout = eq.nn.VariationalDropout(0.5)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(0.3 * self.dropout(self.linear(z)) + x)

    cell = Masked()
    deq = eq.DEQ(cell, stop=STOP)
    before = {name: id(part) for name, part in deq.named_modules()}

    def work(index: int) -> None:
        x = torch.randn(2 + index, 4, dtype=torch.float64)
        for _ in range(10):
            s = deq.solve(x)
            torch.testing.assert_close(s.f(s.z), s.z, rtol=1e-8, atol=1e-8)
            (grad,) = torch.autograd.grad(s.z.sum(), cell.linear.bias)
            (again,) = torch.autograd.grad(_unrolled(s), cell.linear.bias)
            torch.testing.assert_close(grad, again, rtol=1e-6, atol=1e-8)

    in_threads(work)
    assert {name: id(part) for name, part in deq.named_modules()} == before
    assert cell.dropout.mask is None


def _unrolled(s: eq.Solution) -> Tensor:
    """Return a scalar with the gradient of s.z.sum(), by sixty more steps from the equilibrium with their graph."""
    z: Tensor = s.z.detach()
    for _ in range(60):
        z = s.f(z)
    return z.sum()


CHANGES: dict[str, Callable[[Cell], Any]] = {
    "eval": lambda cell: cell.eval(),
    "number": lambda cell: setattr(cell, "gain", 0.2),
    "tensor": lambda cell: setattr(cell, "gain", torch.tensor(0.2, dtype=torch.float64)),
    "module": lambda cell: setattr(cell, "linear", nn.Linear(4, 4).double()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", [eq.Implicit(), eq.NeumannPhantom(steps=80), eq.UnrolledPhantom(steps=80)], ids=repr)
def test_the_backward_runs_the_cell_as_the_forward_did(change: str, way: eq.Gradient) -> None:
    torch.manual_seed(0)
    gain = torch.tensor(0.8, dtype=torch.float64) if change == "tensor" else 0.8
    cell, x = Cell(gain=gain), torch.randn(3, 4, dtype=torch.float64)
    deq, weight = eq.DEQ(cell, stop=STOP, gradient=way), cell.linear.weight
    expected = gradient(deq, weight, x)
    z = deq(x)
    CHANGES[change](cell)
    (grad,) = torch.autograd.grad(z.square().sum(), weight)
    torch.testing.assert_close(grad, expected)


def test_attributes_that_a_cell_sets_are_kept() -> None:
    class Keeping(Cell):
        runs = 0

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            self.runs += 1
            return super().forward(z, x)

    plain, normed = Keeping(), Keeping()
    nn.utils.parametrizations.weight_norm(normed.linear)
    for cell in (plain, normed):
        s = eq.DEQ(cell, stop=STOP).solve(torch.ones(2, 4, dtype=torch.float64))
        assert cell.runs == s.stats.evaluations


REFERENCES: dict[str, Callable[[Cell], Any]] = {
    "replaced forward, a closure": lambda cell: setattr(cell, "forward", lambda z, x: torch.tanh(cell.linear(z) + x)),
    "replaced forward, a bound method": lambda cell: setattr(cell, "forward", cell.forward),
    "modules in a tuple": lambda cell: setattr(cell, "parts", (cell.linear,)),
    "a hook, a closure": lambda cell: cell.register_forward_hook(lambda m, i, out: out + 0 * cell.linear.bias),
    "an object that holds a module": lambda cell: setattr(cell, "helper", Helper(cell.linear)),
}


class Helper:
    def __init__(self, part: nn.Module) -> None:
        self.part = part


class Referring(Cell):
    parts: tuple[nn.Module, ...] = ()
    helper: Helper | None = None

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        linear = self.parts[0] if self.parts else self.helper.part if self.helper is not None else self.linear
        return torch.tanh(linear(z) + x)


@pytest.mark.parametrize("reference", REFERENCES)
def test_modules_outside_of_submodules_are_differentiated(reference: str) -> None:
    torch.manual_seed(0)
    cell, x = Referring(), torch.randn(3, 4, dtype=torch.float64)
    expected = gradient(eq.DEQ(cell, stop=STOP), cell.linear.weight, x)
    REFERENCES[reference](cell)
    torch.testing.assert_close(gradient(eq.DEQ(cell, stop=STOP), cell.linear.weight, x), expected)


def test_recurrent_modules_in_a_cell_are_differentiated() -> None:
    """They keep their weights in a list in addition to the parameters."""
    torch.manual_seed(0)
    gru = nn.GRU(4, 4, batch_first=True).double()
    (weight,) = (parameter for name, parameter in gru.named_parameters() if name == "weight_hh_l0")

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = gru

        def forward(self, z: Tensor, x: Tensor) -> Any:
            return 0.3 * self.gru(z + x)[0]

    x = torch.randn(2, 3, 4, dtype=torch.float64)
    deq, unrolled = (eq.DEQ(Recurrent(), stop=STOP, gradient=way) for way in (eq.Implicit(), eq.Unrolled()))
    grads = [torch.autograd.grad(each(x).square().sum(), weight)[0] for each in (deq, unrolled)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-8)
