"""The solver loop: it steps all rows, stops each by its own tolerance, and drops rows that have stopped.

`solve` runs one solver, or a chain of them, on a map. `_run` takes the steps in torch, `_run_native` in compiled code, with
the same results. Both compare rows once per solve with the same rows run without the others (`compaction`). `_verified`
evaluates the result again if its residual is not known from an evaluation of all rows together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.autodiff_modes import no_autocast
from equilibria._core.bookkeeping import SolveRecord
from equilibria._core.chain import solve_chain
from equilibria._core.closed_record import ClosedRecord
from equilibria._core.compaction import ROUNDING, TRUSTED, RowCheck, compare_answer, compare_rows, is_to_compare
from equilibria._core.maps import Counter, FlatMap, Map
from equilibria._core.results import VERIFICATIONS, LoopRun, SolveResult, confirm, merge, within_dtype
from equilibria.native import solve as native_solve
from equilibria.native.solve import Iteration, Krylov
from equilibria.solution import Stats, Status
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.fallback import AnySolver, Fallback
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.rowwise import compact_rows, gather, map_tensors, rejected
from equilibria.stop import FLOOR, RECURRENCE, USUAL, Stop, binary_size, max_norm


def solve(
    f: FlatMap,
    z0: Tensor,
    solver: AnySolver,
    stop: Stop,
    *,
    scale: Tensor | None = None,
    precision: float | None = None,
    known: Tensor | None = None,
    keep_state: bool = False,
    verify: bool = True,
    measured_later: bool = False,
) -> SolveResult:
    """Find the fixed point of `f` from `z0`, (batch, n), each sample to its own tolerance.

    scale       (batch,), the quantity that rtol is relative to; None uses |f(z)|
    precision   machine epsilon of the numbers `f` computes with, if coarser than that of z0's dtype
    known       f(z0) if the caller has evaluated it
    keep_state  return the solver's state too
    verify      evaluate `f` once more if the solver updates f(z) by a recurrence; False if the caller does
    measured_later  True if the caller evaluates `f` at the result, so that it is not evaluated here after rows were dropped
    """
    if not isinstance(solver, (Solver, Fallback)):
        check_solver(solver)
    f = f if isinstance(f, Map) else Map(f)
    # a map may have been solved before
    f.counter, f.known = Counter(), None if known is None else (z0, known)
    f.any_rank = None if stop.process_group is None else stop.any_rank()
    precision, ordinary = precision or torch.finfo(z0.dtype).eps, autodiff_modes.is_ordinary()
    # a linear system stands alone if the forward solve found that rows do not depend on each other and can be taken. That
    # rows do not mix is not enough: a weight with as many rows as the batch must not be restricted
    cell = None if scale is None else f.equation
    alone = cell is not None and cell.separable and cell.identity.coupled is False
    asked = measured_later and scale is None and stop.process_group is None
    trusted = asked and f.equation is not None and f.equation.identity.trusted
    run = LoopRun(f, stop, scale, precision, keep_state, verify, measured_later, alone, trusted, ordinary, origin=z0)
    with no_autocast(z0.device):
        try:
            result = _verified(run, z0, solver)
        except _Unusual as start:
            result = _divided(run, z0, start.fz, solver)
        for _ in range(VERIFICATIONS):
            if result.faint is None:
                break
            # continue the solve of samples whose results have become too small to be squared
            left = run.with_stop(max_steps=max(stop.max_steps - result.taken, 0))
            result = merge(result, _divided(left, result.z, f(result.z), solver))
            if scale is None and result.coupled is None:  # rows of two solves, which may depend on each other
                result = confirm(run, result, ROUNDING * precision)
        return result


class _Unusual(Exception):  # noqa: N818, no error
    """The start is so small or large that squares leave the dtype."""

    def __init__(self, fz: Tensor) -> None:
        super().__init__()
        self.fz = fz


def _divided(run: LoopRun, z0: Tensor, fz: Tensor, solver: AnySolver) -> SolveResult:
    """Solve g(y) = f(unit y) / unit, whose states have a usual magnitude; units are powers of two per sample."""
    unit = binary_size(z0, fz).unsqueeze(1)
    y0 = z0 / unit
    f = run.f.divided(unit).remember(y0, fz / unit)
    inner = dataclasses.replace(run.with_stop(compact=False), f=f, unit=unit.squeeze(1), origin=None)
    result = _verified(inner, y0, solver)
    stats = dataclasses.replace(result.stats, iterates=tuple(y * unit for y in result.stats.iterates))
    state = None if result.state is None else result.state.rescaled(unit)
    result = within_dtype(dataclasses.replace(result, z=result.z * unit, stats=stats, state=state), z0)
    return result if run.scale is not None or not result.failed else _with_scaled_residuals(run, result)


def _with_scaled_residuals(run: LoopRun, result: SolveResult) -> SolveResult:
    """The result with the residuals of failed samples measured: |f(z)| may be too small beside the start to be squared.

    A relative residual that the dtype cannot hold is inf.
    """
    fz, norm, stats = run.f(result.z), run.stop.norm, result.stats
    unit = binary_size(result.z, fz)
    difference = fz / unit.unsqueeze(1) - result.z / unit.unsqueeze(1)
    above, below = binary_size(difference), binary_size(fz)
    length, size = norm(difference / above.unsqueeze(1)), norm(fz / below.unsqueeze(1))
    powers = (above.double() * unit.double()) / below.double()
    residual = (length / size.clamp_min(torch.finfo(fz.dtype).tiny) * powers).to(length.dtype)
    told = torch.where(stats.failed & ~torch.isnan(residual), residual, stats.residual)
    counter = run.f.counter
    stats = dataclasses.replace(
        stats, residual=told, evaluations=counter.evaluations, sample_evaluations=counter.rows, products=counter.products
    )
    return dataclasses.replace(result, stats=stats)


def _verified(run: LoopRun, z0: Tensor, solver: AnySolver) -> SolveResult:
    """Run; then evaluate the answer where f(z) is known by recurrence only, or from before other rows moved.

    Rows that depend on each other are left where they are: the caller solves them as one problem.
    """
    if isinstance(solver, Fallback):
        return solve_chain(run, z0, solver, _verified)
    result = _run(run, z0, solver)
    measured = _is_to_be_measured(run, solver, result)
    if run.scale is None and run.f.any_rank is not None:  # with sharded weights an evaluation waits for all ranks
        measured = run.f.any_rank(measured)
    if not measured:
        return result
    carried = min(FLOOR * run.precision, RECURRENCE * run.stop.rtol)
    rounding = ROUNDING * run.precision if solver.evaluates_residual else carried
    for round in range(VERIFICATIONS + 1):
        claimed = result.stats.converged
        result = confirm(run, result, 0.0 if result.coupled else rounding)
        left = run.stop.max_steps - result.taken
        if result.coupled or left <= 0 or not run.f.any(claimed & result.stats.failed):
            break
        if solver.evaluates_residual and result.coupled is None:  # nothing else can have moved these rows away
            return dataclasses.replace(result, coupled=True)
        if round == VERIFICATIONS:
            break
        result = merge(result, _run(run.with_stop(max_steps=left), result.z, solver))
    return result


def _is_to_be_measured(run: LoopRun, solver: Solver[Any], result: SolveResult) -> bool:
    if not solver.evaluates_residual:
        return run.verify
    if run.scale is not None:  # the residual of a linear system is measured by whoever asked for its solution
        return False
    if not result.unmeasured or result.coupled:
        return bool(result.coupled)
    # a backward pass that has samples to set aside does not evaluate the answer as it is
    later = run.measured_later and result.coupled is False
    return not (later and not (result.failed and result.stats.count(Status.NONFINITE)))


def _run(run: LoopRun, z0: Tensor, solver: Solver[Any]) -> SolveResult:
    """Run the loop, with native steps if the solver and the map support them."""
    f, stop = run.f, run.stop
    if native_solve.can_run(run, z0, solver):
        fz = f(z0)
        if native_solve.is_readable(fz):  # the map may close over tensors that are differentiated
            return _run_native(run, z0, fz, solver)
        f.remember(z0, fz)
    state = solver.init(f, z0)
    record = SolveRecord(stop, z0, run.scale, run.precision, run.unit)
    often = stop.check_every == 1
    record.record(state, step=0, look=often)
    if z0 is run.origin and record.unusual() and _unusual(z0, state.fz):
        raise _Unusual(state.fz)
    compact = stop.compact and stop.process_group is None
    kept, taken, rows = None, 0, known_rows(run)
    for step in range(1, stop.max_steps + 1):
        if often or step % stop.check_every == 0 or step == 1:
            running = record.running()  # the read-back
            if not (f.any_rank(running > 0) if f.any_rank else running):
                break
            stopped = record.rows - running
            if rows is None and is_to_compare(run, solver, step, stopped, state.z.shape):
                rejecting = rejected(state) is not None
                rows = compare_rows(run, solver, state, record.running_excess(), rejecting=rejecting)
                compact = compact and (rows is None or rows.harmless)
                if rows is not None and rows.coupled:
                    break  # the caller continues with the batch as one problem
            if compact and rows is not None and f.is_worth_restricting(stopped, state.z.shape):
                kept = gather(kept, state, record.index) if run.keep_state else None
                smaller = _compact(f, state, record, over=not run.keep_state)
                compact = smaller is not None
                f, state = smaller or (f, state)
            if stopped and not (compact and solver.steps_finished_rows and not run.keep_state):
                state = record.freeze(state)
        f.growth, f.fell = record.growth, record.fell
        state = solver.step(f, state)
        record.record(state, step, look=often, rejected=rejected(state))
        taken = step
    kept = gather(kept, state, record.index) if run.keep_state else None
    result = finished(record.close(), run.f.counter, taken, kept)
    apart = len(z0) > 1 and (record.stopped_apart(taken) or (taken > 0 and state.fz is not f.latest))
    return _with_rows(run, solver, result, rows, apart=apart, dropped=record.index is not None)


def _run_native(run: LoopRun, z0: Tensor, fz: Tensor, solver: Solver[Any]) -> SolveResult:
    """As `_run`, with a native call for all that is done between two evaluations."""
    f, stop, shape = run.f, run.stop, z0.shape
    method = Krylov(run, z0, fz, solver) if isinstance(solver, GMRES) else Iteration(run, z0, fz, solver)
    work, compact, taken = method.work, stop.compact, 0
    running = method.step(0, last=stop.max_steps == 0)
    opened_at = 0 if work.context.watchful or running < work.rows else None
    if run.scale is None and z0 is run.origin:
        least, most = USUAL[z0.dtype]
        usual = work.context.lowest >= least and work.context.highest <= most and work.context.longest < float("inf")
        if not usual and _unusual(z0, fz):  # nan is not usual
            raise _Unusual(fz)
    rows = known_rows(run)
    for step in range(1, stop.max_steps + 1):
        if running == 0:
            break
        stopped = work.rows - running
        if rows is None and is_to_compare(run, solver, step, stopped, shape):
            excess = torch.where(work.status < 0, work.excess, -1.0)
            rows = compare_rows(run, solver, Iterate(method.z, method.fz), excess, rejecting=False)
            compact = compact and (rows is None or rows.harmless)
            if rows is not None and rows.coupled:
                work.keep_running(method.z)
                break
        if compact and rows is not None and f.is_worth_restricting(stopped, (work.rows, shape[1])):
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
    apart = opened_at is not None and opened_at < taken and shape[0] > 1
    result = finished(work.close(run, z0), run.f.counter, taken)
    return _with_rows(run, solver, result, rows, apart=apart, dropped=work.place is not None)


def known_rows(run: LoopRun) -> RowCheck | None:
    """What is known about the rows before the first step; None if they are to be compared."""
    if run.stands_alone:
        return RowCheck()
    return TRUSTED if run.trusted else None


def _with_rows(
    run: LoopRun, solver: Solver[Any], result: SolveResult, rows: RowCheck | None, *, apart: bool, dropped: bool
) -> SolveResult:
    """A solve with what is known about its rows.

    A result is unmeasured if it joins rows of different evaluations. That rows run alone gave the same is not enough: those
    may be saturated, and depend on the others less than the rest does.
    """
    forward = run.scale is None and solver.evaluates_residual
    apart = apart or (forward and result.failed and _is_joined(result.stats))
    if apart and forward and run.measured_later and (rows is None or (rows is TRUSTED and result.failed)):
        rows, counter = compare_answer(run, result), run.f.counter
        stats = dataclasses.replace(result.stats, evaluations=counter.evaluations, sample_evaluations=counter.rows)
        result = dataclasses.replace(result, stats=stats)
    rows = rows or RowCheck()
    return dataclasses.replace(result, coupled=rows.coupled, unmeasured=dropped or apart)


def _is_joined(stats: Stats) -> bool:
    """True if rows of the answer were not evaluated together: of different steps, or put in place of what was not finite."""
    if len(stats.best) < 2:
        return False
    return bool(((stats.best != stats.best[0]) | (stats.status == Status.NONFINITE)).any())


def finished(record: ClosedRecord, counter: Counter, taken: int, state: Any = None) -> SolveResult:
    """The result of a closed record; reads back once whether a sample has failed, and settles it only then.

    Linear systems have a fixed scale and are not settled, so that nothing is read back.
    """
    stats = record.stats(counter)
    if record.linear:
        return SolveResult(record.z, stats, taken, state)
    asked = [(stats.status != Status.CONVERGED).any(), *([] if record.faint is None else [record.faint.any()])]
    failed, *fainted = autodiff_modes.numbers(torch.stack(asked))
    if not failed:
        return SolveResult(record.z, stats, taken, state, failed=False)
    z, stats, sound = record.settle(stats)
    return SolveResult(z, stats, taken, state, sound=sound, faint=record.faint if any(fainted) else None)


def _unusual(z: Tensor, fz: Tensor) -> bool:
    """True if the squares of a row leave the dtype."""
    least, most = USUAL[z.dtype]
    largest = torch.maximum(max_norm(z), max_norm(fz))
    return bool((((largest > most) & (largest < float("inf"))) | ((largest > 0) & (largest < least))).any())


def _compact(f: Map, state: Iterate, record: SolveRecord, *, over: bool) -> tuple[Map, Iterate] | None:
    """Map and state on the running rows alone, histories written `over` where they stood; None if rows cannot be taken."""
    index = record.running_rows()
    smaller = f.take(index)
    if smaller is None:
        return None
    record.drop_finished(index)
    return smaller, map_tensors(state, lambda tensor: compact_rows(tensor, index, over=over))


def check_solver(solver: Any) -> None:
    """Raise TypeError unless `solver` is a solver or a chain of solvers."""
    if isinstance(solver, type) or not isinstance(solver, (Solver, Fallback)):
        raise TypeError(f"A solver is an object such as Anderson() or Fallback(Picard(), Newton()), got {solver!r}.")
