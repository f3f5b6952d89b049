"""One step of Anderson as one operator: the torch form, the Triton kernel in the interpreter, and whole solves with both.

The interpreter must be switched on before Triton is imported, so that the tests of the kernel run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import native
from equilibria.native import gpu
from equilibria.solvers import anderson
from equilibria.solvers.rowwise import MEDIUM_STATE
from tests.problems import TanhCell, generator, inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
SOLVERS = [eq.Anderson(), eq.Anderson(history=2, damping=0.7)]
WIDE = MEDIUM_STATE + 6  # a state of the Gram form


def kernel() -> gpu.Step:
    from equilibria.native import anderson_triton

    return anderson_triton.step


interpreted = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="Triton's interpreter does not run here")


class Wide(torch.nn.Module):
    """A state of `n` numbers in which pairs of neighbours turn by different angles: long rows without a dense matrix."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        angle, radius = torch.linspace(0.3, 2.8, n // 2, dtype=dtype), torch.linspace(0.5, 0.95, n // 2, dtype=dtype)
        self.a, self.b = torch.nn.Parameter(radius * angle.cos()), torch.nn.Parameter(radius * angle.sin())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        p, q = z.chunk(2, dim=1)
        return torch.tanh(torch.cat((self.a * p - self.b * q, self.b * p + self.a * q), dim=1) + x)


def batch(n: int, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor]:
    """A cell, and samples of different difficulty."""
    cell = TanhCell(n, norm=0.9, dtype=dtype) if n <= MEDIUM_STATE else Wide(n, dtype)
    scales = torch.tensor([3.0, 1.0, 0.3, 0.1, 0.01], dtype=dtype).unsqueeze(1)
    return cell, inputs(5, n).to(dtype) * scales


def solve(cell: torch.nn.Module, x: Tensor, solver: Any, rtol: float) -> eq.Solution:
    with native.disabled():
        deq = eq.DEQ(cell, solver=solver, stop=eq.Stop(rtol=rtol, atol=0, max_steps=300))
        return deq.solve(x)


def check_solves(n: int, solver: Any, dtype: torch.dtype, step: gpu.Step | None, slack: int) -> None:
    """Compare solves by one call per step with those in torch; their steps may differ by `slack`."""
    cell, x = batch(n, dtype)
    rtol = 1e-4 if dtype == torch.float32 else 1e-9
    plain = solve(cell, x, solver, rtol)
    with gpu.fused(("cpu",), step):
        s = solve(cell, x, solver, rtol)
    assert bool(s.stats.converged.all())
    assert int((s.stats.steps - plain.stats.steps).abs().max()) <= slack
    torch.testing.assert_close(s.z, plain.z, rtol=1e3 * rtol, atol=1e3 * rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("n", [6, 70, WIDE])
def test_solves_by_the_operator_take_the_same_steps_to_the_same_answer(n: int, solver: Any, dtype: torch.dtype) -> None:
    check_solves(n, solver, dtype, None, slack=0)


# the kernel adds in another order, and a difference in a last bit may grow with every step
@interpreted
@pytest.mark.parametrize(
    ("n", "solver", "dtype"),
    [
        (6, 0, torch.float64),
        (70, 0, torch.float32),
        (70, 1, torch.float64),
        (WIDE, 0, torch.float64),
        (WIDE, 1, torch.float32),
    ],
)
def test_solves_by_the_kernel_reach_the_same_answer(n: int, solver: int, dtype: torch.dtype) -> None:
    check_solves(n, SOLVERS[solver], dtype, kernel(), slack=2)


@interpreted
@pytest.mark.parametrize("n", [1, 6, 70, WIDE])
@pytest.mark.parametrize(("filled", "slot", "limit"), [(0, 0, 4), (2, 2, 4), (4, 1, 4), (4, 4, 5), (1, 0, 1), (7, 3, 7)])
@pytest.mark.parametrize("damping", [1.0, 0.6])
def test_one_step_is_that_of_torch(n: int, filled: int, slot: int, limit: int, damping: float) -> None:
    """On any ring: partly filled, full, longer than it was, with rows that use fewer pairs than others."""
    source, dtype = generator(n + filled), torch.float64
    rows, slots = 4, 8
    pairs = torch.full((rows, slots, 2 * n), float("nan"), dtype=dtype)  # slots that are not in use are not read
    pairs[:, :filled] = torch.randn(rows, filled, 2 * n, dtype=dtype, generator=source)
    if n > MEDIUM_STATE:
        gram = torch.full((rows, slots, slots), float("nan"), dtype=dtype)
        kept = pairs[:, :filled, :n]
        gram[:, :filled, :filled] = kept @ kept.transpose(1, 2)
    else:
        gram = pairs.new_empty(rows, 0, 0)
        basis, _ = torch.linalg.qr(pairs[:, : min(filled, n), :n].transpose(1, 2))
        pairs[:, :filled, :n] = 0  # more pairs than numbers: the rest are zero, as steps leave them
        pairs[:, : min(filled, n), :n] = basis.transpose(1, 2)
    pair, last = (torch.randn(rows, 2 * n, dtype=dtype, generator=source) for _ in range(2))
    held = torch.tensor([filled, 0, filled // 2, filled], dtype=dtype).unsqueeze(1)
    window = torch.tensor([limit, limit, max(limit // 2, 1), 1], dtype=dtype).unsqueeze(1)
    held = torch.minimum(held, window)
    threshold = eq.Anderson().threshold(n, dtype)
    results = []
    for call in (torch.ops.equilibria.anderson_step, kernel()):
        ring = pairs.clone(), gram.clone(), pair.clone(), last.clone()
        z = call(*ring, held, window, slot, filled, limit, damping, threshold)
        used = min(filled + 1, limit)
        results.append((z, ring[0][:, :used], ring[1][:, :used, :used]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_differentiated_steps_and_other_devices_do_not_use_the_operator() -> None:
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        found: Tensor = torch.ops.equilibria.anderson_step(*args)
        return found

    cell, x = batch(6, torch.float64)
    with gpu.fused(("cuda",), counted):
        solve(cell, x, eq.Anderson(), 1e-6)
    with gpu.fused(("cpu",), counted):
        deq = eq.DEQ(cell, gradient=eq.Unrolled(), stop=eq.Stop(max_steps=10, on_failure="ignore"))
        torch.autograd.grad(deq(x).sum(), list(cell.parameters()))
    assert not calls
    with gpu.fused(("cpu",), counted):
        solve(cell, x, eq.Anderson(), 1e-6)
    assert calls and anderson.fused is None


def test_the_schema_of_the_operator_tells_what_it_writes() -> None:
    pairs, gram = torch.zeros(2, 3, 8), torch.zeros(2, 0, 0)
    pair, last = torch.randn(2, 8, generator=generator(0)), torch.randn(2, 8, generator=generator(1))
    held, window = torch.zeros(2, 1), torch.full((2, 1), 3.0)
    torch.library.opcheck(
        torch.ops.equilibria.anderson_step,
        (pairs, gram, pair, last, held, window, 0, 0, 3, 1.0, 1e-4),
        test_utils="test_schema",
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="Triton is not installed, or this is its process")
def test_the_kernel_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__))]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
