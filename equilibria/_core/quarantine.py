"""Quarantine: samples that are not finite are replaced by good ones, so that they do not spoil the gradients of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.maps import Equation


def quarantine(
    equation: Equation, z: Tensor, args: Sequence[Tensor], v: Tensor, good: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Replace every sample that is not `good` by a good one with a cotangent of zero; returns z, args and v.

    A zero cotangent alone does not suffice: 0 * nan is nan, and gradients of shared weights sum over the batch.
    """
    concrete = autodiff_modes.has_values(z, good, *args)
    if z.shape[0] == 0 or (concrete and bool(good.all())):
        return z, list(args), v
    own = torch.arange(z.shape[0], device=z.device)
    index = torch.where(good, own, good.to(torch.int8).argmax())
    rows = _args_with_rows(equation, z, args, index, good) if concrete else equation.rowwise
    taken = [arg[index] if with_rows else arg for arg, with_rows in zip(args, rows, strict=True)]
    return z[index], taken, torch.where(good.unsqueeze(1), v, torch.zeros_like(v))


def _args_with_rows(equation: Equation, z: Tensor, args: Sequence[Tensor], index: Tensor, good: Tensor) -> Sequence[bool]:
    """Return True for each arg that has a row per sample; a weight may have as many rows by coincidence.

    The test replaces the rows of bad samples. The outputs of good samples change only if the rows belong to a weight.
    """
    if getattr(equation, "opaque", False):  # evaluating it is a collective operation that other ranks would not join
        return equation.rowwise
    rows = list(equation.rowwise)
    with torch.no_grad():
        # a second state without zeros is tested too: a state of zero hides a change of the weight that multiplies it
        largest = torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dim=1, keepdim=True)
        largest = largest.masked_fill(largest == 0, 1.0)
        another = largest * (1 + torch.arange(z.shape[1], device=z.device, dtype=z.dtype) / z.shape[1])
        for state in (z, another):
            expected = equation(state, *args)[good]
            for i, looks_like in enumerate(rows):
                if looks_like:
                    exchanged = [*args[:i], args[i][index], *args[i + 1 :]]
                    rows[i] = torch.equal(equation(state, *exchanged)[good].nan_to_num(), expected.nan_to_num())
    return rows
