"""The cases in JAX are the same equations, and the methods in JAX are used like all others."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.packing import State
from equilibria.lab.bench import jax_cases, jax_methods
from equilibria.lab.bench.cases import Case, contraction, conv, gates, mixed, trained, transformer, two_scales
from equilibria.lab.bench.jax_cases import JaxCase, load, translate
from equilibria.lab.bench.jax_methods import jax
from equilibria.lab.bench.methods import Method
from equilibria.lab.bench.rules import Judge, tighten

ROUNDED = 1e-5  # float32, with sums in another order
SMALL: dict[str, Callable[[], Case]] = {
    "dense": lambda: contraction(4, 0.9, max_steps=200),
    "gain": lambda: mixed(10),
    "conv": lambda: conv(2, channels=16, size=8),
    "two scales": lambda: two_scales(2, channels=16, size=16),
    "transformer": lambda: transformer(2, length=8, width=32),
    "gates": lambda: gates(2, width=16),
    "trained": lambda: trained(2, seed=0),
}
METHODS = jax()
DEMANDING = ("jaxopt Anderson, GMRES", "optimistix Picard, GMRES")  # one differentiates backwards, the other forwards


@pytest.fixture(params=SMALL)
def case(request: pytest.FixtureRequest) -> Case:
    """Return a case whose start has no zeros, since zeros would hide mistakes."""
    found = SMALL[request.param]()
    generator = torch.Generator().manual_seed(0)
    for weight in found.cell.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    for part in pytree.tree_leaves(found.start):
        part.normal_(generator=generator)
    return found


@pytest.fixture
def twin(case: Case) -> JaxCase:
    pytest.importorskip("jax")
    return translate(case)


def test_the_cell_and_its_products_are_the_same(case: Case, twin: JaxCase) -> None:
    """Compared are products with the Jacobian and its transpose, also as the normal equations use them."""
    image, (weights, z, inputs), product, again = load().jit(products(twin))(twin.weights, twin.start, twin.inputs)
    start = pytree.tree_map(lambda part: part.clone().requires_grad_(), case.start)
    expected = case.cell(start, *case.inputs)
    torch.testing.assert_close(twin.state(image), pytree.tree_map(Tensor.detach, expected), rtol=ROUNDED, atol=ROUNDED)
    leaves = [*case.leaves, *tensors(start)]
    found = [*twin.gradients(weights, inputs), *tensors(twin.state(z))]
    for own, other in zip(found, torch.autograd.grad(case.loss(expected), leaves), strict=True):
        torch.testing.assert_close(own, other, rtol=ROUNDED, atol=ROUNDED * float(other.abs().max()))
    # v' J v, from either side
    assert float(case.loss(twin.state(product))) == pytest.approx(float(case.loss(twin.state(z))), rel=1e-3, abs=1e-4)
    torch.testing.assert_close(twin.state(again), twin.state(product), rtol=ROUNDED, atol=ROUNDED)


def products(twin: JaxCase) -> Callable[[Any, Any, Any], Any]:
    """Return all products with the cotangent, compiled together: one by one JAX takes ten times as long."""
    jax, v = load(), twin.cotangent

    def all_of_them(weights: Any, start: Any, inputs: Any) -> Any:
        def f(z: Any) -> Any:
            return twin.cell(weights, z, *inputs)

        image, vjp = jax.vjp(lambda weights, z, inputs: twin.cell(weights, z, *inputs), weights, start, inputs)
        again = jax.vjp(lambda v: jax.vjp(f, start)[1](v)[0], v)[1](v)[0]
        return image, vjp(v), jax.jvp(f, (start,), (v,))[1], again

    return all_of_them


def test_numbers_are_copied_and_return_as_views(case: Case, twin: JaxCase) -> None:
    before = [part.clone() for part in tensors(case.start)]
    for part in tensors(case.start):
        part.zero_()
    assert all(torch.equal(own, other) for own, other in zip(tensors(twin.state(twin.start)), before, strict=True))
    addresses = [part.unsafe_buffer_pointer() for part in pytree.tree_leaves(twin.start)]
    assert [part.data_ptr() for part in tensors(twin.state(twin.start))] == addresses


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_solves_and_differentiates(method: Method) -> None:
    dense = SMALL["dense"]()
    judge = Judge(dense)
    found = tighten(dense, method, judge)
    assert found.reached
    z, gradients = method.step(dense, found.tol)
    assert judge.residual(z) <= dense.rtol
    assert judge.gradient(gradients).cosine > 0.999


@pytest.mark.slow  # it is XLA that is slow, at compiling
@pytest.mark.parametrize(
    "method", [method for method in METHODS if method.name in DEMANDING], ids=lambda method: method.name
)
def test_states_of_several_parts(method: Method) -> None:
    both = SMALL["two scales"]()
    judge = Judge(both)
    found = tighten(both, method, judge)
    assert found.reached
    assert judge.gradient(method.step(both, found.tol)[1]).cosine > 0.95


def test_a_tighter_tolerance_does_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    if not METHODS:
        pytest.skip("JAX has no solver here")
    dense, method = SMALL["dense"](), METHODS[0]
    loose = Judge(dense).residual(method.solve(dense, 1e-2))
    monkeypatch.setattr(jax_methods, "translate", None)
    assert Judge(dense).residual(method.solve(dense, 1e-4)) < 1e-3 < loose


def test_libraries_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_methods, "_installed", lambda name: name != "jax")
    assert jax() == []
    monkeypatch.setattr(jax_methods, "_installed", lambda name: name != "jaxopt")
    assert [method.library for method in jax()] == ["optimistix"]
    monkeypatch.setattr(jax_methods, "_installed", lambda name: name != "optimistix")
    assert {method.library for method in jax()} == {"jaxopt"}


def test_environment_variables_have_precedence_and_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    before = dict(os.environ)
    with jax_cases._defaults({"XLA_FLAGS": "--ours", "PJRT_NPROC": "1"}):
        assert (os.environ["XLA_FLAGS"], os.environ["PJRT_NPROC"]) == ("--mine", "1")
    assert dict(os.environ) == before


def test_an_unknown_cell_raises_with_the_known_ones() -> None:
    unknown = contraction(2, 0.9)
    unknown = Case("", nn.Linear(2, 2), unknown.inputs, unknown.start, unknown.cotangent)
    with pytest.raises(TypeError, match="no JAX cell for Linear, only for AffineTanhCell, "):
        translate(unknown)


def tensors(state: State) -> list[Tensor]:
    return pytree.tree_leaves(state)
