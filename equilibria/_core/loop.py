"""Stop, and the solver loop: it steps all rows, stops each by its own tolerance, and drops rows that have stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.autocast import no_autocast
from equilibria._core.bookkeeping import FLOOR, Ledger
from equilibria._core.compaction import ROUNDING, SHARE, Owned, is_harmless, rows_mix, warn_once, worth_dropping
from equilibria._core.maps import Affine, Counter, FlatMap, Map
from equilibria._core.norms import Norm, binary_size, max_norm, rms_norm, usual_range
from equilibria.native import solve as native_solve
from equilibria.solution import Handover, Stats, Status
from equilibria.solvers.base import Iterate, Solver, differentiated, gather, map_tensors, pack, rejected, require
from equilibria.solvers.fallback import AnySolver, Fallback

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OnFailure = Literal["ignore", "warn", "raise"]
RECURRENCE = 0.1  # share of the tolerance by which a residual updated by recurrence may differ from the measured one
RECURRENCE_SPACINGS = 1000.0  # likewise in machine epsilons, where rows run alone are compared with one
EARLY = 1  # rows that stopped before others and are evaluated again without them
VERIFICATIONS = 3  # how often a result found by recurrence may miss the tolerance and be improved


class DefaultTolerance(float):
    """The default value of a tolerance, which `Stop.reachable` may raise."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The stopping rule |f(z) - z| <= atol + rtol |f(z)|, applied to every sample by itself.

    rtol, atol     tolerances. If rtol is left out and the cell computes in half precision (a state in bfloat16, or
                   autocast), it is at least the machine epsilon, 0.0078 for bfloat16. An rtol that is given is never
                   changed; samples that cannot reach it end STALLED
    max_steps      largest number of steps
    norm           per-sample norm, (batch, n) -> (batch,); the default does not depend on the size of the state
    on_failure     the action for samples that did not converge: "ignore", "warn" (once per cell and cause) or "raise";
                   the statistics report them in any case
    check_every    check every `check_every` steps whether all samples have stopped, because each check waits for the
                   device. The result is the same; up to check_every - 1 further evaluations are made
    patience       a sample is STALLED after this number of steps in which its residual did not fall by a tenth
    compact        drop samples that have stopped from the batch, if rows do not depend on each other
    trace          keep the residual of every iterate in Stats.trace
    keep_every     keep every keep_every-th iterate in Solution.iterates; samples that have stopped are there with their
                   result
    process_group  ranks that must take the same number of steps, because evaluating the cell is a collective operation
                   (sharded weights): a ProcessGroup, or "world"
    """

    rtol: float = DefaultTolerance(1e-3)
    atol: float = 1e-6
    max_steps: int = 40
    norm: Norm = rms_norm
    on_failure: OnFailure = "warn"
    check_every: int = 1
    patience: int | None = None
    compact: bool = True
    trace: bool = False
    keep_every: int | None = None
    process_group: ProcessGroup | Literal["world"] | None = None

    def __post_init__(self) -> None:
        require(
            self.rtol >= 0 and self.atol >= 0, f"Tolerances must not be negative, got rtol={self.rtol}, atol={self.atol}."
        )
        require(self.max_steps >= 0, f"max_steps must not be negative, got {self.max_steps}.")
        require(self.check_every >= 1, f"check_every must be at least 1, got {self.check_every}.")
        require(self.patience is None or self.patience >= 1, f"patience must be at least 1 or None, got {self.patience}.")
        require(self.keep_every is None or self.keep_every >= 1, f"keep_every must be at least 1, got {self.keep_every}.")
        choices = ("ignore", "warn", "raise")
        require(self.on_failure in choices, f"on_failure must be one of {choices}, got {self.on_failure!r}.")

    def reachable(self, precision: float) -> Stop:
        """This stop for a machine epsilon of `precision`, which is the smallest value of a default rtol."""
        if not isinstance(self.rtol, DefaultTolerance) or self.rtol >= precision:
            return self
        return dataclasses.replace(self, rtol=DefaultTolerance(precision))

    def within(self, precision: float) -> float:
        """The relative residual that a measured one may have: rtol, and the rounding of solvers that carry theirs."""
        return self.rtol + min(FLOOR * precision, RECURRENCE * self.rtol)

    def holds(self, residual: Tensor, precision: float, scale: Tensor | None = None) -> Tensor:
        """(batch,) whether measured relative residuals meet the tolerance, up to the rounding of solvers that carry theirs.

        `scale` is what the residuals are relative to; with it, atol counts too.
        """
        wanted = self.within(precision)
        if scale is None or self.atol == 0:
            return residual <= wanted
        return residual <= wanted + self.atol / scale.clamp_min(torch.finfo(scale.dtype).tiny)

    def any_rank(self) -> Callable[[bool], bool] | None:
        """A function that is True if its argument is True on any rank of `process_group`; None without a group."""
        return None if self.process_group is None else lambda here: bool(self.largest(int(here)))

    def largest(self, here: int) -> int:
        """The largest of a number over the ranks of `process_group`."""
        if self.process_group is None:
            return here
        group = dist.group.WORLD if self.process_group == "world" else self.process_group
        number = torch.tensor(here, device=_reduction_device(group))
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
        return int(number)


@dataclass(frozen=True)
class Flat:
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
) -> Flat:
    """Find the fixed point of `f` from `z0`, (batch, n), each sample to its own tolerance.

    scale       (batch,), the quantity that rtol is relative to; None uses |f(z)|
    precision   machine epsilon of the numbers `f` computes with, if coarser than that of z0's dtype
    known       f(z0) if the caller has evaluated it
    keep_state  return the solver's state too
    verify      evaluate `f` once more if the solver updates f(z) by a recurrence; False if the caller does
    measured_later  True if the caller evaluates `f` at the result, so that it is not evaluated here after rows were dropped
    """
    check_solver(solver)
    f = Map(f, Counter(), stop.any_rank())
    if known is not None:
        f.remember(z0, known)
    problem = _Problem(f, stop, scale, precision or torch.finfo(z0.dtype).eps, keep_state, verify, measured_later, z0)
    with no_autocast(z0.device):
        try:
            flat = _answer(problem, z0, solver)
        except _Unusual as start:
            flat = _divided(problem, z0, start.fz, solver)
        for _ in range(VERIFICATIONS):
            if flat.faint is None:
                break
            flat = _merge(flat, _followed(problem, flat, solver))
        return flat


class _Unusual(Exception):  # noqa: N818, no error
    """The start is so small or large that squares leave the dtype."""

    def __init__(self, fz: Tensor) -> None:
        super().__init__()
        self.fz = fz


def _answer(problem: _Problem, z0: Tensor, solver: AnySolver) -> Flat:
    if not isinstance(solver, Fallback):
        return _verified(problem, z0, solver)
    flat = _chain(problem, z0, solver)
    # a chain joins rows of several solves: where they depend on each other, these were not evaluated together
    return _confirm(problem, flat) if flat.coupled and problem.scale is None else flat


def _followed(problem: _Problem, flat: Flat, solver: AnySolver) -> Flat:
    """Continue the solve of samples whose results have become too small to be squared."""
    left = max(problem.stop.max_steps - flat.taken, 0)
    return _divided(problem.with_stop(max_steps=left), flat.z, problem.f(flat.z), solver)


def _divided(problem: _Problem, z0: Tensor, fz: Tensor, solver: AnySolver) -> Flat:
    """Solve g(y) = f(unit y) / unit, whose states have a usual magnitude; units are powers of two per sample."""
    unit = binary_size(z0, fz).unsqueeze(1)
    y0 = z0 / unit
    f = Map(_divide(problem.f.raw, unit), problem.f.counter, problem.f.any_rank).remember(y0, fz / unit)
    inner = dataclasses.replace(problem.with_stop(compact=False), f=f, unit=unit.squeeze(1), origin=None)
    flat = _answer(inner, y0, solver)
    stats = dataclasses.replace(flat.stats, iterates=tuple(y * unit for y in flat.stats.iterates))
    state = None if flat.state is None else flat.state.rescaled(unit)
    return _within_dtype(dataclasses.replace(flat, z=flat.z * unit, stats=stats, state=state), z0)


def _within_dtype(flat: Flat, z0: Tensor) -> Flat:
    """The result with samples that overflow the dtype set to NONFINITE and to their start."""
    lost = ~torch.isfinite(flat.z).all(dim=1)
    if not bool(lost.any()):
        return flat
    start = torch.where(torch.isfinite(z0), z0, torch.zeros_like(z0))
    stats = flat.stats
    status, residual = stats.status.masked_fill(lost, Status.NONFINITE), stats.residual.masked_fill(lost, float("inf"))
    stats = dataclasses.replace(stats, status=status, residual=residual, best=stats.best.masked_fill(lost, 0))
    return dataclasses.replace(flat, z=torch.where(lost.unsqueeze(1), start, flat.z), stats=stats, failed=True)


def _divide(f: FlatMap, unit: Tensor) -> FlatMap:
    if isinstance(f, Affine):
        return Affine(f.product, f.transposed, f.offset / unit)
    return lambda y: f(y * unit) / unit


def make_ledger(s: Stop, z0: Tensor, scale: Tensor | None, precision: float) -> Ledger:
    return Ledger(z0, s.rtol, s.atol, s.norm, scale, s.patience, precision, s.trace, s.keep_every)


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

    def ledger(self, z0: Tensor) -> Ledger:
        ledger = make_ledger(self.stop, z0, self.scale, self.precision)
        if self.unit is not None:
            ledger.divide(self.unit)
        return ledger

    def stands_alone(self) -> bool:
        """True for a linear system whose forward solve has found that rows do not depend on each other."""
        equation = getattr(self.f.raw, "equation", None)
        return self.scale is not None and equation is not None and equation.coupled is False

    def with_stop(self, **changes: Any) -> _Problem:
        return dataclasses.replace(self, stop=dataclasses.replace(self.stop, **changes))


def _run(problem: _Problem, z0: Tensor, solver: Solver[Any]) -> Flat:
    """Run the loop, with native steps if the solver and the map support them."""
    f, stop = problem.f, problem.stop
    if problem.unit is None and not problem.keep_state and native_solve.can_run(z0, solver, stop):
        fz = f(z0)
        if native_solve.can_go_on(fz):
            return _run_native(problem, z0, fz, solver)
        f.remember(z0, fz)
    state = solver.init(f, z0)
    ledger = problem.ledger(z0)
    often = stop.check_every == 1
    ledger.observe(state, step=0, look=often)
    if z0 is problem.origin and ledger.unusual() and _unusual(z0, state.fz):
        raise _Unusual(state.fz)
    compact = stop.compact and stop.process_group is None
    kept, taken, rows = None, 0, _Rows() if problem.stands_alone() else None
    for step in range(1, stop.max_steps + 1):
        if often or step % stop.check_every == 0 or step == 1:
            running = ledger.running()  # the read-back
            if not (f.any_rank(running > 0) if f.any_rank else running):
                break
            stopped = ledger.rows - running
            # not at the start, where all rows may be zero: what they make of each other cannot be seen there
            if compact and rows is None and step > 1 and worth_dropping(f.raw, stopped, state.z.shape):
                rows = _compare_rows(problem, solver, state, ledger)
                compact = rows is None or rows.harmless
                if rows is not None and rows.coupled:
                    break  # the caller continues with the batch as one problem
            if compact and rows is not None and worth_dropping(f.raw, stopped, state.z.shape):
                kept = gather(kept, state, ledger.index) if problem.keep_state else None
                smaller = _compact(f, state, ledger, over=not problem.keep_state)
                compact = smaller is not None
                f, state = smaller or (f, state)
            if stopped and not (compact and solver.runs_on and not problem.keep_state):
                state = ledger.freeze(state)
        f.growth, f.fell = ledger.growth, ledger.fell
        state = solver.step(f, state)
        ledger.observe(state, step, look=often, rejected=rejected(state))
        taken = step
    kept = gather(kept, state, ledger.index) if problem.keep_state else None
    flat = finished(ledger, problem.f.counter, taken, kept)
    return _with_rows(problem, solver, flat, rows, apart=ledger.stopped_apart(taken), dropped=ledger.index is not None)


def _with_rows(
    problem: _Problem, solver: Solver[Any], flat: Flat, rows: _Rows | None, *, apart: bool, dropped: bool
) -> Flat:
    """A solve with what is known about its rows: asked now if it was not yet and rows were not evaluated together."""
    forward = problem.scale is None and solver.exact
    apart = apart or (forward and flat.failed and _is_joined(flat.stats))
    if rows is None and apart and forward:
        rows, counter = _compare_answer(problem, flat), problem.f.counter
        stats = dataclasses.replace(flat.stats, evaluations=counter.evaluations, sample_evaluations=counter.rows)
        flat = dataclasses.replace(flat, stats=stats)
    rows = rows or _Rows()
    return dataclasses.replace(flat, coupled=rows.coupled, unmeasured=dropped or (apart and not rows.harmless))


def _is_joined(stats: Stats) -> bool:
    """True if rows of the answer were not evaluated together: of different steps, or put in place of what was not finite."""
    if len(stats.best) < 2:
        return False
    return bool(((stats.best != stats.best[0]) | (stats.status == Status.NONFINITE)).any())


@dataclass(frozen=True)
class _Rows:
    """What running some rows without the others has shown; of a linear system the cell's own rows have shown it before."""

    harmless: bool = False  # whatever the others do changes no status
    coupled: bool | None = None  # True: rows depend on each other; None: not known


