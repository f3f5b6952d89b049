"""Cells as equations: what running them may write over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.problems import BatchNormCell, inputs


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Broyden(), eq.Newton(), eq.GMRES()], ids=repr)
def test_a_cell_that_writes_over_its_state_is_noticed_at_a_start_of_zeros(solver: eq.Solver[Any], mode: Any) -> None:
    """Half of zero is zero: that something was written shows in the tensor's version, not in its values."""

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return z.mul_(0.5) + x

    with mode():
        x = inputs(4, 3)
        s = eq.fixed_point(cell, torch.zeros_like(x), x, solver=solver, stop=eq.Stop(rtol=1e-10, on_failure="raise"))
        torch.testing.assert_close(s.z, 2 * x, rtol=1e-8, atol=0)
        torch.testing.assert_close(s.z, 0.5 * s.z + x, rtol=1e-8, atol=0)


@pytest.mark.parametrize("solver", [eq.Anderson(), eq.Newton()], ids=repr)
def test_buffers_move_once_per_solve_under_inference_mode(solver: eq.Solver[Any]) -> None:
    moved = []
    for mode in (torch.no_grad, torch.inference_mode):
        cell = BatchNormCell(3)
        with mode():
            eq.DEQ(cell, solver=solver)(inputs(5, 3))
        assert cell.norm.num_batches_tracked is not None and int(cell.norm.num_batches_tracked) == 1
        moved.append(cell.norm.running_mean)
    torch.testing.assert_close(moved[0], moved[1])
