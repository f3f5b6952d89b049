# mypy: ignore-errors
"""One step of `Anderson` as a Triton kernel: one program per row.

A program stores the weights of its row in registers and reads the row in blocks. Rows of up to `MEDIUM_STATE` numbers use an
orthonormal history: the new difference is made orthonormal to the stored ones. For longer rows the program solves the normal
equations from the Gram matrix. Up to rounding, both forms compute what `step_in_torch` in `gpu.py` computes.

If TRITON_INTERPRET=1 is set before Triton is imported, the kernel runs in Python on any device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # numbers of the history that a program loads at a time
MOST = 1024  # largest number of entries of a row in one block


@triton.jit
def _newest(p, b, w, history, j, inside):
    """Return a block of the newest difference, minus its projection on the stored ones."""
    return tl.load(p + j, inside, other=0) - tl.load(b + j, inside, other=0) - tl.sum(w[:, None] * history, axis=0)


@triton.jit
def _step(
    pairs,  # (batch, slots, 2 n)
    gram,  # (batch, slots, slots), of the form with GRAM
    pair,  # (batch, 2 n)
    last,  # (batch, 2 n)
    held,  # (batch,)
    window,  # (batch,)
    out,  # (batch, n)
    n,
    slots,
    slot,
    filled,
    limit,
    DAMPING: tl.constexpr,  # a constant, because Triton rounds arguments to float32
    THRESHOLD: tl.constexpr,
    GRAM: tl.constexpr,
    K: tl.constexpr,  # a power of two, at least `filled` + 1
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, block = tl.arange(0, K), tl.arange(0, BLOCK)
    p, b, q = pair + row * 2 * n, last + row * 2 * n, pairs + row * slots * 2 * n
    had, most = tl.load(held + row), tl.load(window + row)
    new = k == slot
    old = (k < filled) & ((slot - 1 - k + 2 * limit) % limit < had)
    after = tl.minimum(filled + 1, limit)
    used = (k < after) & ((slot - k + 2 * limit) % limit < tl.minimum(had + 1, most))
    other = (k < filled) & (k != slot)  # stays in the ring

    # inner products of the newest difference (w) and the residual (u) with the stored differences
    zero = tl.load(p) * 0
    w, u = tl.zeros([K], zero.dtype), tl.zeros([K], zero.dtype)
    square, along = zero, zero
    for start in range(0, n, BLOCK):
        j = start + block
        inside = j < n
        g = tl.load(p + j, inside, other=0)
        d = g - tl.load(b + j, inside, other=0)
        history = tl.load(q + k[:, None] * 2 * n + j[None, :], (old | other)[:, None] & inside[None, :], other=0)
        w += tl.sum(history * d[None, :], axis=1)
        u += tl.sum(history * g[None, :], axis=1)
        square += tl.sum(d * d, axis=0)
        along += tl.sum(d * g, axis=0)

    if GRAM:
        w = tl.where(new, square, w)
        u = tl.where(new, along, u)
        matrix = gram + row * slots * slots
        tl.store(matrix + slot * slots + k, w, k < after)
        within = (k < after)[:, None] & (k < after)[None, :] & (k != slot)[:, None] & (k != slot)[None, :]
        a = tl.load(matrix + k[:, None] * slots + k[None, :], within, other=0)
        tl.store(matrix + k * slots + slot, w, k < after)
        a = tl.where(new[:, None], w[None, :], tl.where(new[None, :], w[:, None], a)).to(tl.float64)
        diagonal = k[:, None] == k[None, :]
        squares = tl.sum(tl.where(diagonal, a, 0), axis=1)
        sound = used & (squares > 0)
        scale = tl.where(sound, 1 / tl.sqrt(tl.where(sound, squares, 1)), 0)
        a = a * scale[:, None] * scale[None, :] + tl.where(diagonal, tl.where(sound, THRESHOLD, 1)[:, None], 0)
        x = u.to(tl.float64) * scale
        for i in range(0, K):  # Gauss-Jordan without pivoting, because the matrix is positive definite
            here = k == i
            line = tl.sum(tl.where(here[:, None], a, 0), axis=0)
            pivot = tl.sum(tl.where(here, line, 0), axis=0)
            column = tl.where(here, 0, tl.sum(tl.where(here[None, :], a, 0), axis=1))
            line = line / pivot
            part = tl.sum(tl.where(here, x, 0), axis=0) / pivot
            a = tl.where(here[:, None], line[None, :], a - column[:, None] * line[None, :])
            x = tl.where(here, part, x - column * part)
        x = x * scale
        u = tl.where(used & (tl.abs(x) < float("inf")), x, 0).to(zero.dtype)
        w = tl.zeros([K], zero.dtype)
        scale_new = zero + 1
    else:
        w = tl.where(old, w, 0)
        left, along = zero, zero
        for start in range(0, n, BLOCK):
            j = start + block
            inside = j < n
            history = tl.load(q + k[:, None] * 2 * n + j[None, :], old[:, None] & inside[None, :], other=0)
            d = _newest(p, b, w, history, j, inside)
            left += tl.sum(d * d, axis=0)
            along += tl.sum(d * tl.load(p + j, inside, other=0), axis=0)
        # if a difference lies in the span of the others, the remainder is a rounding error and is dropped
        rounding = tl.sqrt(left) <= THRESHOLD * tl.sqrt(square)
        scale_new = tl.where(rounding, 0, 1 / tl.sqrt(tl.where(rounding, 1, left)))
        u = tl.where(used, tl.where(new, along * scale_new, u), 0)

    share = tl.sum(tl.where(new, u, 0), axis=0)
    u = tl.where(new, 0, u)
    for start in range(0, n, BLOCK):
        j = start + block
        inside = j < n
        place = q + k[:, None] * 2 * n + j[None, :]
        residuals = tl.load(place, (old | other)[:, None] & inside[None, :], other=0)
        values = tl.load(place + n, (old | other)[:, None] & inside[None, :], other=0)
        d = _newest(p, b, w, residuals, j, inside) * scale_new
        v = _newest(p + n, b + n, w, values, j, inside) * scale_new
        z = tl.load(p + n + j, inside, other=0) - tl.sum(u[:, None] * values, axis=0) - share * v
        if DAMPING != 1:
            g = tl.load(p + j, inside, other=0) - tl.sum(u[:, None] * residuals, axis=0) - share * d
            z -= (1 - DAMPING) * g
        tl.store(out + row * n + j, z, inside)
        tl.debug_barrier()  # wait until all threads have read this block of the oldest pair, which is overwritten now
        tl.store(q + slot * 2 * n + j, d, inside)
        tl.store(q + slot * 2 * n + n + j, v, inside)


def step(
    pairs: Tensor,
    gram: Tensor,
    pair: Tensor,
    last: Tensor,
    held: Tensor,
    window: Tensor,
    slot: int,
    filled: int,
    limit: int,
    damping: float,
    threshold: float,
) -> Tensor:
    """Return the next iterate, (batch, n); the arguments are those of `equilibria::anderson_step`."""
    batch, slots, width = pairs.shape
    out = torch.empty_like(pair[:, : width // 2], memory_format=torch.contiguous_format)
    many = triton.next_power_of_2(max(filled + 1, 2))
    block = max(16, min(triton.next_power_of_2(width // 2), MOST, TILE // many))
    # the kernel needs contiguous vectors, and `held` and `window` may have other strides
    rows = held.reshape(batch).contiguous(), window.reshape(batch).contiguous()
    form = {"DAMPING": damping, "THRESHOLD": threshold, "GRAM": gram.shape[1] > 0, "K": many, "BLOCK": block}
    _step[(batch,)](pairs, gram, pair, last, *rows, out, width // 2, slots, slot, filled, limit, **form)
    return out
