"""Dropping stopped rows from a batch, and detecting cells whose rows depend on each other.

The check evaluates some rows without the others and compares the result with their values within the batch. It runs once
per solve: before the first rows are dropped, or at the end if rows stopped at different steps. Results of earlier solves
are not relied on, because the cell may have changed. If the check fails, `rows_mix` distinguishes rows that depend on each
other from inputs whose first dimension has the size of the batch by coincidence.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from equilibria._core.maps import FlatMap, Map
from equilibria._core.user_warnings import warn_user
from equilibria.stop import binary_size

WORTH = 4096  # rows with fewer numbers in all are dropped only when they are half: small kernels take equally long
# A difference below SHARE of a row's tolerance changes no status. One below ROUNDING machine epsilons is rounding, because
# matrix kernels block differently for other batch sizes.
SHARE, ROUNDING = 0.05, 4.0


class CellIdentity(NamedTuple):
    """What results of checks are stored under, and which warnings a cell gets."""

    owner: Any  # the cell, or the code object of a plain function; None if it cannot be hashed or referred to weakly
    lasting: bool  # True for a module; False for a function, which may close over other data at every call
    mode: Hashable  # distinguishes calls of one owner, e.g. training and eval mode
    silent: bool  # skip the warning about closures: a function without batched inputs must close over its data


_verdicts: WeakKeyDictionary[Any, dict[Hashable, bool]] = WeakKeyDictionary()
_warned: WeakSet[Any] = WeakSet()


def worth_dropping(f: Map, stopped: int, shape: Sequence[int]) -> bool:
    """True if enough rows have stopped that dropping them saves more time than restricting the map and the state takes."""
    rows, n = shape
    share = f.drop_at if stopped * n >= WORTH else 2
    return 0 < stopped < rows and stopped * share >= rows


def is_known_to_couple(cell: CellIdentity) -> bool:
    """True if rows of this cell were found to depend on each other in an earlier solve."""
    return cell.lasting and cell.owner is not None and ("coupled", cell.mode) in _verdicts.get(cell.owner, {})


def remember_coupling(cell: CellIdentity, coupled: bool, *, warn: bool = True) -> None:
    """Store for later solves of a cell that is a module whether its rows depend on each other; warn once if they do."""
    if coupled and warn:
        warn_once(cell)
    if cell.lasting and cell.owner is not None:
        known = _verdicts.setdefault(cell.owner, {})
        if coupled:
            known["coupled", cell.mode] = True
        else:
            known.pop(("coupled", cell.mode), None)


def is_harmless(alone: Tensor, among: Tensor, relative: float, absolute: float = 0.0) -> bool:
    """True if rows evaluated alone, (k, n), equal the same rows in the batch within these errors; nan is ignored."""
    error, size = torch.linalg.vector_norm(alone - among, dim=1), torch.linalg.vector_norm(among, dim=1)
    return not bool((error > relative * size + absolute).any())


def rows_mix(f: FlatMap, z: Tensor, precision: float) -> bool | None:
    """True if a row of f(z) changes with other rows of z, None if f draws at random.

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
    """The stored results of the check for the cells in a module, by module name; checkpoints keep them."""
    found = ((name, _verdicts.get(part)) for name, part in module.named_modules())
    return {name: dict(known) for name, known in found if known}


def set_verdicts(module: nn.Module, known: Mapping[str, Any]) -> None:
    """Restore the results that `verdicts` returned."""
    for name, part in module.named_modules():
        _verdicts.pop(part, None)
        if name in known:
            _verdicts[part] = dict(known[name])


def warn_once(cell: CellIdentity) -> None:
    """Warn that rows depend on each other, once per cell and never for silent cells."""
    if cell.silent or cell.owner is None or cell.owner in _warned:
        return
    _warned.add(cell.owner)
    warn_user(
        "Converged samples keep being evaluated: this cell returns another value for a row without its neighbours. If rows "
        "depend on each other, the batch is solved as one problem. "
        "Pass every tensor that belongs to a sample as an input of the cell, with the batch dimension first; use "
        "batched=False if the state is one problem, not a batch; or accept the cost with Stop(compact=False).",
    )
