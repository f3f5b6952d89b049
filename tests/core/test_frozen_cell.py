"""Within one solve a cell is one function: weights computed once, masks drawn once, buffers moved once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

import equilibria as eq
from equilibria._core.compile import Compiler
from tests.problems import inputs

WIDTH, BATCH = 6, 4
TIGHT = eq.Stop(rtol=1e-12, atol=0, max_steps=200, on_failure="raise")
GRADIENT_TOLERANCE = 1e-9  # two solves to 1e-12, of which the adjoint loses a few digits to conditioning
ALL_GRADIENTS = [eq.Implicit(), eq.JFB(), eq.UnrolledPhantom(steps=3), eq.NeumannPhantom(steps=3), eq.Unrolled()]


class Counted(nn.Module):
    """The weight times one, counting how often it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.computed += 1
        return 1.0 * weight


class Cell(nn.Module):
    """tanh(W z + x) with anything between the two; |W| is about 0.5."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        with torch.no_grad():
            self.linear.weight.mul_(0.5 / torch.linalg.matrix_norm(self.linear.weight, ord=2))
        self.between = nn.Identity() if between is None else between
        self.seen: list[Tensor] = []

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        hidden = self.between(self.linear(z))
        self.seen.append(hidden.detach())
        return torch.tanh(hidden + x)


def data() -> Tensor:
    return inputs(BATCH, WIDTH)


def masks_of(module: eq.nn.VariationalDropout, run: Callable[[], Any]) -> list[Tensor]:
    """The mask of every call of the module during `run`, but for those with fewer rows, as compaction makes them."""
    found: list[Tensor] = []

    def note(_: nn.Module, __: Any, ___: Any) -> None:
        assert module.mask is not None
        found.append(module.mask)

    handle = module.register_forward_hook(note)
    run()
    handle.remove()
    return [mask for mask in found if len(mask) == BATCH]


# parametrized weights


@pytest.mark.parametrize("gradient", ALL_GRADIENTS, ids=repr)
def test_a_parametrized_weight_is_computed_once_per_solve(gradient: eq.Gradient) -> None:
    cell = Cell()
    counted = Counted()
    register_parametrization(cell.linear, "weight", counted)
    counted.computed = 0
    deq = eq.DEQ(cell, solver=eq.Picard(), stop=TIGHT, gradient=gradient)
    s = deq.solve(data())
    assert isinstance(s.z, Tensor)
    s.z.sum().backward()
    assert counted.computed == 1
    assert len(cell.seen) > 10
    deq(data())
    assert counted.computed == 2


@pytest.mark.parametrize("norm", [spectral_norm, weight_norm])
@pytest.mark.parametrize("gradient", [eq.Implicit(), eq.Unrolled()], ids=repr)
def test_gradients_reach_the_parameters_behind_a_norm(norm: Any, gradient: eq.Gradient) -> None:
    cell = Cell()
    norm(cell.linear)
    cell.eval()  # the vectors of spectral norm then stand still between the two runs
    x = data()
    z = torch.zeros_like(x)
    for _ in range(100):
        z = cell(z, x)
    expected = torch.autograd.grad(z.square().sum(), list(cell.parameters()))
    # plain iteration: the derivatives of Anderson's unrolled steps converge later than its iterates
    z = eq.DEQ(cell, solver=eq.Picard(), stop=TIGHT, gradient=gradient)(x)
    found = torch.autograd.grad(z.square().sum(), list(cell.parameters()))
    torch.testing.assert_close(found, expected, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)


class RowNorm(nn.Module):
    """Rows of length one half; torch's own weight norm has a wrong second derivative, whatever is around it."""

    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight / weight.norm(dim=1, keepdim=True)


