"""The record of a solve that has ended, and the status of its samples.

While a solve runs, a sample is judged by the residual of its best iterate alone. `ClosedRecord` looks at the whole solve: a
sample that came near its tolerance only because its state grew has diverged, and one whose answer is worse than its start
gets the start back. `loop.finished` computes the statistics, which are final if no sample has failed; `settle` decides
about samples that have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.solution import Stats, Status

RUNNING = -1  # the status of a row that has not stopped, beside those of Status
GROWN = 2.0  # a state this many times as large as at the start has grown
FALL = 0.99  # a residual above this share of its largest has not fallen
RUNAWAY = 10.0  # an iterate whose residual exceeds this many times the start's is worse than the start, at any size of state
RECOVERED = 0.1  # a residual below this share of its largest, and of the state, has recovered from divergence
DIVERGENCE = 1e6  # a sample diverges if its residual exceeds this many times the start's scale (and 1)


@dataclass
class ClosedRecord:
    """The record of a solve that has ended, per sample of the whole batch.

    z, length, size    (batch, n) the best iterates, (batch,) their residuals and what these are relative to
    status             (batch,) Status, or RUNNING for samples that had not stopped
    steps, best        (batch,) steps taken, and the step of the best iterate
    rejected           (batch,) steps that were discarded
    start              (batch, n)
    first_length, first_size   (batch,) residual and size of the start
    extremes           returns the residual of the last iterate, (batch,), and the largest one beyond rounding
    natural            residuals below this have not diverged
    linear             True for a linear system, whose `size` is fixed
    moved              True if a step was taken
    """

    z: Tensor
    status: Tensor
    length: Tensor
    size: Tensor
    steps: Tensor
    best: Tensor
    rejected: Tensor
    start: Tensor
    first_length: Tensor
    first_size: Tensor
    extremes: Callable[[], tuple[Tensor, Tensor]]
    rtol: float
    precision: float
    natural: float | Tensor
    atol: float | Tensor = 0.0
    linear: bool = False
    moved: bool = True
    trace: tuple[Tensor, ...] | None = None
    iterates: tuple[Tensor, ...] = ()
    faint: Tensor | None = None  # (batch,) converged samples whose squares underflow; set by `loop.finished`
    doubtful: Tensor | None = None  # (batch,) samples whose state has grown too far for their residual to mean anything

    def settle(self, stats: Stats) -> tuple[Tensor, Stats, Tensor]:
        """Return z and statistics if a sample has failed, and (batch,), True where the residual is below the start's.

        The best iterate is the one with the smallest residual relative to |f(z)|. That of a diverging sample is of no
        use: relative to a state that has grown enough, any residual is small. Such a sample gets its start back. A sample
        that came near its tolerance only by growing has not converged, unless its residual has fallen from its largest: a
        state may start next to an unstable equilibrium.
        """
        length, size, best = self.length, self.size, stats.best
        status = torch.where(self.status == RUNNING, Status.MAX_STEPS, self.status)
        scale = torch.maximum(self.first_length, self.first_size)
        last, peak = self.extremes()
        if self.faint is not None:
            status = torch.where(self.faint, Status.STALLED, status)
        most = length + self.precision * size  # what the residual is at most
        fallen = most <= peak  # by more than rounding can account for; not where `size` is infinite
        if self.doubtful is not None:
            grown = (status == Status.CONVERGED) & self.doubtful & ~fallen
            status = torch.where(grown, Status.DIVERGED, status)
        near = size <= DIVERGENCE * scale.clamp_min(self.natural)
        recovered = (length <= RECOVERED * peak) & (length <= RECOVERED * size) & near
        # a residual that has not fallen says nothing for a state that may have grown: a chain goes on from the start then
        sound = (most <= FALL * self.first_length) | recovered
        lost = (status != Status.CONVERGED) & (length > RUNAWAY * self.first_length) & ~sound
        z = torch.where(lost.unsqueeze(1), self.start, self.z)
        length, size = torch.where(lost, self.first_length, length), torch.where(lost, self.first_size, size)
        best = torch.where(lost, 0, best)
        status = torch.where(lost & (status != Status.NONFINITE), Status.DIVERGED, status)
        unfinished = (status == Status.MAX_STEPS) | (status == Status.STALLED)
        status = torch.where(unfinished & (last > RUNAWAY * scale) & (last > RECOVERED * peak), Status.DIVERGED, status)
        residual = length / size.clamp_min(torch.finfo(size.dtype).tiny)
        return z, dataclasses.replace(stats, status=status.to(torch.int8), residual=residual, best=best), sound
