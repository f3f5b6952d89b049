"""Running a module with other tensors in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def call(module: nn.Module, tensors: dict[str, Tensor], arguments: Sequence[Any]) -> Any:
    """module(*arguments) with `tensors` for the parameters and buffers of these names, wherever else they are used.

    The names are those of `named_parameters` and `named_buffers`. Buffers that the module rebinds are rebound in `tensors`.
    """
    exchanged = {place: tensors[name] for place, name in _places(module).items() if name in tensors}
    out = torch.func.functional_call(module, exchanged, tuple(arguments), tie_weights=False)
    tensors.update({name: exchanged[name] for name in tensors})
    return out


def _places(module: nn.Module) -> dict[str, str]:
    """Every attribute that holds a parameter or a buffer, and the name that goes by: the first one of that tensor.

    torch.func.functional_call, left to tie weights itself, exchanges the tensors of a submodule that is registered twice
    twice, and leaves the module with the wrong ones (pytorch issue 164759). Here every submodule is visited once.
    """
    names: dict[int, str] = {}
    places = {}
    for prefix, part in module.named_modules():
        for attribute, tensor in (*part._parameters.items(), *part._buffers.items()):
            place = f"{prefix}.{attribute}" if prefix else attribute
            if tensor is not None:
                places[place] = names.setdefault(id(tensor), place)
    return places
