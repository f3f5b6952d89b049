"""States of any nesting, laid out as a matrix and back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria._core.packing import Layout
from tests.problems import TIGHT, BatchNormCell, NestedCell, inputs, matrix


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


STATES: list[Any] = [
    torch.randn(3, 4),
    torch.randn(3),
    torch.randn(3, 2, 5, 5).double(),
    (torch.randn(3, 2), torch.randn(3, 4, 4)),
    [torch.randn(3, 2), {"a": torch.randn(3), "b": (torch.randn(3, 1, 2),)}],
    OrderedDict(x=torch.randn(3, 1), y=torch.randn(3, 2)),
    Pair(torch.randn(3, 2), torch.randn(3, 5)),
    (torch.randn(3, 2), torch.randn(3, 2).double(), torch.randn(3, 2).bfloat16()),
    torch.randn(3, 4, dtype=torch.complex64),
    torch.randn(0, 4),
    torch.randn(3, 0),
]


@pytest.mark.parametrize("state", STATES, ids=lambda s: str(pytree.tree_map(lambda t: tuple(t.shape), s)))
@pytest.mark.parametrize("batched", [True, False])
def test_round_trip_keeps_structure_shape_dtype_and_values(state: Any, batched: bool) -> None:
    layout = Layout.of(state, batched=batched)
    packed = layout.pack(state)
    assert packed.shape == (pytree.tree_leaves(state)[0].shape[0] if batched else 1, layout.columns)
    assert packed.dtype in (torch.float32, torch.float64)
    back = layout.unpack(packed)
    assert pytree.tree_structure(back) == pytree.tree_structure(state)
    for a, b in zip(pytree.tree_leaves(back), pytree.tree_leaves(state), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_half_precision_is_solved_in_single() -> None:
    assert Layout.of(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden(), eq.Newton()], ids=repr)
def test_a_nested_state_goes_in_and_comes_out(solver: eq.Solver[Any]) -> None:
    cell, x = NestedCell(), inputs(3, 4)
    z = eq.DEQ(cell, init=NestedCell.zeros, solver=solver, stop=TIGHT)(x)
    assert set(z) == {"a", "b"} and isinstance(z["b"], tuple) and isinstance(z["b"][1], list)
    again = cell(z, x)
    for a, b in zip(pytree.tree_leaves(again), pytree.tree_leaves(z), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_whole_problem_without_batch() -> None:
    """A coupled vector of 16: as one problem Broyden ends after 2n + 1 evaluations, as 16 samples it would crawl."""
    w, x = matrix("orthogonal", 16, 0.95), inputs(1, 16)[0]
    s = eq.fixed_point(
        lambda z, x: w @ z + x, torch.zeros_like(x), x, solver=eq.Broyden(), stop=eq.Stop(rtol=1e-10, atol=0), batched=False
    )
    torch.testing.assert_close(s.z, torch.linalg.solve(torch.eye(16).double() - w, x), rtol=1e-8, atol=1e-8)
    assert s.stats.status.shape == (1,)
    assert s.stats.evaluations <= 34


def test_a_whole_problem_of_parts_with_different_leading_sizes() -> None:
    state = (torch.zeros(5, 2).double(), torch.zeros(3).double())
    s = eq.fixed_point(lambda z: (0.5 * z[0] + 1, 0.5 * z[1] - z[0].mean()), state, stop=TIGHT, batched=False)
    torch.testing.assert_close(s.z[0], torch.full((5, 2), 2.0).double())
    torch.testing.assert_close(s.z[1], torch.full((3,), -4.0).double())


def test_a_scalar_problem() -> None:
    s = eq.fixed_point(torch.cos, torch.tensor(0.0).double(), stop=TIGHT, batched=False)
    torch.testing.assert_close(s.z, torch.tensor(0.7390851332151607).double())


def test_a_complex_state() -> None:
    a = torch.complex(matrix("orthogonal", 4, 0.4), matrix("orthogonal", 4, 0.4, seed=8))
    x = torch.complex(inputs(3, 4), inputs(3, 4, seed=9)).requires_grad_()
    s = eq.fixed_point(lambda z, x: z @ a.T + x, torch.zeros_like(x), x, stop=TIGHT)
    expected = torch.linalg.solve(torch.eye(4) - a, x.T).T
    torch.testing.assert_close(s.z, expected, rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(s.z.abs().square().sum(), x)
    (reference,) = torch.autograd.grad(expected.abs().square().sum(), x)
    torch.testing.assert_close(grad, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), TypeError, "got torch.int64"),
        ((torch.zeros(3, 2), torch.zeros(4, 2)), ValueError, "share the leading batch dimension: got 3 and 4"),
        (torch.tensor(1.0), ValueError, "batched=False"),
        ((), ValueError, "holds no tensor"),
        ((torch.zeros(2), "x"), TypeError, "got str"),
    ],
)
def test_what_cannot_be_a_state(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eq.fixed_point(lambda z: z, state)


@pytest.mark.parametrize(
    ("cell", "error", "message"),
    [
        (lambda z: z[:, :2], ValueError, r"got \(3, 2\) for z of shape \(3, 4\)"),
        (lambda z: z.sum(), ValueError, r"got \(\) for z"),
        (lambda z: z.double(), TypeError, "got torch.float64 for z of torch.float32"),
        (lambda z: z.long(), TypeError, "got torch.int64"),
        (lambda z: (z, z), TypeError, r"got \(tensor, tensor\), expected a tensor"),
        (lambda z: {"z": z}, TypeError, "expected a tensor"),
        (lambda z: None, TypeError, "must return"),
        (lambda z: 3.0, TypeError, "got float"),
    ],
)
def test_a_cell_that_returns_something_else(cell: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eq.fixed_point(cell, torch.zeros(3, 4))


def test_real_and_complex_tensors_with_an_odd_number_of_columns() -> None:
    start = (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.complex128))
    s = eq.fixed_point(lambda z, x: (0.5 * z[0] + x, 0.5j * z[1] + 1), start, inputs(2, 3), stop=TIGHT)
    torch.testing.assert_close(s.z[1], torch.full_like(s.z[1], 1 / (1 - 0.5j)))


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Newton()], ids=repr)
def test_a_cell_may_write_over_the_parts_of_its_state(solver: eq.Solver[Any]) -> None:
    """Autograd refuses to write over one of several views that a function returned together."""

    def cell(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return z[0].mul_(0.5) + x, z[1].mul_(0.3) + x

    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    s = eq.fixed_point(
        cell, (torch.zeros_like(x), torch.zeros_like(x)), x, solver=solver, stop=eq.Stop(rtol=1e-12, max_steps=99)
    )
    (grad,) = torch.autograd.grad(s.z[0].sum() + s.z[1].sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, 1 / 0.5 + 1 / 0.7), rtol=1e-9, atol=0)


def test_a_start_may_be_expanded() -> None:
    """Forward mode, which Newton's method uses, cannot place a tangent beside an expanded tensor."""
    start = torch.zeros(1, 3, dtype=torch.float64).expand(4, 3)
    s = eq.fixed_point(lambda z: 0.5 * z + 1, start, solver=eq.Newton(), stop=eq.Stop(rtol=1e-12, on_failure="raise"))
    torch.testing.assert_close(s.z, torch.full_like(start, 2.0), rtol=1e-9, atol=0)