def _compare_rows(problem: _Problem, solver: Solver[Any], state: Iterate, ledger: Ledger) -> _Rows | None:
    """Run two of the rows that took the last step without the others, and compare with what they gave among them.

    None if those rows are zero, as at the start: a product with them would hide what they depend on.
    """
    whole = problem.f
    if problem.stop.process_group is not None or differentiated(state.z, state.fz):
        return _Rows()
    few = ledger.steps.topk(min(2, len(state.z) - 1)).indices
    smaller = whole.take(few)
    if smaller is None:
        return _Rows()
    # a solver that rejects no step has left the start by now, and need not be asked
    if rejected(state) is not None and not bool(state.z.index_select(0, few[:1]).any()):
        return None
    try:
        alone = smaller(state.z.index_select(0, few))[:1]
    except (RuntimeError, ValueError, IndexError, TypeError):
        # data of the whole batch lies inside the cell, beyond the reach of its inputs
        if isinstance(whole.raw, Owned) and problem.stop.compact:
            warn_once(whole.raw)
        return _Rows()
    among = state.fz.index_select(0, few[:1])  # of the others `fz` need not be an evaluation of the cell
    spacings = ROUNDING if solver.exact else RECURRENCE_SPACINGS
    atol = ledger.atol if isinstance(ledger.atol, float) else 0.0
    if is_harmless(alone, among, max(SHARE * ledger.rtol, spacings * problem.precision), SHARE * atol):
        return _Rows(harmless=True, coupled=False)
    # an input that only looks as if it had a row per sample gives the same picture as rows that depend on each other
    coupled = rows_mix(whole, state.z, problem.precision)
    if not coupled and isinstance(whole.raw, Owned) and problem.stop.compact:
        warn_once(whole.raw)
    return _Rows(coupled=coupled or None)


