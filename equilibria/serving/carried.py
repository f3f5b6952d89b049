"""The tensors that a pool stores per row during the solve: arguments of the cell, kept outputs, inputs of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Carried:
    """Buffers with one row per place.

    buffers  (room, ...) each
    mask     (room, n), 0 for the numbers of padded positions; None without padding
    room     rows for which memory is allocated
    """

    def __init__(self, like: Tensor, n: int) -> None:
        self.like, self.n, self.room = like, n, 0
        self.version = 0  # changes whenever the buffers are other tensors
        self.mask: Tensor | None = None
        self.buffers: list[Tensor] = []

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` rows."""
        self.room = rows
        self.version += 1
        self.buffers = [_grown(buffer, rows) for buffer in self.buffers]
        if self.mask is not None:
            self.mask = _grown(self.mask, rows)

    def write(self, index: Tensor, values: Sequence[Tensor]) -> None:
        """Write the tensors of new rows to the places `index`."""
        if not self.buffers:
            self.buffers = [_grown(value[:1], self.room) for value in values]
            self.version += 1
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.index_copy_(0, index, value)

    def set_masks(self, index: Tensor, masks: Tensor) -> None:
        """Write the padding masks of new rows, (len(index), n), to the places `index`."""
        if self.mask is None:
            self.mask = self.like.new_ones(self.room, self.n)
        self.mask.index_copy_(0, index, masks)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the rows at `source` to the places `target`."""
        here, there = (torch.tensor(places, device=self.like.device) for places in (source, target))
        for buffer in self.buffers if self.mask is None else [*self.buffers, self.mask]:
            buffer.index_copy_(0, there, buffer.index_select(0, here))


def _grown(buffer: Tensor, rows: int) -> Tensor:
    """Return a buffer of `rows` valid rows that begins with `buffer`; copies of its first row fill the rest."""
    new = buffer[:1].expand(rows, *buffer.shape[1:]).clone(memory_format=torch.contiguous_format)
    new[: len(buffer)] = buffer
    return new
