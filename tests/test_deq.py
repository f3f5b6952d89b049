"""DEQ and fixed_point: the contract of the public objects."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import equilibria as eq
from tests.problems import TIGHT, NestedCell, TanhCell, inputs


def test_the_parts_stay_readable_and_print() -> None:
    solver, stop, gradient = eq.Broyden(), eq.Stop(rtol=1e-2), eq.Implicit(solver=eq.BiCGSTAB())
    cell = TanhCell(3)
    deq = eq.DEQ(cell, solver=solver, stop=stop, gradient=gradient)
    assert (deq.cell, deq.solver, deq.stop, deq.gradient) == (cell, solver, stop, gradient)
    assert "Broyden" in repr(deq) and "BiCGSTAB" in repr(deq)


def test_the_layer_returns_the_equilibrium_itself() -> None:
    deq, x = eq.DEQ(TanhCell(4), stop=TIGHT), inputs(3, 4)
    s = deq.solve(x)
    assert torch.equal(deq(x), s.z)
    assert torch.equal(deq.train()(x), deq.eval()(x))  # one value in both modes
    torch.testing.assert_close(s.f(s.z), s.z, rtol=1e-12, atol=1e-12)
    assert torch.equal(s.z0, torch.zeros_like(x))


def test_defaults_are_those_of_the_contract() -> None:
    deq = eq.DEQ(TanhCell(3))
    assert isinstance(deq.solver, eq.Anderson) and isinstance(deq.gradient, eq.Implicit)
    assert (deq.stop.rtol, deq.stop.atol, deq.stop.max_steps, deq.stop.on_failure) == (1e-3, 1e-6, 40, "warn")
    assert deq.eval_stop is None


def test_it_drops_into_a_sequential_and_trains() -> None:
    torch.manual_seed(0)
    x = inputs(64, 6, dtype=torch.float32)
    y = (x[:, 0] + x[:, 1] > 0).long()
    # nothing bounds the cell: as its weights grow, a single sample may need more steps than the limit
    layer = eq.DEQ(TanhCell(16, norm=0.3, dtype=torch.float32), stop=eq.Stop(on_failure="ignore"))
    model = nn.Sequential(nn.Linear(6, 16), layer, nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_layer_survives_pickle_deepcopy_and_state_dict(tmp_path: Path) -> None:
    deq, x = eq.DEQ(TanhCell(4), init=eq.Zeros(4), stop=TIGHT, compile=True), inputs(2, 4)
    twin = copy.deepcopy(deq)
    again = pickle.loads(pickle.dumps(deq))
    fresh = eq.DEQ(TanhCell(4, seed=9), init=eq.Zeros(4), stop=TIGHT)
    fresh.load_state_dict(deq.state_dict())
    for other in (twin, again):
        assert other.solver == deq.solver and other.stop == deq.stop and other.gradient == deq.gradient
    with torch.no_grad():
        for other in (twin, again, fresh):
            other._compiler = None
            torch.testing.assert_close(other(x), eq.DEQ(deq.cell, stop=TIGHT)(x))
        assert isinstance(twin.cell, nn.Module)
        next(twin.cell.parameters()).zero_()
    assert not torch.equal(twin(x), again(x))


def test_a_layer_moves_across_dtypes() -> None:
    deq, x = eq.DEQ(TanhCell(4)), inputs(2, 4)
    for dtype in (torch.float64, torch.float32, torch.float64):
        deq.to(dtype)
        assert deq(x.to(dtype)).dtype == dtype


@pytest.mark.gpu
def test_a_layer_moves_across_devices() -> None:
    deq, x = eq.DEQ(TanhCell(4), stop=eq.Stop(rtol=1e-9)), inputs(2, 4)
    there = deq.cuda()(x.cuda())
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), deq.cpu()(x))


def test_on_the_meta_device_parameters_move_without_data() -> None:
    with torch.device("meta"):
        deq = eq.DEQ(nn.Linear(3, 3))
    assert next(deq.parameters()).is_meta


def test_eval_stop_is_used_outside_training() -> None:
    deq, x = eq.DEQ(TanhCell(4, norm=0.8), solver=eq.Picard(), eval_stop=TIGHT), inputs(2, 4)
    loose, tight = deq.train().solve(x).stats, deq.eval().solve(x).stats
    assert bool((tight.residual < 1e-12).all()) and bool((loose.residual > 1e-6).all())


def test_every_kind_of_start_is_used() -> None:
    cell, x = TanhCell(4), inputs(3, 4)
    assert torch.equal(eq.DEQ(cell).solve(x).z0, torch.zeros_like(x))
    first = eq.DEQ(cell, init=eq.FirstStep()).solve(x)
    torch.testing.assert_close(first.z0, cell(torch.zeros_like(x), x))
    assert first.z0.requires_grad
    predictor = nn.Linear(4, 4).double()
    skip = eq.DEQ(cell, init=predictor, stop=TIGHT)
    s = skip.solve(x)
    torch.testing.assert_close(s.z0, predictor(x))
    assert len(list(skip.parameters())) == 5
    s.z.sum().backward()
    assert predictor.weight.grad is None  # the equilibrium does not depend on where the solver started
    (s.z0.sum()).backward()
    assert predictor.weight.grad is not None


def test_first_step_is_counted() -> None:
    class Counting(TanhCell):
        calls = 0

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(z, x)

    cell = Counting(4)
    s = eq.DEQ(cell, init=eq.FirstStep()).solve(inputs(1, 4))  # several rows may be measured once more
    assert cell.calls == s.stats.evaluations


def test_integer_inputs_say_how_to_start() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.w = nn.Embedding(10, 4), nn.Linear(4, 4)

        def forward(self, z: Tensor, tokens: Tensor) -> Tensor:
            return torch.tanh(0.3 * self.w(z) + self.embed(tokens))

    tokens = torch.randint(10, (3, 5))
    with pytest.raises(TypeError, match=r"holds torch.int64.*init=eq.Zeros"):
        eq.DEQ(Tokens())(tokens)
    z = eq.DEQ(Tokens(), init=eq.Zeros(5, 4))(tokens)
    assert z.shape == (3, 5, 4) and z.dtype == torch.float32
    z.sum().backward()


def test_solving_without_inputs_raises() -> None:
    with pytest.raises(ValueError, match=r"init=eq.Zeros"):
        eq.DEQ(lambda z: z)()
    with pytest.raises(ValueError, match="no tensor among them"):
        eq.DEQ(lambda z: z, init=eq.Zeros(3))()


def test_inputs_may_be_nested_or_none() -> None:
    def cell(z: Tensor, x: dict[str, Any], mask: Tensor | None, power: int) -> Tensor:
        out = 0.5 * torch.tanh(z) + x["a"] ** power + x["b"][0]
        return out if mask is None else out * mask

    x = {"a": inputs(3, 4).requires_grad_(), "b": (inputs(3, 4, seed=8),)}
    s = eq.fixed_point(cell, torch.zeros(3, 4).double(), x, None, 2, stop=TIGHT)
    torch.testing.assert_close(cell(s.z, x, None, 2), s.z, rtol=1e-12, atol=1e-12)
    s.z.sum().backward()
    assert isinstance(x["a"], Tensor) and x["a"].grad is not None


def test_a_solve_starts_from_an_earlier_solution() -> None:
    cell, x = TanhCell(8, norm=0.95), inputs(4, 8)
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-8, max_steps=200))
    cold = deq.solve(x)
    assert deq.solve(x, init=cold).stats.steps.tolist() == [0] * 4
    near = deq.solve(1.001 * x, init=cold)
    assert int(near.stats.steps.sum()) < int(cold.stats.steps.sum())
    assert not near.z0.requires_grad
    torch.testing.assert_close(deq(1.001 * x, init=cold.z), near.z)
    s = eq.fixed_point(cell, cold, x, stop=eq.Stop(rtol=1e-8))
    assert s.stats.steps.tolist() == [0] * 4


def test_record_collects_every_solve_in_order() -> None:
    model = nn.ModuleDict({"a": eq.DEQ(TanhCell(4)), "b": eq.DEQ(TanhCell(4, seed=5)), "other": nn.Linear(4, 4)})
    outside = eq.DEQ(TanhCell(4))
    x = inputs(2, 4)
    with eq.record(model) as solutions, eq.record(model["b"]) as only_b:
        z = model["b"](model["a"](x))
        outside(x)
        z = z + model["a"](x)
    assert len(solutions) == 3 and len(only_b) == 1
    assert solutions[1].z is only_b[0].z
    model["a"](x)
    assert len(solutions) == 3
    assert solutions[0].adjoint is None
    z.sum().backward()
    assert all(s.adjoint is not None for s in solutions)


def test_warnings_come_once_per_cell_and_cause_with_numbers() -> None:
    deq = eq.DEQ(TanhCell(8, norm=0.99), solver=eq.Picard(), stop=eq.Stop(rtol=1e-9, max_steps=3))
    x = inputs(4, 8)
    with pytest.warns(
        eq.ConvergenceWarning, match=r"forward solve did not converge for 4 of 4 samples \(4 max_steps\)"
    ) as caught:
        deq(x)
    assert "wanted 1.0e-09" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deq(x)
        deq(x)
    x[0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning, match="1 nonfinite"):
        deq(x)


def test_on_failure_raise_carries_the_statistics() -> None:
    deq = eq.DEQ(TanhCell(8, norm=0.99), stop=eq.Stop(rtol=1e-9, max_steps=1, on_failure="raise"))
    with pytest.raises(eq.ConvergenceError, match="max_steps") as caught:
        deq(inputs(4, 8))
    assert caught.value.stats.steps.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cell": 3}, "cell must be an nn.Module or a callable"),
        ({"solver": "anderson"}, "A solver is an object such as"),
        ({"solver": eq.Anderson}, "A solver is an object such as"),
        ({"stop": 1e-3}, "stop must be an object such as eq.Stop"),
        ({"eval_stop": 5}, "eval_stop must be an object"),
        ({"gradient": "ift"}, "gradient must be an object such as eq.Implicit"),
        ({"init": 0.0}, "init must be None"),
    ],
)
def test_wrong_parts_are_refused_at_once(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        eq.DEQ(**({"cell": TanhCell(3)} | kwargs))


def test_arguments_of_the_user_are_not_modified() -> None:
    cell, x, z0 = NestedCell(), inputs(3, 4), NestedCell.zeros(inputs(3, 4))
    before = (copy.deepcopy(cell.state_dict()), x.clone(), copy.deepcopy(z0), dict(vars(cell)))
    settings = {"rtol": 1e-6, "max_steps": 50}
    stop = eq.Stop(**settings)  # type: ignore[arg-type]
    s = eq.fixed_point(cell, z0, x, stop=stop)
    s.z["a"].sum().backward()
    assert settings == {"rtol": 1e-6, "max_steps": 50} and dataclasses.asdict(stop)["rtol"] == 1e-6
    assert torch.equal(x, before[1])
    assert all(torch.equal(a, b) for a, b in zip(cell.state_dict().values(), before[0].values(), strict=True))
    assert torch.equal(z0["a"], before[2]["a"])  # type: ignore[arg-type]
    assert vars(cell).keys() == before[3].keys()


def test_settings_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        eq.Stop().rtol = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        eq.Anderson().history = 3  # type: ignore[misc]


def test_spectral_norm_is_one_function_during_a_solve_and_trains() -> None:
    """In training mode torch's spectral norm moves a buffer at every access; a solve sees one weight."""
    cell, x = TanhCell(5, norm=3.0), inputs(4, 5)
    nn.utils.parametrizations.spectral_norm(cell, "w", n_power_iterations=2)
    with torch.no_grad():
        cell.b.zero_()
    deq = eq.DEQ(cell, stop=eq.Stop(rtol=1e-9, max_steps=500))
    s = deq.solve(x)
    s.z.square().sum().backward()
    assert all(p.grad is not None for p in cell.parameters())
    twin = eq.DEQ(cell, stop=eq.Stop(rtol=1e-9, max_steps=500)).eval()
    torch.testing.assert_close(twin(x), twin(x), rtol=0, atol=0)


