"""The solver loop: it steps all rows, stops each by its own tolerance, and drops rows that have stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.bookkeeping import SolveRecord
from equilibria._core.compaction import ROUNDING, SHARE, is_harmless, rows_mix, warn_once, worth_dropping
from equilibria._core.frozen_cell import no_autocast
from equilibria._core.maps import Counter, FlatMap, Map
from equilibria.native import solve as native_solve
from equilibria.solution import Handover, Stats, Status
from equilibria.solvers.base import Iterate, Solver
from equilibria.solvers.fallback import AnySolver, Fallback
from equilibria.solvers.rowwise import compact_rows, differentiated, gather, map_tensors, rejected
from equilibria.stop import Stop, binary_size, max_norm, usual_range

RECURRENCE_SPACINGS = 1000.0  # likewise in machine epsilons, where rows run alone are compared with one
COMPARE_AFTER = 8  # steps after which rows are compared if none has stopped
FEW = 4  # up to so many rows, to evaluate all costs no more than to evaluate two
VERIFICATIONS = 3  # how often a result found by recurrence may miss the tolerance and be improved


@dataclass(frozen=True)
class SolveResult:
    """The result of a solve of a FlatMap."""

    z: Tensor  # (batch, n)
    stats: Stats
    taken: int  # steps of the loop, the same on every rank
    state: Any = None  # state of the solver, with each row as it was when the sample stopped; None unless `keep_state`
    coupled: bool | None = None  # True if rows depend on each other, False if a check found that they do not, else None
    unmeasured: bool = False  # True if rows were evaluated separately and the result was not evaluated as a whole
    failed: bool = True  # False if no sample has failed, as known on the host
    sound: Tensor | None = None  # (batch,) True for results that are no worse than the start; None for all
    faint: Tensor | None = None  # (batch,) True for results whose squares underflow; None if there are none


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
    check_solver(solver)
    f = f if isinstance(f, Map) else Map(f)
    # a map may have been solved before
    f.counter, f.any_rank, f.known = Counter(), stop.any_rank(), None if known is None else (z0, known)
    problem = _Problem(f, stop, scale, precision or torch.finfo(z0.dtype).eps, keep_state, verify, measured_later, z0)
    with no_autocast(z0.device):
        try:
            result = _answer(problem, z0, solver)
        except _Unusual as start:
            result = _divided(problem, z0, start.fz, solver)
        for _ in range(VERIFICATIONS):
            if result.faint is None:
                break
            result = _merge(result, _followed(problem, result, solver))
        return result


class _Unusual(Exception):  # noqa: N818, no error
    """The start is so small or large that squares leave the dtype."""

    def __init__(self, fz: Tensor) -> None:
        super().__init__()
        self.fz = fz


def _answer(problem: _Problem, z0: Tensor, solver: AnySolver) -> SolveResult:
    if not isinstance(solver, Fallback):
        return _verified(problem, z0, solver)
    result = _chain(problem, z0, solver)
    # a chain joins rows of several solves: where they may depend on each other, these were not evaluated together
    if problem.scale is not None or result.coupled is False or not (result.coupled or result.stats.handovers):
        return result
    return _confirm(problem, result, 0.0 if result.coupled else ROUNDING * problem.precision)


def _followed(problem: _Problem, result: SolveResult, solver: AnySolver) -> SolveResult:
    """Continue the solve of samples whose results have become too small to be squared."""
    left = max(problem.stop.max_steps - result.taken, 0)
    return _divided(problem.with_stop(max_steps=left), result.z, problem.f(result.z), solver)


def _divided(problem: _Problem, z0: Tensor, fz: Tensor, solver: AnySolver) -> SolveResult:
    """Solve g(y) = f(unit y) / unit, whose states have a usual magnitude; units are powers of two per sample."""
    unit = binary_size(z0, fz).unsqueeze(1)
    y0 = z0 / unit
    f = problem.f.divided(unit).remember(y0, fz / unit)
    inner = dataclasses.replace(problem.with_stop(compact=False), f=f, unit=unit.squeeze(1), origin=None)
    result = _answer(inner, y0, solver)
    stats = dataclasses.replace(result.stats, iterates=tuple(y * unit for y in result.stats.iterates))
    state = None if result.state is None else result.state.rescaled(unit)
    return _within_dtype(dataclasses.replace(result, z=result.z * unit, stats=stats, state=state), z0)


def _within_dtype(result: SolveResult, z0: Tensor) -> SolveResult:
    """The result with samples that overflow the dtype set to NONFINITE and to their start."""
    lost = ~torch.isfinite(result.z).all(dim=1)
    if not bool(lost.any()):
        return result
    start = torch.where(torch.isfinite(z0), z0, torch.zeros_like(z0))
    stats = result.stats
    status, residual = stats.status.masked_fill(lost, Status.NONFINITE), stats.residual.masked_fill(lost, float("inf"))
    stats = dataclasses.replace(stats, status=status, residual=residual, best=stats.best.masked_fill(lost, 0))
    return dataclasses.replace(result, z=torch.where(lost.unsqueeze(1), start, result.z), stats=stats, failed=True)


@dataclass(frozen=True)
class _Problem:
    f: Map
    stop: Stop
    scale: Tensor | None
    precision: float
    keep_state: bool
    verify: bool
    measured_later: bool
    origin: Tensor | None = None  # (batch, n), the start, if its size is to be looked at
    unit: Tensor | None = None  # (batch,), by which f and z are divided; None: by nothing

    def record(self, z0: Tensor) -> SolveRecord:
        record = SolveRecord(self.stop, z0, self.scale, self.precision)
        if self.unit is not None:
            record.divide(self.unit)
        return record

    def stands_alone(self) -> bool:
        """True for a linear system whose forward solve has found that rows do not depend on each other and can be taken.

        That rows do not mix is not enough: a weight with as many rows as the batch must not be restricted.
        """
        equation = self.f.equation
        return self.scale is not None and equation is not None and equation.separable and equation.coupled is False

    def warn_of_coupling(self) -> None:
        """Warn once per cell that its rows cannot be dropped, unless compaction is not wanted."""
        if self.f.equation is not None and self.stop.compact:
            warn_once(self.f.equation.identity)

    def with_stop(self, **changes: Any) -> _Problem:
        return dataclasses.replace(self, stop=dataclasses.replace(self.stop, **changes))


def _run(problem: _Problem, z0: Tensor, solver: Solver[Any]) -> SolveResult:
    """Run the loop, with native steps if the solver and the map support them."""
    f, stop = problem.f, problem.stop
    if problem.unit is None and not problem.keep_state and native_solve.can_run(z0, solver, stop):
        fz = f(z0)
        if native_solve.is_readable(fz):  # the map may close over tensors that are differentiated
            return _run_native(problem, z0, fz, solver)
        f.remember(z0, fz)
    state = solver.init(f, z0)
    record = problem.record(z0)
    often = stop.check_every == 1
    record.record(state, step=0, look=often)
    if z0 is problem.origin and record.unusual() and _unusual(z0, state.fz):
        raise _Unusual(state.fz)
    compact = stop.compact and stop.process_group is None
    kept, taken, rows = None, 0, _Rows() if problem.stands_alone() else None
    for step in range(1, stop.max_steps + 1):
        if often or step % stop.check_every == 0 or step == 1:
            running = record.running()  # the read-back
            if not (f.any_rank(running > 0) if f.any_rank else running):
                break
            stopped = record.rows - running
            if rows is None and _is_to_compare(problem, solver, step, stopped, state.z.shape):
                rows = _compare_rows(problem, solver, state, record, record.running_excess())
                compact = compact and (rows is None or rows.harmless)
                if rows is not None and rows.coupled:
                    break  # the caller continues with the batch as one problem
            if compact and rows is not None and worth_dropping(f, stopped, state.z.shape):
                kept = gather(kept, state, record.index) if problem.keep_state else None
                smaller = _compact(f, state, record, over=not problem.keep_state)
                compact = smaller is not None
                f, state = smaller or (f, state)
            if stopped and not (compact and solver.steps_finished_rows and not problem.keep_state):
                state = record.freeze(state)
        f.growth, f.fell = record.growth, record.fell
        state = solver.step(f, state)
        record.record(state, step, look=often, rejected=rejected(state))
        taken = step
    kept = gather(kept, state, record.index) if problem.keep_state else None
    result = finished(record, problem.f.counter, taken, kept)
    apart = len(z0) > 1 and (record.stopped_apart(taken) or (taken > 0 and state.fz is not f.latest))
    return _with_rows(problem, solver, result, rows, apart=apart, dropped=record.index is not None)


def _with_rows(
    problem: _Problem, solver: Solver[Any], result: SolveResult, rows: _Rows | None, *, apart: bool, dropped: bool
) -> SolveResult:
    """A solve with what is known about its rows.

    A result is unmeasured if it joins rows of different evaluations, unless rows that were run alone gave the same up to
    rounding and none has failed: those that were run may be saturated, and depend on the others less than the rest does.
    """
    forward = problem.scale is None and solver.evaluates_residual
    apart = apart or (forward and result.failed and _is_joined(result.stats))
    if rows is None and apart and forward and problem.measured_later:
        rows, counter = _compare_answer(problem, result), problem.f.counter
        stats = dataclasses.replace(result.stats, evaluations=counter.evaluations, sample_evaluations=counter.rows)
        result = dataclasses.replace(result, stats=stats)
    rows = rows or _Rows()
    sure = rows.harmless and not rows.weakly and not result.failed
    return dataclasses.replace(result, coupled=rows.coupled, unmeasured=dropped or (apart and not sure))


def _is_joined(stats: Stats) -> bool:
    """True if rows of the answer were not evaluated together: of different steps, or put in place of what was not finite."""
    if len(stats.best) < 2:
        return False
    return bool(((stats.best != stats.best[0]) | (stats.status == Status.NONFINITE)).any())


@dataclass(frozen=True)
class _Rows:
    """What running some rows without the others has shown; of a linear system the cell's own rows have shown it before."""

    harmless: bool = False  # whatever the others do changes no status of the rows that were compared
    weakly: bool = False  # but it changes more than rounding does
    coupled: bool | None = None  # True: rows depend on each other; None: not known


