"""Native steps of solvers for the loop, and the check whether a solve may use them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equilibria import native
from equilibria._core.bookkeeping import LEAST
from equilibria._core.closed_record import ClosedRecord
from equilibria._core.maps import Counter, Map
from equilibria.native.context import (
    ANDERSON,
    ANDERSON_GRAM,
    BROYDEN,
    COUNTERS,
    GMRES,
    GMRES_BEGIN,
    NUMBERS,
    PICARD,
    Context,
)
from equilibria.solution import Stats
from equilibria.solvers import anderson, krylov
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.picard import Picard
from equilibria.solvers.rowwise import MEDIUM_STATE, SMALL_STATE, history_size
from equilibria.stop import FLOOR, euclidean_norm, rms_norm

if TYPE_CHECKING:
    from equilibria._core.results import LoopRun

STEPS, BEST_STEP, EXCESS = COUNTERS.index("steps"), COUNTERS.index("best_step"), NUMBERS.index("excess")
FIRST_CORE = 8  # number of slots for whose products memory is allocated at first
DTYPES = (torch.float32, torch.float64)


def can_run(run: LoopRun, z0: Tensor, solver: Any) -> bool:
    """Return True if a solve may use native steps, as far as this is known before the first evaluation."""
    if not run.ordinary or run.unit is not None or run.keep_state:
        return False
    if native.kernels is None or native.off.get() or type(solver) not in KINDS:
        return False
    if isinstance(solver, Broyden) and solver.line_search:
        return False
    stop = run.stop
    if stop.check_every != 1 or stop.trace or stop.keep_every is not None or stop.process_group is not None:
        return False
    if stop.norm is not rms_norm and stop.norm is not euclidean_norm:
        return False
    return z0.dtype in DTYPES and z0.numel() > 0 and is_readable(z0)


def is_readable(x: Tensor) -> bool:
    """Return True if kernels may read the memory of `x`, and results computed from it are not differentiated."""
    if type(x) is not Tensor or x.device.type != "cpu" or x.layout is not torch.strided:
        return False
    followed = torch.is_grad_enabled() and x.requires_grad
    return not (followed or torch._C._functorch.is_functorch_wrapped_tensor(x))


class Iteration:
    """The steps of a solver with one evaluation per step: Picard, Anderson or Broyden.

    z, fz  the iterate recorded last and the value of the map there, (rows, n)
    out    the point to evaluate next, (rows, n)
    """

    def __init__(self, run: LoopRun, z0: Tensor, fz: Tensor, solver: Any) -> None:
        self.f, self.kind = run.f, kind_of(solver, z0.shape[1])
        self.z, self.fz = _rows(z0, z0), _rows(fz, z0)
        self.out = self.z
        most, vectors, settings = needs(solver, z0.shape, z0.dtype)
        self.work = Workspace(self.z, most, vectors, settings, run)

    def step(self, step: int, last: bool) -> int:
        """Record an iterate, at step 0 the start, and compute the next one unless the step is the `last`.

        Returns the number of running rows.
        """
        before = self.z
        if step:
            self.z = self.out
            self.fz = _rows(self.f(self.z), self.z)
        self.out = torch.empty_like(self.z)
        return self.work.advance(self.kind, self.z, self.fz, before, None if last else self.out, step)

    def drop(self, f: Map, index: Tensor) -> None:
        """Continue with the rows at `index` only; `f` is the map on these rows."""
        self.f = f
        self.z, self.fz, self.out = (tensor.index_select(0, index) for tensor in (self.z, self.fz, self.out))
        self.work.drop(index)


class Krylov:
    """The steps of GMRES, with one product per step; z and its residual are stored in the workspace."""

    def __init__(self, run: LoopRun, z0: Tensor, fz: Tensor, solver: krylov.GMRES) -> None:
        self.f, self.base, self.taken = run.f, z0, 0
        self.start = _rows(z0, z0), _rows(fz, z0)
        self.out = self.start[0]
        most, vectors, settings = needs(solver, z0.shape, z0.dtype)
        self.work = Workspace(self.out, most, vectors, settings, run)

    @property
    def z(self) -> Tensor:
        return self.work.vector(self.taken % 2)

    @property
    def fz(self) -> Tensor:
        return self.z + self.work.vector(2)

    def step(self, step: int, last: bool) -> int:
        """Record an iterate and compute the next one, as `Iteration.step` does; returns the number of running rows."""
        if step == 0:
            method, (a, b) = GMRES_BEGIN, self.start
        else:
            if self.taken and self.taken % krylov.ANEW == 0:
                self._compute_residual()
            product = self.f.jacobian(self.base).product(self.out)
            self.taken += 1
            method, a, b = GMRES, self.out, _rows(product, self.out)
        self.out = torch.empty_like(a)
        return self.work.advance(method, a, b, a, None if last else self.out, step)

    def drop(self, f: Map, index: Tensor) -> None:
        self.f = f
        self.base, self.out = self.base.index_select(0, index), self.out.index_select(0, index)
        self.work.drop(index)

    def _compute_residual(self) -> None:
        """Drop all directions and compute r = f(base) - base - A (z - base).

        This is necessary from time to time, because the rounding errors of images grow with every step.
        """
        away = self.z - self.base
        left = self.f(self.base) - self.base - away + self.f.jacobian(self.base).product(away)
        place = slice(None) if self.work.place is None else self.work.place
        self.work.vectors[2][place] = left
        self.work.counter("count")[place] = 0
        self.work.context.wanted = 1
        running = self.work.status[place] < 0
        self.out = torch.where(running.unsqueeze(1), left, torch.zeros_like(left))


KINDS: dict[type[Solver[Any]], int] = {Picard: PICARD, Anderson: ANDERSON, Broyden: BROYDEN, krylov.GMRES: GMRES}


def kind_of(solver: Any, n: int) -> int:
    """Return the number of the kernel of a solver for rows of `n` numbers."""
    return ANDERSON_GRAM if isinstance(solver, Anderson) and n > MEDIUM_STATE else KINDS[type(solver)]


@functools.lru_cache(maxsize=256)
def needs(solver: Any, shape: torch.Size, dtype: torch.dtype) -> tuple[int, tuple[str, ...], Mapping[str, Any]]:
    """Return the largest number of history slots, the names of the vectors stored per row, and the settings of a solver.

    The result is cached, because a layer needs it in every solve.
    """
    n, z0 = shape[1], torch.empty(shape, dtype=dtype, device="meta")
    if isinstance(solver, krylov.GMRES):
        most = history_size(solver.restart, solver.budget, z0, small=n, medium=20, large=20)
        first = most if solver.restart is not None or n <= SMALL_STATE else min(krylov.FEW, most)
        settings = {"first_limit": first, "threshold": 10 * torch.finfo(dtype).eps, "slow": krylov.SLOW}
        return most, ("iterate", "other", "residual"), settings
    if isinstance(solver, Picard):
        return 1, (), {"first_limit": 0, "damping": solver.damping}
    if isinstance(solver, Broyden):
        most = history_size(solver.history, solver.budget, z0, small=2 * n, medium=20, large=20)
        return most, ("residual", "value"), {"first_limit": most}
    assert isinstance(solver, Anderson)
    first, most = solver.history_range(z0)
    settings = {"first_limit": first, "damping": solver.damping, "slow": anderson.SLOW}
    settings |= {"threshold": solver.threshold(n, dtype), "patience_of_trust": anderson.PATIENCE}
    return most, ("residual", "value"), settings


@functools.lru_cache(maxsize=256)
def _addresses(most: int) -> Any:
    """Return the type of an array of `most` addresses; it is cached, because ctypes takes about 20 us to create one."""
    return c_void_p * most


def _rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` with contiguous rows, as kernels require; raises ValueError if shape or dtype differ from `like`."""
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"The map must keep shape and dtype of its state: got {tuple(tensor.shape)}, {tensor.dtype} for a state of "
            f"{tuple(like.shape)}, {like.dtype}."
        )
    return tensor.contiguous()


