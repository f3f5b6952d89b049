"""Do rows depend on each other? A few rows are run without the others and compared with what they gave among them.

That is asked once in every solve, before the first rows are dropped or at its end if rows stopped at different steps; an
answer from an earlier solve is not trusted, because a cell may have changed since. `rows_mix` then tells rows that depend on
each other from inputs that only look as if they had a row per sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from equilibria._core.maps import FlatMap
from equilibria._core.user_warnings import warn_user

WORTH = 4096  # numbers in the rows to be dropped; fewer are worth it when they are half: small kernels take equally long
DROP_AT = 8  # a map drops its stopped rows when they are an eighth; one that is dear to take apart sets another `drop_at`
# A difference below this share of a row's tolerance changes no status. One below so many spacings of the numbers is
# rounding: the blocking of matrix kernels changes with the batch size.
SHARE, ROUNDING = 0.05, 4.0


@runtime_checkable
class Owned(Protocol):
    """A map that knows which cell it runs, so that one answer serves all its solves."""

    owner: Any
    lasting: bool
    mode: Hashable
    precision: float
    silent: bool


_verdicts: WeakKeyDictionary[Any, dict[Hashable, bool]] = WeakKeyDictionary()
_warned: WeakSet[Any] = WeakSet()


def worth_dropping(f: FlatMap, stopped: int, shape: Sequence[int]) -> bool:
    """Have so many rows stopped that going on without them pays for taking the map and the state apart?"""
    rows, n = shape
    share = getattr(f, "drop_at", DROP_AT) if stopped * n >= WORTH else 2
    return 0 < stopped < rows and stopped * share >= rows


def is_known_to_couple(owner: Any, mode: Hashable) -> bool:
    """True if rows of this cell were found to depend on each other in an earlier solve."""
    return owner is not None and ("coupled", mode) in _verdicts.get(owner, {})


def remember_coupling(f: Owned, coupled: bool) -> None:
    """Store for later solves of a cell that is a module whether its rows depend on each other; warn once if they do."""
    if coupled:
        warn_once(f)
    if f.lasting and f.owner is not None:
        known = _verdicts.setdefault(f.owner, {})
        if coupled:
            known["coupled", f.mode] = True
        else:
            known.pop(("coupled", f.mode), None)


def is_harmless(alone: Tensor, among: Tensor, relative: float, absolute: float = 0.0) -> bool:
    """True if rows run alone, (k, n), equal the same rows among others up to these errors; nan does not count."""
    error, size = torch.linalg.vector_norm(alone - among, dim=1), torch.linalg.vector_norm(among, dim=1)
    return not bool((error > relative * size + absolute).any())


def rows_mix(f: FlatMap, z: Tensor, precision: float) -> bool:
    """True if rows of f(z) change with other rows of z: even and odd ones are changed in turn, in three evaluations."""
    if len(z) < 2:
        return False
    even = (torch.arange(len(z), device=z.device) % 2 == 0).unsqueeze(1)
    before = f(z)
    kept = torch.where(even, f(torch.where(even, z, 0.5 * z)), f(torch.where(even, 0.5 * z, z)))
    return not is_harmless(kept, before, ROUNDING * precision)


def verdicts(module: nn.Module) -> dict[str, Any]:
    """What is known of the cells in a module: to find it out anew costs an evaluation, and could end differently."""
    found = ((name, _verdicts.get(part)) for name, part in module.named_modules())
    return {name: dict(known) for name, known in found if known}


def set_verdicts(module: nn.Module, known: Mapping[str, Any]) -> None:
    """As they were when `verdicts` was called."""
    for name, part in module.named_modules():
        _verdicts.pop(part, None)
        if name in known:
            _verdicts[part] = dict(known[name])


def warn_once(f: Owned) -> None:
    if f.silent or f.owner is None or f.owner in _warned:
        return
    _warned.add(f.owner)
    warn_user(
        "Converged samples keep being evaluated: this cell gives another value for a row without its neighbours. Where rows "
        "depend on each other, the batch is solved as one problem. "
        "Make every tensor that belongs to a sample an input of the cell with the batch first; take batched=False if "
        "the state is one problem, not a batch of them; or accept the cost with Stop(compact=False).",
    )