def _is_to_compare(problem: _Problem, solver: Solver[Any], step: int, stopped: int, shape: Sequence[int]) -> bool:
    """True if rows are to be compared before this step: once the first one has stopped, or after COMPARE_AFTER steps.

    Rows that depend on each other and are solved as if they did not may take all steps without stopping.
    """
    # at the start all rows may be zero: what they make of each other cannot be seen there
    if step == 1 or shape[0] == 1:
        return False
    if problem.scale is None and solver.evaluates_residual:
        return stopped > 0 or step > COMPARE_AFTER
    return problem.stop.compact and worth_dropping(problem.f, stopped, shape)


def _compare_rows(
    problem: _Problem, solver: Solver[Any], state: Iterate, record: SolveRecord, excess: Tensor
) -> _Rows | None:
    """Run two of the running rows without the others, and compare with what they gave among them.

    `excess`, (batch,), is negative for rows that have stopped. The rows with the largest one are run, because rows that
    still change are the least likely to be saturated. Returns None if those rows are zero, as at the start: a product with
    them would hide what they depend on.
    """
    whole = problem.f
    if problem.stop.process_group is not None or differentiated(state.z, state.fz):
        return _Rows()
    largest, few = excess.topk(min(2, len(state.z) - 1))
    smaller = whole.take(few)
    if smaller is None:
        return _Rows()
    # a solver that rejects no step has left the start by now, and need not be asked
    if rejected(state) is not None and not bool(state.z.index_select(0, few[:1]).any()):
        return None
    try:
        alone = smaller(state.z.index_select(0, few))
    except (RuntimeError, ValueError, IndexError, TypeError):
        # data of the whole batch lies inside the cell, beyond the reach of its inputs
        problem.warn_of_coupling()
        return _Rows()
    # of rows that have stopped, `fz` need not be an evaluation of the cell
    among = torch.where((largest >= 0).unsqueeze(1), state.fz.index_select(0, few), alone)
    spacings = ROUNDING if solver.evaluates_residual else RECURRENCE_SPACINGS
    # in the dtype of the state: the rounding of a cell in half precision may hide a weak dependence
    if is_harmless(alone, among, spacings * torch.finfo(alone.dtype).eps):
        return _Rows(harmless=True, coupled=False)
    atol = record.atol if isinstance(record.atol, float) else 0.0
    # these rows do not depend on the others so far as is known; other rows may
    if is_harmless(alone, among, max(SHARE * record.rtol, spacings * problem.precision), SHARE * atol):
        return _Rows(harmless=True, coupled=False, weakly=True)
    # an input that only looks as if it had a row per sample gives the same picture as rows that depend on each other
    coupled = rows_mix(whole, state.z, problem.precision)
    if coupled is False:  # of a cell that draws at random, the failed solve is reported
        problem.warn_of_coupling()
    return _Rows(coupled=coupled or None)


