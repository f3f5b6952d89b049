"""Queries of the active modes of torch (transforms, forward mode, traces, autocast), and derivatives that work in all.

PyTorch has two interfaces to forward mode, `torch.func.jvp` and `torch.autograd.forward_ad`, and they do not nest: inside
an open `forward_ad.dual_level()` a `torch.func.jvp` raises. This module is the only one that distinguishes the two. It
reads private state of torch (`torch._C._functorch`), because there is no public query for the active transforms.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")
_tracing = False
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has no such query
# torch has one stack of forward-mode levels for all threads, so that only one thread at a time may run a jvp
_forward_mode = threading.RLock()
_forward_thread: int | None = None  # the thread whose jvp is running


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that `torch.compile` must not trace, as `torch.compiler.disable` does.

    `torch.compiler.disable` imports torch._dynamo and sympy at once, which takes seconds. This decorator calls it only after
    they have been loaded, for example by the first `torch.compile`.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, behind `torch.compiler.disable` if torch._dynamo is loaded."""
        # `is_compiling` first: it is a constant in a trace, and sys.modules cannot be traced
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            if not disabled:
                disabled.append(_disabled(function))
            return disabled[0](*args, **kwargs)
        return function(*args, **kwargs)

    return call


@contextmanager
def tracing() -> Iterator[None]:
    """Mark a block that is traced into a graph: no in-place writes and no control flow that depends on values."""
    global _tracing
    before, _tracing = _tracing, True
    try:
        yield
    finally:
        _tracing = before


def _disabled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `torch.compiler.disable(function)`, with the reason that errors of a strict export print."""
    reason = "The steps of a solve depend on values. To export a model with equilibrium layers, use eq.export or eq.to_onnx."
    try:
        return torch.compiler.disable(function, reason=reason)
    except TypeError:  # torch 2.6 takes no reason
        return torch.compiler.disable(function)


def check_not_exported() -> None:
    """Raise inside torch.export, torch.onnx.export and torch.jit.trace, which cannot record a loop of unknown length."""
    if _is_exporting() or torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "torch.export, torch.onnx.export and torch.jit.trace record operations once, and the number of steps to an "
            "equilibrium depends on values. Export the model with eq.export(model, inputs) or "
            "eq.to_onnx(model, inputs, path), which turn every equilibrium layer into a loop."
        )


def is_ordinary() -> bool:
    """Return True if no transform, no forward mode and no trace is active; all other queries are then False."""
    if _tracing or forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    return torch._C._get_tracing_state() is None and not _is_exporting()


def is_tracing() -> bool:
    """Return True inside a `tracing()` block."""
    return _tracing


def inside_transform() -> bool:
    """Return True if a `torch.func` transform (grad, vjp, jvp, vmap) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_dual_level() -> bool:
    """Return True if a `forward_ad.dual_level()` of this thread is open outside of any `torch.func` transform."""
    return forward_ad._current_level >= 0 and not inside_transform() and not _another_threads_level()


def _another_threads_level() -> bool:
    """Return True if the open forward-mode level belongs to a jvp of another thread."""
    return _forward_thread is not None and _forward_thread != threading.get_ident()


