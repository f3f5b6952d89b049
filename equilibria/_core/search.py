"""Sums over a batch without the samples that spoil them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SEARCHES = 8  # trials per halving of the batch, at most
Grads = Sequence[Tensor | None]


def sum_finite_shares(rows: Tensor, share: Callable[[Tensor], Grads], zero: Grads) -> tuple[Grads, Tensor]:
    """The sum of the gradients of as many of `rows` as have finite ones, and (batch,) the rows left out.

    `share` gets a mask of rows and returns their gradients; `zero` is those of no row. Groups whose gradients are not finite
    are halved: a sample may spoil what it is computed with and be fine alone. Groups for which the trials do not suffice
    are left out.
    """
    total, lost = zero, torch.zeros_like(rows)
    groups, left = [rows], SEARCHES * max(len(rows).bit_length(), 1)
    while groups:
        group, left = groups.pop(), left - 1
        grads = share(group) if left >= 0 else None
        if grads is not None and all_finite(grads):
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, grads, strict=True)]
            continue
        index = group.nonzero().squeeze(1)
        if len(index) <= 1 or grads is None:
            lost = lost | group
        else:
            groups += [torch.zeros_like(group).index_fill(0, half, True) for half in index.chunk(2)]
    return total, lost


def all_finite(grads: Grads) -> bool:
    """Sums first: torch.isfinite needs as much memory again as a gradient has."""
    given = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads if grad is not None]
    sums = [grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in given]
    if not sums or bool(torch.isfinite(torch.stack([each.to(sums[0]) for each in sums]).sum())):
        return True
    return all(bool(torch.isfinite(grad).all()) for grad in given)