def test_an_empty_batch_of_coupled_samples_has_gradients() -> None:
    deq = eq.DEQ(BatchNormCell(3))
    x = torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
    deq(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_empty_batch_of_any_dtype_has_gradients(dtype: torch.dtype) -> None:
    x = torch.zeros(0, 3, dtype=dtype, requires_grad=True)
    eq.fixed_point(lambda z, x: 0.5 * z + x, torch.zeros(0, 3, dtype=dtype), x).z.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 3)


def test_a_state_that_leaves_its_dtype_is_not_finite_but_returned_so() -> None:
    """1e5 is a number of the float32 matrix that solvers work on, and inf in float16."""
    layout = Layout.of((torch.zeros(3, 1, dtype=torch.float16), torch.zeros(3, 1)))
    matrix = torch.tensor([[1e5, 1e5], [1.0, 1e5], [float("nan"), 0.0]])
    marked = layout.refuse_overflow(matrix, torch.ones(3, 2))
    assert torch.isnan(marked).all(dim=1).tolist() == [True, False, False]
    half, single = layout.unpack(layout.saturate(matrix))
    assert half[:2, 0].tolist() == [torch.finfo(torch.float16).max, 1.0] and single[:2, 0].tolist() == [1e5, 1e5]
    plain = Layout.of(torch.zeros(3, 2))
    assert plain.saturate(matrix) is matrix and plain.refuse_overflow(matrix, marked) is marked


def test_stored_layouts_follow_shape_dtype_and_batching() -> None:
    """The layout of a single tensor is computed once per shape, dtype, device and batching."""
    states = [torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, 4).double(), torch.zeros(3, 2, 2), torch.zeros(3, 4)]
    for batched in (True, False, True):
        for state in states:
            layout, fresh = Layout.of(state, batched=batched), Layout._of_tree(state, batched)
            assert layout == fresh
            assert layout.unpack(layout.pack(state)).shape == state.shape
    assert Layout.of(states[0]) is Layout.of(states[-1])


class Affine(nn.Linear):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(0.3 * super().forward(z) + x)


def test_a_layer_takes_another_batch_dtype_and_autocast_at_every_call() -> None:
    deq = eq.DEQ(Affine(4, 4))
    for batch in (3, 1, 5, 3):
        assert deq(torch.randn(batch, 4)).shape == (batch, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = deq.solve(torch.randn(3, 4))
        assert s.equation.precision == torch.finfo(torch.bfloat16).eps
    assert deq.solve(torch.randn(3, 4)).equation.precision == torch.finfo(torch.float32).eps
    assert deq.double()(torch.randn(3, 4, dtype=torch.float64)).dtype == torch.float64
