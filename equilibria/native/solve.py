"""The loop with native steps, and whether a solve may take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from equilibria import native
from equilibria._core import autodiff_modes
from equilibria._core.bookkeeping import FLOOR, LEAST
from equilibria._core.compaction import worth_dropping
from equilibria._core.maps import Map
from equilibria._core.norms import euclidean_norm, rms_norm
from equilibria.native.context import COUNTERS, NUMBERS
from equilibria.native.methods import KINDS, Iteration, Krylov
from equilibria.native.workspace import Workspace
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.krylov import GMRES

if TYPE_CHECKING:
    from equilibria._core.loop import Stop

DTYPES = (torch.float32, torch.float64)


class Rows(Protocol):
    """Whether rows depend on each other."""

    @property
    def harmless(self) -> bool: ...
    @property
    def coupled(self) -> bool | None: ...


@dataclass(frozen=True)
class NativeSolve:
    """The record of a native solve, by row of the whole batch."""

    work: Workspace
    taken: int  # steps
    rows: Any  # what `compare` said; None: it was not asked
    apart: bool  # some rows stopped before the last step

    def record(self) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """What `Ledger.adopt` asks for."""
        numbers = dict(zip(NUMBERS, self.work.numbers.unbind(), strict=True))
        counters = dict(zip(COUNTERS, self.work.counters.unbind(), strict=True))
        record = {name: numbers[name] for name in ("length", "size", "last")}
        record |= {"z": self.work.answer, "status": self.work.status, "steps": counters["steps"]}
        record |= {"best": counters["best_step"], "rejected": torch.zeros_like(counters["steps"])}
        return record, numbers["first_length"], numbers["first_size"], numbers["peak"]


def can_run(z0: Tensor, solver: Any, stop: Stop) -> bool:
    """True if a solve may take native steps, as far as can be told before its first evaluation."""
    if not native.available() or type(solver) not in KINDS or (isinstance(solver, Broyden) and solver.line_search):
        return False
    if stop.check_every != 1 or stop.trace or stop.keep_every is not None or stop.process_group is not None:
        return False
    if stop.norm is not rms_norm and stop.norm is not euclidean_norm:
        return False
    if z0.dtype not in DTYPES or z0.numel() == 0 or not _readable(z0):
        return False
    return not (autodiff_modes.is_tracing() or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level())


def can_go_on(fz: Tensor) -> bool:
    """True if the value of the map at the start is readable, too: the map may close over tensors that are followed."""
    return _readable(fz)


def _readable(x: Tensor) -> bool:
    """True if kernels may read the memory of `x`, and nobody follows what is computed from it."""
    if type(x) is not Tensor or x.device.type != "cpu" or x.layout is not torch.strided:
        return False
    followed = torch.is_grad_enabled() and x.requires_grad
    return not (followed or torch._C._functorch.is_functorch_wrapped_tensor(x))


def run(
    f: Map,
    z0: Tensor,
    fz: Tensor,
    solver: Any,
    stop: Stop,
    *,
    scale: Tensor | None,
    precision: float,
    check_start: Callable[[float, float], None],
    compare: Callable[[Tensor, Tensor, Tensor], Rows | None] | None,
) -> NativeSolve:
    """Solve from z0 with native steps.

    fz           f(z0)
    scale        (batch,) what rtol is relative to; None: |f(z)|
    check_start  is called with the least and the largest |f(z0)| of a row; may raise
    compare      is called with z, f(z) and the steps of every row before the first rows are dropped, and tells whether rows
                 depend on each other, or None if that cannot be seen yet; None: they do not
    """
    settings = _settings(z0, stop, scale, precision)
    method = (Krylov if isinstance(solver, GMRES) else Iteration)(native.kernels, f, z0, fz, solver, settings)
    work, compact, rows, taken = method.work, stop.compact, None, 0
    running = method.begin(last=stop.max_steps == 0)
    opened_at = 0 if settings["watchful"] or running < work.rows else None
    if scale is None:
        context = work.context
        check_start(context.lowest, context.highest if context.longest < float("inf") else context.longest)
    for step in range(1, stop.max_steps + 1):
        if running == 0:
            break
        if compact and worth_dropping(f.raw, work.rows - running, (work.rows, z0.shape[1])):
            if compare is not None and rows is None and step > 1:
                rows = compare(method.z, method.fz, work.counter("steps"))
                compact = rows is None or rows.harmless
                if rows is not None and rows.coupled:
                    work.keep_running(method.z)
                    break
            if compact and (rows is not None or compare is None):
                index = work.running_rows()
                smaller = f.take(index)
                compact = smaller is not None
                if smaller is not None:
                    f = smaller
                    method.drop(f, index)
        running = method.step(step, last=step == stop.max_steps)
        taken = step
        if opened_at is None and running < work.rows:
            opened_at = step
    apart = opened_at is not None and opened_at < taken and len(z0) > 1
    return NativeSolve(work, taken, rows, apart)


def _settings(z0: Tensor, stop: Stop, scale: Tensor | None, precision: float) -> dict[str, Any]:
    """Those that do not depend on the solver. Lengths stand for means: every comparison comes out the same."""
    info = torch.finfo(z0.dtype)
    root = max(z0.shape[1], 1) ** 0.5 if stop.norm is rms_norm else 1.0
    if scale is not None:
        scale = (scale * root).contiguous()
    return {
        "rtol": max(stop.rtol, LEAST * info.eps),
        "atol": max(stop.atol * root, info.tiny**0.8),
        "scale": scale,
        "floor": FLOOR * precision,
        "natural": root,
        "patience": stop.patience or 0,
        "watchful": int(stop.patience is not None or stop.rtol < FLOOR * precision),
    }
