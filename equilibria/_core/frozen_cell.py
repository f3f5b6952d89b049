"""Freezing a cell: from the first evaluation of a solve to the end of its backward, the cell is one and the same function.

What a module may recompute at every call is fixed for the solve:

    parametrized weights (weight norm, spectral norm)   computed once, in the autograd graph of the forward (`HeldWeight`)
    masks of `VariationalDropout`                       drawn at the first evaluation, then reused
    buffers (running statistics)                        constant; every evaluation that writes to them works on copies

States. A `FrozenCell` is built before the solve. It copies the module tree if there is something to hold and the tree is
copyable; `cell` is then the copy and `original` the user's module. `in_place()` installs the held weights and masks in
`cell` for the duration of a block and restores what was there before, also when blocks of nested solves or of other
threads overlap. `hand_back` copies attributes that the module set on itself while it ran to the original.

A `Snapshot` stores the module tree: every submodule, its attributes and its tensors, by reference. `build` makes new
module objects with the same attributes, in which references to submodules and tensors of the tree are replaced by their
counterparts. `call` builds a copy with the given tensors and runs it.

Any number of threads may call one snapshot. A snapshot runs the module as it was when the snapshot was taken,
even if attributes were reassigned since. Tied tensors and submodules registered twice stay tied. If an object that
cannot be copied refers to the tree (a closure, an object that stores a layer), the copy would keep using the original
through it: `copyable` is then False, and `call` swaps tensors in the module itself under a lock. Nothing here waits for
the device.

Invariants. The user's module is never modified while it can be copied, so that any number of solves may run at once. No
method here waits for the device.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import ParametrizationList

from equilibria._core import autodiff_modes
from equilibria._core.packing import State
from equilibria.nn import VariationalDropout

REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes that hold tensors and submodules; a copy gets new ones
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, torch.Generator)
_CONTAINERS = (dict, OrderedDict, set, list, tuple)  # most are empty: hooks that nobody registered
_DEPTH = 3  # nesting of plain objects up to which references to the tree are searched
_in_place = threading.RLock()  # held while the tensors of a tree that cannot be copied are swapped


class HeldWeight(nn.Module):
    """Replaces a parametrization and returns the weight that it computed.

    stands  True while this module is installed in place of the parametrization
    """

    def __init__(self, value: Tensor, original: nn.Module) -> None:
        super().__init__()
        self.stands = False
        self._original = (original,)  # in a tuple, so that it is not registered as a submodule
        self.value: Tensor
        self.register_buffer("value", value, persistent=False)

    def forward(self) -> Tensor:
        """Return the weight that was computed once."""
        return self.value

    @staticmethod
    def original(part: nn.Module) -> nn.Module:
        """Return the parametrization that `part` replaces; `part` itself if it is not a HeldWeight."""
        return part._original[0] if isinstance(part, HeldWeight) else part


@dataclass(frozen=True)
class CellTensors:
    """The tensors a cell depends on besides its arguments, by their names in the module under `FrozenCell.in_place`."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)  # of HeldWeight modules
    masks: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class FrozenCell:
    """A cell with everything that varies between calls fixed for one solve.

    Calling it has no side effects. Callers that run `cell` in other ways do so under `in_place()`. A module tree that
    cannot be copied is itself modified while `in_place()` is active.
    """

    def __init__(self, cell: Callable[..., State]) -> None:
        self.original = self.cell = cell
        self.module = cell if isinstance(cell, nn.Module) else None
        self.modules = self.sources = list(self.module.modules()) if self.module is not None else []
        # FSDP needs a process group, which most runs do not have
        self.sharded = torch.distributed.is_available() and torch.distributed.is_initialized() and is_sharded(self.modules)
        # the dict and not `hasattr`, which raises inside for every module without parametrizations
        held = any(
            "parametrizations" in m._modules or (isinstance(m, VariationalDropout) and m.active) for m in self.modules
        )
        if self.module is not None and held and not self.sharded:
            snapshot = Snapshot(self.module)
            if snapshot.copyable:
                self.modules = snapshot.build()
                self.cell = self.module = self.modules[0]
        self._before = [dict(vars(module)) for module in self.modules] if self.module is not self.original else []
        self.training = any(module.training for module in self.modules)
        self.dropouts = [m for m in self.modules if isinstance(m, VariationalDropout) and m.active]
        self._weights = _computed_weights(self.modules) if held and not self.sharded else []
        self._masks = [dropout.mask for dropout in self.dropouts]  # set if an enclosing solve has drawn them, else None
        self.holds = bool(self._weights or self.dropouts)
        self._is_in_place = False

    def __call__(self, z: State, *inputs: Any) -> State:
        """Run the cell with its held weights and masks; buffers that it moves are copies."""
        with self.in_place():
            snapshot = self.snapshot() if self.training else None
            if snapshot is None or not snapshot.tensors.buffers:
                return self.cell(z, *inputs)
            copies = {name: buffer.clone() for name, buffer in snapshot.tensors.buffers.items()}
            out: State = snapshot.call(copies, (z, *inputs))
            return out

    def snapshot(self) -> Snapshot | None:
        """Return the module as it is now, with its held weights and masks; None for a function and for sharded weights."""
        if self.module is None or self.sharded:
            return None
        if not self.holds:
            return Snapshot(self.module)
        with self.in_place():
            return Snapshot(self.module)

    def hand_back(self) -> None:
        """Copy the attributes and buffers that were assigned on the copy during the solve to the original module."""
        for source, module, before in zip(self.sources, self.modules, self._before, strict=False):
            if isinstance(module, VariationalDropout):
                continue
            changed = {name: value for name, value in vars(module).items() if value is not before.get(name)}
            vars(source).update({name: value for name, value in changed.items() if name not in REGISTERED})
            source._buffers.update(
                {name: buffer for name, buffer in module._buffers.items() if buffer is not source._buffers.get(name)}
            )

    def in_place(self) -> AbstractContextManager[None]:
        """Return a context in which `cell` has the held weights and masks; it may be entered again while it is active."""
        return self._put() if self.holds and not self._is_in_place else nullcontext()

    @contextmanager
    def _put(self) -> Iterator[None]:
        """Install held weights and masks, and restore the previous ones on exit."""
        before = [place[name] for place, name, _ in self._weights]
        around = [dropout.held for dropout in self.dropouts]  # True where an enclosing solve holds the mask too
        for place, name, weight in self._weights:
            place[name], weight.stands = weight, True
        for dropout, mask in zip(self.dropouts, self._masks, strict=True):
            dropout.held, dropout.mask = True, mask
        self._is_in_place = True
        try:
            yield
        finally:
            self._is_in_place = False
            for (place, name, weight), part in zip(self._weights, before, strict=True):
                weight.stands = False
                # `part` may be another thread's HeldWeight; if that thread has left its block, restore the parametrization
                gone = isinstance(part, HeldWeight) and not part.stands
                place[name] = HeldWeight.original(part) if gone else part
            self._masks = [dropout.mask for dropout in self.dropouts]
            for dropout, held, mask in zip(self.dropouts, around, self._masks, strict=True):
                dropout.held, dropout.mask = held, mask if held else None

    def undrawn(self) -> bool:
        """Return True if the next run draws a dropout mask, whose shape is not known before."""
        with self.in_place():
            return any(dropout.mask is None for dropout in self.dropouts)


