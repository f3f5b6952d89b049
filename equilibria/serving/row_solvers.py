"""Picard, Anderson and Broyden for rows that start at different times.

The updates are those of `eq.Picard`, `eq.Anderson` and `eq.Broyden`, but every row has its own slots in use. A row may
therefore start with an empty history beside rows that continue. Histories are stored in buffers, so rows enter and leave
without copying the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.serving.adapter import (
    GROWTH,
    MEDIUM_STATE,
    PATIENCE,
    SLOW,
    history_limit,
    history_range,
    least_squares,
    products,
    solve_small,
    subtract_combination,
)
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.picard import Picard

FIRST_SLOTS = 4  # history slots at the first growth; most rows need few


class RowSolver:
    """An update rule whose state has a place for each row of a pool; methods work on the first `len(z)` rows.

    One step calls `propose`, evaluates the cell, calls `absorb`, and calls `begin` for rows that start in this step.
    """

    def residual(self, z: Tensor, fz: Tensor) -> Tensor:
        """Return f(z) - z, (rows, n)."""
        return fz - z

    def propose(
        self, z: Tensor, fz: Tensor, residual: Tensor, length: Tensor, depth: int, improved: Tensor | None
    ) -> Tensor:
        """Return the next iterate, (rows, n).

        length    (rows,) norms of the residuals
        depth     steps taken by the oldest row
        improved  (rows,) bool, rows whose last iterate was their best; None: all
        """
        raise NotImplementedError

    def absorb(self, z: Tensor, fz: Tensor) -> None:
        """Record the values at the iterate that `propose` returned."""

    def begin(self, rows: Tensor, length: Tensor, numbers: Sequence[int] | None = None) -> None:
        """Clear the history of these rows; `length`, (rows,), contains the norms of their residuals at the start.

        numbers  size of each row's state without padding; None: the full size
        """

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the state of rows at `source` to the places `target`."""

    def reserve(self, capacity: int) -> None:
        """Allocate memory for `capacity` rows."""


def row_solver(solver: Any, like: Tensor, n: int) -> RowSolver:
    """Return the update rule of `solver` for rows of `n` numbers, in the dtype and on the device of `like`."""
    if isinstance(solver, Anderson):
        return RowAnderson(solver, like, n)
    return RowBroyden(solver, like, n) if isinstance(solver, Broyden) else RowPicard(solver)


def unsupported(solver: Any) -> str | None:
    """Return why rows of this solver cannot start at different times; None if they can."""
    if isinstance(solver, Broyden) and solver.line_search:
        return "Broyden's line search takes a different number of evaluations per row; use Broyden(line_search=False)"
    if isinstance(solver, (Picard, Anderson, Broyden)):
        return None
    return (
        f"its solver is {solver!r}; rows can enter a running solve with Picard, Anderson and Broyden only. Pass one of them "
        "as solver="
    )


class RowPicard(RowSolver):
    """z <- z + damping (f(z) - z)."""

    def __init__(self, solver: Picard) -> None:
        self.damping = solver.damping

    def propose(
        self, z: Tensor, fz: Tensor, residual: Tensor, length: Tensor, depth: int, improved: Tensor | None
    ) -> Tensor:
        return fz if self.damping == 1 else torch.lerp(z, fz, self.damping)


