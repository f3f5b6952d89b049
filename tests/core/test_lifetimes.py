"""What a solve leaves in memory is freed by reference counts: no result, graph or layer refers to itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria import native

GRADIENTS: dict[str, eq.Gradient] = {
    "implicit": eq.Implicit(),
    "jfb": eq.JFB(),
    "phantom": eq.UnrolledPhantom(steps=2),
    "neumann": eq.NeumannPhantom(steps=2),
    "escalate": eq.Escalate(),
    "unrolled": eq.Unrolled(),
    "explicit": eq.Unrolled(depth=3),
    "shine": eq.Shine(),
    "reversible": eq.Reversible(),
}


class Cell(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, width)
        self.linear.weight.data *= 0.5

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """The garbage collector, which frees cycles, does not run inside a test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def layer(name: str) -> eq.DEQ:
    others: dict[str, eq.Solver[Any]] = {"shine": eq.Broyden(), "reversible": eq.Picard()}
    solver = others.get(name, eq.Anderson())
    return eq.DEQ(Cell(), solver=solver, gradient=GRADIENTS[name])


def watch(s: eq.Solution) -> dict[str, weakref.ref[Any]]:
    """Weak references to what a solve made: the answer, its graph, the problem, the equation and the result."""
    assert isinstance(s.z, Tensor)
    parts = {"solution": s, "z": s.z, "problem": s.problem, "equation": s.equation, "result": s.result, "f": s.f}
    found = {name: weakref.ref(part) for name, part in parts.items()}
    if s.z.grad_fn is not None:
        found["graph"] = weakref.ref(s.z.grad_fn)
    return found


def alive(found: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in found.items() if reference() is not None]


@pytest.mark.parametrize("kernels", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_training_step_is_freed_without_the_garbage_collector(name: str, kernels: bool) -> None:
    deq, x = layer(name), torch.randn(5, 6, requires_grad=True)
    with native.disabled() if not kernels else torch.enable_grad():
        s = deq.solve(x)
        found = watch(s)
        assert "graph" in found
        s.z.square().sum().backward()
    assert s.stats.converged.all() or name == "explicit"
    del s
    assert alive(found) == []


@pytest.mark.parametrize("name", GRADIENTS)
def test_an_answer_that_is_not_differentiated_is_freed(name: str) -> None:
    deq, x = layer(name), torch.randn(5, 6, requires_grad=True)
    s = deq.solve(x)
    found = watch(s)
    del s
    assert alive(found) == []
    with torch.no_grad():
        s = deq.solve(x)
    found = watch(s)
    del s
    assert alive(found) == []


def test_a_graph_keeps_no_solution_alive_and_works_without_it() -> None:
    deq, x = layer("implicit"), torch.randn(5, 6, requires_grad=True)
    s = deq.solve(x)
    found, z, result = watch(s), s.z, s.result
    del s
    assert alive({"solution": found["solution"]}) == []
    z.square().sum().backward()
    assert result.adjoint is not None and x.grad is not None
    del z
    assert alive(found) == ["result"]


def test_recorded_solutions_are_freed_with_their_list() -> None:
    deq, x = layer("implicit"), torch.randn(5, 6, requires_grad=True)
    with eq.record(deq) as solutions:
        deq(x).square().sum().backward()
    found = watch(solutions[0])
    assert solutions[0].adjoint is not None
    solutions.clear()
    assert alive(found) == []


def test_gradients_of_closures_are_freed() -> None:
    weight, x = torch.eye(6).mul(0.5).requires_grad_(), torch.randn(5, 6)
    s = eq.fixed_point(lambda z: torch.tanh(z @ weight + x), torch.zeros(5, 6))
    found = watch(s)
    s.z.square().sum().backward()
    assert weight.grad is not None
    del s
    assert alive(found) == []


def test_second_derivatives_are_freed() -> None:
    deq, x = layer("implicit").double(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    for first_time in (True, False):
        s = deq.solve(x)
        found = watch(s)
        (first,) = torch.autograd.grad(s.z.square().sum(), x, create_graph=True)
        first.square().sum().backward()
        del s, first
        # torch imports modules in its first such backward, and their frames stay until the garbage collector runs
        assert first_time or alive(found) == []