def test_second_derivatives_pass_through_a_norm() -> None:
    cell = Cell()
    register_parametrization(cell.linear, "weight", RowNorm())
    deq = eq.DEQ(cell, stop=TIGHT)
    names = [name for name, _ in cell.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        named = {f"cell.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
        return torch.func.functional_call(deq, named, (x,))

    arguments = (data()[:1].requires_grad_(), *cell.parameters())
    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


def test_the_vectors_of_spectral_norm_move_once_per_forward() -> None:
    cell = Cell()
    spectral_norm(cell.linear)
    alone = copy.deepcopy(cell)
    eq.DEQ(cell, stop=TIGHT)(data()).sum().backward()
    _ = alone.linear.weight  # torch's own way to move them once
    for found, expected in zip(cell.buffers(), alone.buffers(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("norm", [spectral_norm, eq.constraints.spectral_norm])
def test_norms_pass_torch_func_in_training_mode(norm: Any) -> None:
    cell = Cell()
    norm(cell.linear)
    deq, x = eq.DEQ(cell, stop=TIGHT), data()
    found = torch.func.grad(lambda u: deq(u).square().sum())(x)
    tangent = torch.func.jvp(lambda u: deq(u).square().sum(), (x,), (x,))[1]
    torch.testing.assert_close((found * x).sum(), tangent, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)


def test_the_cell_is_left_as_it_was() -> None:
    cell = Cell(eq.nn.VariationalDropout(0.5))
    weight_norm(cell.linear)
    names = [name for name, _ in cell.named_parameters()], [name for name, _ in cell.named_buffers()]
    deq = eq.DEQ(cell, stop=TIGHT)
    s = deq.solve(data())
    assert is_parametrized(cell.linear, "weight")
    assert names == ([name for name, _ in cell.named_parameters()], [name for name, _ in cell.named_buffers()])
    pickle.loads(pickle.dumps(deq.state_dict()))
    copy.deepcopy(cell.between)
    del s


def test_a_failing_cell_is_left_as_it_was() -> None:
    cell = Cell(nn.Linear(WIDTH, WIDTH + 1).double())
    weight_norm(cell.linear)
    with pytest.raises(RuntimeError):
        eq.DEQ(cell)(data())
    assert isinstance(cell.linear.weight.grad_fn, object)
    assert is_parametrized(cell.linear, "weight")


def test_prepare_sees_the_same_weight() -> None:
    class Prepared(Cell):
        def prepare(self, x: Tensor) -> Tensor:
            return self.linear(x)

    cell = Prepared()
    counted = Counted()
    register_parametrization(cell.linear, "weight", counted)
    counted.computed = 0
    x = data().requires_grad_()
    z = eq.DEQ(cell, stop=TIGHT)(x)
    (found,) = torch.autograd.grad(z.sum(), cell.linear.parametrizations.weight.original)  # type: ignore[union-attr, arg-type]
    assert counted.computed == 1
    u, given = torch.zeros_like(x), cell.prepare(x)
    for _ in range(100):
        u = cell(u, given)
    (expected,) = torch.autograd.grad(u.sum(), cell.linear.parametrizations.weight.original)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(found, expected, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)


def test_compiled_solves_take_held_weights() -> None:
    cell = Cell()
    del cell.seen
    cell.forward = lambda z, x: torch.tanh(cell.linear(z) + x)  # type: ignore[method-assign]
    weight_norm(cell.linear)
    plain, compiled = eq.DEQ(cell, stop=TIGHT), eq.DEQ(cell, stop=TIGHT, compile=True)
    compiled._compiler = Compiler(backend=lambda graph, inputs: graph, trials=0)
    for scale in (1.0, 2.0):
        with torch.no_grad():
            cell.linear.parametrizations.weight.original0.fill_(0.3 * scale)  # type: ignore[union-attr, operator]
            torch.testing.assert_close(compiled(data()), plain(data()))


# masks


@pytest.mark.parametrize("gradient", ALL_GRADIENTS, ids=repr)
def test_masks_are_equal_within_a_solve_and_differ_between_solves(gradient: eq.Gradient) -> None:
    dropout = eq.nn.VariationalDropout(0.5)
    deq = eq.DEQ(Cell(dropout), stop=TIGHT, gradient=gradient)

    def step() -> None:
        deq(data()).sum().backward()

    first, second = masks_of(dropout, step), masks_of(dropout, step)
    assert len(first) > 3
    assert all(torch.equal(mask, first[0]) for mask in first)
    assert all(torch.equal(mask, second[0]) for mask in second)
    assert not torch.equal(first[0], second[0])
    assert dropout.mask is None


@pytest.mark.parametrize("shared", [(), (1,), (-1,)])
def test_gradients_are_those_of_the_masked_cell(shared: tuple[int, ...]) -> None:
    dropout = eq.nn.VariationalDropout(0.4, shared=shared)
    cell, x = Cell(dropout), data().requires_grad_()
    s = eq.DEQ(cell, stop=TIGHT).solve(x)
    z = torch.zeros_like(x)
    for _ in range(100):
        z = s.f(z)
    arguments = (x, *cell.parameters())
    found, expected = (torch.autograd.grad(out.square().sum(), arguments) for out in (s.z, z))
    torch.testing.assert_close(found, expected, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)


def test_two_solves_before_a_backward_keep_their_own_masks() -> None:
    cell, x = Cell(eq.nn.VariationalDropout(0.5)), data()
    deq = eq.DEQ(cell, stop=TIGHT)
    torch.manual_seed(3)
    solutions = [deq.solve(x) for _ in range(2)]
    both = torch.autograd.grad(sum(s.z.sum() for s in solutions), cell.linear.weight)[0]
    torch.manual_seed(3)
    parts = [torch.autograd.grad(deq(x).sum(), cell.linear.weight)[0] for _ in range(2)]
    torch.testing.assert_close(both, parts[0] + parts[1])
    assert not torch.equal(parts[0], parts[1])


def test_masks_follow_their_samples_through_compaction() -> None:
    torch.manual_seed(1)
    dropout = eq.nn.VariationalDropout(0.5)
    cell, x = Cell(dropout).eval(), inputs(40, WIDTH)
    dropout.train()
    hard = torch.cat([torch.full((36, 1), 20.0), torch.zeros(4, 1)]).double()  # saturated samples converge at once
    s = eq.DEQ(cell, solver=eq.Picard(), stop=TIGHT).solve(x + hard)
    assert s.stats.sample_evaluations < 0.9 * 40 * s.stats.evaluations  # rows were left out
    torch.testing.assert_close(s.f(s.z), s.z, rtol=1e-11, atol=1e-11)


def test_dropout_scales_what_it_keeps() -> None:
    torch.manual_seed(0)
    dropout, x = eq.nn.VariationalDropout(0.25), torch.ones(200, 200)
    out = dropout(x)
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs(float(out.mean()) - 1) < 5 * (0.25 / 0.75 / x.numel()) ** 0.5  # five standard errors
    assert not torch.equal(out, dropout(x))  # outside of a solve every call draws its own
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(eq.nn.VariationalDropout(0.0)(x), x)
    assert torch.equal(eq.nn.VariationalDropout(1.0)(x), torch.zeros_like(x))


@pytest.mark.parametrize(("shape", "shared", "mask"), [((2, 5, 3), (1,), (2, 1, 3)), ((2, 3, 4, 4), (2, 3), (2, 3, 1, 1))])
def test_shared_dimensions_are_dropped_together(
    shape: tuple[int, ...], shared: tuple[int, ...], mask: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    dropout = eq.nn.VariationalDropout(0.5, shared=shared, generator=generator)
    out = dropout(torch.ones(shape))
    kept = out.amax(dim=shared, keepdim=True)
    assert kept.shape == mask
    assert torch.equal(out, kept.expand(shape))


def test_one_dropout_for_two_shapes_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = eq.nn.VariationalDropout(0.5)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.dropout(z) + self.dropout(x[:, :2]).sum() + x

    with pytest.raises(ValueError, match="a separate module"):
        eq.DEQ(Twice())(data())


@pytest.mark.parametrize("bad", [-0.1, 1.5])
def test_a_share_outside_of_0_1_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="share that is dropped"):
        eq.nn.VariationalDropout(bad)


def test_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared=\(3,\)"):
        eq.nn.VariationalDropout(0.5, shared=(3,))(torch.ones(2, 2))


@pytest.mark.parametrize("checkpoint", [None, "sqrt", "recursive"])
def test_weight_tied_networks_hold_masks_and_weights_too(checkpoint: Any) -> None:
    dropout = eq.nn.VariationalDropout(0.5)
    cell, counted = Cell(dropout), Counted()
    register_parametrization(cell.linear, "weight", counted)
    counted.computed = 0
    network = eq.WeightTied(cell, depth=9, checkpoint=checkpoint)
    masks = masks_of(dropout, lambda: network(data()).sum().backward())
    assert counted.computed == 1
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert not torch.equal(masks[0], masks_of(dropout, lambda: network(data()))[0])


def test_an_inner_equilibrium_keeps_the_masks_of_the_outer_solve() -> None:
    dropout = eq.nn.VariationalDropout(0.5)
    inner = eq.DEQ(Cell(dropout), stop=TIGHT)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.inner(0.2 * z + x)
            return out

    # an inner solve is as exact as its tolerance, not to the last bit, which is what leaving out rows asks for
    outer = eq.DEQ(Outer(), solver=eq.Picard(), stop=dataclasses.replace(TIGHT, compact=False))
    masks = masks_of(dropout, lambda: outer(data()).sum().backward())
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert not torch.equal(masks[0], masks_of(dropout, lambda: outer(data()))[0])


# buffers


@pytest.mark.parametrize("init", [None, eq.FirstStep()])
def test_batch_statistics_move_once_per_forward_at_the_equilibrium(init: Any) -> None:
    norm = nn.BatchNorm1d(WIDTH).double()
    cell = Cell(norm)
    deq = eq.DEQ(cell, init=init, stop=eq.Stop(rtol=1e-10, atol=0, max_steps=200))
    s = deq.solve(data())
    assert norm.num_batches_tracked == 1
    expected = 0.1 * cell.linear(s.z).mean(dim=0)
    torch.testing.assert_close(norm.running_mean, expected.detach())
    s.f(s.z)  # looking does not move them
    s.z.sum().backward()
    assert norm.num_batches_tracked == 1


class Overwriting(nn.Module):
    """The same with what comes in written over."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.function(z, x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()], ids=repr)
def test_a_cell_may_write_over_its_state(solver: Any, mode: Any) -> None:
    cell = Overwriting(lambda z, x: z.mul_(0.5).add_(x))
    x = inputs(3, 4).abs().requires_grad_(mode is torch.enable_grad)
    with mode():
        s = eq.DEQ(cell, solver=solver, stop=TIGHT).solve(x)
    torch.testing.assert_close(s.z.clone(), 2 * x, rtol=1e-10, atol=1e-10)
    if mode is torch.enable_grad:
        torch.testing.assert_close(torch.autograd.grad(s.z.sum(), x)[0], torch.full_like(x, 2.0))


def test_a_buffer_that_becomes_another_tensor_moves_once_too() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Tensor
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out = 0.5 * torch.tanh(z) + x + self.mean
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(dim=0)
            return out

    cell, x = Averaging(), inputs(3, 4)
    z = eq.DEQ(cell, stop=TIGHT)(x)
    torch.testing.assert_close(z, 0.5 * torch.tanh(z) + x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cell.mean, 0.1 * z.mean(dim=0), rtol=1e-9, atol=1e-9)


def test_threads_leave_parametrized_weights_where_they_are() -> None:
    linear = weight_norm(nn.Linear(32, 32))
    cell = Overwriting(lambda z, x: torch.tanh(0.5 * linear(z) + x))
    cell.linear = linear
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-5, max_steps=100, on_failure="ignore")).eval()
    before = [name for name, _ in deq.named_parameters()]
    x = torch.randn(4, 8, 32)

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                deq(x[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in deq.named_parameters()] == before and is_parametrized(linear)
