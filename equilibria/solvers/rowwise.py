"""Operations on solver states row by row: rows are taken, put back and combined without influencing each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria.solvers.base import Iterate

T = TypeVar("T")


def map_tensors(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a state with `change` applied to each of its tensors, also those of states it wraps."""
    changed = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
        elif isinstance(value, Iterate):
            changed[field.name] = map_tensors(value, change)
    return dataclasses.replace(state, **changed)


def collect(state: Any, kind: type[T]) -> list[T]:
    """Return the values of type `kind` in a state and the states it wraps, in the order of their fields."""
    found: list[T] = []
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        found += [value] if isinstance(value, kind) else collect(value, kind) if isinstance(value, Iterate) else []
    return found


def rebuild(like: Any, tensors: Iterator[Tensor], counters: Iterator[int]) -> Any:
    """Return a state of the kind of `like` from its tensors and counters."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(like):
        value = getattr(like, field.name)
        if isinstance(value, Tensor):
            values[field.name] = next(tensors)
        elif isinstance(value, Iterate):
            values[field.name] = rebuild(value, tensors, counters)
        elif isinstance(value, int):
            values[field.name] = next(counters)
    return dataclasses.replace(like, **values)


def gather(whole: Any, part: Any, index: Tensor | None) -> Any:
    """Return the state of the batch with its rows at `index` (None for all) from `part`, whose history may have grown."""
    if whole is None or index is None:
        return part
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        old, new = getattr(whole, field.name), getattr(part, field.name)
        if isinstance(new, Tensor) and isinstance(old, Tensor):
            grown = new.new_zeros(old.shape[0], *new.shape[1:])
            grown[tuple(slice(0, extent) for extent in old.shape)] = old
            changed[field.name] = grown.index_copy(0, index, new)
        elif isinstance(new, Iterate):
            changed[field.name] = gather(old, new, index)
        elif isinstance(new, Tensor):
            changed[field.name] = None  # `active` and `rejected` are valid only for the rows of `part`
    return dataclasses.replace(part, **changed)


def compact_rows(tensor: Tensor, index: Tensor, *, over: bool) -> Tensor:
    """Return the rows at `index`, which ascends.

    A history (batch, slots, n) is the largest tensor of a state. With `over`, it is compacted in place, slot by slot, so
    that no second copy is allocated.
    """
    if tensor.dim() != 3 or not over or differentiated(tensor):
        return tensor.index_select(0, index)
    front = tensor[: len(index)]
    for slot in range(tensor.shape[1]):
        front[:, slot] = tensor[:, slot].index_select(0, index)
    return front


def rejected(state: Iterate) -> Tensor | None:
    """Return (batch,), True for rows whose last step was discarded, also by a wrapped solver; None if there are none."""
    if state.rejected is not None:
        return state.rejected
    wrapped = (value for value in vars(state).values() if isinstance(value, Iterate))
    return next((rows for rows in map(rejected, wrapped) if rows is not None), None)


def differentiated(*tensors: Tensor) -> bool:
    """Return True if these tensors are differentiated or traced, so that in-place writes are not allowed."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level() or autodiff_modes.is_tracing()


def without_graph(x: Tensor) -> Tensor:
    """Return `x` itself if it has no graph, else x.detach(), which takes time."""
    return x.detach() if x.requires_grad else x


def set_slot(buffer: Tensor, slot: int | Tensor, value: Tensor, active: Tensor | None = None) -> Tensor:
    """Return `buffer` (batch, slots, ...) with `value` in one slot of the active rows.

    Writes in place, because a copy of the history costs more than a step, unless autograd needs the old values.
    """
    if isinstance(slot, Tensor):  # in a trace
        here = torch.arange(buffer.shape[1], device=buffer.device) == slot
        return torch.where(here.view(-1, *[1] * (buffer.dim() - 2)), value.unsqueeze(1), buffer)
    if active is not None:
        value = torch.where(active.view(-1, *[1] * (value.dim() - 1)), value, buffer[:, slot])
    if differentiated(buffer, value):
        return torch.cat([buffer[:, :slot], value.unsqueeze(1), buffer[:, slot + 1 :]], dim=1)
    buffer[:, slot] = value
    return buffer


SMALL_STATE = 64  # up to this size, a full history is cheap and solves an affine problem in n steps
MEDIUM_STATE = 1024  # beyond this size, reading the history costs as much as a cheap cell
FIRST_SLOTS = 8  # history slots at the first growth; a short solve needs few