def test_a_deq_works_inside_the_cell_of_another() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = eq.DEQ(TanhCell(3, norm=0.5), stop=TIGHT)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            out: Tensor = 0.3 * self.inner(z + x)
            return out

    deq = eq.DEQ(Outer(), solver=eq.Picard(), stop=eq.Stop(rtol=1e-11, atol=0, max_steps=100))
    names = [key for key, _ in deq.named_parameters()]

    def f(x: Tensor, *p: Tensor) -> Tensor:
        out: Tensor = functional_call(deq, dict(zip(names, p, strict=True)), (x,))
        return out

    args = (inputs(2, 3).requires_grad_(), *[p.detach().clone().requires_grad_() for p in deq.parameters()])
    assert torch.autograd.gradcheck(f, args)


@pytest.mark.parametrize("cell", [TanhCell(6), torch.nn.Linear(4, 4)], ids=["another width", "one argument"])
def test_an_error_of_the_first_call_has_a_note_with_the_shapes(cell: torch.nn.Module) -> None:
    with pytest.raises((RuntimeError, TypeError)) as raised:
        eq.DEQ(cell)(torch.randn(3, 4, dtype=torch.float64))
    (added,) = raised.value.__notes__
    assert "(3, 4), (3, 4)" in added and "eq.Zeros(*shape)" in added


def test_an_error_of_a_later_call_has_no_note() -> None:
    calls = []

    def cell(z: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the fourth call")
        return torch.tanh(0.5 * z + x)

    with pytest.raises(RuntimeError, match="the fourth call") as raised, torch.no_grad():
        eq.DEQ(cell)(torch.randn(3, 4))
    assert not getattr(raised.value, "__notes__", [])