def _compare_answer(problem: _Problem, result: SolveResult) -> _Rows:
    """Evaluate the row that stopped first and the one with the largest residual without the others.

    The others have moved since a row stopped: where it depends on them, its residual is not the one that is told any more.
    """
    whole, stats, stop = problem.f, result.stats, problem.stop
    if len(result.z) <= FEW or stop.process_group is not None or differentiated(result.z):
        return _Rows()  # an evaluation of all rows tells more
    largest = torch.where(stats.residual < float("inf"), stats.residual, -1.0).argmax()  # nan is not below
    few = torch.stack((stats.steps.argmin(), largest))
    smaller = whole.take(few)
    if smaller is None:
        return _Rows()
    z = result.z.index_select(0, few)
    try:
        fz = smaller(z)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return _Rows()  # data of the whole batch lies inside the cell, beyond the reach of its inputs
    size = stop.norm(fz)
    change = (stop.norm(fz - z) - stats.residual.index_select(0, few) * size).abs()
    if not bool((change > ROUNDING * torch.finfo(z.dtype).eps * size).any()):  # nan does not count
        return _Rows(harmless=True, coupled=False)
    if not bool((change > SHARE * stop.atol + max(SHARE * stop.rtol, ROUNDING * problem.precision) * size).any()):
        return _Rows(harmless=True, coupled=False, weakly=True)
    # if rows do not mix, the cell draws at random or an input only looks as if it had a row per sample
    # a state that has run away may be one at which rows do not mix: that says nothing about the result
    return _Rows(coupled=rows_mix(whole, result.z, problem.precision) or None)