def _compare_answer(problem: _Problem, flat: Flat) -> _Rows:
    """Evaluate rows that stopped first and the last one without the others, and compare residuals with those that are told.

    The others have moved since a row stopped: where it depends on them, its residual is another one by now.
    """
    whole, stats, stop = problem.f, flat.stats, problem.stop
    order = stats.steps.argsort()
    few = torch.cat((order[: min(EARLY, len(order) - 2)], order[-1:]))
    smaller = whole.take(few) if len(few) > 1 and stop.process_group is None and not differentiated(flat.z) else None
    if smaller is None:
        return _Rows()
    z = flat.z.index_select(0, few)
    try:
        fz = smaller(z)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return _Rows()  # data of the whole batch lies inside the cell, beyond the reach of its inputs
    size = stop.norm(fz)
    change = (stop.norm(fz - z) - stats.residual.index_select(0, few) * size).abs()
    allowed = SHARE * stop.atol + max(SHARE * stop.rtol, ROUNDING * problem.precision) * size
    if not bool((change > allowed).any()):  # nan does not count
        return _Rows(harmless=True, coupled=False)
    # if rows do not mix, the cell draws at random or an input only looks as if it had a row per sample
    # a state that has run away may be one at which rows do not mix: that says nothing about the result
    return _Rows(coupled=rows_mix(whole, flat.z, problem.precision) or None)


