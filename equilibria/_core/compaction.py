"""Dropping stopped rows from a batch, and detecting cells whose rows depend on each other.

The check evaluates some rows without the others and compares the result with their values within the batch. It runs once
per solve: before the first rows are dropped, or at the end if rows stopped at different steps. Results of earlier solves
are not relied on, because the cell may have changed. If the check fails, `rows_mix` distinguishes rows that depend on each
other from inputs whose first dimension has the size of the batch by coincidence.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from equilibria._core.user_warnings import warn_user
from equilibria.stop import binary_size, rms_norm

if TYPE_CHECKING:
    from equilibria._core.maps import FlatMap
    from equilibria._core.results import LoopRun
    from equilibria.solution import SolveResult
    from equilibria.solvers.base import Iterate, Solver

# A difference below SHARE of a row's tolerance changes no status. One below ROUNDING machine epsilons is rounding, because
# matrix kernels block differently for other batch sizes.
SHARE, ROUNDING = 0.05, 4.0
RECURRENCE_SPACINGS = 1000.0  # likewise in machine epsilons, for rows whose values are updated by a recurrence
COMPARE_AFTER = 8  # steps after which rows are compared if none has stopped
FEW = 4  # up to so many rows, to evaluate all costs no more than to evaluate two


@dataclass(eq=False)
class CellIdentity:
    """The identity of a cell: the key of stored results, its warnings, and whether its rows depend on each other.

    One object per solve, shared by the equation of the cell and the linear equations of its derivatives.
    """

    owner: Any  # the cell, or the code object of a plain function; None if it cannot be hashed or referred to weakly
    lasting: bool  # True for a module; False for a function, which may close over other data at every call
    mode: Hashable  # distinguishes calls of one owner, e.g. training and eval mode
    silent: bool  # skip the warning about closures: a function without batched inputs must close over its data
    statistics: bool = False  # True if the cell uses batch statistics, so that its rows certainly depend on each other
    coupled: bool | None = None  # True if rows depend on each other, False if a check found that they do not, else None
    trusted: bool = False  # True if the last answer that a backward pass measured was that of rows that stand alone


# What earlier solves found about the rows of a module, by mode: ("coupled", mode) if they depend on each other,
# ("apart", mode) if the last answer that a backward pass measured had the residuals of its statistics.
known_rows: WeakKeyDictionary[Any, dict[Hashable, bool]] = WeakKeyDictionary()
_warned: WeakSet[Any] = WeakSet()


def remember_measured(cell: CellIdentity, agreed: bool) -> None:
    """Store for later solves of a cell that is a module whether an answer had the residuals of its statistics."""
    if cell.lasting and cell.owner is not None:
        cell.trusted, known = agreed, known_rows.setdefault(cell.owner, {})
        if agreed:
            known["apart", cell.mode] = True
        else:
            known.pop(("apart", cell.mode), None)


def remember_coupling(cell: CellIdentity, coupled: bool, *, warn: bool = True) -> None:
    """Store for later solves of a cell that is a module whether its rows depend on each other; warn once if they do."""
    if coupled and warn:
        warn_once(cell)
    if cell.lasting and cell.owner is not None:
        known = known_rows.setdefault(cell.owner, {})
        if coupled:
            known["coupled", cell.mode] = True
        else:
            known.pop(("coupled", cell.mode), None)


@dataclass(frozen=True)
class RowCheck:
    """The result of running some rows without the others; a linear system uses the result for the rows of its cell."""

    harmless: bool = False  # the influence of other rows changes no status of the rows that were compared
    weakly: bool = False  # but their influence exceeds rounding
    coupled: bool | None = None  # True: rows depend on each other; None: not known


TRUSTED = RowCheck(harmless=True, coupled=False)  # not compared: the answer is measured in the backward pass


def is_to_compare(run: LoopRun, solver: Solver[Any], step: int, stopped: int, shape: Sequence[int]) -> bool:
    """Return True if rows are to be compared before this step: once the first one has stopped, or after COMPARE_AFTER steps.

    Rows that depend on each other may never stop if they are solved separately, so that the first stop is not enough.
    """
    # at the start all rows may be zero, which hides a dependence between them
    if step == 1 or shape[0] == 1:
        return False
    if run.scale is None and solver.evaluates_residual:
        return stopped > 0 or step > COMPARE_AFTER
    return run.stop.compact and run.f.is_worth_restricting(stopped, shape)


def compare_rows(run: LoopRun, solver: Solver[Any], state: Iterate, excess: Tensor, *, rejecting: bool) -> RowCheck | None:
    """Run two of the running rows without the others, and compare the results with those in the batch.

    rejecting  True if the solver may have rejected all steps so far

    `excess`, (batch,), is negative for rows that have stopped. The rows with the largest one are run, because rows that
    still change are the least likely to be saturated. Returns None if those rows are zero, as at the start: a product with
    them would hide what they depend on.
    """
    whole = run.f
    if (
        run.stop.process_group is not None
        or not run.ordinary
        or (torch.is_grad_enabled() and is_followed(state.z, state.fz))
    ):
        return RowCheck()
    largest, few = excess.topk(min(2, len(state.z) - 1))
    smaller = whole.take(few)
    if smaller is None:
        return RowCheck()
    # only a solver that rejects steps can still be at its start; for others no value is read
    if rejecting and not bool(state.z.index_select(0, few[:1]).any()):
        return None
    try:
        alone = smaller(state.z.index_select(0, few))
    except (RuntimeError, ValueError, IndexError, TypeError):
        # the cell holds data of the whole batch, which cannot be restricted to rows
        run.warn_of_coupling()
        return RowCheck()
    # of rows that have stopped, `fz` need not be an evaluation of the cell
    among = torch.where((largest >= 0).unsqueeze(1), state.fz.index_select(0, few), alone)
    spacings = ROUNDING if solver.evaluates_residual else RECURRENCE_SPACINGS
    # in the dtype of the state: the rounding of a cell in half precision may hide a weak dependence
    if is_harmless(alone, among, spacings * torch.finfo(alone.dtype).eps):
        return RowCheck(harmless=True, coupled=False)
    stop, n = run.stop, alone.shape[1]
    # lengths are Euclidean here; a problem that is divided by units has another atol for each row
    atol = 0.0 if run.unit is not None else stop.atol * (n**0.5 if stop.norm is rms_norm else 1.0)
    # these rows do not depend on the others so far as is known; other rows may
    if is_harmless(alone, among, max(SHARE * stop.rtol, spacings * run.precision), SHARE * atol):
        return RowCheck(harmless=True, coupled=False, weakly=True)
    # values also change if an input has as many rows as the batch by coincidence, and is restricted to some of them
    coupled = rows_mix(whole, state.z, run.precision)
    if coupled is False:  # of a cell that draws at random, the failed solve is reported
        run.warn_of_coupling()
    return RowCheck(coupled=coupled or None)


def compare_answer(run: LoopRun, result: SolveResult) -> RowCheck:
    """Evaluate the row that stopped first and the one with the largest residual without the others.

    The others have changed since a row stopped. If it depends on them, its residual is no longer the recorded one.
    """
    whole, stats, stop = run.f, result.stats, run.stop
    if (
        len(result.z) <= FEW
        or stop.process_group is not None
        or not run.ordinary
        or (torch.is_grad_enabled() and is_followed(result.z))
    ):
        return RowCheck()  # an evaluation of all rows verifies more
    largest = torch.where(stats.residual < float("inf"), stats.residual, -1.0).argmax()  # nan is not below
    few = torch.stack((stats.steps.argmin(), largest))
    smaller = whole.take(few)
    if smaller is None:
        return RowCheck()
    z = result.z.index_select(0, few)
    try:
        fz = smaller(z)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return RowCheck()  # the cell holds data of the whole batch, which cannot be restricted to rows
    size = stop.norm(fz)
    change = (stop.norm(fz - z) - stats.residual.index_select(0, few) * size).abs()
    if not bool((change > ROUNDING * torch.finfo(z.dtype).eps * size).any()):  # nan does not count
        return RowCheck(harmless=True, coupled=False)
    if not bool((change > SHARE * stop.atol + max(SHARE * stop.rtol, ROUNDING * run.precision) * size).any()):
        return RowCheck(harmless=True, coupled=False, weakly=True)
    # if rows do not mix, the cell draws at random or an input only looks as if it had a row per sample
    # if rows do not mix at a state that has diverged, they may still mix at the result
    return RowCheck(coupled=rows_mix(whole, result.z, run.precision) or None)


def is_harmless(alone: Tensor, among: Tensor, relative: float, absolute: float = 0.0) -> bool:
    """Return True if rows evaluated alone, (k, n), equal the same rows in the batch within these errors; nan is ignored."""
    # one norm and one read-back: this runs in every solve, beside steps of a few microseconds
    norms = torch.linalg.vector_norm(torch.stack((alone - among, among)), dim=2)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(norms)  # `tolist` fails on these in torch 2.6
    errors, sizes = [[each.item() for each in row] for row in norms] if wrapped else norms.tolist()
    return not any(error > relative * size + absolute for error, size in zip(errors, sizes, strict=True))


def is_followed(*tensors: Tensor) -> bool:
    """Return True if any of these tensors requires gradients."""
    return any(tensor.requires_grad for tensor in tensors)


def rows_mix(f: FlatMap, z: Tensor, precision: float) -> bool | None:
    """Return True if a row of f(z) changes with other rows of z, None if f draws at random.

    Changes even and odd rows in turn, in four to six evaluations.
    """
    if len(z) < 2:
        return False
    before = f(z)
    unit = binary_size(before).unsqueeze(1)  # squares may leave the dtype
    if not is_harmless(f(z) / unit, before / unit, ROUNDING * precision):
        return None  # no two evaluations agree
    even = (torch.arange(len(z), device=z.device) % 2 == 0).unsqueeze(1)
    # halving changes no zero, and a cell that saturates may be equal at z and z / 2: then the next row's state may differ
    for other in (torch.where((z == 0) & torch.isfinite(before), before, 0.5 * z), z.roll(1, 0)):
        kept = torch.where(even, f(torch.where(even, z, other)), f(torch.where(even, other, z)))
        if not is_harmless(kept / unit, before / unit, ROUNDING * precision):
            return True
    return False


def verdicts(module: nn.Module) -> dict[str, Any]:
    """Return the stored results of the row check of the cells in a module, by module name; checkpoints keep them."""
    found = ((name, known_rows.get(part)) for name, part in module.named_modules())
    return {name: dict(known) for name, known in found if known}


def set_verdicts(module: nn.Module, known: Mapping[str, Any]) -> None:
    """Restore the results of the row check that `verdicts` returned, for example from a checkpoint."""
    for name, part in module.named_modules():
        known_rows.pop(part, None)
        if name in known:
            known_rows[part] = dict(known[name])


def warn_once(cell: CellIdentity) -> None:
    """Warn that rows depend on each other, once per cell and never for silent cells."""
    if cell.silent or cell.owner is None or cell.owner in _warned:
        return
    _warned.add(cell.owner)
    warn_user(
        "Converged samples keep being evaluated: the cell returns another value for a row if the other rows are left out. "
        "If rows depend on each other, the batch is solved as one problem; if that is intended, pass batched=False, or "
        "Stop(compact=False), which drops no rows and does not warn. Otherwise pass every tensor with data of samples as an "
        "input of the cell, with the batch dimension first.",
    )
