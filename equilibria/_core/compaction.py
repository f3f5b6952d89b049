"""May a row be evaluated without its neighbours? Asked once per cell, answered by trying it."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from equilibria._core.maps import FlatMap

WORTH = 4096  # numbers in the rows to be dropped; fewer are worth it when they are half: small kernels take equally long
DROP_AT = 8  # a map drops its stopped rows when they are an eighth; one that is dear to take apart sets another `drop_at`
# in spacings of the numbers, and at most: blocking of matrix kernels changes with the batch size, meaning does not
AGREEMENT, LOOSEST_AGREEMENT = 1e3, 0.05


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


def rows_stand_alone(f: FlatMap, smaller: FlatMap, z: Tensor, fz: Tensor, index: Tensor) -> bool:
    """Does `smaller`, the map on the rows at `index`, give what `f` gave there? Remembered for a cell that is a module."""
    if not isinstance(f, Owned):
        return _agree(smaller, z, fz, index, torch.finfo(z.dtype).eps)
    if not f.lasting:
        return _checked(f, smaller, z, fz, index)
    verdicts = _verdicts.setdefault(f.owner, {})
    if f.mode not in verdicts:
        verdicts[f.mode] = _checked(f, smaller, z, fz, index)
    return verdicts[f.mode]


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


def _checked(f: Owned, smaller: FlatMap, z: Tensor, fz: Tensor, index: Tensor) -> bool:
    verdict = _agree(smaller, z, fz, index, f.precision)
    if not verdict and not f.silent and f.owner is not None and f.owner not in _warned:
        _warned.add(f.owner)
        warnings.warn(
            "Converged samples keep being evaluated: this cell gives another value for a row without its neighbours. "
            "Make every tensor that belongs to a sample an input of the cell with the batch first; take batched=False if "
            "the state is one problem, not a batch of them; or accept the cost with Stop(compact=False).",
            stacklevel=2,
        )
    return verdict


def _agree(smaller: FlatMap, z: Tensor, fz: Tensor, index: Tensor, precision: float) -> bool:
    expected = fz.index_select(0, index)
    try:
        alone = smaller(z.index_select(0, index))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # data of the whole batch lies inside the cell, beyond the reach of its inputs
    error = torch.linalg.vector_norm(alone - expected, dim=1)
    size = torch.linalg.vector_norm(expected, dim=1)
    close = error <= min(AGREEMENT * precision, LOOSEST_AGREEMENT) * size
    return bool((close | ~torch.isfinite(size)).all())