def _run_native(problem: _Problem, z0: Tensor, fz: Tensor, solver: Solver[Any]) -> Flat:
    ledger = problem.ledger(z0)

    def check_start(lowest: float, highest: float) -> None:
        ledger.range = lowest, highest
        if z0 is problem.origin and ledger.unusual() and _unusual(z0, fz):
            raise _Unusual(fz)

    def compare(z: Tensor, fz: Tensor, steps: Tensor) -> _Rows | None:
        ledger.steps = steps
        return _compare_rows(problem, solver, Iterate(z, fz), ledger)

    found = native_solve.run(
        problem.f,
        z0,
        fz,
        solver,
        problem.stop,
        scale=problem.scale,
        precision=problem.precision,
        check_start=check_start,
        compare=None if problem.stands_alone() else compare,
    )
    ledger.adopt(*found.record())
    flat = finished(ledger, problem.f.counter, found.taken)
    rows = _Rows() if problem.stands_alone() else found.rows
    return _with_rows(problem, solver, flat, rows, apart=found.apart, dropped=found.work.place is not None)


def finished(ledger: Ledger, counter: Counter, taken: int, state: Any = None) -> Flat:
    """A solve whose books are closed; asks once whether a sample has failed, and only then looks closer.

    Linear systems have a fixed scale and need no closer look, so nothing is asked.
    """
    z, stats = ledger.close(counter)
    if ledger.whole_scale is not None:
        return Flat(z, stats, taken, state)
    asked = [stats.failed.any(), *([] if ledger.faint is None else [ledger.faint.any()])]
    failed, *fainted = autodiff_modes.numbers(torch.stack(asked))
    if not failed:
        return Flat(z, stats, taken, state, failed=False)
    z, stats, sound = ledger.settle(z, stats)
    faint = ledger.faint if any(fainted) else None
    return Flat(z, stats, taken, state, sound=sound, faint=faint)