class _Histories(RowSolver):
    """Buffers (capacity, slots, width) in which row i writes to slot `slot[i]` next."""

    def __init__(self, solver: Any, like: Tensor, n: int) -> None:
        self.rule, self.like, self.n, self.capacity, self.slots = solver, like, n, 0, 0
        # largest number of slots, of any row and of a row without padding
        self.limit = self.usual = history_limit(solver, n, like)
        self.limits = torch.zeros(0, dtype=torch.int64, device=like.device)  # (capacity,)
        self.slot = torch.zeros(0, dtype=torch.int64, device=like.device)
        # index of a row's first slot in the flattened buffers
        self.base = torch.zeros(0, dtype=torch.int64, device=like.device)

    def _buffers(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape per row of every buffer; -1 stands for the number of slots."""
        raise NotImplementedError

    def reserve(self, capacity: int) -> None:
        if capacity > self.capacity:
            self._resize(capacity, self.slots)

    def _room(self, slots: int) -> None:
        """Allocate at least this many slots; they double, since short solves need no long history."""
        if slots > self.slots:
            self._resize(self.capacity, min(max(2 * self.slots, slots, FIRST_SLOTS), self.limit))

    def _resize(self, capacity: int, slots: int) -> None:
        """Reallocate all buffers and copy their contents."""
        for name, shape in self._buffers().items():
            old: Tensor | None = getattr(self, name, None)
            new = self._blank(name, capacity, tuple(slots if extent < 0 else extent for extent in shape))
            if old is not None:
                new[tuple(slice(0, extent) for extent in old.shape)] = old
            setattr(self, name, new)
        slot = torch.full((capacity,), self._first_slot(), dtype=torch.int64, device=self.like.device)
        slot[: len(self.slot)] = self.slot
        limits = torch.full_like(slot, self.usual)
        limits[: len(self.limits)] = self.limits
        self.slot, self.limits, self.capacity, self.slots = slot, limits, capacity, slots
        self.base = torch.arange(capacity, device=self.like.device) * slots

    def _blank(self, name: str, capacity: int, shape: tuple[int, ...]) -> Tensor:
        return self.like.new_zeros(capacity, *shape)

    def _first_slot(self) -> int:
        return 0

    def _next_slot(self, rows: int) -> None:
        if self.limit == self.usual:
            self.slot[:rows].add_(1).remainder_(self.limit)
        else:
            self.slot[:rows].add_(1).remainder_(self.limits[:rows])

    def _set_limits(self, rows: Tensor, numbers: Sequence[int] | None) -> list[int]:
        """Limit the history of padded rows to what they would keep on their own."""
        if numbers is None:
            return []
        own = [history_limit(self.rule, count, self.like) for count in numbers]
        self.limit = max(self.limit, *own)
        self.limits.index_copy_(0, rows, torch.tensor(own, device=rows.device))
        return own

    def move(self, source: Tensor, target: Tensor) -> None:
        for name in (*self._buffers(), "slot", "limits"):
            buffer: Tensor = getattr(self, name)
            buffer.index_copy_(0, target, buffer.index_select(0, source))


class RowAnderson(_Histories):
    """`eq.Anderson` with a history per row; row i overwrites its oldest pair when its window is full."""

    pairs: (
        Tensor  # (capacity, slots, 2 n), differences of residuals, beside those of values; see `eq.Anderson` for its forms
    )
    gram: Tensor  # (capacity, slots, slots), inner products of the differences of residuals, in the second form
    written: Tensor  # (capacity, slots), step at which a pair was written, 0 for none
    last: Tensor  # (capacity, 2 n), residual and value of the previous iterate
    spare: Tensor  # (capacity, 2 n), memory for those of the current iterate
    shortest: Tensor  # (capacity, 1), smallest residual since the row last restarted
    waited: Tensor  # (capacity, 1), steps since then
    patience: Tensor  # (capacity, 1), steps a row may take without a smaller residual
    window: Tensor  # (capacity, 1), pairs that a row may keep
    most: Tensor  # (capacity, 1), pairs that its window may grow to

    def __init__(self, solver: Anderson, like: Tensor, n: int) -> None:
        super().__init__(solver, like, n)
        self.damping, self.threshold = solver.damping, solver.threshold(n, like.dtype)
        self.with_gram = n > MEDIUM_STATE
        self.time = 0  # steps so far
        self.longest = history_range(solver, n, like)[0]  # an upper limit of all windows
        self.fresh: Tensor | None = None  # rows that started since the last step: they have no previous iterate

    def _buffers(self) -> dict[str, tuple[int, ...]]:
        wide = (2 * self.n,)
        numbers = ("shortest", "waited", "patience", "window", "most")
        found = {"pairs": (-1, *wide), "written": (-1,), "last": wide, "spare": wide} | dict.fromkeys(numbers, (1,))
        return found | ({"gram": (-1, -1)} if self.with_gram else {})

    def _blank(self, name: str, capacity: int, shape: tuple[int, ...]) -> Tensor:
        usual = dict(zip(("window", "most", "patience"), self._limits(self.n), strict=True))
        if name in usual:
            return self.like.new_full((capacity, *shape), usual[name])
        blank = super()._blank(name, capacity, shape)
        return blank.to(torch.int64) if name == "written" else blank

    def _limits(self, n: int) -> tuple[int, int, int]:
        """Return the pairs that a row of `n` numbers keeps at first and at most, and its patience."""
        first, most = history_range(self.rule, n, self.like)
        # n differences determine an affine map; before they are collected, the residual need not shrink
        return first, most, PATIENCE if most < n else most + PATIENCE

    def residual(self, z: Tensor, fz: Tensor) -> Tensor:
        pair = self.spare[: len(z)]
        torch.sub(fz, z, out=pair[:, : self.n])
        pair[:, self.n :] = fz
        return pair[:, : self.n]

    def propose(
        self, z: Tensor, fz: Tensor, residual: Tensor, length: Tensor, depth: int, improved: Tensor | None
    ) -> Tensor:
        """Insert the latest difference, then return f(z) minus the least-squares combination of value differences."""
        rows, self.time = len(z), self.time + 1
        slow = ~(length.unsqueeze(1) < SLOW * self.shortest[:rows])
        self._judge(rows, length.unsqueeze(1), improved)
        if depth == 0:  # every row is at its start
            self.fresh = None
            self.last, self.spare = self.spare, self.last
            return fz if self.damping == 1 else torch.lerp(z, fz, self.damping)
        self._insert(rows)
        k = self.slots
        residuals, values = self.pairs[:rows, :k, : self.n], self.pairs[:rows, :k, self.n :]
        mask = (self.written[:rows] > 0).to(z.dtype)
        weights = products(residuals, residual) * mask
        if self.with_gram:
            weights = least_squares(self.gram[:rows], weights, mask, self.threshold)
        self._widen(rows, slow & (mask.sum(dim=1, keepdim=True) == self.window[:rows]))
        z = subtract_combination(fz, weights, values)
        return z if self.damping == 1 else z - (1 - self.damping) * subtract_combination(residual, weights, residuals)

    def _widen(self, rows: int, slow: Tensor) -> None:
        """Let the windows of these rows, which are full, grow by a pair."""
        window = self.window[:rows]
        window.add_(slow & (window < self.most[:rows]))
        if self.longest < self.limit:  # otherwise no window can grow, and the read-back is avoided
            self.longest = max(self.longest, int(window.max())) if rows else self.longest

    def _judge(self, rows: int, length: Tensor, improved: Tensor | None) -> None:
        """Drop the history of rows whose residual grew, or did not shrink for `patience` steps."""
        shortest, waited = self.shortest[:rows], self.waited[:rows]
        if improved is None:
            shortest.copy_(length)
            waited.zero_()
            return
        better = improved.unsqueeze(1)
        waiting = (waited + 1) * ((length >= shortest) & ~better)
        usual = better | ((length <= GROWTH * shortest) & (waiting < self.patience[:rows]))  # false for nan
        least = torch.where(better, length, torch.minimum(length, shortest))
        shortest.copy_(torch.where(usual, least, length))
        waited.copy_(waiting * usual)
        self.written[:rows].mul_(usual)

    def _insert(self, rows: int) -> None:
        """Write the difference from the previous iterate into a free slot of each row, or over its oldest pair."""
        self._room(self.longest)
        pair, last, written = self.spare[:rows], self.last[:rows], self.written[:rows]
        if self.fresh is not None:  # new rows get a difference of zero, which has no effect
            fresh = self.fresh[self.fresh < rows]  # a row that was done at its start may have been cut off since
            last.index_copy_(0, fresh, pair.index_select(0, fresh))
        difference = torch.sub(pair, last, out=last)
        changes = difference[:, : self.n]
        if not self.with_gram:
            size = torch.linalg.vector_norm(changes, dim=1, keepdim=True)
            old = self.pairs[:rows]
            weights = products(old[:, :, : self.n], changes) * (written > 0)
            difference = subtract_combination(difference, weights, old, over=True)
            left = torch.linalg.vector_norm(changes, dim=1, keepdim=True)
            # of a difference in the span of the others only a rounding error is left, which becomes zero here
            difference.mul_(left.masked_fill_(left <= self.threshold * size, float("inf")).reciprocal_())
        within = torch.arange(self.slots, device=written.device) < self.window[:rows]
        slot = torch.where(within, written, self.time).argmin(dim=1)
        place = slot + self.base[:rows]
        self.pairs.view(-1, 2 * self.n).index_copy_(0, place, difference)
        if self.with_gram:
            inner = products(self.pairs[:rows, :, : self.n], changes)
            self.gram.view(-1, self.slots).index_copy_(0, place, inner)
            self.gram[:rows].scatter_(2, slot.view(-1, 1, 1).expand(-1, self.slots, 1), inner.unsqueeze(2))
        self.written.view(-1).index_fill_(0, place, self.time)
        if self.fresh is not None:  # new rows have no pair yet
            self.written.index_fill_(0, self.fresh[self.fresh < rows], 0)
            self.fresh = None
        self.last, self.spare = self.spare, self.last

    def begin(self, rows: Tensor, length: Tensor, numbers: Sequence[int] | None = None) -> None:
        """Clear the history of these rows and set their limits."""
        if self.slots:
            self.pairs.index_fill_(0, rows, 0.0)
            self.written.index_fill_(0, rows, 0)
        self.shortest.index_copy_(0, rows, length.unsqueeze(1))
        self.waited.index_fill_(0, rows, 0.0)
        self.fresh = rows
        limits = [self._limits(n) for n in numbers] if numbers is not None else [self._limits(self.n)] * len(rows)
        for name, own in zip(("window", "most", "patience"), zip(*limits, strict=True), strict=False):
            getattr(self, name).index_copy_(0, rows, self.like.new_tensor(own).unsqueeze(1))
        self.longest = max(self.longest, *(first for first, _, _ in limits)) if limits else self.longest
        self.limit = max(self.limit, *(most for _, most, _ in limits)) if limits else self.limit

    def move(self, source: Tensor, target: Tensor) -> None:
        super().move(source, target)
        if self.fresh is not None:
            place = dict(zip(source.tolist(), target.tolist(), strict=True))
            self.fresh = torch.tensor([place.get(row, row) for row in self.fresh.tolist()], device=self.fresh.device)


class RowBroyden(_Histories):
    """`eq.Broyden` with a ring buffer of pairs per row."""

    steps: Tensor  # (capacity, slots, n), steps s, normalised
    sums: Tensor  # (capacity, slots, n), s + y
    core: Tensor  # (capacity, slots, slots), the identity where a row has no pair

    def __init__(self, solver: Broyden, like: Tensor, n: int) -> None:
        super().__init__(solver, like, n)
        self.direction, self.fz, self.depth = like, like, 0

    def _buffers(self) -> dict[str, tuple[int, ...]]:
        return {"steps": (-1, self.n), "sums": (-1, self.n), "core": (-1, -1)}

    def _blank(self, name: str, capacity: int, shape: tuple[int, ...]) -> Tensor:
        if name != "core":
            return super()._blank(name, capacity, shape)
        eye = torch.eye(shape[0], dtype=self.like.dtype, device=self.like.device)
        return eye.expand(capacity, *shape).contiguous()

    def propose(
        self, z: Tensor, fz: Tensor, residual: Tensor, length: Tensor, depth: int, improved: Tensor | None
    ) -> Tensor:
        """Return z plus the Broyden direction from the pairs of every row."""
        rows, k = len(z), min(depth, self.limit)
        direction = residual
        if k:
            weights = solve_small(self.core[:rows, :k, :k], products(self.steps[:rows, :k], direction))
            direction = subtract_combination(direction, weights, self.sums[:rows, :k])
        self.direction, self.fz, self.depth = direction, fz, depth
        return z + direction

    def absorb(self, z: Tensor, fz: Tensor) -> None:
        """Store the last step and the change of the value as a new pair, and their products in the core matrix."""
        rows, used = len(fz), min(self.depth + 1, self.limit)
        self._room(used)
        length = torch.linalg.vector_norm(self.direction, dim=1, keepdim=True)
        still = length == 0
        scale = length.masked_fill_(still, float("inf")).reciprocal_()
        s, sums = self.direction * scale, (fz - self.fz) * scale  # s + y: the change of f
        slot = self.slot[:rows].clamp(max=used - 1)  # clamps rows without a request only: the others have no larger slot
        place = slot + self.base[:rows]
        self.steps.view(-1, self.n).index_copy_(0, place, s)
        self.sums.view(-1, self.n).index_copy_(0, place, sums)
        # the new step follows all others; a row that did not move gets 1 on the diagonal of its empty pair
        row, column = products(self.sums[:rows, :used], s), products(self.steps[:rows, :used], sums - s)
        column.scatter_add_(1, slot.unsqueeze(1), still.to(column.dtype))
        core, every = self.core[:rows, :used, :used], torch.arange(rows, device=slot.device)
        core[every, slot] = row
        core.transpose(1, 2)[every, slot] = column
        self._next_slot(rows)

    def begin(self, rows: Tensor, length: Tensor, numbers: Sequence[int] | None = None) -> None:
        """Clear the pairs of these rows and set their limits."""
        if self.slots:
            self.steps.index_fill_(0, rows, 0.0)
            self.sums.index_fill_(0, rows, 0.0)
            self.core.index_copy_(0, rows, self._blank("core", len(rows), (self.slots, self.slots)))
        self.slot.index_fill_(0, rows, 0)
        self._set_limits(rows, numbers)