def _run_native(problem: _Problem, z0: Tensor, fz: Tensor, solver: Solver[Any]) -> SolveResult:
    record = problem.record(z0)

    def check_start(lowest: float, highest: float) -> None:
        record.range = lowest, highest
        if z0 is problem.origin and record.unusual() and _unusual(z0, fz):
            raise _Unusual(fz)

    def compare(z: Tensor, fz: Tensor, excess: Tensor) -> _Rows | None:
        return _compare_rows(problem, solver, Iterate(z, fz), record, excess)

    found = native_solve.run(
        problem.f,
        z0,
        fz,
        solver,
        problem.stop,
        scale=problem.scale,
        precision=problem.precision,
        check_start=check_start,
        is_to_compare=lambda step, stopped: _is_to_compare(problem, solver, step, stopped, z0.shape),
        compare=None if problem.stands_alone() else compare,
    )
    record.adopt(*found.record())
    result = finished(record, problem.f.counter, found.taken)
    rows = _Rows() if problem.stands_alone() else found.rows
    return _with_rows(problem, solver, result, rows, apart=found.apart, dropped=found.work.place is not None)


def finished(record: SolveRecord, counter: Counter, taken: int, state: Any = None) -> SolveResult:
    """A solve whose books are closed; asks once whether a sample has failed, and only then looks closer.

    Linear systems have a fixed scale and need no closer look, so nothing is asked.
    """
    z, stats = record.close(counter)
    if record.whole_scale is not None:
        return SolveResult(z, stats, taken, state)
    asked = [stats.failed.any(), *([] if record.faint is None else [record.faint.any()])]
    failed, *fainted = autodiff_modes.numbers(torch.stack(asked))
    if not failed:
        return SolveResult(z, stats, taken, state, failed=False)
    z, stats, sound = record.settle(z, stats)
    faint = record.faint if any(fainted) else None
    return SolveResult(z, stats, taken, state, sound=sound, faint=faint)


def _unusual(z: Tensor, fz: Tensor) -> bool:
    """True if the squares of a row leave the dtype."""
    least, most = usual_range(z.dtype)
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


