"""Histories that all rows write in step, of which each row keeps as many of the last entries as it needs."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria._core.maps import FALLEN, Map

SLOW = 0.8  # a step that leaves more of the residual than this: to drop an entry now would make it slower still


def next_slot(order: tuple[int, ...], limit: int) -> int:
    """The slot of a new entry: an empty one, or the oldest. `order` has the slots in use, the oldest first."""
    return len(order) if len(order) < limit else order[0]


def following(order: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """`order` with a new entry."""
    slot = next_slot(order, limit)
    return (*order[len(order) == limit :], slot)


def recent(order: tuple[int, ...], held: Tensor) -> Tensor:
    """(batch, slots) True for the last `held` (batch, 1) entries of each row."""
    newer = [0] * len(order)  # entries after that of a slot
    for age, slot in enumerate(reversed(order)):
        newer[slot] = age
    return torch.tensor(newer, device=held.device) < held


def larger(f: Map, window: Tensor, held: Tensor, most: int) -> Tensor:
    """(batch, 1), entries that a row may keep: one more where it keeps as many as it may and its last step was slow."""
    assert f.ratio is not None
    return window + (~(f.ratio < SLOW).unsqueeze(1) & (held >= window) & (window < most))


def none_slow(f: Map) -> bool:
    """True if no row took a slow step, as far as is known on the host; FALLEN does not say how far."""
    return f.ratio is None or (f.growth < SLOW and f.growth != FALLEN)