def forward_levels() -> int:
    """Return the number of nested `torch.func.jvp` transforms."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def check_derivatives(what: str, *tensors: Tensor) -> None:
    """Raise under inference mode, where torch silently returns zero derivatives; `what` begins the message."""
    if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors):
        raise RuntimeError(f"{what} needs derivatives, which torch.inference_mode() forbids: take torch.no_grad() instead.")


def primal(x: Tensor) -> Tensor:
    """Return `x` without its tangent of the open dual level, if it has one."""
    return forward_ad.unpack_dual(x).primal if inside_dual_level() else x


def tangent(x: Tensor) -> Tensor | None:
    """Return the tangent of `x` in the open dual level or `torch.func.jvp`; None if it has none."""
    if forward_ad._current_level < 0 or _another_threads_level():
        return None
    return forward_ad.unpack_dual(x).tangent


def is_mapped(x: Tensor) -> bool:
    """Return True if `x` has a dimension that `torch.func.vmap` maps over."""
    return bool(torch._C._functorch.is_batchedtensor(x))


def has_values(*tensors: Tensor) -> bool:
    """Return True if numbers can be read from these tensors: no vmap maps over them, at any level of transforms."""
    functorch = torch._C._functorch
    for tensor in tensors:
        while functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                return False
            tensor = functorch.get_unwrapped(tensor)
    return True


def numbers(x: Tensor) -> list[Any]:
    """Return `x.tolist()` of a vector, also inside a transform, where `tolist` fails in torch 2.6."""
    return [each.item() for each in x] if torch._C._functorch.is_functorch_wrapped_tensor(x) else x.tolist()


def check_recordable() -> None:
    """Raise where torch records the operations once, because the number of steps of a solve depends on values."""
    if _tracing:
        return
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    if any(level.key() == functorch.TransformType.Functionalize for level in stack):
        raise RuntimeError(
            "torch.func.functionalize cannot pass through an equilibrium: torch has no rule for functions with derivatives "
            "of their own there. Functionalize what comes before and after it."
        )
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise RuntimeError(
            "torch.func.linearize and make_fx record operations once, and the number of steps to an equilibrium depends on "
            "values. Take torch.func.jvp or torch.func.vjp in place of linearize; to ship a model, see eq.export."
        )


def pull_each(pull: Callable[[Tensor], Sequence[Tensor | None]], v: Tensor) -> Sequence[Tensor | None]:
    """Return pull(v). Under autograd.grad(is_grads_batched=True), call pull for each cotangent of the batch in turn."""
    if not torch._C._functorch.is_legacy_batchedtensor(v):
        return pull(v)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    pulled = [pull(each) for each in torch._remove_batch_dim(v, level, 1, 0)]
    return [
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)
        for parts in zip(*pulled, strict=True)
    ]


def jvp(f: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    """Return the derivative of `f` at `primals` along `tangents`."""
    if not inside_dual_level():
        try:
            with _one_thread():
                return torch.func.jvp(f, tuple(primals), tuple(tangents))[1]
        except RuntimeError as error:
            if "mutate a captured Tensor" not in str(error):
                raise
            raise RuntimeError(
                "The cell is a function that changes a tensor it closes over, as batch norm in training mode moves its "
                "statistics, and the solver needs forward-mode derivatives of it, in which that is not possible. Make the "
                "cell an nn.Module that holds the tensor, call eval() on the layer that changes it, or take a solver "
                "without derivatives such as eq.Anderson()."
            ) from error
    # autograd.Function disables forward mode inside its methods; the level itself is still open
    with forward_ad._set_fwd_grad_enabled(True):
        out = f(*[forward_ad.make_dual(primal(p), t) for p, t in zip(primals, tangents, strict=True)])
        value, derivative = forward_ad.unpack_dual(out)
    return torch.zeros_like(value) if derivative is None else derivative


@contextmanager
def _one_thread() -> Iterator[None]:
    """Hold the lock of forward mode, and store which thread holds it; leave inference mode."""
    global _forward_thread
    with ExitStack() as stack:
        stack.enter_context(_forward_mode)
        if torch.is_inference_mode_enabled():  # the jvp of torch 2.6 returns zeros there; no_grad still prevents a graph
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        before, _forward_thread = _forward_thread, threading.get_ident()
        try:
            yield
        finally:
            _forward_thread = before


def vjp(f: Callable[..., Tensor], *primals: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return the pull-back of `f` at `primals`, itself differentiable."""
    pull: Callable[[Tensor], tuple[Tensor, ...]] = torch.func.vjp(f, *primals)[1]
    return pull


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward pass, stored because backward must evaluate the cell in the same state."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> Autocast:
        """Return the autocast state that is active now for this type of device."""
        if not torch.amp.is_autocast_available(device.type):
            return _autocast(device.type, False, torch.float32)
        return _autocast(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def inside(self) -> AbstractContextManager[Any]:
        """Return a context that restores this state, for evaluations of the cell."""
        return torch.autocast(self.device, dtype=self.dtype) if self.enabled else nullcontext()


_autocast = functools.lru_cache(maxsize=64)(Autocast)  # every solve needs one


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast, for the solver: Gram matrices and small systems need full precision."""
    kind = device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return _autocast_disabled(kind) if enabled else nullcontext()


@contextmanager
def _autocast_disabled(kind: str) -> Iterator[None]:
    """Disable autocast for a type of device, and clear its cache at the end."""
    with torch.autocast(kind, enabled=False):
        yield
    # casts cached under no_grad have no graph; reused in a later evaluation, they would cut the gradient
    torch.clear_autocast_cache()
