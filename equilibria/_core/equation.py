"""The equation of a cell on packed states, and equations under vmap.

`CellEquation` takes every tensor that the cell depends on as an argument: inputs, parameters, masks and buffers. It runs the
module itself where the arguments are the module's own tensors, and a copy with other tensors elsewhere. Under vmap, an
equation with a mapped dimension becomes a `FoldedEquation` with more rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from equilibria._core import autodiff_modes
from equilibria._core.autodiff_modes import Autocast
from equilibria._core.compaction import CellIdentity, known_rows
from equilibria._core.frozen_cell import CellTensors, FrozenCell
from equilibria._core.maps import Equation, LinearMap, Map
from equilibria._core.packing import Layout, State


class CellEquation(Equation):
    """A cell on nested states as an equation on matrices; its args are the inputs, parameters, masks and buffers.

    Buffers are constant during a solve. If the cell updates them (batch norm), every evaluation works on a copy, and
    `settle` updates the module's own buffers once, at the equilibrium.
    """

    def __init__(self, cell: FrozenCell, layout: Layout, inputs: Sequence[Any]) -> None:
        self.cell, self.layout, self._given = cell, layout, tuple(inputs)
        self._leaves: list[Any] = list(inputs)
        self._inputs_spec: pytree.TreeSpec | None = None  # None if every input is a tensor
        if not all(isinstance(each, Tensor) for each in inputs):
            self._leaves, self._inputs_spec = pytree.tree_flatten(tuple(inputs))
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.opaque = cell.sharded  # True if the cell depends on tensors that cannot be passed as arguments
        self._snapshot = cell.snapshot()
        own = CellTensors() if self._snapshot is None else self._snapshot.tensors
        self._names = (*own.parameters, *own.weights, *own.masks, *own.buffers)
        self._buffers = tuple(own.buffers)
        self._inputs = len(tensors)
        may_move = cell.training and len(own.buffers) > 0
        self.moves_buffers = None if may_move else False  # True if the cell updates its buffers; None before its first run
        self._writes: bool | None = None  # True if the cell writes into its state in place; None before its first run
        kept = [buffer.clone() if may_move else buffer for buffer in own.buffers.values()]  # `settle` updates the originals
        still = (*own.parameters.values(), *own.weights.values())
        masks = tuple(own.masks.values())
        self._own = (*still, *masks, *kept)
        self.args: tuple[Tensor, ...] = (*tensors, *self._own)
        # backward runs elsewhere, perhaps outside of the autocast block, and must compute the same numbers
        self.autocast = Autocast.current(layout.device)
        self.precision = torch.finfo(self.autocast.dtype).eps if self.autocast.enabled else layout.precision
        self._needs_context = self.autocast.enabled or cell.holds
        batch = layout.batch if layout.batched else None
        rows = [tensor.dim() > 0 and tensor.shape[0] == batch for tensor in (*tensors, *masks)]
        self.rowwise = (*rows[: len(tensors)], *[False] * len(still), *rows[len(tensors) :], *[False] * len(kept))
        lasting, mode = cell.module is not None, (cell.training, self.rowwise)
        statistics = any(isinstance(module, _NormBase) and uses_batch_statistics(module) for module in cell.modules)
        owner, silent = cell.original if lasting else _owner(cell.original), not lasting and not any(rows)
        self.identity = CellIdentity(owner, lasting, mode, silent, statistics)
        known = known_rows.get(owner, {}) if lasting else {}
        self.identity.coupled = True if statistics or ("coupled", mode) in known else None
        self.identity.trusted = ("apart", mode) in known
        # the dropout masks of a sharded cell are not args, so that `take` cannot restrict them
        self.restrictable = not statistics and not (self.opaque and cell.dropouts)

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return F(z, *args) with all tensors replaced by `args`, differentiable in them."""
        inputs = args[: self._inputs] if self._inputs_spec is None else self._unflatten(args)
        return self._run(z, args, inputs, direct=False)

    def bind(self, args: Sequence[Tensor]) -> Map:
        """Return the map z -> F(z, *args); it calls the module itself if the args are the module's own tensors."""
        # the module itself may be called if the args are its own tensors
        own = all(a is b for a, b in zip(args[self._inputs :], self._own, strict=True))
        same = own and all(a is b for a, b in zip(args, self.args, strict=True))
        inputs = self._given if same else args[: self._inputs] if self._inputs_spec is None else self._unflatten(args)
        return Map(lambda z: self._run(z, args, inputs, direct=own), self, args)

    def untraceable(self) -> str | None:
        """Return the reason why the cell cannot be traced; None if it can."""
        if self.cell.module is None:
            return "the cell is a function, which may close over other data every time; an nn.Module can be compiled"
        if self.opaque or self.identity.coupled or self.moves_buffers is not False:
            return "the cell is sharded, couples the samples or has buffers that may change in training"
        return None

    def fingerprint(self) -> Hashable:
        """Return a key of the settings of the cell that a trace takes as constants."""
        constants = tuple(_known(leaf) for leaf in self._leaves if not isinstance(leaf, Tensor))
        settings = tuple(_settings(module) for module in self.cell.sources)
        # TreeSpecs are not hashable in torch 2.6, their text is
        structure = repr(self._inputs_spec), len(self._leaves)
        return self.identity.mode, self.autocast, constants, structure, self.layout.leaves, settings

    def captures(self, z: Tensor) -> tuple[Tensor, bool]:
        """Return F(z), and True if a plain callable closes over tensors that require gradients."""
        with torch.enable_grad():
            args = [autodiff_modes.primal(arg).detach() for arg in self.args]
            out = self._run(z, args, self._unflatten(args), direct=True)
        mapped = autodiff_modes.is_mapped(out) and not any(autodiff_modes.is_mapped(arg) for arg in (z, *self.args))
        if mapped or autodiff_modes.tangent(out) is not None:
            raise RuntimeError(OUT_OF_REACH)
        return out.detach(), out.requires_grad

    def settle(self, z: Tensor) -> bool:
        """Run the cell at z, (batch, n), so that it updates its own buffers; True, because it was run."""
        with torch.no_grad(), self.autocast.inside(), self.cell.in_place():
            self.cell.cell(self.layout.unpack(z.clone() if self._writes else z), *self._unflatten(self.args))
        return True

    def _run(self, z: Tensor, args: Sequence[Tensor], inputs: Sequence[Any], *, direct: bool) -> Tensor:
        """Evaluate the cell on the matrix z; `direct` calls it without replacing its tensors by `args`."""
        first, layout = self._writes is None, self.layout
        given = _copied(z) if first or self._writes else z  # a cell that writes in place must not change the solver's z
        state, direct = given if layout.flat else layout.unpack(given), direct and self.moves_buffers is False
        # the leaves and not `given`: unpacking copies some leaves and returns views for others, depending on the batch size
        parts = [] if not first else [state] if layout.flat else pytree.tree_leaves(state)
        watched = [(part, _version(part)) for part in parts]
        if self._needs_context:  # entering a context takes measurable time
            with self.autocast.inside(), self.cell.in_place():
                out = self.cell.cell(state, *inputs) if direct else self._run_functional(state, inputs, args[self._inputs :])
        else:
            out = self.cell.cell(state, *inputs) if direct else self._run_functional(state, inputs, args[self._inputs :])
        if first:
            self._writes = any(version is None or _version(part) != version for part, version in watched)
        if layout.flat and isinstance(out, Tensor) and out.shape == z.shape and out.dtype == z.dtype:
            return out
        packed = layout.pack_output(out, z.shape[0], cast=self.autocast.enabled)
        return layout.refuse_overflow(z, packed) if layout.narrow else packed

    def _run_functional(self, state: State, inputs: Sequence[Any], tensors: Sequence[Tensor]) -> State:
        """Call a copy of the module with `tensors` in place of its own, so that the module is not modified."""
        named = dict(zip(self._names, tensors, strict=True))
        if self.moves_buffers is not False:
            named |= {name: _copied(named[name]) for name in self._buffers}
        before = [(named[name], _version(named[name])) for name in self._buffers] if self.moves_buffers is None else []
        arguments = (state, *inputs)
        snapshot = self._snapshot  # the cell itself may have been changed between forward and backward
        out: State = self.cell.cell(*arguments) if snapshot is None else snapshot.call(named, arguments)
        if self.moves_buffers is None:
            after = [named[name] for name in self._buffers]
            self.moves_buffers = any(
                new is not old or version is None or _version(new) != version
                for new, (old, version) in zip(after, before, strict=True)
            )
        return out

    def _unflatten(self, args: Sequence[Tensor]) -> Sequence[Any]:
        """Return the nested inputs of the cell, with the first tensors of `args` as leaves."""
        if self._inputs_spec is None:
            return args[: self._inputs]
        tensors = iter(args)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        inputs: Sequence[Any] = pytree.tree_unflatten(leaves, self._inputs_spec)
        return inputs