def _verified(problem: _Problem, z0: Tensor, solver: Solver[Any]) -> SolveResult:
    """Run; then evaluate the answer where f(z) is known by recurrence only, or from before other rows moved.

    Rows that depend on each other are left where they are: the caller solves them as one problem.
    """
    result = _run(problem, z0, solver)
    if not _is_to_be_measured(problem, solver, result):
        return result
    rounding = ROUNDING * problem.precision if solver.evaluates_residual else problem.stop.carried(problem.precision)
    for round in range(VERIFICATIONS + 1):
        claimed = result.stats.converged
        result = _confirm(problem, result, 0.0 if result.coupled else rounding)
        left = problem.stop.max_steps - result.taken
        if result.coupled or left <= 0 or not problem.f.any(claimed & result.stats.failed):
            break
        if solver.evaluates_residual and result.coupled is None:  # nothing else can have moved these rows away
            return dataclasses.replace(result, coupled=True)
        if round == VERIFICATIONS:
            break
        result = _merge(result, _run(problem.with_stop(max_steps=left), result.z, solver))
    return result


def _is_to_be_measured(problem: _Problem, solver: Solver[Any], result: SolveResult) -> bool:
    if not solver.evaluates_residual:
        return problem.verify
    if problem.scale is not None:  # the residual of a linear system is measured by whoever asked for its solution
        return False
    if not result.unmeasured or result.coupled:
        return bool(result.coupled)
    # a backward pass that has samples to set aside does not evaluate the answer as it is
    later = problem.measured_later and result.coupled is False
    return not (later and not (result.failed and result.stats.count(Status.NONFINITE)))


def _confirm(problem: _Problem, claimed: SolveResult, rounding: float) -> SolveResult:
    """The result with measured residuals; samples are CONVERGED only if the measured residual is within the tolerance.

    A sample marked CONVERGED that is not becomes STALLED, because by its own residual the solver had finished. `rounding`
    is by how much the relative residual of such a sample may exceed the tolerance: 0 for rows that depend on each other,
    whose change is no rounding.
    """
    fz = problem.f(claimed.z)
    problem.f.remember(claimed.z, fz)
    seen = _measured(problem, claimed.z, fz)
    unless = torch.where(claimed.stats.converged, Status.STALLED, claimed.stats.status)
    holds = seen.converged | (claimed.stats.converged & (seen.residual <= problem.stop.rtol + rounding))
    status = torch.where(holds, Status.CONVERGED, unless).to(torch.int8)
    before = claimed.stats
    # a cell that fails from some call on has failed here too: its best iterate keeps the residual that was measured before
    kept = (before.status == Status.NONFINITE) & ~torch.isfinite(seen.residual)
    stats = dataclasses.replace(seen, status=status, residual=torch.where(kept, before.residual, seen.residual))
    stats = dataclasses.replace(stats, steps=before.steps, rejected=before.rejected, best=before.best)
    stats = dataclasses.replace(stats, trace=before.trace, iterates=before.iterates, handovers=before.handovers)
    return dataclasses.replace(claimed, stats=stats, failed=True, unmeasured=False)


def measure(result: SolveResult, f: FlatMap, stop: Stop, precision: float) -> SolveResult:
    """The result of a solve with its residuals measured by one evaluation of `f`."""
    before = result.stats
    f = Map(f.raw if isinstance(f, Map) else f)
    f.counter = Counter(before.evaluations, before.sample_evaluations, before.products)
    with no_autocast(result.z.device):
        return _confirm(_Problem(f, stop, None, precision, False, True, False), result, 0.0)


def _measured(problem: _Problem, z: Tensor, fz: Tensor) -> Stats:
    """Statistics of one iterate; rows are divided by their magnitude before entries are squared."""
    unit = None if problem.scale is not None else binary_size(z, fz)
    if unit is not None:
        z, fz = z / unit.unsqueeze(1), fz / unit.unsqueeze(1)
    record = problem.record(z)
    if unit is not None:
        record.divide(unit)
    record.record(Iterate(z, fz), step=0, look=False)
    return record.close(problem.f.counter)[1]


