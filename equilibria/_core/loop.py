"""The solver loop: it steps all rows, stops each by its own tolerance, and drops rows that have stopped.

`solve` runs one solver, or a chain of them, on a map. `_run` takes the steps in torch, `_run_native` in compiled code, with
the same results. Both compare rows once per solve with the same rows run without the others (`compaction`), unless backward
measures the answer and found nothing wrong the last time. `finished` makes the statistics; natively one call does, unless a
sample has failed. `_verified` evaluates the result again if its residual is not known from an evaluation of all rows
together.

Invariants. The device is waited for once per check (`Stop.check_every`), once at the end, and once where rows are compared.
A row that has stopped does not change any more. `LoopRun` is constant during a run; a chain or a repetition gets a new one.
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
from equilibria._core.closed_record import FALL, GROWN, RUNNING, ClosedRecord
from equilibria._core.compaction import ROUNDING, TRUSTED, RowCheck, compare_answer, compare_rows, is_to_compare
from equilibria._core.magnitude import Unusual, is_unusual, solve_divided
from equilibria._core.maps import Counter, FlatMap, Map
from equilibria._core.results import VERIFICATIONS, LoopRun, merge
from equilibria.native import measures
from equilibria.native import solve as native_solve
from equilibria.native.solve import Iteration, Krylov
from equilibria.solution import SolveResult, Stats, Status
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.fallback import AnySolver, Fallback, check_solver
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.rowwise import compact_rows, gather, map_tensors, rejected
from equilibria.stop import FLOOR, RECURRENCE, USUAL, Stop, binary_size, euclidean_norm, rms_norm


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
    f.precision = precision = precision or torch.finfo(z0.dtype).eps
    ordinary = autodiff_modes.is_ordinary()
    # rows of a linear system need no check if the forward solve found that they do not depend on each other and can be
    # taken. The first alone is not enough: a weight with as many rows as the batch must not be restricted to rows
    rows, cell = None, f.equation
    if cell is not None and scale is not None and cell.separable and cell.identity.coupled is False:
        rows = RowCheck()
    elif cell is not None and scale is None and measured_later and stop.process_group is None and cell.identity.trusted:
        rows = TRUSTED
    run = LoopRun(f, stop, scale, precision, keep_state, verify, measured_later, rows, ordinary, origin=z0)
    with no_autocast(z0.device):
        try:
            result = _verified(run, z0, solver)
        except Unusual as start:
            result = solve_divided(run, z0, start.fz, solver, _verified)
        for _ in range(VERIFICATIONS):
            here = result.faint is not None
            if not (here if f.any_rank is None else f.any_rank(here)):
                break
            if keep_state:  # states of two solves cannot be joined: measure how far the first one came
                result = dataclasses.replace(confirm(run, result, ROUNDING * precision), faint=None)
                break
            # continue the solve of samples whose results have become too small to be squared
            left = run.with_stop(max_steps=max(stop.max_steps - result.taken, 0))
            result = merge(result, solve_divided(left, result.z, f(result.z), solver, _verified))
            if f.anywhere(scale is None and result.coupled is None):  # rows of two solves, which may depend on each other
                result = confirm(run, result, ROUNDING * precision)
        return result


def _verified(run: LoopRun, z0: Tensor, solver: AnySolver) -> SolveResult:
    """Run; then evaluate the answer if f(z) is known by recurrence only, or was evaluated before other rows changed.

    Rows that depend on each other are not solved further here: the caller solves them as one problem.
    """
    if isinstance(solver, Fallback):
        result = solve_chain(run, z0, solver, _verified)
        # a chain joins rows of several solves: where they may depend on each other, these were not evaluated together
        if run.scale is not None or result.coupled is False or not (result.coupled or result.stats.handovers):
            return result
        return confirm(run, result, 0.0 if result.coupled else ROUNDING * run.precision)
    result = _run(run, z0, solver)
    if not solver.evaluates_residual:
        due = run.verify
    elif run.scale is not None:  # the caller measures the residual of a linear system
        due = False
    elif not result.unmeasured or result.coupled:
        due = bool(result.coupled)
    else:
        # backward replaces samples that are not finite, so that it does not evaluate this answer
        later = run.measured_later and result.coupled is False
        due = not later or (result.failed and result.stats.count(Status.NONFINITE) > 0)
    if not (run.f.anywhere(due) if run.scale is None else due):
        return result
    carried = min(FLOOR * run.precision, RECURRENCE * run.stop.rtol)
    rounding = ROUNDING * run.precision if solver.evaluates_residual else carried
    for round in range(VERIFICATIONS + 1):
        claimed = result.stats.converged
        result = confirm(run, result, 0.0 if result.coupled else rounding)
        left = run.stop.max_steps - result.taken
        if not result.failed and run.f.any_rank is None:
            break
        if result.coupled or left <= 0 or not run.f.any(claimed & result.stats.failed):
            break
        if solver.evaluates_residual and result.coupled is None:  # only other rows can have changed these residuals
            return dataclasses.replace(result, coupled=True)
        if round == VERIFICATIONS:
            break
        result = merge(result, _run(run.with_stop(max_steps=left), result.z, solver))
    return result


def _run(run: LoopRun, z0: Tensor, solver: Solver[Any]) -> SolveResult:
    """Run the loop, with native steps if the solver and the map support them."""
    f, stop = run.f, run.stop
    if (natively := _run_native(run, z0, solver)) is not None:
        return natively
    state = solver.init(f, z0)
    record = SolveRecord(stop, z0, run.scale, run.precision, run.unit)
    often = stop.check_every == 1
    record.record(state, step=0, look=often)
    if z0 is run.origin and f.anywhere(record.unusual() and is_unusual(z0, state.fz)):
        raise Unusual(state.fz)
    compact = stop.compact and stop.process_group is None
    kept, taken, rows = None, 0, run.rows
    for step in range(1, stop.max_steps + 1):
        if often or step % stop.check_every == 0 or step == 1:
            running = record.running()  # the read-back
            if not f.anywhere(running > 0):
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


def _run_native(run: LoopRun, z0: Tensor, solver: Solver[Any]) -> SolveResult | None:
    """Run the loop with one native call between two evaluations; None if that is not possible."""
    if not native_solve.can_run(run, z0, solver):
        return None
    f, stop, shape = run.f, run.stop, z0.shape
    fz = f(z0)
    if not native_solve.is_readable(fz):  # the map may close over tensors that are differentiated
        f.remember(z0, fz)
        return None
    method = Krylov(run, z0, fz, solver) if isinstance(solver, GMRES) else Iteration(run, z0, fz, solver)
    work, compact, taken = method.work, stop.compact, 0
    running = method.step(0, last=stop.max_steps == 0)
    opened_at = 0 if work.context.watchful or running < work.rows else None
    if run.scale is None and z0 is run.origin:
        least, most = USUAL[z0.dtype]
        usual = work.context.lowest >= least and work.context.highest <= most and work.context.longest < float("inf")
        if not usual and is_unusual(z0, fz):  # nan is not usual
            raise Unusual(fz)
    rows = run.rows
    for step in range(1, stop.max_steps + 1):
        if running == 0:
            break
        stopped = work.rows - running
        if rows is None and is_to_compare(run, solver, step, stopped, shape):
            excess = torch.where(work.status < 0, work.number("excess"), -1.0)
            rows = compare_rows(run, solver, Iterate(method.z, method.fz), excess, rejecting=False)
            compact = compact and (rows is None or rows.harmless)
            if rows is not None and rows.coupled:
                work.keep_running(method.z)
                break
        if compact and rows is not None and f.is_worth_restricting(stopped, (work.rows, shape[1])):
            status = work.status if work.place is None else work.status.index_select(0, work.place)
            index = (status < 0).nonzero().squeeze(1)  # the rows that still run
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
    stats = work.finish(run.f.counter)
    if stats is None:
        result = finished(work.close(run, z0), run.f.counter, taken)
    else:
        result = SolveResult(work.answer, stats, taken, failed=run.scale is not None)
    if run.scale is not None and run.rows is not None:  # a linear system with independent rows needs no row check
        return result
    return _with_rows(run, solver, result, rows, apart=apart, dropped=work.place is not None)


def _with_rows(
    run: LoopRun, solver: Solver[Any], result: SolveResult, rows: RowCheck | None, *, apart: bool, dropped: bool
) -> SolveResult:
    """Set what is known about the rows of a result: whether they are coupled, and whether they were measured together.

    A result is unmeasured if it joins rows of different evaluations. The check of single rows does not measure a
    result: these rows may be saturated, and depend on the others less than the rest does.
    """
    forward = run.scale is None and solver.evaluates_residual
    if forward and result.failed and len(result.z) > 1:
        # rows of different steps, or put in place of what was not finite, were not evaluated together
        best, status = result.stats.best, result.stats.status
        apart = apart or bool(((best != best[0]) | (status == Status.NONFINITE)).any())
    if apart and forward and run.measured_later and (rows is None or (rows is TRUSTED and result.failed)):
        rows, counter = compare_answer(run, result), run.f.counter
        result.stats = dataclasses.replace(result.stats, evaluations=counter.evaluations, sample_evaluations=counter.rows)
    result.coupled, result.unmeasured = None if rows is None else rows.coupled, dropped or apart
    return result


def finished(
    record: ClosedRecord, counter: Counter, taken: int = 0, state: Any = None, *, settle: bool = True
) -> SolveResult:
    """Return the result of a closed record; reads back once whether a sample has failed, and only then settles it.

    Linear systems have a fixed scale and are not settled, so that nothing is read back. Without `settle` nothing is read
    back either, and the statistics are final only if no sample has failed.
    """
    status = torch.where(record.status == RUNNING, Status.MAX_STEPS, record.status)
    if not record.linear and record.moved:
        least, _ = USUAL[record.size.dtype]
        record.faint = (status == Status.CONVERGED) & (record.size < least) & (record.best > 0)
        # a state may have grown so far that the residual of its start would be within the tolerance; a residual is known up
        # to the spacing of the numbers beside the state
        beyond = (record.first_length - record.atol).clamp_min(0.0)  # what rtol must account for
        enough = beyond * (FALL / (record.rtol + record.precision))
        record.doubtful = record.size > torch.maximum(GROWN * record.first_size, enough)
        status = torch.where(record.faint, Status.STALLED, status)
        status = torch.where(record.doubtful, Status.DIVERGED, status)
    stats = Stats(
        status=status.to(torch.int8),
        steps=record.steps,
        rejected=record.rejected,
        best=record.best,
        residual=record.length / record.size.clamp_min(torch.finfo(record.size.dtype).tiny),
        evaluations=counter.evaluations,
        sample_evaluations=counter.rows,
        products=counter.products,
        trace=record.trace,
        iterates=record.iterates,
    )
    if record.linear or not settle:
        return SolveResult(record.z, stats, taken, state)
    asked = [(stats.status != Status.CONVERGED).any(), *([] if record.faint is None else [record.faint.any()])]
    failed, *fainted = autodiff_modes.numbers(torch.stack(asked))
    if not failed:
        return SolveResult(record.z, stats, taken, state, failed=False)
    z, stats, sound = record.settle(stats)
    return SolveResult(z, stats, taken, state, sound=sound, faint=record.faint if any(fainted) else None)


def confirm(run: LoopRun, claimed: SolveResult, rounding: float) -> SolveResult:
    """Return the result with measured residuals; samples are CONVERGED only if their measured residual meets the tolerance.

    A sample that was marked CONVERGED with too large a residual becomes STALLED, because the solver had finished with it.
    It stays CONVERGED if the relative residual exceeds the tolerance by `rounding` at most. That is 0 for rows that depend
    on each other, whose change is not rounding.
    """
    fz, before = run.f(claimed.z), claimed.stats
    run.f.remember(claimed.z, fz)
    if run.scale is None and run.unit is None and run.ordinary and run.stop.norm in (rms_norm, euclidean_norm):
        found = measures.ratios(fz, claimed.z, fz, status=before.status)
        if found is not None and found[1] <= run.stop.rtol + rounding:  # all samples converged, and have
            calls, rows = run.f.counter.evaluations, run.f.counter.rows
            stats = dataclasses.replace(before, residual=found[0], evaluations=calls, sample_evaluations=rows)
            return dataclasses.replace(claimed, stats=stats, failed=False, unmeasured=False)
    # statistics of one iterate; rows are divided by their magnitude before entries are squared
    z = claimed.z
    unit = None if run.scale is not None else binary_size(z, fz)
    if unit is not None:
        z, fz = z / unit.unsqueeze(1), fz / unit.unsqueeze(1)
    by = run.unit if unit is None else unit if run.unit is None else unit * run.unit
    record = SolveRecord(run.stop, z, run.scale, run.precision, by)
    record.record(Iterate(z, fz), step=0, look=False)
    seen = finished(record.close(), run.f.counter, settle=False).stats
    unless = torch.where(claimed.stats.converged, Status.STALLED, claimed.stats.status)
    # relative to a state that has grown enough any residual is small: a diverged sample stays DIVERGED
    within = seen.converged & (claimed.stats.status != Status.DIVERGED)
    holds = within | (claimed.stats.converged & (seen.residual <= run.stop.rtol + rounding))
    status = torch.where(holds, Status.CONVERGED, unless).to(torch.int8)
    # a cell that fails from some call on has failed here too: its best iterate keeps the residual that was measured before
    kept = (before.status == Status.NONFINITE) & ~torch.isfinite(seen.residual)
    stats = dataclasses.replace(seen, status=status, residual=torch.where(kept, before.residual, seen.residual))
    stats = dataclasses.replace(stats, steps=before.steps, rejected=before.rejected, best=before.best)
    stats = dataclasses.replace(stats, trace=before.trace, iterates=before.iterates, handovers=before.handovers)
    return dataclasses.replace(claimed, stats=stats, failed=True, unmeasured=False)


def measure(result: SolveResult, f: FlatMap, stop: Stop, precision: float) -> SolveResult:
    """Return the result of a solve with its residuals measured by one evaluation of `f`."""
    before = result.stats
    f = Map(f.raw if isinstance(f, Map) else f)
    f.counter = Counter(before.evaluations, before.sample_evaluations, before.products)
    with no_autocast(result.z.device):
        return confirm(LoopRun(f, stop, None, precision), result, 0.0)


def _compact(f: Map, state: Iterate, record: SolveRecord, *, over: bool) -> tuple[Map, Iterate] | None:
    """Return map and state of the running rows, histories compacted in place if `over`; None if rows cannot be taken."""
    index = record.running_rows()
    smaller = f.take(index)
    if smaller is None:
        return None
    record.drop_finished(index)
    return smaller, map_tensors(state, lambda tensor: compact_rows(tensor, index, over=over))
