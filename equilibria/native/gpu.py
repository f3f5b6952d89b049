"""One step of `Anderson` as a torch operator for GPUs, implemented in torch and as a Triton kernel.

In torch, a step of `Anderson` consists of about ten operations on vectors, and a GPU launches a kernel for each of them.
`torch.ops.equilibria.anderson_step` does them in one call. For CUDA tensors it calls the kernel in `anderson_triton.py`, for
others it runs in torch. The Triton kernel has run in Triton's interpreter only, and never on a GPU. Solves therefore use the
operator only inside `fused()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from equilibria.solvers import anderson
from equilibria.solvers.anderson import Fused, Ring, combine, insert, mask_of
from equilibria.solvers.rowwise import MEDIUM_STATE, grow

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int, int, float, float], Tensor]


@torch.library.custom_op(
    "equilibria::anderson_step",
    mutates_args=("pairs", "gram", "last"),
    schema=(
        "(Tensor(a!) pairs, Tensor(b!) gram, Tensor pair, Tensor(c!) last, Tensor held, Tensor window, int slot, "
        "int filled, int limit, float damping, float threshold) -> Tensor"
    ),
)
def step_in_torch(
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
    """Store the difference of two iterates in a slot of the ring, and return the next iterate, (batch, n).

    pairs      (batch, slots, 2 n), the ring; `filled` slots are in use
    gram       (batch, slots, slots), inner products of its residual parts; it has no slots in the orthonormal form
    pair       (batch, 2 n), residual and value of the newest iterate
    last       (batch, 2 n), residual and value of the previous iterate; the step overwrites them
    held       (batch, 1), number of stored pairs that a row uses, counted from the newest one and without the new pair
    window     (batch, 1), largest number of pairs that a row uses, including the new one
    slot       slot of the new pair; `limit` is the length of the ring
    threshold  the value of `Anderson.threshold`
    """
    ring, n = Ring(pairs, gram, limit, filled, slot), pair.shape[1] // 2
    ring = insert(ring, pair, last, mask_of(ring, held), threshold)
    used = mask_of(ring, torch.minimum(held + 1, window))
    return combine(ring, pair[:, n:], pair[:, :n], used, damping, threshold)


@step_in_torch.register_kernel("cuda")
def _(*arguments: Any) -> Tensor:
    from equilibria.native import anderson_triton  # imported here, because torch for the CPU comes without Triton

    return anderson_triton.step(*arguments)


@step_in_torch.register_fake
def _(pairs: Tensor, gram: Tensor, pair: Tensor, *rest: object) -> Tensor:
    return pair.new_empty(len(pair), pair.shape[1] // 2)


@contextmanager
def fused(devices: tuple[str, ...] = ("cuda",), step: Step | None = None) -> Iterator[None]:
    """Run every step of `Anderson` inside the block by one call, in all threads, for states on devices of these types.

    step  function that does one step; None uses `torch.ops.equilibria.anderson_step`
    """
    call = step or torch.ops.equilibria.anderson_step

    def advance(
        ring: Ring, pair: Tensor, last: Tensor, held: Tensor, window: Tensor, damping: float, threshold: float
    ) -> tuple[Tensor, Ring]:
        """Return the next iterate, and the ring with the newest pair."""
        assert isinstance(ring.slot, int)
        slot, filled, limit, gram = ring.slot, ring.filled, ring.limit, ring.gram
        pairs = grow(ring.pairs, slot, limit, blank=False)
        if pair.shape[1] // 2 > MEDIUM_STATE:
            gram = grow(gram, slot, limit, dims=(1, 2))
        z = call(pairs, gram, pair, last, held, window, slot, filled, limit, damping, threshold)
        return z, Ring(pairs, gram, limit, min(filled + 1, limit), (slot + 1) % limit)

    before, anderson.fused = anderson.fused, Fused(advance, devices)
    try:
        yield
    finally:
        anderson.fused = before
