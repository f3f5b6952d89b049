"""Weight-tied networks: plain backpropagation with any checkpointing, and their way to the equilibrium."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call, grad, jvp, vmap
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria._core.checkpointing import Checkpoint
from equilibria.explicit import WeightTied
from tests.problems import TIGHT, NestedCell, TanhCell, inputs, unrolled

CHECKPOINTS: list[Checkpoint] = [None, "sqrt", "recursive"]
REPLAYED: list[Checkpoint] = ["sqrt", "recursive"]


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = pytree.tree_leaves(tree)
    return found


def assert_same_bits(a: Any, b: Any) -> None:
    for left, right in zip(leaves(a), leaves(b), strict=True):
        assert torch.equal(left, right)


def gradients(net: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output, and the gradients of a loss with respect to the input and every parameter."""
    x = x.detach().clone().requires_grad_()
    out = leaves(net(x))
    loss = sum((leaf.square().sum() for leaf in out), torch.zeros(()))
    return out, list(torch.autograd.grad(loss, [x, *net.parameters()]))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_it_applies_the_cell_depth_times(depth: int, checkpoint: Checkpoint) -> None:
    cell, x = TanhCell(5), inputs(3, 5).requires_grad_()
    z = WeightTied(cell, depth, checkpoint=checkpoint)(x)
    reference = unrolled(cell, torch.zeros_like(x), x, steps=depth)
    assert torch.equal(z, reference)
    if depth:
        args = [x, *cell.parameters()]
        assert_same_bits(torch.autograd.grad(z.square().sum(), args), torch.autograd.grad(reference.square().sum(), args))


def test_starts_are_those_of_a_deq_and_are_trained() -> None:
    cell, x, predictor = TanhCell(4), inputs(3, 4), nn.Linear(4, 4).double()
    for init in (None, eq.Zeros(4), eq.FirstStep(), predictor):
        start = eq.DEQ(cell, init).solve(x).z0
        assert torch.equal(WeightTied(cell, 0, init)(x), start)
        assert torch.equal(WeightTied(cell, 6, init)(x), unrolled(cell, start, x, steps=6))
    WeightTied(cell, 6, predictor)(x).sum().backward()
    assert predictor.weight.grad is not None and bool(predictor.weight.grad.any())


def test_a_state_to_start_from_gets_gradients() -> None:
    cell, x, z0 = TanhCell(4), inputs(3, 4), inputs(3, 4, seed=9).requires_grad_()
    z = WeightTied(cell, 3)(x, init=z0)
    (ours,) = torch.autograd.grad(z.sum(), z0)
    (reference,) = torch.autograd.grad(unrolled(cell, z0, x, steps=3).sum(), z0)
    assert torch.equal(ours, reference)


def test_without_injection_the_input_is_the_start() -> None:
    cell, x = TanhCell(4), inputs(3, 4)

    class Alone(nn.Module):
        def prepare(self) -> None:
            raise AssertionError("there is nothing to prepare")

        def forward(self, z: Tensor) -> Tensor:
            return torch.tanh(z @ cell.w.T)

    net = WeightTied(Alone(), 3, injected=False)
    assert torch.equal(net(x), unrolled(Alone(), x, steps=3))
    embed = nn.Linear(4, 6).double()
    assert torch.equal(WeightTied(torch.sin, 2, embed, injected=False)(x), embed(x).sin().sin())
    with pytest.raises(ValueError, match=r"the only input, got 2 inputs; combine them by a callable init"):
        net(x, x)