@dataclass(frozen=True)
class Fold:
    """A mapped dimension of size `size` that is folded into the batch."""

    size: int
    batch: int
    dims: tuple[int | None, ...]  # position of the mapped dimension in each arg; None for args that are not mapped
    randomness: str

    def unfold(self, x: Tensor) -> Tensor:
        """Split the first dimension of a folded tensor again: (size * batch, ...) -> (size, batch, ...)."""
        return x.unflatten(0, (self.size, self.batch))


class FoldedEquation(Equation):
    """An equation under vmap as an equation over size * batch rows.

    Rows cannot be taken, because the mapped dimension need not be the first one of an arg.
    """

    def __init__(self, of: Equation, fold: Fold) -> None:
        self.of, self.fold = of, fold
        self.rowwise, self.linear = (False,) * len(fold.dims), of.linear
        self.precision, self.identity = of.precision, of.identity

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        """Return F over all mapped samples, (size * batch, n)."""
        mapped = torch.func.vmap(self.of, in_dims=(0, *self.fold.dims), randomness=self.fold.randomness)
        out: Tensor = mapped(self.fold.unfold(z), *args)
        return out.flatten(0, 1)

    def bind(self, args: Sequence[Tensor]) -> Map:
        """Return the map over all rows, a `LinearMap` if the equation is linear."""
        right = self.right(*args)
        if right is None:
            return super().bind(args)

        def product(t: Tensor) -> Tensor:
            return self(t, *args) - right

        def transposed(t: Tensor) -> Tensor:
            return autodiff_modes.vjp(product, torch.zeros_like(t))(t)[0]

        return LinearMap(product, transposed, right, self, args)

    def right(self, *args: Tensor) -> Tensor | None:
        """Return the right-hand sides of all mapped samples, (size * batch, n); None if the equation is not linear."""
        if not self.linear:
            return None
        mapped: Any = torch.func.vmap(self.of.right, in_dims=self.fold.dims)(*args)
        return mapped.flatten(0, 1)

    def set_coupled(self, coupled: bool, *, warn: bool = True) -> None:
        """Store that rows depend on each other."""
        if coupled:  # False is not stored: with a batch of one, the rows compared are different mapped samples
            super().set_coupled(coupled, warn=warn)


