"""Starting states of a solve, and inputs that a cell prepares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core.packing import State, zeros_like_first
from equilibria.remember import Remember


@dataclass(frozen=True, init=False)
class Zeros:
    """Zeros of shape (batch, *shape), with the dtype and device of the inputs; integer inputs use the cell's dtype."""

    shape: tuple[int, ...]

    def __init__(self, *shape: int) -> None:
        object.__setattr__(self, "shape", shape)

    def __repr__(self) -> str:
        return f"Zeros({', '.join(map(str, self.shape))})"

    def make(self, cell: Any, inputs: Sequence[Any], *, batched: bool) -> Tensor:
        """Return the start of a solve with these inputs, whose first tensor has the batch size."""
        tensors = [leaf for leaf in pytree.tree_leaves(tuple(inputs)) if isinstance(leaf, Tensor)]
        if not tensors:
            raise ValueError(
                "eq.Zeros takes the batch size from the inputs, and there is no tensor among them. Pass z0 or a "
                "callable init."
            )
        parameters = list(cell.parameters()) if isinstance(cell, nn.Module) else []
        real = [tensor for tensor in (*tensors, *parameters) if tensor.is_floating_point()]
        dtype = real[0].dtype if real else torch.get_default_dtype()
        size = (tensors[0].shape[0], *self.shape) if batched else self.shape
        return torch.zeros(size, dtype=dtype, device=tensors[0].device)


@dataclass(frozen=True)
class FirstStep:
    """Start from f(start, x), the explicit first step of Skip DEQ V2; `start` is any other `init`, None for zeros."""

    start: Any = None


Init = None | Zeros | FirstStep | Remember | Callable[..., State]


def check_cell(cell: Any) -> None:
    if not callable(cell):
        raise TypeError(f"The cell must be an nn.Module or a callable cell(z, *inputs) -> z, got {cell!r}.")


def check_init(init: Any) -> None:
    if init is not None and not callable(init) and not isinstance(init, (Zeros, FirstStep, Remember)):
        raise TypeError(
            "init must be None, eq.Zeros(*shape), eq.FirstStep(), eq.Remember() or a callable init(*inputs) -> z0, "
            f"got {init!r}."
        )
    if isinstance(init, (FirstStep, Remember)):
        check_init(init.start)


def memory_of(init: Init) -> Remember | None:
    """Return the `Remember` inside an `init`, or None."""
    if isinstance(init, FirstStep):
        return memory_of(init.start)
    return init if isinstance(init, Remember) else None


def first_steps(init: Init) -> int:
    """Return the number of cell evaluations that the start costs."""
    if isinstance(init, FirstStep):
        return 1 + first_steps(init.start)
    return first_steps(init.start) if isinstance(init, Remember) else 0


def prepared(cell: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the result of `cell.prepare(*inputs)` as a tuple, or the inputs if the cell has no `prepare`."""
    prepare = getattr(cell, "prepare", None)
    if prepare is None:
        return tuple(inputs)
    result = prepare(*inputs)
    return result if isinstance(result, tuple) else (result,)


def start_of(init: Init, cell: Any, f: Callable[[State], State], inputs: Sequence[Any], *, batched: bool) -> State:
    """Return the starting state; differentiable if `init` is."""
    if init is None:
        return zeros_like_first(inputs)
    if isinstance(init, Zeros):
        return init.make(cell, inputs, batched=batched)
    if isinstance(init, FirstStep):
        return f(start_of(init.start, cell, f, inputs, batched=batched))
    if isinstance(init, Remember):
        return init.recall(start_of(init.start, cell, f, inputs, batched=batched), batched)
    return init(*inputs)


def note_first_call(error: Exception, cell: Any, inputs: Sequence[Any]) -> None:
    """Add the shapes of the first call to an error that the cell raises there, for a solve from zeros like the first input.

    The cell is called once more, to see whether it raises the same error by itself.
    """
    # with several processes a call may be a collective operation, which the others do not join
    if type(error) not in (RuntimeError, TypeError) or (dist.is_available() and dist.is_initialized()):
        return
    try:
        z = zeros_like_first(inputs)
        given = prepared(cell, inputs) if hasattr(cell, "prepare") else inputs
    except Exception:  # the error is not one of the call
        return
    try:
        with torch.no_grad():
            cell(z, *given)
    except Exception as again:
        if type(again) is type(error) and str(again) == str(error):
            shapes = ", ".join(str(tuple(x.shape)) for x in pytree.tree_leaves((z, *given)) if isinstance(x, Tensor))
            error.add_note(
                f"The cell raised this when it was called as cell(z, *inputs) with tensors of shapes {shapes}. A solve "
                "starts from zeros like the first input; for a state of another shape, pass init=eq.Zeros(*shape)."
            )
