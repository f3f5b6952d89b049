"""Sums of gradients over the samples of a batch whose gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SEARCHES = 8  # most calls of `share` per halving of the batch
Grads = Sequence[Tensor | None]


def sum_finite_shares(rows: Tensor, share: Callable[[Tensor], Grads], zero: Grads) -> tuple[Grads, Tensor]:
    """Return the sum of the finite gradients of `rows`, and (batch,) a mask of the rows that were left out.

    `share` maps a mask of rows to the sum of their gradients; `zero` is the sum over no rows. A group whose sum is not
    finite is halved, because one sample makes the sum of its group non-finite. Groups that remain after
    the last call allowed are left out.
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
    """Return True if all gradients are finite; sums are checked first, because torch.isfinite allocates a mask."""
    given = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads if grad is not None]
    sums = [grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in given]
    if not sums or bool(torch.isfinite(torch.stack([each.to(sums[0]) for each in sums]).sum())):
        return True
    return all(bool(torch.isfinite(grad).all()) for grad in given)