OUT_OF_REACH = (
    "The cell closes over tensors that are being differentiated or mapped over. Only tensors that are passed to it can be "
    "tracked: forward mode, torch.func transforms and second derivatives need them as inputs, "
    "f(z, *inputs), or as parameters of a cell that is an nn.Module."
)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with a version counter, also under `torch.inference_mode()`, where a plain clone has none."""
    if not torch.is_inference_mode_enabled() or autodiff_modes.inside_transform():
        return tensor.clone()
    with torch.inference_mode(False):
        copy = torch.empty_like(tensor)
    return copy.copy_(tensor)


def _version(tensor: Tensor) -> int | None:
    """Return the version counter, which every in-place write increments; None for inference tensors, which have none.

    A tensor whose version is None counts as written to.
    """
    return None if tensor.is_inference() else tensor._version


def _settings(module: nn.Module) -> Hashable:
    """Return a module's type and attributes except tensors and submodules: constants of a trace, hooks included."""
    elsewhere = ("_parameters", "_buffers", "_modules")
    return type(module), tuple((name, _known(value)) for name, value in vars(module).items() if name not in elsewhere)


def _known(value: Any) -> Hashable:
    """Return a key of a value: numbers, strings and containers by content, other objects by identity."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_known, value))
    if isinstance(value, dict):
        return type(value), tuple((key, _known(each)) for key, each in value.items())
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return True if the module normalizes over the batch: batch norm, except in eval mode with running statistics."""
    over_batch = isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)
    return over_batch and (module.training or not module.track_running_stats)


def _owner(cell: Any) -> Any:
    """Return a hashable, weakly referable object that lives as long as the cell; None if there is none."""
    owner = cell if isinstance(cell, nn.Module) else getattr(cell, "__code__", cell)
    try:
        weakref.ref(owner)
        hash(owner)
    except TypeError:
        return None
    return owner
