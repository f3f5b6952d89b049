"""The tensors of a pool, with one row per place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.serving.row_solvers import RowSolver


class RowTensors:
    """The tensors of a solve whose rows enter and leave.

    z, fz        (rows, n), the current iterates and the cell there
    best_z       (rows, n), the best iterates; the same object as `z` while every row improves
    residual     (rows, n), f(z) - z
    length       (rows,), Euclidean norms of the residuals
    improved     (rows,) bool, rows whose last iterate was their best; None: all
    tolerances   (2, room), rtol and atol
    mask         (room, n), 0 for the numbers of padded positions; None without padding
    buffers      (room, ...) each, what rows carry: arguments of the cell, kept outputs, inputs of the model
    room         rows for which memory is allocated
    """

    def __init__(self, solver: RowSolver, like: Tensor, n: int) -> None:
        self.solver, self.like, self.n, self.room = solver, like, n, 0
        self.z = self.fz = self.best_z = like.new_zeros(0, n)
        self.residual, self.length = self.z, like
        self.improved: Tensor | None = None
        self.tolerances = like.new_zeros(2, 0)
        self.mask: Tensor | None = None
        self.buffers: list[Tensor] = []

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` rows."""
        self.room = rows
        self.solver.reserve(rows)
        tolerances = self.like.new_ones(2, rows)
        tolerances[:, : self.tolerances.shape[1]] = self.tolerances
        self.tolerances = tolerances
        self.buffers = [_grown(buffer, rows) for buffer in self.buffers]
        if self.mask is not None:
            self.mask = _grown(self.mask, rows)

    def extend(self, rows: int) -> None:
        """Append `rows` rows of zeros to the iterates."""
        zeros = self.like.new_zeros(rows, self.n)
        self.z, self.fz = torch.cat([self.z, zeros]), torch.cat([self.fz, zeros])
        self.best_z = torch.cat([self.best_z, zeros])
        self.length = torch.cat([self.length, zeros[:, 0]])
        self.residual = self.solver.residual(self.z, self.fz)
        if self.improved is not None:
            self.improved = torch.cat([self.improved, torch.ones(rows, dtype=torch.bool, device=self.like.device)])

    def carry(self, index: Tensor, values: Sequence[Tensor]) -> None:
        """Write what new rows carry to the places `index`."""
        if not self.buffers:
            self.buffers = [_grown(value[:1], self.room) for value in values]
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.index_copy_(0, index, value)

    def set_masks(self, index: Tensor, masks: Tensor) -> None:
        """Write the padding masks of new rows, (len(index), n), to the places `index`."""
        if self.mask is None:
            self.mask = self.like.new_ones(self.room, self.n)
        self.mask.index_copy_(0, index, masks)

    def set_iterate(self, z: Tensor, fz: Tensor) -> None:
        """Store a new iterate with its residual."""
        self.z, self.fz = z, fz
        self.residual = self.solver.residual(z, fz)
        self.length = torch.linalg.vector_norm(self.residual, dim=1)

    def keep_best(self, worse: Sequence[int]) -> None:
        """Update the best iterates; those of the rows in `worse` stay."""
        if not worse:
            self.improved, self.best_z = None, self.z
            return
        better = torch.ones(len(self.z), dtype=torch.bool)
        better[list(worse)] = False
        self.improved = better.to(self.like.device)
        self.best_z = torch.where(self.improved.unsqueeze(1), self.z, self.best_z)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the rows at `source` to the places `target`."""
        here, there = (torch.tensor(places, device=self.like.device) for places in (source, target))
        self.solver.move(here, there)
        for buffer in self.buffers if self.mask is None else [*self.buffers, self.mask]:
            buffer.index_copy_(0, there, buffer.index_select(0, here))
        self.tolerances.index_copy_(1, there, self.tolerances.index_select(1, here))
        same = self.best_z is self.z
        self.z, self.fz, self.length = (_moved(t, here, there) for t in (self.z, self.fz, self.length))
        self.best_z = self.z if same else _moved(self.best_z, here, there)
        self.improved = None if self.improved is None else _moved(self.improved, here, there)
        self.residual = self.solver.residual(self.z, self.fz)

    def cut(self, rows: int) -> None:
        """Keep the iterates of the first `rows` rows."""
        same = self.best_z is self.z
        self.z, self.fz, self.residual = self.z[:rows], self.fz[:rows], self.residual[:rows]
        self.best_z = self.z if same else self.best_z[:rows]
        self.length = self.length[:rows]
        self.improved = None if self.improved is None else self.improved[:rows]


def _grown(buffer: Tensor, rows: int) -> Tensor:
    """Return a buffer of `rows` rows that begins with `buffer`; its first row fills the rest, so that all rows are valid."""
    new = buffer[:1].expand(rows, *buffer.shape[1:]).clone(memory_format=torch.contiguous_format)
    new[: len(buffer)] = buffer
    return new


def _moved(tensor: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return tensor.index_copy(0, target, tensor.index_select(0, source))