def _unusual(z: Tensor, fz: Tensor) -> bool:
    """True if the squares of a row leave the dtype."""
    least, most = usual_range(z.dtype)
    largest = torch.maximum(max_norm(z), max_norm(fz))
    return bool((((largest > most) & (largest < float("inf"))) | ((largest > 0) & (largest < least))).any())


def _compact(f: Map, state: Iterate, ledger: Ledger, *, over: bool) -> tuple[Map, Iterate] | None:
    """Map and state on the running rows alone, histories written `over` where they stood; None if rows cannot be taken."""
    index = ledger.running_rows()
    smaller = f.take(index)
    if smaller is None:
        return None
    ledger.drop_finished(index)
    return smaller, map_tensors(state, lambda tensor: pack(tensor, index, over=over))


def _verified(problem: _Problem, z0: Tensor, solver: Solver[Any]) -> Flat:
    """Run; then evaluate the answer where f(z) is known by recurrence only, or from before other rows moved.

    Rows that depend on each other are left where they are: the caller solves them as one problem.
    """
    flat = _run(problem, z0, solver)
    if not _is_to_be_measured(problem, solver, flat):
        return flat
    for round in range(VERIFICATIONS + 1):
        claimed = flat.stats.converged
        flat = _confirm(problem, flat)
        left = problem.stop.max_steps - flat.taken
        if flat.coupled or left <= 0 or not problem.f.any(claimed & flat.stats.failed):
            break
        if solver.exact and flat.coupled is None:  # nothing else can have moved these rows away
            return dataclasses.replace(flat, coupled=True)
        if round == VERIFICATIONS:
            break
        flat = _merge(flat, _run(problem.with_stop(max_steps=left), flat.z, solver))
    return flat


def _is_to_be_measured(problem: _Problem, solver: Solver[Any], flat: Flat) -> bool:
    if not solver.exact:
        return problem.verify
    if problem.scale is not None:  # the residual of a linear system is measured by whoever asked for its solution
        return False
    if not flat.unmeasured or flat.coupled:
        return bool(flat.coupled)
    # a backward pass that has samples to set aside does not evaluate the answer as it is
    later = problem.measured_later and flat.coupled is False
    return not (later and not (flat.failed and flat.stats.count(Status.NONFINITE)))


def _confirm(problem: _Problem, claimed: Flat) -> Flat:
    """The result with measured residuals; samples are CONVERGED only if the measured residual is within the tolerance.

    A sample marked CONVERGED that is not becomes STALLED, because by its own residual the solver had finished.
    """
    fz = problem.f(claimed.z)
    problem.f.remember(claimed.z, fz)
    seen = _measured(problem, claimed.z, fz)
    unless = torch.where(claimed.stats.converged, Status.STALLED, claimed.stats.status)
    holds = seen.converged | (claimed.stats.converged & problem.stop.holds(seen.residual, problem.precision))
    status = torch.where(holds, Status.CONVERGED, unless).to(torch.int8)
    before = claimed.stats
    stats = dataclasses.replace(seen, status=status, steps=before.steps, rejected=before.rejected, best=before.best)
    stats = dataclasses.replace(stats, trace=before.trace, iterates=before.iterates)
    return dataclasses.replace(claimed, stats=stats, failed=True, unmeasured=False)


