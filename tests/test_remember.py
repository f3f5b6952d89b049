"""Warm starts keyed by sample."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import NestedCell, TanhCell, generator, inputs

WIDTH = 6
STOP = eq.Stop(rtol=1e-8, atol=0, max_steps=200)


def layer(memory: eq.Remember, stop: eq.Stop = STOP) -> eq.DEQ:
    return eq.DEQ(TanhCell(WIDTH), init=memory, solver=eq.Picard(), stop=stop)


def visit(deq: eq.DEQ, keys: list[int], data: Tensor) -> eq.Solution:
    with eq.sample_keys(deq, keys):
        return deq.solve(data[keys])


def test_a_known_sample_starts_from_its_equilibrium_in_any_order() -> None:
    memory, data = eq.Remember(), inputs(20, WIDTH)
    deq = layer(memory)
    first = [visit(deq, keys, data) for keys in (list(range(10)), list(range(10, 20)))]
    answers = torch.cat([s.z for s in first]).detach()
    order = torch.randperm(20, generator=generator(0)).tolist()
    for keys in (order[:7], order[7:]):
        s = visit(deq, keys, data)
        assert torch.equal(s.z0, answers[keys])
        assert int(s.stats.steps.max()) == 0
        torch.testing.assert_close(s.z, answers[keys])
    assert (memory.hits, memory.misses) == (20, 20)


def test_warm_starts_after_a_weight_update_need_fewer_steps_and_give_the_same() -> None:
    memory, data = eq.Remember(), inputs(8, WIDTH)
    deq = layer(memory)
    visit(deq, list(range(8)), data)
    with torch.no_grad():
        deq.cell.w.add_(1e-3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator(1)))  # type: ignore[attr-defined]
    cold, warm = eq.DEQ(deq.cell, solver=eq.Picard(), stop=STOP).solve(data), visit(deq, list(range(8)), data)
    assert int(warm.stats.steps.max()) < int(cold.stats.steps.max())
    torch.testing.assert_close(warm.z, cold.z, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(s.z.sum(), deq.cell.w, retain_graph=True)[0] for s in (cold, warm)]  # type: ignore[attr-defined]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_known_and_new_samples_mix() -> None:
    memory, data = eq.Remember(), inputs(6, WIDTH)
    deq = layer(memory)
    known = visit(deq, [0, 1, 2], data).z
    s = visit(deq, [4, 1, 5], data)
    assert s.stats.steps.tolist()[1] == 0
    assert torch.equal(s.z0[1], known[1].detach())
    assert torch.equal(s.z0[[0, 2]], torch.zeros(2, WIDTH, dtype=torch.float64))


def test_the_capacity_is_bounded_and_the_least_recently_used_is_removed() -> None:
    memory, data = eq.Remember(capacity=5), inputs(12, WIDTH)
    deq = layer(memory)
    visit(deq, [0, 1, 2, 3], data)
    visit(deq, [0], data)
    visit(deq, [4, 5], data)
    assert len(memory) == 5
    steps = {key: int(visit(deq, [key], data).stats.steps) for key in (0, 4, 5)}
    assert steps == {0: 0, 4: 0, 5: 0}
    visit(deq, list(range(12)), data)  # more than fit
    assert len(memory) == 5
    assert [int(visit(deq, [key], data).stats.steps) for key in (7, 8, 9, 10, 11)] == [0] * 5
    assert int(visit(deq, [0], data).stats.steps) > 0
    (bank,) = memory._banks.values()
    assert len(bank.values) == 5


def test_failed_samples_are_removed() -> None:
    memory, data = eq.Remember(), inputs(3, WIDTH)
    deq = layer(memory, eq.Stop(rtol=1e-8, atol=0, max_steps=200, on_failure="ignore"))
    visit(deq, [0, 1, 2], data)
    data[1] = float("nan")
    visit(deq, [0, 1, 2], data)
    assert len(memory) == 2
    assert torch.equal(visit(deq, [1], inputs(3, WIDTH)).z0, torch.zeros(1, WIDTH, dtype=torch.float64))


def test_old_states_are_not_used() -> None:
    memory, data = eq.Remember(max_age=2), inputs(6, WIDTH)
    deq = layer(memory)
    for keys in ([0], [1], [2]):
        visit(deq, keys, data)
    assert int(visit(deq, [1], data).stats.steps) == 0
    assert int(visit(deq, [0], data).stats.steps) > 0


def test_solves_without_keys_are_not_stored() -> None:
    memory, data = eq.Remember(), inputs(3, WIDTH)
    deq = layer(memory)
    deq(data)
    assert len(memory) == 0
    visit(deq, [0, 1, 2], data)
    assert torch.equal(deq.solve(data).z0, torch.zeros_like(data))
    memory.forget()
    assert len(memory) == 0


def test_single_samples_can_be_removed() -> None:
    memory, data = eq.Remember(), inputs(3, WIDTH)
    deq = layer(memory)
    visit(deq, [0, 1, 2], data)
    memory.forget(torch.tensor([1, 7]))  # 7 was never stored
    assert len(memory) == 2
    again = visit(deq, [0, 1, 2], data).z0
    assert torch.equal(again[1], torch.zeros(WIDTH, dtype=torch.float64)) and bool(again[[0, 2]].any(dim=1).all())
    assert len(memory) == 3


def test_first_step_and_memory_combine_both_ways() -> None:
    data = inputs(3, WIDTH)
    memory = eq.Remember(start=eq.FirstStep())
    deq = layer(memory)
    new = visit(deq, [0, 1, 2], data)
    torch.testing.assert_close(new.z0, deq.cell(torch.zeros_like(data), data))
    assert torch.equal(visit(deq, [2, 1, 0], data).z0, new.z.detach().flip(0))
    around = layer(eq.FirstStep(eq.Remember()))  # type: ignore[arg-type]
    s = visit(around, [0, 1, 2], data)
    again = visit(around, [0, 1, 2], data)
    torch.testing.assert_close(again.z0, around.cell(s.z, data))
    # the start of a first step and the loop: every run of the cell is counted
    assert again.stats.evaluations == 2


def test_states_of_several_shapes_and_nested_ones_are_kept_apart() -> None:
    memory, x = eq.Remember(), inputs(4, 4)
    cell = NestedCell()
    deq = eq.DEQ(cell, init=eq.Remember(start=cell.zeros), stop=STOP)
    with eq.sample_keys(deq, torch.arange(4)):
        first = deq.solve(x)
    with eq.sample_keys(deq, torch.tensor([3, 0])):
        second = deq.solve(x[[3, 0]])
    torch.testing.assert_close(second.z0["a"], first.z["a"][[3, 0]])
    rows = eq.DEQ(lambda z, u: 0.5 * z + u, init=memory, stop=STOP)
    for n in (3, 5):
        with eq.sample_keys(rows, ["a", "b"]):
            rows(inputs(2, n))
    with eq.sample_keys(rows, ["b", "a"]):
        assert int(rows.solve(inputs(2, 3).flip(0)).stats.steps.max()) == 0
    assert len(memory) == 4


def test_every_layer_has_its_memory_and_copies_keep_it() -> None:
    memories = [eq.Remember(), eq.Remember()]
    model = nn.Sequential(*(layer(memory) for memory in memories))
    data = inputs(4, WIDTH)
    with eq.sample_keys(model, range(4)), torch.no_grad():
        model(data)
    assert [len(memory) for memory in memories] == [4, 4]
    twin = copy.deepcopy(model)
    with eq.sample_keys(twin, range(4)), eq.record(twin) as solutions, torch.no_grad():
        twin(data)
    assert [int(s.stats.steps.max()) for s in solutions] == [0, 0]
    assert list(model.state_dict()) == [f"{i}.cell.{name}" for i in range(2) for name in ("w", "u", "b")]


def test_the_memory_may_be_on_another_device() -> None:
    memory, data = eq.Remember(device="cpu"), inputs(3, WIDTH)
    deq = layer(memory)
    visit(deq, [0, 1, 2], data)
    assert int(visit(deq, [2, 0, 1], data).stats.steps.max()) == 0


def test_bad_keys_and_settings_are_refused() -> None:
    memory, data = eq.Remember(), inputs(3, WIDTH)
    deq = layer(memory)
    with pytest.raises(ValueError, match="2 keys for a batch of 3"), eq.sample_keys(deq, [0, 1]):
        deq(data)
    with pytest.raises(ValueError, match="one integer per sample"), eq.sample_keys(deq, torch.rand(3)):
        deq(data)
    with pytest.raises(ValueError, match="capacity"):
        eq.Remember(capacity=0)
    with pytest.raises(ValueError, match="max_age"):
        eq.Remember(max_age=0)
    whole = eq.DEQ(lambda z, u: 0.5 * z + u, init=memory, batched=False)
    with pytest.raises(ValueError, match="one problem without samples"), eq.sample_keys(whole, [0]):
        whole(data)
    with pytest.raises(TypeError, match="Remember"):
        eq.DEQ(TanhCell(WIDTH), init=3)  # type: ignore[arg-type]


def test_states_stored_in_inference_mode_can_be_changed_in_training() -> None:
    deq = eq.DEQ(TanhCell(4), init=eq.Remember())
    x = inputs(3, 4)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode(), eq.sample_keys(deq, range(3)):
            deq(x)