def history_size(setting: int | None, budget: int | None, z: Tensor, *, small: int, medium: int, large: int) -> int:
    """Return how many pairs of vectors a solver stores: `setting`, or a default for the size of the state.

    The number is limited to what fits into `budget` bytes for the whole batch, and is at least one.
    """
    n = z.shape[1]
    wanted = setting
    if wanted is None:
        wanted = max(small, 1) if n <= SMALL_STATE else medium if n <= MEDIUM_STATE else large
    if budget is None:
        return wanted
    return max(1, min(wanted, budget // max(2 * z.numel() * z.element_size(), 1)))


def ridge(setting: float | None, dtype: torch.dtype) -> float:
    """Return the share of a difference's norm below which its orthogonal part is rounding; default sqrt(epsilon)."""
    return torch.finfo(dtype).eps ** 0.5 if setting is None else setting


def check_history(solver: str, name: str, setting: int | None, budget: int | None, instead: str = "") -> None:
    """Raise unless a history setting and a budget are positive or None."""
    require(setting is None or setting >= 1, f"{solver}'s {name} must be at least 1, got {setting}{instead}.")
    require(budget is None or budget >= 1, f"{solver}'s budget must be some bytes or None, got {budget}.")


def grow(buffer: Tensor, slot: int, limit: int, dims: tuple[int, ...] = (1,), *, blank: bool = True) -> Tensor:
    """Return `buffer` with at least `slot` + 1 places along `dims`, at most `limit`; its size doubles when it is full.

    A short solve therefore allocates little. New places are zero if `blank`, otherwise uninitialized.
    """
    size = buffer.shape[1]
    if slot < size:
        return buffer
    larger = list(buffer.shape)
    for dim in dims:
        doubled = max(2 * size, FIRST_SLOTS)
        # both the old and the new buffer are in memory while one is copied: no step of growth for the last third
        larger[dim] = limit if 3 * doubled >= 2 * limit else doubled
    grown = buffer.new_zeros(larger) if blank else buffer.new_empty(larger)
    grown[tuple(slice(0, extent) for extent in buffer.shape)] = buffer
    return grown


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each row, (batch, 1)."""
    return (a * b).sum(dim=1, keepdim=True)


def products(rows: Tensor, x: Tensor) -> Tensor:
    """Return (batch, k), the inner products of each sample's k vectors (batch, k, n) with its x (batch, n)."""
    if autodiff_modes.is_tracing():  # where sums are fused with what goes around them
        return (rows * x.unsqueeze(1)).sum(dim=2)
    # this order of factors is twice as fast on a CPU
    return torch.bmm(x.unsqueeze(1), rows.transpose(1, 2)).squeeze(1)


def subtract_combination(x: Tensor, weights: Tensor, rows: Tensor, *, over: bool = False) -> Tensor:
    """Return x (batch, n) minus each sample's k vectors (batch, k, n) times weights (batch, k), in x if `over`."""
    if autodiff_modes.is_tracing():
        return x - (weights.unsqueeze(2) * rows).sum(dim=1)
    if over:
        x.unsqueeze(1).baddbmm_(weights.unsqueeze(1), rows, alpha=-1)
        return x
    return torch.baddbmm(x.unsqueeze(1), weights.unsqueeze(1), rows, alpha=-1).squeeze(1)


def combine(weights: Tensor, rows: Tensor) -> Tensor:
    """Return (batch, n), the sum of each sample's k vectors (batch, k, n) times weights (batch, k)."""
    return torch.bmm(weights.unsqueeze(1), rows).squeeze(1)


def solve_small(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^{-1} right of each sample, (batch, k, k) and (batch, k); zero where the matrix is singular.

    Zero weights turn the caller's step into a plain one, which is always defined. An exception for one sample would stop
    all others.
    """
    solution = torch.linalg.solve_ex(matrix, right.unsqueeze(2))[0].squeeze(2)
    if not differentiated(solution):
        return torch.nan_to_num_(solution, nan=0.0, posinf=0.0, neginf=0.0)
    # an unused solution that is not finite would still give 0 * nan in the gradient
    usable = torch.isfinite(solution).all(dim=1, keepdim=True)
    eye = torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    safe = torch.where(usable.unsqueeze(2), matrix, eye), torch.where(usable, right, torch.zeros_like(right))
    return torch.linalg.solve_ex(safe[0], safe[1].unsqueeze(2))[0].squeeze(2)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0."""
    zero = b == 0
    return torch.where(zero, torch.zeros_like(a), a / torch.where(zero, torch.ones_like(b), b))
