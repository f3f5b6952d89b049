"""State dicts: how they are stored in a file, and the check that one fits a model.

The check comes before any copy, so that a model that does not fit is left unchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 3  # names in a message


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of `torch.compile` and of data parallelism."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def identities(tensors: Mapping[str, Tensor]) -> dict[str, Hashable]:
    """Return a key per name that is equal for tied weights; views of other shapes have different keys."""
    found: dict[str, Hashable] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        found[name] = place if tensor.numel() else name  # empty tensors may share an address without being tied
    return found


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise ValueError for lazy, meta and sparse tensors, which a file cannot hold."""
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name} is a lazy parameter without a shape: run the model once before you save it.")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no numbers to save: make the model on a real device.")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is sparse ({tensor.layout}), but a file holds dense tensors: convert it with to_dense().")


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors requires: contiguous, complex ones as pairs of reals, none sharing memory."""
    stored: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().resolve_conj().resolve_neg()
        host = (torch.view_as_real(host) if host.is_complex() else host).contiguous()
        pointer = host.untyped_storage().data_ptr()
        stored[name] = host.clone() if pointer in used else host
        used.add(pointer)
    return stored


def check_fit(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """Return a sentence that lists the differences between state and model; None if the state fits."""
    own = model.state_dict()
    if any(isinstance(value, Tensor) and value.is_meta for value in own.values()):
        return "the model is on the meta device and has no memory. Allocate it with model.to_empty(device=...)."
    problems = [
        _listed("the file lacks", [name for name in own if name not in state]),
        _listed("the model has no", [name for name in state if name not in own]),
        _listed("", [text for name in own if name in state and (text := _difference(name, state[name], own[name]))]),
        _listed("tied weights of the model differ in the file:", _torn(own, state)),
    ]
    found = [problem for problem in problems if problem]
    return "; ".join(found) + "." if found else None


def take_dtypes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Convert the model's tensors to the dtypes of a state that fits it; tied tensors stay tied."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(floating) == 1 and not any(tensor.is_complex() for tensor in tensors):
        model.to(floating.pop())  # buffers that are in no state dict follow
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)


def _difference(name: str, given: Any, own: Any) -> str | None:
    """Return the difference between a tensor in the file and the model's own as text; None if they agree."""
    if not isinstance(given, Tensor) or not isinstance(own, Tensor):
        return None if isinstance(given, Tensor) == isinstance(own, Tensor) else f"{name} is a tensor in only one of them"
    if not nn.parameter.is_lazy(own) and given.shape != own.shape:
        return f"{name} is {tuple(given.shape)} in the file and {tuple(own.shape)} in the model"
    if _dtype_kind(given) != _dtype_kind(own):
        return f"{name} is {given.dtype} in the file and {own.dtype} in the model"
    return None


def _dtype_kind(tensor: Tensor) -> tuple[bool, ...]:
    """Return the kind of a dtype (real, complex, integer, bool) as flags; tensors are not converted between kinds."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def _torn(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return pairs of names that are one tensor in the model and different tensors in the file."""
    first: dict[Hashable, str] = {}
    shared = {name: value for name, value in own.items() if isinstance(value, Tensor) and not nn.parameter.is_lazy(value)}
    pairs = [(first.setdefault(key, name), name) for name, key in identities(shared).items() if name in state]
    return [f"{a} and {b}" for a, b in pairs if state[a] is not state[b] and not _same_bits(state[a], state[b])]


def _same_bits(a: Any, b: Any) -> bool:
    """Return True if two tensors are equal bit by bit; a nan equals itself."""
    same = a.shape == b.shape and a.dtype == b.dtype
    return bool(same and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))))


def _listed(what: str, names: Sequence[str]) -> str:
    """Return `what` followed by the first SHOWN names; an empty text without names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(names[:SHOWN])}{more}".strip() if names else ""
