"""Solves whose numbers are so small or large that their squares leave the dtype: they are divided by powers of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equilibria._core.results import LoopRun, within_dtype
from equilibria.solution import SolveResult
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import USUAL, binary_size, max_norm

Solve = Callable[[LoopRun, Tensor, Any], SolveResult]


class Unusual(Exception):  # noqa: N818, no error
    """The start is so small or large that squares leave the dtype."""

    def __init__(self, fz: Tensor) -> None:
        super().__init__()
        self.fz = fz


def solve_divided(run: LoopRun, z0: Tensor, fz: Tensor, solver: AnySolver, solve: Solve) -> SolveResult:
    """Solve g(y) = f(unit y) / unit by `solve`; units are powers of two per sample, which give states a usual magnitude."""
    unit = binary_size(z0, fz).unsqueeze(1)
    y0 = z0 / unit
    f = run.f.divided(unit).remember(y0, fz / unit)
    inner = dataclasses.replace(run.with_stop(compact=False), f=f, unit=unit.squeeze(1), origin=None)
    result = solve(inner, y0, solver)
    stats = dataclasses.replace(result.stats, iterates=tuple(y * unit for y in result.stats.iterates))
    state = None if result.state is None else result.state.rescaled(unit)
    result = within_dtype(dataclasses.replace(result, z=result.z * unit, stats=stats, state=state), z0)
    measured = run.scale is None and run.f.anywhere(result.failed)
    return _with_scaled_residuals(run, result) if measured else result


def _with_scaled_residuals(run: LoopRun, result: SolveResult) -> SolveResult:
    """Measure the residuals of failed samples: |f(z)| may be too small beside the start to be squared.

    A relative residual that the dtype cannot hold is inf.
    """
    fz, norm, stats = run.f(result.z), run.stop.norm, result.stats
    unit = binary_size(result.z, fz)
    difference = fz / unit.unsqueeze(1) - result.z / unit.unsqueeze(1)
    above, below = binary_size(difference), binary_size(fz)
    length, size = norm(difference / above.unsqueeze(1)), norm(fz / below.unsqueeze(1))
    powers = (above.double() * unit.double()) / below.double()
    residual = (length / size.clamp_min(torch.finfo(fz.dtype).tiny) * powers).to(length.dtype)
    told = torch.where(stats.failed & ~torch.isnan(residual), residual, stats.residual)
    counter = run.f.counter
    stats = dataclasses.replace(
        stats, residual=told, evaluations=counter.evaluations, sample_evaluations=counter.rows, products=counter.products
    )
    return dataclasses.replace(result, stats=stats)


def is_unusual(z: Tensor, fz: Tensor) -> bool:
    """Return True if the squares of a row leave the dtype."""
    least, most = USUAL[z.dtype]
    largest = torch.maximum(max_norm(z), max_norm(fz))
    return bool((((largest > most) & (largest < float("inf"))) | ((largest > 0) & (largest < least))).any())