def measure(flat: Flat, f: FlatMap, stop: Stop, precision: float) -> Flat:
    """The result of a solve with its residuals measured by one evaluation of `f`."""
    before = flat.stats
    counter = Counter(before.evaluations, before.sample_evaluations, before.products)
    with no_autocast(flat.z.device):
        return _confirm(_Problem(Map(f, counter), stop, None, precision, False, True, False), flat)


def _measured(problem: _Problem, z: Tensor, fz: Tensor) -> Stats:
    """Statistics of one iterate; rows are divided by their magnitude before entries are squared."""
    unit = None if problem.scale is not None else binary_size(z, fz)
    if unit is not None:
        z, fz = z / unit.unsqueeze(1), fz / unit.unsqueeze(1)
    ledger = problem.ledger(z)
    if unit is not None:
        ledger.divide(unit)
    ledger.observe(Iterate(z, fz), step=0, look=False)
    return ledger.close(problem.f.counter)[1]


def _chain(problem: _Problem, z0: Tensor, chain: Fallback) -> Flat:
    """Run each solver of a Fallback in turn on the samples that are not solved yet.

    A solver may fail from the best iterate of another one and succeed from the start. Samples that all solvers leave are
    therefore solved again from the start, by the last solver first: the chain solves every sample that one of them solves.
    """
    *first, last = chain.solvers
    impatient = problem.with_stop(patience=problem.stop.patience or chain.patience)
    flat = _verified(impatient, z0, first[0])
    untried = [_gave_up(problem, flat)]  # per solver the samples for which its own run from the start is still to be seen
    for before, solver in zip(chain.solvers, (*first[1:], last), strict=False):
        if flat.faint is not None or not problem.f.any(flat.stats.failed):
            return flat  # answers that are too small for the numbers they were found with are followed first
        start = flat.z if flat.sound is None else torch.where((flat.sound | flat.stats.converged).unsqueeze(1), flat.z, z0)
        flat, more = _hand_over(problem if solver is last else impatient, flat, before, solver, start)
        moved = (start != z0).any(dim=1)
        untried.append(moved | _gave_up(problem, more))
    before = last
    for solver, rows in zip(reversed(chain.solvers), reversed(untried), strict=True):
        again = rows & flat.stats.failed & torch.isfinite(flat.stats.residual)
        if problem.f.any(again):
            flat, _ = _hand_over(problem, flat, before, solver, torch.where(again.unsqueeze(1), z0, flat.z), again)
            before = solver
    return flat


def _gave_up(problem: _Problem, flat: Flat) -> Tensor:
    """(batch,), True for samples that stalled by the patience of the chain, not by that of the caller."""
    stalled = flat.stats.status == Status.STALLED
    return stalled if problem.stop.patience is None else torch.zeros_like(stalled)


def _hand_over(
    problem: _Problem, flat: Flat, before: Solver[Any], solver: Solver[Any], start: Tensor, rows: Tensor | None = None
) -> tuple[Flat, Flat]:
    """Run `solver` from `start` on the samples that failed, or on `rows`; returns the joined result and the new one."""
    index = (flat.stats.failed if rows is None else rows).nonzero().squeeze(1)
    handover = Handover(repr(before), repr(solver), index, flat.stats.status[index], flat.stats.residual[index])
    more = _verified(problem, start, solver)
    merged = _merge(flat, more)
    stats = dataclasses.replace(merged.stats, handovers=(*flat.stats.handovers, handover))
    return dataclasses.replace(merged, stats=stats), more


def _merge(first: Flat, then: Flat) -> Flat:
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
    return Flat(z, stats, first.taken + then.taken, coupled=coupled, unmeasured=unmeasured, sound=sound, faint=then.faint)


def check_solver(solver: Any) -> None:
    if isinstance(solver, type) or not isinstance(solver, (Solver, Fallback)):
        raise TypeError(f"A solver is an object such as Anderson() or Fallback(Picard(), Newton()), got {solver!r}.")


def _reduction_device(group: Any) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
