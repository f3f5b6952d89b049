"""A solve as one operator that `torch.compile` does not look into, so that it compiles what is around a layer.

A graph break is not sufficient: torch runs a frame with a break inside a loop without compiling any of it, and the forward
of `nn.Sequential` is such a loop.

The operator runs `DEQ.solve` as usual, on copies of its inputs because a compiled program may reuse their memory. It keeps
the graph of that solve until its token, an output that autograd saves, is freed; `solve_backward` differentiates that graph.
Layers are passed by number, because an operator takes tensors and plain values only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from equilibria import solution
from equilibria.starts import Zeros

AVAILABLE = hasattr(torch.compiler, "is_exporting")  # torch 2.6 does not distinguish an export from a compilation
# torch runs an operator with autograd switched off below it; a solve needs the keys that ordinary code has
_ORDINARY = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_numbers = itertools.count()
_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()


@dataclass(frozen=True)
class _Graph:
    """A solve that awaits its backward pass: its output, the tensors to differentiate for, and the life of its token."""

    z: Tensor
    leaves: list[Tensor]
    token: StorageWeakRef


_graphs: dict[int, _Graph] = {}


def register(layer: nn.Module) -> int:
    """Store the layer, and return the number by which the operator finds it."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def applies(layer: Any, inputs: tuple[Any, ...], init: Any) -> bool:
    """Return True if this call can be one operator: a module as cell, tensors, a start of known shape, nothing that records.

    `torch.compile` evaluates it while it traces, and compiles anew when the result changes.
    """
    return (
        AVAILABLE
        and not torch.compiler.is_exporting()
        and torch._C._functorch.maybe_current_level() is None  # the operator has no rules for torch.func
        and forward_ad._current_level < 0
        and solution.open_recordings() == 0  # a recorded solution is connected to the graph around it
        and isinstance(layer.cell, nn.Module)
        and init is None
        and (layer.init is None or isinstance(layer.init, Zeros))
        and len(inputs) > 0
        and all(isinstance(each, Tensor) for each in inputs)
        and inputs[0].is_floating_point()
        and not torch.is_autocast_enabled(inputs[0].device.type)  # the operator would run outside of it
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())  # sharded weights
    )


def call(layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the equilibrium, computed by the operator."""
    parameters = list(layer.parameters())
    recording = torch.is_grad_enabled()
    wanted = [recording and each.requires_grad for each in (*inputs, *parameters)]
    z, _ = torch.ops.equilibria.solve(layer._number, list(inputs), parameters, wanted)
    return z


# The schemas are written out: torch before 2.7 cannot read them from hints like list[Tensor].
@torch.library.custom_op(
    "equilibria::solve",
    mutates_args=(),
    schema="(int layer, Tensor[] inputs, Tensor[] parameters, bool[] wanted) -> (Tensor, Tensor)",
)
def solve(layer: int, inputs: list[Tensor], parameters: list[Tensor], wanted: list[bool]) -> tuple[Tensor, Tensor]:
    """Solve a layer; returns the equilibrium and a token for backward. `wanted`: tensors that need gradients."""
    found = _layers[layer]
    # free the graphs whose tokens are gone: no backward can reach them any more
    for number in [number for number, graph in _graphs.items() if graph.token.expired()]:
        del _graphs[number]
    token = torch.tensor(next(_numbers))
    with torch._C._ForceDispatchKeyGuard(*_ORDINARY), torch.set_grad_enabled(any(wanted)):
        copies = [each.detach().clone().requires_grad_(want) for each, want in zip(inputs, wanted, strict=False)]
        z = found.solve(*copies).z
    if any(wanted):
        every = [*copies, *found.parameters()]
        leaves = [each for each, want in zip(every, wanted, strict=True) if want]
        # raise if z depends on a tensor that needs a gradient and is neither an input nor a parameter of the layer
        known = {id(leaf) for leaf in leaves}
        waiting, seen = [z.grad_fn], {z.grad_fn}
        while waiting:
            node: Any = waiting.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise RuntimeError(
                    f"The cell uses a tensor of shape {tuple(leaf.shape)} that needs a gradient and is neither an input nor "
                    "a parameter of the layer; torch.compile would lose its gradient. Make it one of these, or keep the "
                    "layer out of the compiled program: layer.forward = torch.compiler.disable(layer.forward)."
                )
            new = {next_node for next_node, _ in getattr(node, "next_functions", ()) if next_node is not None} - seen
            seen |= new
            waiting += new
        _graphs[int(token)] = _Graph(z, leaves, StorageWeakRef(token.untyped_storage()))
    return z.detach().clone(memory_format=torch.contiguous_format), token


@solve.register_fake
def _(layer: int, inputs: list[Tensor], parameters: list[Tensor], wanted: list[bool]) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes of the results, for traces."""
    found, first = _layers[layer], inputs[0]
    shape = first.shape if found.init is None else (*first.shape[: int(found.batched)], *found.init.shape)
    return first.new_empty(shape), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "equilibria::solve_backward", mutates_args=(), schema="(Tensor token, Tensor cotangent, Tensor[] like) -> Tensor[]"
)
def solve_backward(token: Tensor, cotangent: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a solve, for the tensors that need them, which have the shapes of `like`."""
    graph = _graphs.get(int(token))
    if graph is None:
        raise RuntimeError(
            "The solve of this backward pass is gone: a backend of torch.compile has copied what autograd saved. Keep the "
            "equilibrium layer out of the compiled program: layer.forward = torch.compiler.disable(layer.forward)."
        )
    with torch._C._ForceDispatchKeyGuard(*_ORDINARY):
        found = torch.autograd.grad(graph.z, graph.leaves, cotangent, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each.clone() for each, leaf in zip(found, like, strict=True)]


@solve_backward.register_fake
def _(token: Tensor, cotangent: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(each) for each in like]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the token of the graph, and tensors like the gradients, for backward."""
    _, given, parameters, ctx.wanted = inputs
    ctx.given = len(given)
    like = [each for each, want in zip((*given, *parameters), ctx.wanted, strict=True) if want]
    ctx.save_for_backward(output[1], *like)


def _backward(ctx: Any, cotangent: Tensor, _: Any) -> tuple[Any, ...]:
    """Return the gradients of inputs and parameters, by the graph that forward stored."""
    token, *like = ctx.saved_tensors
    found = iter(torch.ops.equilibria.solve_backward(token, cotangent, like) if like else [])
    every = [next(found) if want else None for want in ctx.wanted]
    return None, every[: ctx.given], every[ctx.given :], None


solve.register_autograd(_backward, setup_context=_save)
