"""Running a module with other tensors in place of its own, on a shallow copy, so that the module is not modified.

A `Snapshot` stores the module tree: every submodule, its attributes and its tensors, by reference. `build` makes new
module objects with the same attributes, in which references to submodules and tensors of the tree are replaced by their
counterparts. `call` builds a copy with the given tensors and runs it.

Invariants. Any number of threads may call one snapshot. A snapshot runs the module as it was when the snapshot was taken,
even if attributes were reassigned since. Tied tensors and submodules registered twice stay tied. If an object that
cannot be copied refers to the tree (a closure, an object that stores a layer), the copy would keep using the original
through it: `copyable` is then False, and `call` swaps tensors in the module itself under a lock. Nothing here waits for
the device.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, torch.Generator)
_CONTAINERS = (dict, OrderedDict, set, list, tuple)  # most are empty: hooks that nobody registered
_DEPTH = 3  # nesting of plain objects up to which references to the tree are searched
_in_place = threading.RLock()  # held while the tensors of a tree that cannot be copied are swapped


def call(module: nn.Module, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
    """module(*arguments) with `tensors` in place of the parameters and buffers of these names, tied ones included.

    The names are those of `named_parameters` and `named_buffers`. A buffer that the module rebinds is rebound in `tensors`.
    """
    return Snapshot(module).call(tensors, arguments)


class Snapshot:
    """A module at the time of construction: its submodules, their attributes and their tensors, by reference.

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
        for i, (prefix, part) in enumerate(parts.items()):
            for kind in ("_parameters", "_buffers"):
                for attribute, tensor in getattr(part, kind).items():
                    if tensor is not None:
                        place = f"{prefix}.{attribute}" if prefix else attribute
                        self._places.append((i, kind, attribute, names.setdefault(id(tensor), place)))
        self._names = names
        self._attributes = [dict(vars(part)) for part in self.parts]
        self._children = [dict(part._modules) for part in self.parts]
        self._tensors = [(dict(part._parameters), dict(part._buffers)) for part in self.parts]
        others = [
            (i, name, value)
            for i, attributes in enumerate(self._attributes)
            for name, value in attributes.items()
            if not (
                isinstance(value, _PLAIN) or name in REGISTERED or (isinstance(value, (dict, set)) and not value)
            )  # no hooks
        ]
        self._referring = [(i, name) for i, name, value in others if self._refers(value)]
        self.copyable = not any(
            isinstance(part, torch.jit.ScriptModule) or (isinstance(part, LazyModuleMixin) and _is_lazy(part))
            for part in self.parts
        ) and not any(self._reaches(value, _DEPTH) for _, _, value in others)

    def build(self, tensors: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
        """Copies of all modules of the tree, the root first; `tensors` replaces the tensors of these names."""
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
        """As the function `call`, for this snapshot."""
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
        """True if `value` is a module or tensor of the tree, or a container, method or partial that holds one."""
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
        """`value` with the modules and tensors of the tree replaced by their counterparts in the copy."""
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
        """True if an object that cannot be copied, up to `depth` levels inside `value`, refers to the tree."""
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
    """The values a function closes over, and the modules and tensors among the globals it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), (nn.Module, Tensor)):
            yield value


def _is_lazy(module: Any) -> bool:
    """True for a lazy module without initialized parameters, which cannot be copied."""
    return bool(module.has_uninitialized_params())
