"""`torch.compile` of a model with an equilibrium layer: one graph, with the solve as one operator in it."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import equilibria as eq
from equilibria._core import opaque

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # dynamo warns about itself
    pytest.mark.skipif(not opaque.AVAILABLE, reason="torch 2.6 breaks the graph at a layer"),
]


class Cell(nn.Linear):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(0.5 * super().forward(z) + x)


class Normed(nn.Module):
    """A cell with running statistics, masks and an input prepared once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.inject = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def prepare(self, x: Tensor) -> Tensor:
        return self.inject(x)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.dropout(self.norm(self.inner(z))) + x)


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.seen: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.seen.append(graph)
        return graph.forward

    def calls(self) -> list[str]:
        return [str(node.target) for graph in self.seen for node in graph.graph.nodes if node.op == "call_function"]


def network(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), layer, nn.ReLU(), nn.Linear(8, 3))


def values_and_gradients(model: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # of masks
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad.clone() for p in net.parameters() if p.grad is not None]]


def test_a_sequential_with_a_layer_is_one_graph() -> None:
    torch._dynamo.reset()
    net, graphs = network(eq.DEQ(Cell(8, 8))), Graphs()
    x = torch.randn(4, 5)
    torch.testing.assert_close(torch.compile(net, backend=graphs)(x), net(x), rtol=0, atol=0)
    assert len(graphs.seen) == 1
    calls = graphs.calls()
    assert sum("linear" in call for call in calls) == 2 and sum("equilibria.solve" in call for call in calls) == 1


LAYERS = {
    "implicit": lambda: eq.DEQ(Cell(8, 8)),
    "jfb": lambda: eq.DEQ(Cell(8, 8), gradient=eq.JFB()),
    "unrolled": lambda: eq.DEQ(Cell(8, 8), solver=eq.Picard(), gradient=eq.Unrolled()),
    "shine": lambda: eq.DEQ(Cell(8, 8), solver=eq.Broyden(), gradient=eq.Shine()),
    "buffers and masks": lambda: eq.DEQ(Normed(8)),
    "zeros": lambda: eq.DEQ(Cell(8, 8), init=eq.Zeros(8)),
    "one problem": lambda: eq.DEQ(Cell(8, 8), init=eq.Zeros(4, 8), batched=False),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_values_gradients_and_buffers_are_those_of_the_model(kind: str) -> None:
    torch._dynamo.reset()
    net, x = network(LAYERS[kind]()), torch.randn(4, 5)
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # buffers move in the first
        expected, found = values_and_gradients(net, net, x), values_and_gradients(compiled, twin, x)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for a, b in zip(twin.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.slow
def test_machine_code_around_a_layer_gives_the_same_gradients() -> None:
    torch._dynamo.reset()
    net, x = network(eq.DEQ(Cell(8, 8))), torch.randn(4, 5)
    expected = values_and_gradients(net, net, x)
    for a, b in zip(values_and_gradients(torch.compile(net, fullgraph=True), net, x), expected, strict=True):
        torch.testing.assert_close(a, b)  # code generation reorders the float32 sums of the layers around


def test_the_graph_of_a_solve_is_freed_with_its_output() -> None:
    torch._dynamo.reset()
    net = network(eq.DEQ(Cell(8, 8)))
    compiled, x = torch.compile(net, backend="aot_eager"), torch.randn(4, 5)
    compiled(x).sum().backward()
    for _ in range(5):
        compiled(x)  # with gradients, but without a backward pass
    gc.collect()
    with torch.no_grad():
        compiled(x)  # sweeps
    assert len(opaque._graphs) == 0


def test_two_solves_before_backward() -> None:
    torch._dynamo.reset()
    net = network(eq.DEQ(Cell(8, 8)))
    compiled, x = torch.compile(net, backend="aot_eager"), torch.randn(4, 5)

    def both(model: Any) -> Any:
        return lambda x: model(x) + model(2 * x)

    expected = values_and_gradients(both(net), net, x)
    for a, b in zip(values_and_gradients(both(compiled), net, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_recorded_solutions_keep_their_gradients() -> None:
    """A penalty on a recorded solution reaches the layers below: the graph breaks at the layer while a recording is open."""
    torch._dynamo.reset()
    net, x = network(eq.DEQ(Cell(8, 8))), torch.randn(4, 5)
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x)  # compiled without a recording first

    def weight_gradient(model: Any) -> Tensor:
        net.zero_grad()
        with eq.record(net) as solutions:
            model(x)
        z = solutions[0].z
        assert isinstance(z, Tensor)
        z.square().sum().backward()
        grad = net.get_parameter("0.weight").grad
        assert grad is not None
        return grad.clone()

    torch.testing.assert_close(weight_gradient(compiled), weight_gradient(net), rtol=0, atol=0)


def test_a_monitor_does_not_break_the_graph() -> None:
    torch._dynamo.reset()
    net = network(eq.DEQ(Cell(8, 8)))
    logged: list[dict[str, float]] = []

    with eq.monitor(net, to=logged.append, manual=True) as monitor:
        torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(4, 5)).sum().backward()
        monitor.flush()
    assert logged and any("residual" in key for key in logged[0])


def test_a_tensor_that_is_no_parameter_is_reported() -> None:
    torch._dynamo.reset()

    class Captured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [torch.full((8,), 0.5, requires_grad=True)]

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.held[0] * z + x)

    net = network(eq.DEQ(Captured(), gradient=eq.JFB()))
    with pytest.raises(RuntimeError, match="neither an input nor a parameter of the layer"):
        torch.compile(net, backend="aot_eager")(torch.randn(4, 5))


@pytest.mark.parametrize("start", ["callable", "given"])
def test_other_starts_break_the_graph_and_give_the_same_numbers(start: str) -> None:
    torch._dynamo.reset()
    layer = eq.DEQ(Cell(8, 8), init=(lambda x: torch.ones_like(x)) if start == "callable" else None)
    z0 = torch.ones(4, 8) if start == "given" else None

    def net(x: Tensor) -> Tensor:
        return torch.tanh(layer(torch.tanh(x), init=z0))

    graphs, x = Graphs(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(net, backend=graphs)(x), net(x), rtol=0, atol=0)
    assert len(graphs.seen) > 1 and sum("tanh" in call for call in graphs.calls()) == 2


def test_autocast_around_the_model_gives_the_same_numbers() -> None:
    torch._dynamo.reset()
    net, x = network(eq.DEQ(Cell(8, 8))), torch.randn(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = net(x)
        found = torch.compile(net, backend="aot_eager")(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_copies_of_a_layer_are_layers_of_their_own() -> None:
    torch._dynamo.reset()
    first = network(eq.DEQ(Cell(8, 8)))
    for second in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        with torch.no_grad():
            second.get_parameter("1.cell.weight").mul_(0.5)
        x = torch.randn(4, 5)
        torch.testing.assert_close(torch.compile(second, backend="aot_eager")(x), second(x), rtol=0, atol=0)