class Workspace:
    """Record and history of every row, stored at the row's position in the original batch; stopped rows stay in place.

    numbers, counters, status  the record, with one column or entry per row
    answer                     (batch, n), best iterates; complete when no row runs, or after a call without `out`
    rows, place                number of rows that are still evaluated, and their places in the batch, (rows,); None for all
    """

    def __init__(
        self, z0: Tensor, most: int, vectors: tuple[str, ...], settings: Mapping[str, Any], run: LoopRun | None = None
    ) -> None:
        """Allocate the memory of a solve; `run` has the tolerances, None if every row has its own (see `pool`).

        The kernels compute Euclidean norms. For root mean squares, `atol` and `scale` are multiplied by sqrt(n).
        """
        batch, n = z0.shape
        self.scale: Tensor | None = None
        pointers: dict[str, int] = {}
        if run is not None:
            info, stop, floor = torch.finfo(z0.dtype), run.stop, FLOOR * run.precision
            root = max(n, 1) ** 0.5 if stop.norm is rms_norm else 1.0
            if run.scale is not None:
                self.scale = (run.scale * root).contiguous()
                pointers["scale"] = self.scale.data_ptr()
            settings = {
                "rtol": max(stop.rtol, LEAST * info.eps),
                "atol": max(stop.atol * root, info.tiny**0.8),
                "floor": floor,
                "natural": root,
                "patience": stop.patience or 0,
                "watchful": int(stop.patience is not None or stop.rtol < floor),
                **settings,
            }
        self.advance_rows, self.wide = native.kernels.advance, int(z0.dtype == torch.float64)
        self.numbers = z0.new_empty(len(NUMBERS), batch)
        self.counters = torch.empty(len(COUNTERS), batch, dtype=torch.int64)
        self.flags = torch.empty(2, batch, dtype=torch.int8)
        self.status, self.rows = self.flags[0], batch
        self.order = torch.empty(batch, most, dtype=torch.int32)
        self.answer = torch.empty_like(z0)
        self.vectors = [torch.empty_like(z0) for _ in vectors]
        self.slots: list[Tensor] = []
        self.core: Tensor | None = None
        self.place: Tensor | None = None
        self.first, self.second = _addresses(most)(), _addresses(most)()
        # addresses of rows are computed, because creating a view of every row would take longer than a step
        numbers, counters, width = self.numbers.data_ptr(), self.counters.data_ptr(), batch * z0.element_size()
        for i, name in enumerate(NUMBERS):
            pointers[name] = numbers + i * width
        for i, name in enumerate(COUNTERS):
            pointers[name] = counters + i * batch * 8
        for name, vector in zip(vectors, self.vectors, strict=True):
            pointers[name] = vector.data_ptr()
        self.context = Context(
            n=n,
            rows=batch,
            batch=batch,
            most=most,
            threads=torch.get_num_threads(),
            status=self.status.data_ptr(),
            current=self.status.data_ptr() + batch,
            order=self.order.data_ptr(),
            answer=self.answer.data_ptr(),
            first=ctypes.addressof(self.first),
            second=ctypes.addressof(self.second),
            **pointers,
            **settings,
        )
        self.address = ctypes.addressof(self.context)

    def number(self, name: str) -> Tensor:
        return self.numbers[NUMBERS.index(name)]

    def counter(self, name: str) -> Tensor:
        return self.counters[COUNTERS.index(name)]

    def vector(self, at: int) -> Tensor:
        """Return one of the `vectors` for the rows that are still evaluated, (rows, n)."""
        return self.vectors[at] if self.place is None else self.vectors[at].index_select(0, self.place)

    def advance(self, method: int, a: Tensor, b: Tensor, before: Tensor, out: Tensor | None, step: int) -> int:
        """Record a step and write the next point to evaluate into `out`; returns the number of running rows."""
        where = 0 if out is None else out.data_ptr()
        running: int = self.advance_rows(
            self.address, method, self.wide, a.data_ptr(), b.data_ptr(), before.data_ptr(), where, step
        )
        if self.context.wanted > len(self.slots):
            # allocate the slots that the next call fills
            while len(self.slots) < self.context.wanted:
                slot = self.answer.new_empty(2, *self.answer.shape)
                at = len(self.slots)
                self.first[at] = slot.data_ptr()
                self.second[at] = slot.data_ptr() + slot.stride(0) * slot.element_size()
                self.slots.append(slot)
            self.context.slots = len(self.slots)
        if method in (BROYDEN, ANDERSON_GRAM) and self.context.wanted > self.context.core_size:
            # allocate the products between slots; the capacity doubles when it is used up
            size = self.context.core_size
            larger = min(max(2 * size, FIRST_CORE, self.context.wanted), self.context.most)
            core = self.answer.new_empty(len(self.answer), larger, larger)
            if self.core is not None:
                core[:, :size, :size] = self.core
            self.core, self.context.core, self.context.core_size = core, core.data_ptr(), larger
        return running

    def finish(self, counter: Counter) -> Stats | None:
        """Return the statistics at the end of the solve, or None if the statistics need the record of `close`.

        They need it if a sample may have failed. The statistics of a linear system are final even then.
        """
        finish = getattr(native.kernels, "finish", None)  # None if the extension was built before this function existed
        if finish is None or (finish(self.address, self.wide) and self.scale is None):
            return None
        steps, best = self.counters[STEPS], self.counters[BEST_STEP]
        return Stats(
            self.status,
            steps,
            torch.zeros_like(steps),
            best,
            self.numbers[EXCESS],
            counter.evaluations,
            counter.rows,
            counter.products,
        )

    def close(self, run: LoopRun, z0: Tensor) -> ClosedRecord:
        """Return the record of the whole batch, at the end of the solve."""
        numbers = dict(zip(NUMBERS, self.numbers.unbind(), strict=True))
        counters = dict(zip(COUNTERS, self.counters.unbind(), strict=True))
        return ClosedRecord(
            self.answer,
            self.status,
            numbers["length"],
            numbers["size"] if self.scale is None else self.scale,
            counters["steps"],
            counters["best_step"],
            torch.zeros_like(counters["steps"]),
            start=z0,
            first_length=numbers["first_length"],
            first_size=numbers["first_size"],
            extremes=lambda: (numbers["last"], numbers["peak"]),
            rtol=run.stop.rtol,
            precision=run.precision,
            natural=self.context.natural,
            atol=self.context.atol,
            linear=self.scale is not None,
        )

    def keep_running(self, z: Tensor) -> None:
        """Store the iterates of running rows where they are the best so far, when the solve ends before they converge."""
        place = torch.arange(len(self.status)) if self.place is None else self.place
        best = (self.flags[1].index_select(0, place) != 0).nonzero().squeeze(1)
        self.answer.index_copy_(0, place.index_select(0, best), z.index_select(0, best))

    def drop(self, index: Tensor) -> None:
        """Continue with the rows at `index` only. History does not move: rows are addressed by their position."""
        self.place = index if self.place is None else self.place.index_select(0, index)
        self.rows = len(index)
        self.context.place, self.context.rows = self.place.data_ptr(), self.rows
