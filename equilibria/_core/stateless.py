"""Running a module with other tensors in place of its own, on a shallow copy: the module itself is never written to.

A copy is a tree of new module objects with the attributes of the old ones, so that any number of threads may run one
module, and a module runs as it was when it was copied whatever its owner has changed since.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, torch.Generator)
_DEPTH = 3  # how far into objects that are no modules references to the tree are looked for
_in_place = threading.RLock()  # for trees that cannot be copied


def call(module: nn.Module, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
    """module(*arguments) with `tensors` for the parameters and buffers of these names, wherever else they are used.

    The names are those of `named_parameters` and `named_buffers`. Buffers that the module rebinds are rebound in `tensors`.
    """
    return Snapshot(module).call(tensors, arguments)


class Snapshot:
    """A module as it is now: its submodules, their attributes and their tensors, by reference.

    A tree is copied only where every reference to its parts is seen: registered, or in lists, tuples, dicts and bound
    methods. Where other objects refer to parts of it (a closure, an object that holds a layer), `copyable` is False, and
    tensors are exchanged in the module itself, one thread at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parts = dict(module.named_modules())  # a submodule that is registered twice goes by its first name
        self.parts = list(parts.values())
        self._index = {id(part): i for i, part in enumerate(self.parts)}
        self._places: list[tuple[int, str, str, str]] = []  # part, dict, attribute and the name of the tensor
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
        self._referring = [(i, name) for i in range(len(self.parts)) for name in self._names_that_refer(i)]
        self.copyable = not any(map(_cannot_be_copied, self.parts)) and not self._is_referred_to_from_elsewhere()

    def build(self, tensors: Mapping[str, Tensor] | None = None) -> list[nn.Module]:
        """New parts, the module itself first, with other tensors under their names."""
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
            if hasattr(type(part), "follow"):  # a module whose copies hand something back
                part.follow(source)
        return new

    def call(self, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
        """As the function `call`."""
        if not self.copyable:
            return self._call_in_place(tensors, arguments)
        new = self.build(tensors)
        out = new[0](*arguments)
        for i, kind, attribute, name in self._places:
            if name in tensors:
                tensors[name] = new[i].__dict__[kind][attribute]
        return out

    def _call_in_place(self, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
        """By torch.func.functional_call, which exchanges the tensors of the module.

        Left to tie weights itself, it exchanges the tensors of a submodule that is registered twice twice, and leaves the
        module with the wrong ones (pytorch issue 164759). Here every submodule is visited once.
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

    def _names_that_refer(self, i: int) -> Iterator[str]:
        """Attributes through which a part refers to parts or tensors of the tree, beside those it has registered."""
        for name, value in self._attributes[i].items():
            if name not in REGISTERED and not isinstance(value, _PLAIN) and self._refers(value):
                yield name

    def _refers(self, value: Any) -> bool:
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
        """`value` with the new parts and tensors in place of the old ones."""
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

    def _is_referred_to_from_elsewhere(self) -> bool:
        values = (value for part in self._attributes for name, value in part.items() if name not in REGISTERED)
        return any(self._reaches(value, _DEPTH) for value in values if not isinstance(value, _PLAIN))

    def _reaches(self, value: Any, depth: int) -> bool:
        """Does something that cannot be copied refer to the tree?"""
        if isinstance(value, (*_PLAIN, Tensor)) or depth == 0 or id(value) in self._index:
            return False
        if isinstance(value, nn.Module):  # one that is not registered
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
    """What a function closes over, and the globals it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(name), (nn.Module, Tensor)):
            yield value


def _cannot_be_copied(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
