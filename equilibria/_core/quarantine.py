"""Keeping one sample from spoiling the gradients of others: scales per sample, and the replacement of non-finite samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.equation import Equation
from equilibria.stop import rms_norm


def cotangent_scale(equation: Equation, v: Tensor, *, measured: bool) -> Tensor:
    """(batch, 1), the RMS of each row of the right-hand side v, by which it is divided before the solve.

    The solution then does not depend on the scale of the loss. Coupled samples share one divisor, because dividing rows
    by different numbers would change a coupled system. Samples also share it if it is not known whether they are coupled
    and the solution is not `measured` afterwards.
    """
    if v.numel() == 0:
        return v.new_ones(v.shape[0], 1)
    v = v.detach()
    largest = _sound(v.abs().amax(dim=1, keepdim=True))
    # squares of very small or very large numbers underflow or overflow, so these rows are divided first
    size = _usual(rms_norm(v).unsqueeze(1), largest * rms_norm(v / largest).unsqueeze(1))
    if equation.identity.coupled or (equation.identity.coupled is None and not measured):
        most = _sound(size.amax(dim=0, keepdim=True))
        apart = most * (size / most).square().mean(dim=0, keepdim=True).sqrt()
        size = _usual(size.square().mean(dim=0, keepdim=True).sqrt(), apart).expand_as(size)
    return _sound(size)


def _usual(size: Tensor, otherwise: Tensor) -> Tensor:
    """`size`, which was computed from squares, where they neither underflow nor overflow; `otherwise` elsewhere."""
    least = float(torch.finfo(size.dtype).tiny ** 0.5 / torch.finfo(size.dtype).eps)
    return torch.where((size > least) & (size < 1 / least), size, otherwise)


def _sound(size: Tensor) -> Tensor:
    """`size` with 1 in place of entries that are zero or not finite."""
    return size.masked_fill(~((size > 0) & (size < float("inf"))), 1.0)  # nan is neither


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
    """True for each arg that has a row per sample; a weight may have as many rows by coincidence.

    The test replaces the rows of bad samples. The outputs of good samples change only if the rows belong to a weight.
    """
    if getattr(equation, "opaque", False):  # evaluating it is a collective operation that other ranks would not join
        return equation.rowwise
    rows = list(equation.rowwise)
    with torch.no_grad():
        # a second state without zeros is tested too: a state of zero hides a change of the weight that multiplies it
        for state in (z, _another_state(z)):
            expected = equation(state, *args)[good]
            for i, looks_like in enumerate(rows):
                if looks_like:
                    exchanged = [*args[:i], args[i][index], *args[i + 1 :]]
                    rows[i] = torch.equal(equation(state, *exchanged)[good].nan_to_num(), expected.nan_to_num())
    return rows


def _another_state(z: Tensor) -> Tensor:
    """A state of about the magnitude of `z` without zero entries."""
    largest = _sound(torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dim=1, keepdim=True))
    return largest * (1 + torch.arange(z.shape[1], device=z.device, dtype=z.dtype) / z.shape[1])