def _computed_weights(modules: Sequence[nn.Module]) -> list[tuple[nn.ModuleDict, str, HeldWeight]]:
    """Return (ModuleDict, key, HeldWeight) of all parametrized weights; an enclosing solve's held weights are reused."""
    places = [place for m in modules if isinstance(place := getattr(m, "parametrizations", None), nn.ModuleDict)]
    parts = [(place, name, part) for place in places for name, part in place.items()]
    kinds = (ParametrizationList, HeldWeight)
    return [
        (place, name, HeldWeight(_value(part), HeldWeight.original(part)))
        for place, name, part in parts
        if isinstance(part, kinds)
    ]


def _value(parametrization: nn.Module) -> Tensor:
    """Return the weight that a parametrization computes; a spectral norm updates its vectors."""
    if autodiff_modes.inside_transform():  # torch.func forbids the in-place update of the vectors of a spectral norm
        buffers = {name: buffer.clone() for name, buffer in parametrization.named_buffers()}
        value: Tensor = Snapshot(parametrization).call(buffers, ())
        return value
    return parametrization()


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """Return True if FSDP shards these modules: it gathers weights around each call, unseen by functional_call."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in modules)


class Snapshot:
    """A module at the time of construction: its submodules, their attributes and their tensors, by reference.

    tensors   the parameters and buffers by name, a tied tensor once
    copyable  True if every reference to a part of the tree is registered or lies in lists, tuples, dicts, partials and
              bound methods, where it can be replaced
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parts = dict(module.named_modules())  # lists a submodule that is registered twice once, under its first name
        self.parts = list(parts.values())
        self._index = {id(part): i for i, part in enumerate(self.parts)}
        self._places: list[tuple[int, str, str, str]] = []  # index of the part, dict, attribute, name of the tensor
        names: dict[int, str] = {}
        self.tensors = tensors = CellTensors()
        for i, (prefix, part) in enumerate(parts.items()):
            held = isinstance(part, HeldWeight), isinstance(part, VariationalDropout)
            buffers = tensors.weights if held[0] else tensors.masks if held[1] else tensors.buffers
            for kind, found in (("_parameters", tensors.parameters), ("_buffers", buffers)):
                for attribute, tensor in getattr(part, kind).items():
                    if tensor is not None:
                        place = f"{prefix}.{attribute}" if prefix else attribute
                        if (name := names.setdefault(id(tensor), place)) == place:
                            found[name] = tensor
                        self._places.append((i, kind, attribute, name))
        self._names = names
        self._attributes = [dict(vars(part)) for part in self.parts]
        self._children = [dict(part._modules) for part in self.parts]
        self._tensors = [(dict(part._parameters), dict(part._buffers)) for part in self.parts]
        others = [
            (i, name, value)
            for i, attributes in enumerate(self._attributes)
            for name, value in attributes.items()
            # containers that are empty refer to nothing; most are hooks that nobody registered
            if not (isinstance(value, _PLAIN) or name in REGISTERED or (type(value) in _CONTAINERS and not value))
        ]
        self._referring = [(i, name) for i, name, value in others if self._refers(value)]
        self.copyable = not any(
            isinstance(part, torch.jit.ScriptModule)
            or (isinstance(part, LazyModuleMixin) and part.has_uninitialized_params())  # type: ignore[misc]
            for part in self.parts
        ) and not any(self._reaches(value, _DEPTH) for _, _, value in others)

    def build(self, tensors: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
        """Return copies of all modules of the tree, the root first; `tensors` replaces the tensors of these names."""
        # without __init__, which may be costly, draw random numbers or require arguments
        new = [object.__new__(type(part)) for part in self.parts]
        for part, attributes, children, (parameters, buffers) in zip(
            new, self._attributes, self._children, self._tensors, strict=True
        ):
            inside = part.__dict__
            inside.update(attributes)
            inside["_parameters"], inside["_buffers"] = parameters.copy(), buffers.copy()
            inside["_modules"] = {
                name: child if child is None else new[self._index[id(child)]] for name, child in children.items()
            }
        for i, kind, attribute, name in self._places if tensors else ():
            if name in tensors:  # type: ignore[operator]
                new[i].__dict__[kind][attribute] = tensors[name]  # type: ignore[index]
        for i, attribute in self._referring:
            new[i].__dict__[attribute] = self._moved(self._attributes[i][attribute], new, tensors or {})
        for part, source in zip(new, self.parts, strict=True):
            if hasattr(type(part), "follow"):  # the copy reports results to its source
                part.follow(source)
        return new

    def call(self, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
        """Run the module on `arguments` with `tensors` in place of its tensors of these names, tied ones included.

        The names are those of `named_parameters` and `named_buffers`. A buffer that the module rebinds is rebound in
        `tensors`.
        """
        if not self.copyable:
            return self._call_in_place(tensors, arguments)
        new = self.build(tensors)
        out = new[0](*arguments)
        for i, kind, attribute, name in self._places:
            if name in tensors:
                tensors[name] = new[i].__dict__[kind][attribute]
        return out

    def _call_in_place(self, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
        """Run the module itself by torch.func.functional_call, which swaps its tensors for the duration of the call.

        With tie_weights=True, functional_call swaps the tensors of a submodule that is registered twice two times and
        leaves the module with the wrong ones (pytorch issue 164759). Here every submodule is visited once.
        """
        prefixes = [name for name, _ in self.module.named_modules()]
        exchanged = {
            f"{prefixes[i]}.{attribute}" if prefixes[i] else attribute: (name, tensors[name])
            for i, _, attribute, name in self._places
            if name in tensors
        }
        given = {place: tensor for place, (_, tensor) in exchanged.items()}
        with _in_place:
            out = torch.func.functional_call(self.module, given, tuple(arguments), tie_weights=False)
        tensors.update({name: given[place] for place, (name, _) in exchanged.items()})
        return out

    def _refers(self, value: Any) -> bool:
        """Return True if `value` is a module or tensor of the tree, or a container, method or partial that holds one."""
        if isinstance(value, (nn.Module, Tensor)):
            return id(value) in self._index or id(value) in self._names
        if isinstance(value, (list, tuple, set, frozenset)):
            return any(self._refers(each) for each in value)
        if isinstance(value, dict):
            return any(self._refers(each) for each in value.values())
        if isinstance(value, MethodType):
            return self._refers(value.__self__)
        return isinstance(value, functools.partial) and self._refers((value.func, value.args, value.keywords))

    def _moved(self, value: Any, new: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> Any:
        """Return `value` with the modules and tensors of the tree replaced by their counterparts in the copy."""
        if id(value) in self._index:
            return new[self._index[id(value)]]
        if isinstance(value, Tensor):
            return tensors.get(self._names.get(id(value), ""), value)
        if not self._refers(value):
            return value

        def moved(each: Any) -> Any:
            return self._moved(each, new, tensors)

        if isinstance(value, MethodType):
            return MethodType(value.__func__, moved(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(moved(value.func), *moved(value.args), **moved(value.keywords))
        if isinstance(value, dict):
            copied = value.copy()
            copied.update({key: moved(each) for key, each in value.items()})
            return copied
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(moved, value))
        return type(value)(map(moved, value))

    def _reaches(self, value: Any, depth: int) -> bool:
        """Return True if an object that cannot be copied, up to `depth` levels inside `value`, refers to the tree."""
        if isinstance(value, (*_PLAIN, Tensor)) or depth == 0 or id(value) in self._index:
            return False
        if isinstance(value, nn.Module):  # a module that is not registered in the tree
            return any(self._refers(part) for part in value.modules())
        if isinstance(value, (list, tuple, set, frozenset)):
            return any(self._reaches(each, depth) for each in value)
        if isinstance(value, dict):
            return any(self._reaches(each, depth) for each in value.values())
        if isinstance(value, MethodType):
            return self._reaches(value.__self__, depth)
        if isinstance(value, functools.partial):
            return self._reaches((value.func, value.args, value.keywords), depth)
        inner = list(
            _held_by_function(value) if isinstance(value, FunctionType) else getattr(value, "__dict__", {}).values()
        )
        return any(self._refers(each) or self._reaches(each, depth - 1) for each in inner if not isinstance(each, _PLAIN))


def _held_by_function(function: Callable[..., Any]) -> Iterator[Any]:
    """Return the values a function closes over, and the modules and tensors among the globals it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), (nn.Module, Tensor)):
            yield value
