"""Penalties against dense values, and their gradients against the formulas they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from tests.problems import NestedCell, TanhCell, generator, inputs

TIGHT = eq.Stop(rtol=1e-12, atol=0, max_steps=300, on_failure="raise")
CLOSE = 1e-9  # after two solves to 1e-12
WIDTH, BATCH = 5, 3


def jacobians(cell: nn.Module, z: Tensor, x: Tensor) -> Tensor:
    """(batch, n, n)"""
    return torch.stack([torch.func.jacrev(lambda u, i=i: cell(u[None], x[i : i + 1])[0])(z[i]) for i in range(len(z))])


# the Jacobian penalty


def test_the_estimate_is_unbiased_to_its_own_standard_error() -> None:
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    s = eq.DEQ(cell, stop=TIGHT).solve(x)
    exact = jacobians(cell, s.z.detach(), x).square().sum(dim=(1, 2)).mean() / WIDTH
    draws = torch.stack([eq.jacobian_penalty(s, generator=generator(seed)).detach() for seed in range(400)])
    error = draws.std() / math.sqrt(len(draws))
    assert abs(float(draws.mean() - exact.detach())) < 3 * float(error)
    many = torch.stack([eq.jacobian_penalty(s, probes=16, generator=generator(seed)).detach() for seed in range(100)])
    assert float(many.std() / draws.std()) == pytest.approx(0.25, rel=0.3)  # 16 probes: a quarter of the error


def test_its_gradient_is_that_of_the_formula_with_z_constant() -> None:
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH).requires_grad_()
    s = eq.DEQ(cell, stop=TIGHT).solve(x)
    arguments = (x, *cell.parameters())
    found = torch.autograd.grad(eq.jacobian_penalty(s, probes=2, generator=generator(7)), arguments)
    draws = generator(7)
    probes = torch.stack([torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=draws) for _ in range(2)])
    products = torch.einsum("pbi,bij->pbj", probes, jacobians(cell, s.z.detach(), x))
    expected = torch.autograd.grad(products.square().mean(), arguments)
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


def test_it_takes_nested_states_and_whole_problems() -> None:
    cell = NestedCell()
    x = inputs(2, 4)
    s = eq.DEQ(cell, init=cell.zeros, stop=TIGHT).solve(x)
    penalty = eq.jacobian_penalty(s, probes=4, generator=generator(0))
    assert torch.isfinite(penalty) and penalty.requires_grad
    whole = eq.fixed_point(lambda z: 0.5 * z, torch.ones(6, dtype=torch.float64), batched=False)
    draws = torch.randn(1, 6, dtype=torch.float64, generator=generator(1))
    expected = (0.5 * draws).square().mean()
    torch.testing.assert_close(eq.jacobian_penalty(whole, generator=generator(1)), expected)


def test_a_nan_sample_does_not_count_and_does_not_reach_the_weights() -> None:
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    spoiled = torch.cat([x, torch.full((1, WIDTH), float("nan"), dtype=torch.float64)])
    s = eq.DEQ(cell, stop=eq.Stop(rtol=1e-10, on_failure="ignore")).solve(spoiled)
    eq.jacobian_penalty(s, probes=2).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in cell.parameters() if p is not cell.b)
    constant = eq.fixed_point(lambda z, u: 0.5 * z + u, torch.zeros_like(spoiled), spoiled, stop=s_ignore())
    draws = [float(eq.jacobian_penalty(constant, generator=generator(seed))) for seed in range(200)]
    assert sum(draws) / len(draws) == pytest.approx(0.25, rel=0.1)


def s_ignore() -> eq.Stop:
    return eq.Stop(on_failure="ignore")


def test_masks_and_weights_are_those_of_the_solve() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = eq.nn.VariationalDropout(0.5)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.dropout(0.4 * z) + x

    x = inputs(BATCH, WIDTH)
    s = eq.DEQ(Dropped(), stop=TIGHT).solve(x)
    mask = (s.f(torch.ones_like(x)) - x) / 0.4
    probe = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator(0))
    expected = (0.4 * mask * probe).square().mean()
    torch.testing.assert_close(eq.jacobian_penalty(s, generator=generator(0)), expected)


def test_no_probes_is_an_error() -> None:
    s = eq.DEQ(TanhCell(WIDTH)).solve(inputs(BATCH, WIDTH))
    with pytest.raises(ValueError, match="at least one"):
        eq.jacobian_penalty(s, probes=0)


def test_it_is_a_number_without_a_graph_where_gradients_are_off() -> None:
    with torch.no_grad():
        s = eq.DEQ(TanhCell(WIDTH)).solve(inputs(BATCH, WIDTH))
        assert not eq.jacobian_penalty(s).requires_grad


# the skip penalty


@pytest.mark.parametrize("version", [1, 2])
def test_skip_penalty_and_its_gradient(version: int) -> None:
    torch.manual_seed(0)
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    predictor = nn.Linear(WIDTH, WIDTH).double()
    deq = eq.DEQ(cell, init=predictor if version == 1 else eq.FirstStep(), stop=TIGHT)
    s = deq.solve(x)
    z = torch.zeros_like(x)
    for _ in range(300):
        z = cell(z, x)
    start = predictor(x) if version == 1 else cell(torch.zeros_like(x), x)
    expected = (z - start).abs().mean()
    torch.testing.assert_close(eq.skip_penalty(s), expected, rtol=CLOSE, atol=CLOSE)
    parameters = list(deq.parameters())
    found = torch.autograd.grad(eq.skip_penalty(s), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(expected, parameters), rtol=CLOSE, atol=CLOSE)


def test_skip_penalty_sums_over_the_tensors_of_a_state() -> None:
    cell = NestedCell()
    s = eq.DEQ(cell, init=cell.zeros, stop=TIGHT).solve(inputs(2, 4))
    leaves = torch.utils._pytree.tree_leaves(s.z)
    torch.testing.assert_close(eq.skip_penalty(s), sum(leaf.abs().mean() for leaf in leaves))


@pytest.mark.parametrize("version", [1, 2])
def test_skip_penalty_leaves_a_nan_sample_out(version: int) -> None:
    torch.manual_seed(0)
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    spoiled = torch.cat([x, torch.full((1, WIDTH), float("nan"), dtype=torch.float64)])
    deq = eq.DEQ(cell, init=nn.Linear(WIDTH, WIDTH).double() if version == 1 else eq.FirstStep(), stop=s_ignore())
    expected = eq.skip_penalty(deq.solve(x))
    s = deq.solve(spoiled)
    assert s.stats.status.tolist() == [0, 0, 0, int(eq.Status.NONFINITE)]
    torch.testing.assert_close(eq.skip_penalty(s), expected)
    eq.skip_penalty(s).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in deq.parameters())


# the correction penalty


def loss(z: Tensor) -> Tensor:
    return z.square().mean()


def test_correction_weights_follow_their_formulas() -> None:
    n = 4
    assert [eq.penalties.ExponentialWeights(0.8)(n, k) for k in range(n)] == pytest.approx([0.8**3, 0.8**2, 0.8, 1])
    assert [eq.penalties.LinearWeights(0.9)(n, k) for k in range(n)] == pytest.approx([1 - 0.9 * 0.75, 0.55, 0.775, 1])
    assert [eq.penalties.ConstantWeights(0.5)(n, k) for k in range(n)] == [0.5] * 4


def test_without_iterates_it_is_the_loss() -> None:
    s = eq.DEQ(TanhCell(WIDTH), stop=TIGHT).solve(inputs(BATCH, WIDTH))
    torch.testing.assert_close(eq.correction_penalty(s, loss), loss(s.z))


def test_iterates_are_those_of_plain_iteration_and_carry_phantom_gradients() -> None:
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    stop = eq.Stop(rtol=0, atol=0, max_steps=7, keep_every=3, on_failure="ignore")
    s = eq.DEQ(cell, solver=eq.Picard(), stop=stop).solve(x)
    path = [torch.zeros_like(x)]
    for _ in range(7):
        path.append(cell(path[-1], x).detach())
    torch.testing.assert_close(torch.stack(s.iterates), torch.stack([path[3], path[6]]))

    def head(h: Tensor) -> Tensor:
        for _ in range(2):
            h = 0.5 * h + 0.5 * cell(h, x)
        return h

    expected = 0.7**2 * loss(head(path[3])) + 0.7 * loss(head(path[6])) + loss(s.z)
    found = eq.correction_penalty(s, loss, eq.penalties.ExponentialWeights(0.7), steps=2, damping=0.5)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(total, cell.w, retain_graph=True)[0] for total in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_bounded_number_of_iterates_is_spread_over_the_way() -> None:
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    stop = eq.Stop(rtol=0, atol=0, max_steps=9, keep_every=1, on_failure="ignore")
    s = eq.DEQ(cell, solver=eq.Picard(), stop=stop).solve(x)
    kept = len(s.iterates)
    for most in (0, 1, 2, 4, kept, kept + 3):
        states = eq.penalties.correction_states(s, most=most)
        assert len(states) == min(most, kept) + 1 and states[-1] is s.z
        heads = [cell(z, x) for z in s.iterates]
        places = [next(i for i, head in enumerate(heads) if torch.equal(head, state)) for state in states[:-1]]
        gaps = [b - a for a, b in zip([-1, *places], [*places, kept], strict=True)]
        assert places == sorted(set(places)) and max(gaps) - min(gaps) <= 1
    found = eq.correction_penalty(s, loss, eq.penalties.ConstantWeights(), most=2)
    torch.testing.assert_close(found, torch.stack([loss(z) for z in eq.penalties.correction_states(s, most=2)]).sum())
    with pytest.raises(ValueError, match="most must not be negative, got -1"):
        eq.penalties.correction_states(s, most=-1)


def test_iterates_survive_compaction_and_fallback() -> None:
    scale = torch.cat([torch.full((30, 1), 0.01), torch.full((2, 1), 0.9)]).double()
    x = inputs(32, WIDTH)
    for solver in (eq.Picard(), eq.Fallback(eq.Picard(), eq.Anderson(), patience=5)):
        stop = eq.Stop(rtol=1e-9, atol=0, max_steps=300, keep_every=4)
        s = eq.fixed_point(lambda z, a, u: a * torch.tanh(z) + u, torch.zeros_like(x), scale, x, solver=solver, stop=stop)
        assert s.stats.sample_evaluations < 0.8 * 32 * s.stats.evaluations
        assert len(s.iterates) >= 3
        z = torch.zeros_like(x)
        for _ in range(4):
            z = scale * torch.tanh(z) + x
        first = s.iterates[0]
        assert isinstance(first, Tensor)
        torch.testing.assert_close(first[30:], z[30:])
        torch.testing.assert_close(first[:30], s.z[:30], rtol=1e-6, atol=1e-9)


def test_a_trajectory_and_plain_states_are_penalised() -> None:
    cell, x = TanhCell(WIDTH), inputs(BATCH, WIDTH)
    trajectory = eq.WeightTied(cell, depth=3).trajectory(x)
    expected = 0.64 * loss(trajectory.states[1]) + 0.8 * loss(trajectory.states[2]) + loss(trajectory.states[3])
    torch.testing.assert_close(eq.correction_penalty(trajectory, loss), expected)
    torch.testing.assert_close(eq.correction_penalty(trajectory.states[1:], loss), expected)
    with pytest.raises(ValueError, match="at least one state"):
        eq.correction_penalty([], loss)


# schedules


def test_a_schedule_follows_the_published_rules() -> None:
    schedule = eq.penalties.PenaltySchedule(
        weight=1.9, increment=0.1, every=100, pretraining=50, pretraining_weight=0.03, until=400
    )
    weights = [schedule(step) for step in (0, 49, 50, 149, 150, 399, 400)]
    assert weights == pytest.approx([0.03, 0.03, 1.9, 1.9, 2.0, 2.2, 0.0])


def test_a_schedule_draws_its_share_and_draws_it_again() -> None:
    schedule = eq.penalties.PenaltySchedule(weight=2.0, frequency=0.35)
    drawn = [schedule(step) for step in range(4000)]
    share = sum(weight > 0 for weight in drawn) / 4000
    assert abs(share - 0.35) < 4 * math.sqrt(0.35 * 0.65 / 4000)  # four standard errors
    assert drawn == [schedule(step) for step in range(4000)]
    other = eq.penalties.PenaltySchedule(weight=2.0, frequency=0.35, seed=1)
    assert drawn != [other(step) for step in range(4000)]
    with pytest.raises(ValueError, match="share of the steps"):
        eq.penalties.PenaltySchedule(frequency=1.5)


def test_jitter_draws_every_length_and_no_other() -> None:
    stop = eq.Stop(max_steps=12)
    assert {eq.random_max_steps(stop, step).max_steps for step in range(100)} == {10, 11, 12}
    assert {eq.random_max_steps(stop, step, above=1).max_steps for step in range(100)} == {10, 11, 12, 13}
    assert eq.random_max_steps(stop, 5) == eq.random_max_steps(stop, 5)
