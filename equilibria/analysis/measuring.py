"""Measure a model without side effects: capture the inputs of its equilibrium layers and run it with its state restored."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.deq import DEQ, constant


@dataclass(frozen=True)
class LayerCall:
    """A layer and its inputs."""

    deq: DEQ
    inputs: tuple[Any, ...]


class _FirstSolve(NamedTuple):
    """A call and the `init` it was given; None if it used the layer's own."""

    deq: DEQ
    inputs: tuple[Any, ...]
    start: Any


def captured(model: nn.Module, batch: Any) -> dict[str, LayerCall]:
    """Return every DEQ in `model` by name, with the detached inputs of its first solve in model(batch).

    If that solve was called with `init`, the DEQ is a twin around the same cell that always starts there.

    `batch` is a tensor, or a tuple or list of the model's arguments. Floating-point inputs require gradients, as in
    training. A DEQ inside another DEQ's cell is not returned.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, DEQ)]
    if not layers:
        raise ValueError(f"This {type(model).__name__} contains no eq.DEQ.")
    found: dict[str, _FirstSolve] = {}
    with untouched(model, batch), torch.no_grad(), _watched(layers, found):
        model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    # a DEQ inside another's cell is part of that cell's function
    inner = {name for name, _ in layers for other, _ in layers if name.startswith(f"{other}.cell." if other else "cell.")}
    return {name: LayerCall(_starting(s.deq, s.start), s.inputs) for name, s in found.items() if name not in inner}


@contextmanager
def untouched(module: nn.Module, inputs: Any = (), seed: int | None = None) -> Iterator[None]:
    """Give the module copies of its buffers inside the block, and restore buffers and random state after it.

    inputs  tensors whose devices have their random state restored too
    seed    of the random state inside the block, so that measurements repeat; None: the state stays as it is
    """
    parts = list(module.modules())
    originals = [dict(part._buffers) for part in parts]
    copies = {id(buffer): buffer.clone() for buffer in module.buffers()}
    generators = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    for part, own in zip(parts, originals, strict=True):
        part._buffers.update({name: copies.get(id(buffer)) for name, buffer in own.items()})
    leaves = [*module.parameters(), *pytree.tree_leaves(inputs)]
    devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            if seed is not None:  # torch.manual_seed would change GPUs whose state is not restored
                for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)):
                    generator.manual_seed(seed)
            yield
    finally:
        for part, own in zip(parts, originals, strict=True):
            part._buffers.clear()
            part._buffers.update(own)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def muted(layers: Sequence[DEQ]) -> Iterator[None]:
    """Set on_failure="ignore" and compact=False on the layers inside the block.

    Compaction is off because its first use checks the cell and remembers the result, which is a side effect.
    """
    stops = [(layer, layer.stop, layer.eval_stop) for layer in layers]
    for layer, stop, eval_stop in stops:
        layer.stop = dataclasses.replace(stop, on_failure="ignore", compact=False)
        if eval_stop is not None:
            layer.eval_stop = dataclasses.replace(eval_stop, on_failure="ignore", compact=False)
    try:
        yield
    finally:
        for layer, stop, eval_stop in stops:
            layer.stop, layer.eval_stop = stop, eval_stop


@contextmanager
def _watched(layers: Sequence[tuple[str, DEQ]], found: dict[str, _FirstSolve]) -> Iterator[None]:
    """Record the inputs of every layer's `solve` inside the block; failures to converge are ignored."""
    for name, deq in layers:
        deq.solve = _noting(name, deq, found)  # type: ignore[method-assign]
    try:
        with muted([deq for _, deq in layers]):
            yield
    finally:
        for _, deq in layers:
            del deq.solve


def _noting(name: str, deq: DEQ, found: dict[str, _FirstSolve]) -> Any:
    """Return a `solve` that records its first inputs and then solves."""

    def solve(*inputs: Any, init: Any = None) -> Any:
        if name not in found:
            found[name] = _FirstSolve(deq, pytree.tree_map(_leaf, inputs), init)
        return type(deq).solve(deq, *inputs, init=init)

    return solve


def _starting(deq: DEQ, start: Any) -> DEQ:
    """Return the layer, or if `start` is given a twin of the same parts that always starts there."""
    if start is None:
        return deq
    twin = copy.copy(deq)
    # without "init": nn.Module refuses to replace a registered module by a function
    twin.__dict__["_modules"] = {name: part for name, part in deq._modules.items() if name != "init"}
    twin.init = constant(start)
    return twin


def _leaf(value: Any) -> Any:
    """Return a detached copy of a tensor, which requires a gradient if its dtype allows one; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    real = value.is_floating_point() or value.is_complex()
    return value.detach().clone().requires_grad_(real)


def brief(part: Any) -> str:
    """Return settings as source text; a dataclass shows the fields that differ from their defaults."""
    if isinstance(part, tuple):
        return f"({', '.join(map(brief, part))})"
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return getattr(part, "__name__", repr(part))
    shown = [field for field in dataclasses.fields(part) if not _is_default(field, getattr(part, field.name))]
    text = ", ".join(f"{field.name}={brief(getattr(part, field.name))}" for field in shown)
    return f"{type(part).__name__}({text})"


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return True if `value` equals the default of the field."""
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(made is not dataclasses.MISSING and value == made)
