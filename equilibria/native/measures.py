"""Sizes and residuals of rows and checks of gradients, in one native call each.

In torch each of them takes several operations, whose overhead exceeds the arithmetic of a small batch. If kernels cannot
read the tensors, `normalized` and `ratios` return None, and the caller computes the result in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria import native

WIDE = {torch.float32: 0, torch.float64: 1}  # the dtypes that kernels read; 1 stands for the wider one
LARGE = 1 << 18  # above this number of entries torch sums a gradient faster, because it uses several threads


def _readable(*tensors: Tensor) -> bool:
    """Return True if kernels may read these tensors: plain, contiguous, on the CPU, of one dtype, without a graph."""
    dtype = tensors[0].dtype
    return (
        native.kernels is not None
        and not native.off.get()
        and not torch.is_grad_enabled()
        and dtype in WIDE
        and all(type(x) is Tensor and x.is_cpu and x.is_contiguous() and x.dtype == dtype for x in tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def normalized(v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Divide the rows of v by their root mean square.

    Returns the divisors, (batch, 1), the divided v, and the root mean square of its rows after the division, (batch,). Rows
    that are zero or not finite are divided by 1.
    """
    if v.numel() == 0 or not _readable(v):
        return None
    (rows, n), rhs, found = v.shape, torch.empty_like(v), v.new_empty(2, v.shape[0])
    scale, size = found[0], found[1]
    native.kernels.normalize(WIDE[v.dtype], rows, n, v.data_ptr(), rhs.data_ptr(), scale.data_ptr(), size.data_ptr())
    return scale.unsqueeze(1), rhs, size


def ratios(
    a: Tensor, b: Tensor | None, c: Tensor, *, told: Tensor | None = None, status: Tensor | None = None
) -> tuple[Tensor, float] | None:
    """Return the ratios |a - b| / |c| of all rows, (batch,), and the largest ratio. Without b the ratios are |a| / |c|.

    If `told`, (batch,), is given, the second result is the largest difference between a ratio and `told`, over the rows
    where it is not nan. The second result is nan if the squares of a row of c may overflow or underflow, or if the
    `status` of a row, (batch,) int8, is not 0.
    """
    given = (a, c, *(() if b is None else (b,)), *(() if told is None else (told,)))
    if a.numel() == 0 or not _readable(*given):
        return None
    out = a.new_empty(a.shape[0])
    told_at, status_at = 0 if told is None else told.data_ptr(), 0 if status is None else status.data_ptr()
    worst: float = native.kernels.ratios(
        WIDE[a.dtype],
        *a.shape,
        a.data_ptr(),
        0 if b is None else b.data_ptr(),
        c.data_ptr(),
        told_at,
        status_at,
        out.data_ptr(),
    )
    return out, worst


def seem_finite(grads: Sequence[Tensor | None], like: Tensor) -> Tensor | bool:
    """Return False if any gradient is not finite.

    Where kernels cannot read the gradients, the check sums them in torch. The result is then a tensor on the device of
    `like`, so this function does not wait for the device. It may also be False because the sum of finite numbers overflows.
    """
    given = [grad for grad in grads if grad is not None]
    # the order of entries is irrelevant, so transposed matrices count as contiguous
    dense = [grad.t() if grad.dim() == 2 and not grad.is_contiguous() else grad for grad in given]
    if all(grad.numel() <= LARGE and _readable(grad) for grad in dense):
        return all(native.kernels.finite(WIDE[grad.dtype], grad.data_ptr(), grad.numel()) for grad in given)
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in given]
    # a sum in half precision overflows early
    sums = [grad.sum(dtype=torch.float32 if grad.element_size() < 4 else None).to(like.dtype) for grad in real]
    return torch.isfinite(torch.stack(sums).sum()).to(like.device)
