"""Breadth: the selection of a start, votes, and samples that converge in the first solve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq

TIGHT = eq.Stop(rtol=1e-10, atol=0.0, max_steps=200, on_failure="ignore")


def double_well(z: Tensor, x: Tensor) -> Tensor:
    """Return a map with equilibria at 1 and -1 in every entry, whose basins are z > 0 and z < 0; x has no effect."""
    return torch.sign(z) * (1 + 0.2 * (z.abs() - 1)) + 0.0 * x


class Slow(nn.Module):
    """A cell that converges quickly to 1 from positive starts, and by a factor of 0.99 per step to -1 from negative ones."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        rate = torch.where(z > 0, 0.1, 0.99).to(z)
        return torch.where(z > 0, 1.0, -1.0).to(z) + rate * (z - torch.where(z > 0, 1.0, -1.0).to(z)) + 0.0 * x


def layer(cell: object, stop: eq.Stop = TIGHT) -> eq.DEQ:
    return eq.DEQ(cell, eq.looped.RandomStart(), eq.Picard(), stop)  # type: ignore[arg-type]


def test_the_best_converged_start_is_kept() -> None:
    torch.manual_seed(0)
    x = torch.zeros(20, 1, dtype=torch.float64)
    few = eq.Stop(rtol=1e-10, atol=0.0, max_steps=15, on_failure="ignore")
    found = eq.looped.breadth(layer(Slow()), starts=12, stop=few)(x)
    assert found.residual.shape == (20, 12) and torch.equal(found.winner, found.residual.argmin(dim=1))
    assert bool(found.converged.all())  # 12 starts are all negative once in 4096 samples
    torch.testing.assert_close(found.z, torch.ones_like(x), rtol=1e-9, atol=1e-9)
    assert bool((found.starts == 12).all())
    mixed = torch.isfinite(found.residual).sum(dim=1) == 12
    assert bool(mixed.all()) and float(found.spread.max()) > 0.5


def test_one_batch_gives_what_single_solves_give() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    deq = layer(lambda z, x: 0.5 * torch.tanh(z) + x)
    torch.manual_seed(3)
    found = eq.looped.breadth(deq, starts=4)(x)
    torch.testing.assert_close(found.z, deq(x), rtol=1e-8, atol=1e-8)  # one equilibrium: every start finds it
    assert float(found.spread.max()) < 1e-8


def test_a_vote_takes_the_answer_of_most_starts() -> None:
    torch.manual_seed(0)
    x = torch.zeros(30, 1, dtype=torch.float64)
    deq = layer(double_well)
    found = eq.looped.breadth(deq, starts=7, keep="vote", answer=lambda z: (z > 0).long())(x)
    torch.manual_seed(0)
    s = deq.solve(x.repeat(7, 1))
    positive = (s.z.view(7, 30) > 0).double().mean(dim=0)
    assert torch.equal(found.z.squeeze(1) > 0, positive > 0.5)
    torch.testing.assert_close(found.spread.double(), torch.minimum(positive, 1 - positive))


def test_samples_that_converged_leave_early() -> None:
    torch.manual_seed(0)
    x = torch.zeros(40, 1, dtype=torch.float64)
    few = eq.Stop(rtol=1e-10, atol=0.0, max_steps=15, on_failure="ignore")
    found = eq.looped.breadth(layer(Slow()), starts=12, first=1, stop=few)(x)
    assert set(found.starts.tolist()) == {1, 12}
    assert bool(found.converged.all())
    early = found.starts == 1
    assert bool((found.winner[early] == 0).all()) and bool(torch.isinf(found.residual[early, 1:]).all())
    assert bool((found.winner[~early] > 0).all())
    together = eq.looped.breadth(layer(Slow()), starts=12, stop=few)(x)
    assert found.sample_evaluations < together.sample_evaluations


def test_states_of_several_tensors_and_nonfinite_starts_are_handled() -> None:
    def cell(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        bad = torch.where(z[0] < 0, torch.nan, 0.0).to(x)
        return 0.5 * z[1] + x + bad, 0.5 * z[0]

    torch.manual_seed(0)
    x = torch.ones(6, 1, dtype=torch.float64)
    deq = eq.DEQ(cell, eq.looped.RandomStart(states=2), eq.Picard(), TIGHT)
    found = eq.looped.breadth(deq, starts=10)(x)
    torch.testing.assert_close(found.z[0], x / 0.75, rtol=1e-8, atol=1e-8)
    assert bool(torch.isinf(found.residual).any()) and bool(found.converged.all())


def test_breadth_refuses_invalid_arguments() -> None:
    deq = eq.DEQ(double_well)
    with pytest.raises(ValueError, match=r"eq\.looped\.RandomStart\(\)"):
        eq.looped.breadth(deq, starts=2)(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="starts must be at least 1"):
        eq.looped.breadth(deq, starts=0)
    with pytest.raises(ValueError, match="compares answers"):
        eq.looped.breadth(deq, starts=2, keep="vote")
    with pytest.raises(ValueError, match="first must lie in"):
        eq.looped.breadth(deq, starts=2, first=3)
    with pytest.raises(ValueError, match="there is no tensor among them"):
        eq.looped.RandomStart()()
    drawn = eq.looped.RandomStart(shape=(4,))(torch.zeros(2, dtype=torch.int64))
    assert isinstance(drawn, Tensor) and drawn.shape == (2, 4) and drawn.dtype == torch.float32
