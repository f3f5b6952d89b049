"""Dropping stopped rows from a batch, and detecting cells whose rows depend on each other.

The check evaluates some rows without the others and compares the result with their values within the batch. It runs once
per solve: before the first rows are dropped, or at the end if rows stopped at different steps. Results of earlier solves
are not relied on, because the cell may have changed. If the check fails, `rows_mix` distinguishes rows that depend on each
other from inputs whose first dimension has the size of the batch by coincidence.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from equilibria._core.maps import FlatMap
from equilibria._core.user_warnings import warn_user

WORTH = 4096  # rows with fewer numbers in all are dropped only when they are half: small kernels take equally long
DROP_AT = 8  # rows are dropped when an eighth has stopped; maps that are expensive to restrict set another `drop_at`
# A difference below SHARE of a row's tolerance changes no status. One below ROUNDING machine epsilons is rounding, because
# matrix kernels block differently for other batch sizes.
SHARE, ROUNDING = 0.05, 4.0


@runtime_checkable
class Owned(Protocol):
    """A map with the identity of its cell, under which the result of the check is stored; see `Equation`."""

    owner: Any
    lasting: bool
    mode: Hashable
    precision: float
    silent: bool


_verdicts: WeakKeyDictionary[Any, dict[Hashable, bool]] = WeakKeyDictionary()
_warned: WeakSet[Any] = WeakSet()


def worth_dropping(f: FlatMap, stopped: int, shape: Sequence[int]) -> bool:
    """True if enough rows have stopped that dropping them saves more time than restricting the map and the state takes."""
    rows, n = shape
    share = getattr(f, "drop_at", DROP_AT) if stopped * n >= WORTH else 2
    return 0 < stopped < rows and stopped * share >= rows


def is_known_to_couple(owner: Any, mode: Hashable) -> bool:
    """True if rows of this cell were found to depend on each other in an earlier solve."""
    return owner is not None and ("coupled", mode) in _verdicts.get(owner, {})


def remember_coupling(f: Owned, coupled: bool, *, warn: bool = True) -> None:
    """Store for later solves of a cell that is a module whether its rows depend on each other; warn once if they do."""
    if coupled and warn:
        warn_once(f)
    if f.lasting and f.owner is not None:
        known = _verdicts.setdefault(f.owner, {})
        if coupled:
            known["coupled", f.mode] = True
        else:
            known.pop(("coupled", f.mode), None)


def is_harmless(alone: Tensor, among: Tensor, relative: float, absolute: float = 0.0) -> bool:
    """True if rows evaluated alone, (k, n), equal the same rows in the batch within these errors; nan is ignored."""
    error, size = torch.linalg.vector_norm(alone - among, dim=1), torch.linalg.vector_norm(among, dim=1)
    return not bool((error > relative * size + absolute).any())


def rows_mix(f: FlatMap, z: Tensor, precision: float) -> bool:
    """True if a row of f(z) changes with other rows of z; perturbs even and odd rows in turn, in four evaluations."""
    if len(z) < 2:
        return False
    even = (torch.arange(len(z), device=z.device) % 2 == 0).unsqueeze(1)
    before = f(z)
    if not is_harmless(f(z), before, ROUNDING * precision):
        return False  # the cell draws at random, and no two evaluations agree
    kept = torch.where(even, f(torch.where(even, z, 0.5 * z)), f(torch.where(even, 0.5 * z, z)))
    return not is_harmless(kept, before, ROUNDING * precision)


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


def warn_once(f: Owned) -> None:
    """Warn that rows depend on each other, once per cell and never for silent maps."""
    if f.silent or f.owner is None or f.owner in _warned:
        return
    _warned.add(f.owner)
    warn_user(
        "Converged samples keep being evaluated: this cell returns another value for a row without its neighbours. If rows "
        "depend on each other, the batch is solved as one problem. "
        "Pass every tensor that belongs to a sample as an input of the cell, with the batch dimension first; use "
        "batched=False if the state is one problem, not a batch; or accept the cost with Stop(compact=False).",
    )
