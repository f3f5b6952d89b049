"""The log of all iterates of a solve: their residuals, and on request the iterates themselves.

While a solve runs, the log only keeps references. They are put together at its end, and only what is requested: the
trace (`Stop.trace`), the iterates (`Stop.keep_every`), or the extremes of the residual if a sample has failed. Rows may be
dropped from the batch meanwhile, so that every entry has the places of its rows; None stands for all rows in order. Nothing
here waits for the device before the end of the solve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equilibria.stop import Stop

FOLD = 64  # number of residuals stored until they are replaced by their maximum


class IterateLog:
    """The residuals and sizes of all iterates.

    lengths   (places, residuals, sizes) of every iterate; sizes are None if they are accounted for
    trace     (places, relative residuals) of every iterate; None if no trace is kept
    iterates  (step, places, rows still running, z) of the iterates that are kept; None in place of rows: all
    """

    def __init__(self, stop: Stop, precision: float, *, linear: bool) -> None:
        self.precision, self.linear = precision, linear
        self.lengths: list[tuple[Tensor | None, Tensor, Tensor | None]] = []
        self.trace: list[tuple[Tensor | None, Tensor]] | None = [] if stop.trace else None
        self.iterates: list[tuple[int, Tensor | None, Tensor | None, Tensor]] = []

    def note(self, index: Tensor | None, length: Tensor, size: Tensor) -> None:
        """Keep references to the norms of an iterate; many are replaced by their maximum."""
        if self.trace is not None:
            self.trace.append((index, length / size.clamp_min(torch.finfo(size.dtype).tiny)))
        if self.linear:  # the best iterate is then the one with the least residual, which needs no judgement
            self.lengths.clear()
        elif len(self.lengths) >= FOLD and self.lengths[-FOLD][0] is index:  # a solve may take thousands of steps
            last = self.lengths[-FOLD:]
            largest = torch.stack([beyond_rounding(kept, of, self.precision) for _, kept, of in last]).amax(dim=0)
            self.lengths[-FOLD:] = [(index, largest, None)]
        self.lengths.append((index, length, size))

    def peak(self, first: Tensor) -> Tensor:
        """Return (batch,), the largest residual of each sample, beyond rounding; `first` is that of the start."""
        beyond = [(index, beyond_rounding(length, size, self.precision)) for index, length, size in self.lengths]
        return _placed(first, larger, beyond)

    def last(self, first: Tensor) -> Tensor:
        """Return (batch,), the last residual of samples that have not finished; `first` is that of the start."""
        index, length, _ = self.lengths[-1]
        return _placed(first, lambda old, new: new, [(index, length)])

    def placed_iterates(self, answer: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        """Return the kept iterates but for the last step's, which is the answer; (batch, n) each.

        A row that had stopped before an iterate has its answer there.
        """
        # read back only if iterates were requested
        last = int(steps.max()) if self.iterates and len(steps) else 0
        found = []
        for step, index, rows, z in self.iterates:
            if step >= last:
                continue
            if rows is None:
                found.append(z)
            elif index is None:
                found.append(torch.where(rows.unsqueeze(1), z, answer))
            else:
                joined = torch.where(rows.unsqueeze(1), z, answer.index_select(0, index))
                found.append(answer.index_copy(0, index, joined))
        return tuple(found)

    def traces(self, steps: Tensor) -> tuple[Tensor, ...] | None:
        """Return the relative residuals of every sample, cut where the sample stopped; None if no trace is kept."""
        if self.trace is None:
            return None
        like = self.trace[0][1]
        whole = torch.full((len(self.trace), len(steps)), float("nan"), dtype=like.dtype, device=like.device)
        for step, (index, residual) in enumerate(self.trace):
            if index is None:
                whole[step] = residual
            else:
                whole[step].index_copy_(0, index, residual)
        return tuple(whole[: int(taken) + 1, sample].clone() for sample, taken in enumerate(steps))


def _placed(
    whole: Tensor, join: Callable[[Tensor, Tensor], Tensor], lengths: Sequence[tuple[Tensor | None, Tensor]]
) -> Tensor:
    """Return `whole`, (batch,), joined with each of `lengths` at the places of its rows."""
    for index, length in lengths:
        if index is None:
            whole = join(whole, length)
        else:
            whole = whole.index_copy(0, index, join(whole.index_select(0, index), length))
    return whole


def beyond_rounding(length: Tensor, size: Tensor | None, precision: float) -> Tensor:
    """Return the residual less the rounding error of a value of norm `size`; without `size` the residual itself."""
    return length if size is None else length - precision * size


def larger(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger value, `a` where `b` is nan; ONNX has no fmax."""
    return torch.where(b > a, b, a)
