"""The history of Anderson grows where steps gain little, in both of its forms, and whatever repeats its steps follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria import native
from equilibria._core.loop import solve
from equilibria._core.maps import Map
from equilibria.solvers.anderson import FEW, MANY, AndersonState
from equilibria.solvers.rowwise import MEDIUM_STATE
from tests.native.choice import can_run
from tests.problems import generator

SIZES = [100, MEDIUM_STATE + 76]  # of either form
STOP = eq.Stop(rtol=1e-6, atol=0.0, max_steps=300, on_failure="ignore")


class Turning(nn.Module):
    """Pairs of numbers are turned by angles of their own and shrunk: normal, and far from symmetric."""

    def __init__(self, n: int, radius: float, seed: int = 0) -> None:
        super().__init__()
        angles = 3 * torch.rand(n // 2, generator=generator(seed), dtype=torch.float64)
        self.cos, self.sin = (nn.Parameter(radius * part) for part in (angles.cos(), angles.sin()))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        a, b = z.chunk(2, dim=1)
        return torch.cat((self.cos * a - self.sin * b, self.sin * a + self.cos * b), dim=1) + x


def drawn(batch: int, n: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, n, generator=generator(seed), dtype=torch.float64)


def states(n: int, radius: float, solver: eq.Anderson, steps: int) -> list[AndersonState]:
    cell, x = Turning(n, radius), drawn(3, n)
    f = Map(lambda z: cell(z, x))
    with torch.no_grad():
        found = [solver.init(f, torch.zeros_like(x))]
        for _ in range(steps):
            found.append(solver.step(f, found[-1]))
    return found


@pytest.mark.parametrize("n", SIZES)
def test_the_history_grows_only_where_steps_gain_little(n: int) -> None:
    # after ten quick steps nothing but rounding is left, which no longer falls
    quick, slow = states(n, 0.2, eq.Anderson(), 10)[-1], states(n, 0.97, eq.Anderson(), 30)[-1]
    assert quick.limit == FEW and slow.limit == MANY
    assert float(slow.held.max()) == MANY and quick.pairs.shape[1] == FEW
    assert states(n, 0.97, eq.Anderson(history=3), 30)[-1].limit == 3


@pytest.mark.parametrize("n", SIZES)
def test_growth_stays_within_the_budget(n: int) -> None:
    pair = 2 * 3 * n * 8
    assert states(n, 0.97, eq.Anderson(budget=6 * pair), 30)[-1].pairs.shape[1] == 6
    assert states(n, 0.97, eq.Anderson(budget=2 * pair), 30)[-1].pairs.shape[1] == 2


@pytest.mark.parametrize("n", SIZES)
def test_a_growing_history_saves_steps(n: int) -> None:
    cell, x = Turning(n, 0.95), drawn(3, n)
    taken = {}
    for solver in (eq.Anderson(), eq.Anderson(history=FEW)):
        with torch.no_grad():
            stats = solve(lambda z: cell(z, x[: len(z)]), torch.zeros_like(x), solver, STOP).stats
        assert bool(stats.converged.all())
        taken[solver.history] = int(stats.steps.max())
    assert taken[None] < taken[FEW]


def test_every_sample_grows_by_itself() -> None:
    n = 100
    slow, x = Turning(n, 0.97), drawn(4, n)
    gain = torch.tensor([0.2, 1.0, 0.2, 1.0], dtype=torch.float64).unsqueeze(1)
    f = Map(lambda z: slow(gain * z, x))
    with torch.no_grad():
        state = eq.Anderson().init(f, torch.zeros_like(x))
        for _ in range(12):
            state = eq.Anderson().step(f, state)
    assert state.window.flatten().tolist()[::2] == [FEW, FEW]
    assert min(state.window.flatten().tolist()[1::2]) > FEW


def test_beyond_1024_numbers_a_step_minimizes_over_the_last_differences_alone() -> None:
    """Truncated Gram-Schmidt would also contain directions of differences that were dropped."""
    solver = eq.Anderson(history=3)
    found = states(MEDIUM_STATE + 76, 0.9, solver, 12)
    residuals, values = [state.fz - state.z for state in found], [state.fz for state in found]
    for k in range(6, 12):
        changes = torch.stack([residuals[i + 1] - residuals[i] for i in range(k - 3, k)], dim=2)
        moved = torch.stack([values[i + 1] - values[i] for i in range(k - 3, k)], dim=2)
        weights = torch.linalg.lstsq(changes, residuals[k].unsqueeze(2)).solution
        expected = values[k] - (moved @ weights).squeeze(2)
        torch.testing.assert_close(found[k + 1].z, expected, rtol=1e-6, atol=1e-6 * float(residuals[k].abs().max()))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("checkpoint", ["sqrt", "recursive"])
def test_replays_follow_the_history_as_it_grows(n: int, checkpoint: Any) -> None:
    cell, x = Turning(n, 0.95), drawn(3, n)
    stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=25, on_failure="ignore", compact=False)

    def gradients(gradient: eq.Unrolled) -> list[Tensor]:
        layer = eq.DEQ(cell, stop=stop, gradient=gradient)
        return list(torch.autograd.grad(layer(x).square().sum(), list(cell.parameters())))

    expected = gradients(eq.Unrolled())
    for found, own in zip(gradients(eq.Unrolled(checkpoint=checkpoint)), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-7, atol=1e-7 * float(own.abs().max()))
    for found, own in zip(gradients(eq.Unrolled(truncate=100)), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-7, atol=1e-7 * float(own.abs().max()))


@pytest.mark.skipif(not native.available(), reason=native.reason() or "native")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Anderson(damping=0.7), eq.Anderson(history=6)], ids=repr)
def test_native_steps_grow_the_same_history(n: int, solver: eq.Anderson) -> None:
    cell, x = Turning(n, 0.95), drawn(4, n)
    x[2, 5] = float("nan")
    z0 = torch.zeros_like(x)
    assert can_run(z0, solver, STOP)

    def run() -> Any:
        with torch.no_grad():
            return eq.fixed_point(cell, z0, x, solver=solver, stop=STOP)

    found = run()
    with native.disabled():
        expected = run()
    assert found.stats.status.tolist() == expected.stats.status.tolist()
    assert found.stats.steps.tolist() == expected.stats.steps.tolist()
    torch.testing.assert_close(found.z, expected.z, rtol=1e-7, atol=1e-7)