def _chain(problem: _Problem, z0: Tensor, chain: Fallback) -> SolveResult:
    """Run each solver of a Fallback in turn on the samples that are not solved yet.

    A solver may fail from the best iterate of another one and succeed from the start. Samples that all solvers leave are
    therefore solved again from the start, by the last solver first: the chain solves every sample that one of them solves.
    """
    *first, last = chain.solvers
    impatient = problem.with_stop(patience=problem.stop.patience or chain.patience)
    result = _verified(impatient, z0, first[0])
    untried = [_gave_up(problem, result)]  # per solver the samples for which its own run from the start is still to be seen
    for before, solver in zip(chain.solvers, (*first[1:], last), strict=False):
        if result.coupled or result.faint is not None or not problem.f.any(result.stats.failed):
            # the caller solves rows that depend on each other as one problem, with the whole chain; answers that are too
            # small for the numbers they were found with are followed first
            return result
        start = (
            result.z
            if result.sound is None
            else torch.where((result.sound | result.stats.converged).unsqueeze(1), result.z, z0)
        )
        result, more = _hand_over(problem if solver is last else impatient, result, before, solver, start)
        moved = (start != z0).any(dim=1)
        untried.append(moved | _gave_up(problem, more))
    before = last
    if result.coupled:
        return result
    for solver, rows in zip(reversed(chain.solvers), reversed(untried), strict=True):
        again = rows & result.stats.failed & torch.isfinite(result.stats.residual)
        if problem.f.any(again):
            result, _ = _hand_over(problem, result, before, solver, torch.where(again.unsqueeze(1), z0, result.z), again)
            before = solver
    return result


def _gave_up(problem: _Problem, result: SolveResult) -> Tensor:
    """(batch,), True for samples that stalled by the patience of the chain, not by that of the caller."""
    stalled = result.stats.status == Status.STALLED
    return stalled if problem.stop.patience is None else torch.zeros_like(stalled)


def _hand_over(
    problem: _Problem,
    result: SolveResult,
    before: Solver[Any],
    solver: Solver[Any],
    start: Tensor,
    rows: Tensor | None = None,
) -> tuple[SolveResult, SolveResult]:
    """Run `solver` from `start` on the samples that failed, or on `rows`; returns the joined result and the new one."""
    index = (result.stats.failed if rows is None else rows).nonzero().squeeze(1)
    handover = Handover(repr(before), repr(solver), index, result.stats.status[index], result.stats.residual[index])
    more = _verified(problem, start, solver)
    merged = _merge(result, more)
    stats = dataclasses.replace(merged.stats, handovers=(*result.stats.handovers, handover))
    return dataclasses.replace(merged, stats=stats), more


def _merge(first: SolveResult, then: SolveResult) -> SolveResult:
    """Join two successive solves: per sample the later result if it is better, with the steps of both."""
    a, b = first.stats, then.stats
    sound = torch.ones_like(b.converged) if then.sound is None else then.sound
    better = b.converged | (a.failed & sound & (b.residual < a.residual))
    if first.faint is not None:  # what is known about those is not worth anything
        better = better | first.faint
    trace = None
    if a.trace is not None and b.trace is not None:
        trace = tuple(torch.cat([x, y[1:]]) for x, y in zip(a.trace, b.trace, strict=True))
    stats = dataclasses.replace(
        b,
        # a sample that stays failed keeps the later reason: it is what the caller can still act on
        status=torch.where(a.converged, a.status, b.status),
        steps=a.steps + b.steps,
        rejected=a.rejected + b.rejected,
        best=torch.where(better, a.steps + b.best, a.best),
        residual=torch.where(better, b.residual, a.residual),
        trace=trace,
        iterates=a.iterates + b.iterates,
    )
    z = torch.where(better.unsqueeze(1), then.z, first.z)
    sound = sound if first.sound is None else torch.where(better, sound, first.sound)
    coupled = then.coupled if first.coupled is None else first.coupled or then.coupled
    unmeasured = first.unmeasured or then.unmeasured
    return SolveResult(
        z, stats, first.taken + then.taken, coupled=coupled, unmeasured=unmeasured, sound=sound, faint=then.faint
    )


def check_solver(solver: Any) -> None:
    if isinstance(solver, type) or not isinstance(solver, (Solver, Fallback)):
        raise TypeError(f"A solver is an object such as Anderson() or Fallback(Picard(), Newton()), got {solver!r}.")