def test_prepare_is_called_once_per_forward() -> None:
    class Prepared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = TanhCell(4), 0

        def prepare(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x @ self.inner.u.T + self.inner.b

        def forward(self, z: Tensor, injected: Tensor) -> Tensor:
            return torch.tanh(z @ self.inner.w.T + injected)

    for checkpoint in CHECKPOINTS:
        cell, x = Prepared(), inputs(3, 4)
        out, grads = gradients(WeightTied(cell, 9, checkpoint=checkpoint), x)
        assert cell.calls == 1
        reference, expected = gradients(WeightTied(cell.inner, 9), x)
        torch.testing.assert_close(out, reference, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("init", [None, "predictor"])
def test_weights_move_to_a_deq_and_back(init: str | None) -> None:
    def start(seed: int) -> nn.Module | None:
        torch.manual_seed(seed)
        return nn.Linear(4, 4).double() if init else None

    x = inputs(3, 4)
    tied, deq = WeightTied(TanhCell(4, seed=1), 300, start(1)), eq.DEQ(TanhCell(4, seed=2), start(2), stop=TIGHT)
    assert tied.state_dict().keys() == deq.state_dict().keys()
    deq.load_state_dict(tied.state_dict())
    torch.testing.assert_close(deq(x), tied(x), rtol=1e-11, atol=1e-12)
    fresh = WeightTied(TanhCell(4, seed=3), 300, start(3))
    fresh.load_state_dict(deq.state_dict())
    assert torch.equal(fresh(x), tied(x))


def test_it_converges_to_the_equilibrium_as_fast_as_the_cell_contracts() -> None:
    cell, x = TanhCell(16, norm=0.9), inputs(4, 16)
    exact = eq.DEQ(cell, stop=TIGHT)(x)
    for depth in (5, 20, 80, 300):
        error = torch.linalg.vector_norm(WeightTied(cell, depth)(x) - exact, dim=1)
        bound = 0.9**depth * torch.linalg.vector_norm(exact, dim=1)  # |z_d - z*| <= |W|^d |z_0 - z*|, tanh being tame
        assert bool((error <= bound + 1e-12).all())


def test_its_gradient_converges_to_the_implicit_one() -> None:
    """Spec: cosine > 0.9999 at depth 100 for contraction 0.9."""
    x = inputs(4, 16) / 10  # near the linear regime: here the rate really is close to 0.9
    cell = TanhCell(16, norm=0.9)
    _, exact = gradients(eq.DEQ(cell, stop=TIGHT), x)
    similarity = []
    for depth in (1, 10, 100):
        _, ours = gradients(WeightTied(cell, depth), x)
        a, b = (torch.cat([g.flatten() for g in grads]) for grads in (ours, exact))
        similarity.append(float(torch.cosine_similarity(a, b, dim=0)))
    assert similarity == sorted(similarity) and similarity[0] < 0.99
    assert similarity[-1] > 0.9999


class Noisy(nn.Module):
    """A cell whose dropout draws a new mask in every step; a replay must draw the same masks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = TanhCell(5), nn.Dropout(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.inner(z, x))
        return out


class Normed(nn.Module):
    """A cell with batch norm in training mode, whose running statistics change in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = TanhCell(5), nn.BatchNorm1d(5).double()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.inner(z, x))
        return out


class Spectral(TanhCell):
    """A cell with spectral norm in training mode, whose weight changes in every step."""

    def __init__(self) -> None:
        super().__init__(5, norm=3.0, kind="symmetric")
        nn.utils.parametrizations.spectral_norm(self, "w")


class Clocked(TanhCell):
    """A cell with a buffer that is rebound in every step and used in the next."""

    time: Tensor

    def __init__(self) -> None:
        super().__init__(5)
        self.register_buffer("time", torch.zeros((), dtype=torch.float64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.time = self.time + 1
        return super().forward(z, x / self.time)


KINDS = {"plain": lambda: TanhCell(5), "noise": Noisy, "batch norm": Normed, "spectral norm": Spectral, "clock": Clocked}


@pytest.mark.parametrize("checkpoint", REPLAYED)
@pytest.mark.parametrize("depth", [1, 2, 3, 10, 17])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_checkpoints_change_no_bit(kind: Any, depth: int, checkpoint: Checkpoint) -> None:
    def run(checkpoint: Checkpoint) -> tuple[Any, dict[str, Tensor], Tensor]:
        torch.manual_seed(0)
        cell = kind()
        result = gradients(WeightTied(cell, depth, checkpoint=checkpoint), inputs(6, 5))
        return result, cell.state_dict(), torch.get_rng_state()

    assert_same_bits(run(checkpoint), run(None))


@pytest.mark.parametrize("checkpoint", REPLAYED)
def test_checkpoints_of_a_nested_state(checkpoint: Checkpoint) -> None:
    net, x = WeightTied(NestedCell(), 11, NestedCell.zeros, checkpoint=checkpoint), inputs(3, 4)
    plain = WeightTied(net.cell, 11, NestedCell.zeros)
    z = net(x)
    assert set(z) == {"a", "b"} and isinstance(z["b"], tuple) and isinstance(z["b"][1], list)
    assert_same_bits(gradients(net, x), gradients(plain, x))


@pytest.mark.parametrize("checkpoint", REPLAYED)
def test_checkpoints_serve_two_backwards_and_second_derivatives(checkpoint: Checkpoint) -> None:
    cell, x = TanhCell(4), inputs(2, 4).requires_grad_()

    def penalty(net: WeightTied) -> tuple[Any, Any]:
        z = net(x)
        once = torch.autograd.grad(z.sum(), list(cell.parameters()), retain_graph=True)
        (gx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return once, torch.autograd.grad(gx.square().sum(), list(cell.parameters()))

    ours, plain = penalty(WeightTied(cell, 9, checkpoint=checkpoint)), penalty(WeightTied(cell, 9))
    for a, b in zip(leaves(ours), leaves(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_it_passes_gradcheck_in_both_modes(checkpoint: Checkpoint) -> None:
    net = WeightTied(TanhCell(3), 5, checkpoint=checkpoint)
    names = [key for key, _ in net.named_parameters()]

    def f(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(net, dict(zip(names, parameters, strict=True)), (x,))

    args = (inputs(2, 3).requires_grad_(), *[p.detach().clone().requires_grad_() for p in net.parameters()])
    assert gradcheck(f, args, check_forward_ad=True)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_it_works_with_torch_func_transforms(checkpoint: Checkpoint) -> None:
    cell, x = TanhCell(3), inputs(4, 3)
    net, reference = WeightTied(cell, 6, checkpoint=checkpoint), WeightTied(cell, 6)
    transforms: list[Callable[[WeightTied], Tensor]] = [
        lambda f: grad(lambda x: f(x).square().sum())(x),
        lambda f: jvp(f, (x,), (x,))[1],
        lambda f: vmap(grad(lambda x: f(x).square().sum()))(x.unsqueeze(1)),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(net), transform(reference), rtol=1e-13, atol=1e-14)


class Alive:
    """Counts the tensors that are alive, and their maximum."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watch(self, tensor: Tensor) -> Tensor:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.now -= 1


class Tanh(torch.autograd.Function):
    """tanh that saves a tensor for backward, as the layers of a real cell do."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activations: Alive) -> Tensor:
        ctx.save_for_backward(activations.watch(z.tanh()))
        return z.tanh()

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return v[0] * (1 - kept.square()), None


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.activations, self.states = 0, Alive(), Alive()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = Tanh.apply(0.5 * z + x, self.activations)  # type: ignore[no-untyped-call]
        return self.states.watch(out)


@pytest.mark.parametrize(
    ("checkpoint", "depth", "activations", "states", "calls"),
    [
        (None, 64, 64, 2, 64),
        ("sqrt", 64, 8, 8 + 1, 64 + 56),  # √64 in a segment and as many starts; the last segment is not replayed
        ("sqrt", 256, 16, 16 + 1, 256 + 240),
        ("recursive", 64, 1, 6 + 1, 64 * (1 + 3)),  # log2(64) starts; log2(64) / 2 replays
        ("recursive", 256, 1, 8 + 1, 256 * (1 + 4)),
    ],
)
def test_checkpointing_stores_and_recomputes_the_documented_steps(
    checkpoint: Checkpoint, depth: int, activations: int, states: int, calls: int
) -> None:
    cell, x = Watched(), inputs(2, 3).requires_grad_()
    WeightTied(cell, depth, checkpoint=checkpoint)(x).sum().backward()
    assert cell.activations.most <= activations
    assert cell.states.most <= states
    assert cell.calls == calls
    before = cell.calls
    with torch.no_grad():
        WeightTied(cell, depth, checkpoint=checkpoint)(x)
    assert cell.calls == before + depth


def test_the_trajectory_is_plain_iteration_of_a_deq() -> None:
    cell, x = TanhCell(6, norm=0.9), inputs(3, 6)
    net = WeightTied(cell, 12)
    way = net.trajectory(x)
    assert len(way.states) == 13 and way.residuals.shape == (12, 3)
    assert torch.equal(way.states[0], torch.zeros_like(x)) and torch.equal(way.states[-1], net(x))
    stop = eq.Stop(rtol=0, atol=0, max_steps=11, trace=True, on_failure="ignore")
    trace = eq.DEQ(cell, solver=eq.Picard(), stop=stop).solve(x).stats.trace
    assert trace is not None
    torch.testing.assert_close(way.residuals, torch.stack(trace, dim=1), rtol=1e-12, atol=1e-14)
    lengths = torch.stack([torch.linalg.vector_norm(b - a, dim=1) for a, b in pairwise(way.states)])
    assert bool((lengths[1:] <= 0.9 * lengths[:-1]).all())


def test_a_trajectory_may_be_longer_and_is_differentiable() -> None:
    cell, x = TanhCell(4), inputs(2, 4)
    net = WeightTied(cell, 2, checkpoint="sqrt")
    way = net.trajectory(x, depth=5)
    assert torch.equal(way.states[2], net(x)) and len(way.states) == 6
    (deep,) = torch.autograd.grad(sum((z.sum() for z in way.states), torch.zeros(())), cell.w)
    each = [torch.autograd.grad(WeightTied(cell, d)(x).sum(), cell.w)[0] for d in range(1, 6)]
    torch.testing.assert_close(deep, torch.stack(each).sum(0), rtol=1e-12, atol=1e-13)
    assert not way.residuals.requires_grad
    assert net.trajectory(x, depth=0).residuals.shape == (0, 2)
    nested = WeightTied(NestedCell(), 3, NestedCell.zeros).trajectory(x)
    assert nested.residuals.shape == (3, 2) and set(nested.states[-1]) == {"a", "b"}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_under_autocast_the_state_keeps_its_dtype(checkpoint: Checkpoint) -> None:
    cell, x = TanhCell(8, norm=0.5, dtype=torch.float32), inputs(3, 8, dtype=torch.float32)
    net = WeightTied(cell, 12, checkpoint=checkpoint)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z, deq = net(x), eq.DEQ(cell, solver=eq.Picard(), stop=eq.Stop(rtol=1e-2))(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, deq, rtol=0.05, atol=0.02)
    z.sum().backward()
    assert cell.w.grad is not None and cell.w.grad.dtype == torch.float32


def test_a_problem_without_batch_is_iterated() -> None:
    w, x = TanhCell(4).w, inputs(1, 4)[0]
    net = WeightTied(lambda z, x: torch.tanh(w @ z + x), 200, batched=False)
    z = net(x)
    torch.testing.assert_close(torch.tanh(w @ z + x), z, rtol=1e-12, atol=1e-12)
    assert net.trajectory(x).residuals.shape == (200, 1)


def test_it_is_copied_and_printed() -> None:
    net, x = WeightTied(TanhCell(4), 3, eq.Zeros(4), checkpoint="sqrt"), inputs(2, 4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x)) and twin.checkpoint == "sqrt"
    assert "depth=3" in repr(net) and "checkpoint='sqrt'" in repr(net)
    assert "injected=False" in repr(WeightTied(torch.sin, 3, injected=False))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_it_compiles(checkpoint: Checkpoint) -> None:
    net, x = WeightTied(TanhCell(4), 6, checkpoint=checkpoint), inputs(2, 4)
    out, grads = gradients(net, x)
    compiled, compiled_grads = gradients(torch.compile(net), x)  # type: ignore[arg-type]
    torch.testing.assert_close(compiled, out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(compiled_grads, grads, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cell": 3}, TypeError, "cell must be an nn.Module or a callable"),
        ({"init": 0.0}, TypeError, "init must be None"),
        ({"depth": -1}, ValueError, "depth must not be negative, got -1; 0 returns the start"),
        ({"depth": 2.0}, TypeError, "an int, got 2.0"),
        ({"depth": True}, TypeError, "an int, got True"),
        ({"checkpoint": "log"}, ValueError, r"checkpoint must be one of \(None, 'sqrt', 'recursive'\), got 'log'"),
    ],
)
def test_wrong_settings_are_refused_at_once(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WeightTied(**({"cell": TanhCell(3), "depth": 2} | change))  # type: ignore[arg-type]


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="depth must not be negative"):
        WeightTied(TanhCell(3), 2).trajectory(inputs(2, 3), depth=-2)
    with pytest.raises(ValueError, match=r"got \(2, 5\) for z of shape \(2, 3\)"):
        WeightTied(nn.Linear(3, 5).double(), 2, injected=False)(inputs(2, 3))
    with pytest.raises(TypeError, match=r"init=eq.Zeros"):
        WeightTied(TanhCell(3), 2)(torch.ones(2, 3, dtype=torch.int64))
