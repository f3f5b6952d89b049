"""One function per solve: what a cell computes or draws anew at every call is held from the first call to the backward.

Weights behind a parametrization (weight norm, spectral norm) are computed once, inside the autograd graph of the forward,
masks of `VariationalDropout` are drawn once, buffers such as running statistics stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from equilibria._core import autodiff_modes, stateless
from equilibria._core.packing import State
from equilibria.nn import VariationalDropout


class HeldWeight(nn.Module):
    """Stands where a parametrization stood and gives the weight that it computed."""

    def __init__(self, value: Tensor, original: nn.Module) -> None:
        super().__init__()
        self.stands = False
        self._original = (original,)  # no part of this module
        self.value: Tensor
        self.register_buffer("value", value, persistent=False)

    def forward(self) -> Tensor:
        return self.value

    @staticmethod
    def original(part: nn.Module) -> nn.Module:
        """The parametrization that a part is, or stands for."""
        return part._original[0] if isinstance(part, HeldWeight) else part


@dataclass(frozen=True)
class CellTensors:
    """What a cell depends on beside its arguments, by name in the cell as it is `in_place`."""

    parameters: dict[str, Tensor]
    weights: dict[str, Tensor]  # held in place of their parametrizations
    masks: dict[str, Tensor]
    buffers: dict[str, Tensor]


class FrozenCell:
    """A cell for the time of one solve.

    Called, it is a function without side effects. `in_place` puts what is held into `cell`, for those who run it in other
    ways. `cell` is then a copy of the one that was given, `original`, so that any number of solves may be under way, in any
    number of threads; a tree that cannot be copied is changed itself for as long as it runs.
    """

    def __init__(self, cell: Callable[..., State]) -> None:
        self.original = self.cell = cell
        self.module = cell if isinstance(cell, nn.Module) else None
        self.modules = self.sources = list(self.module.modules()) if self.module is not None else []
        if self.module is not None and any(map(_is_held, self.modules)) and not is_sharded(self.modules):
            snapshot = stateless.Snapshot(self.module)
            if snapshot.copyable:
                self.modules = snapshot.build()
                self.cell = self.module = self.modules[0]
        self._before = [dict(vars(module)) for module in self.modules] if self.module is not self.original else []
        self.sharded = is_sharded(self.modules)
        self.training = any(module.training for module in self.modules)
        self.dropouts = [m for m in self.modules if isinstance(m, VariationalDropout) and m.active]
        self._weights = [] if self.sharded else _computed_weights(self.modules)
        self._masks = [dropout.mask for dropout in self.dropouts]  # of a solve around this one; None: yet to be drawn
        self.holds = bool(self._weights or self.dropouts)
        self._is_in_place = False
        self._snapshot: stateless.Snapshot | None = None

    def __call__(self, z: State, *inputs: Any) -> State:
        with self.in_place():
            buffers = self.tensors().buffers if self.training and not self.sharded else {}
            if self.module is None or not buffers:
                return self.cell(z, *inputs)
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            out: State = self.snapshot().call(copies, (z, *inputs))
            return out

    def snapshot(self) -> stateless.Snapshot:
        """The module with what this solve holds, as it was when this was first asked for."""
        assert self.module is not None
        if self._snapshot is None:
            with self.in_place():
                self._snapshot = stateless.Snapshot(self.module)
        return self._snapshot

    def hand_back(self) -> None:
        """Give the original the attributes and buffers that a copy of it was given while it ran."""
        for source, module, before in zip(self.sources, self.modules, self._before, strict=False):
            if isinstance(module, VariationalDropout):
                continue
            changed = {name: value for name, value in vars(module).items() if value is not before.get(name)}
            vars(source).update({name: value for name, value in changed.items() if name not in stateless.REGISTERED})
            source._buffers.update(
                {name: buffer for name, buffer in module._buffers.items() if buffer is not source._buffers.get(name)}
            )

    def in_place(self) -> AbstractContextManager[None]:
        """The cell itself with what this solve holds."""
        return self._put() if self.holds and not self._is_in_place else nullcontext()

    @contextmanager
    def _put(self) -> Iterator[None]:
        before = [place[name] for place, name, _ in self._weights]
        around = [dropout.held for dropout in self.dropouts]  # does a solve around this one hold it too?
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
                # another thread's weight was found there; if that thread is done since, nobody would take it away again
                gone = isinstance(part, HeldWeight) and not part.stands
                place[name] = HeldWeight.original(part) if gone else part
            self._masks = [dropout.mask for dropout in self.dropouts]
            for dropout, held, mask in zip(self.dropouts, around, self._masks, strict=True):
                dropout.held, dropout.mask = held, mask if held else None

    def undrawn(self) -> bool:
        """Are there masks that the next run will draw? Their shape is not known before."""
        with self.in_place():
            return any(dropout.mask is None for dropout in self.dropouts)

    def tensors(self) -> CellTensors:
        """None, where the cell is a plain function or its weights are sharded: they are then out of reach."""
        if self.module is None or self.sharded:
            return CellTensors({}, {}, {}, {})
        with self.in_place():
            buffers = dict(self.module.named_buffers())
            weights = {name: b for name, b in buffers.items() if _owned_by(self.module, name, HeldWeight)}
            masks = {name: b for name, b in buffers.items() if _owned_by(self.module, name, VariationalDropout)}
            others = {name: b for name, b in buffers.items() if name not in weights and name not in masks}
            return CellTensors(dict(self.module.named_parameters()), weights, masks, others)


def _is_held(module: nn.Module) -> bool:
    """Does a solve hold something of this module: a weight that is computed, or a mask?"""
    if isinstance(module, VariationalDropout):
        return module.active
    return isinstance(getattr(module, "parametrizations", None), nn.ModuleDict)


def _owned_by(module: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    """Is the tensor of that name an attribute of such a module?"""
    return isinstance(module.get_submodule(name.rpartition(".")[0]), kind)


def _computed_weights(modules: Sequence[nn.Module]) -> list[tuple[nn.ModuleDict, str, HeldWeight]]:
    """Every parametrized weight with its place, computed; one that a solve around this one holds is not computed again."""
    places = [place for m in modules if isinstance(place := getattr(m, "parametrizations", None), nn.ModuleDict)]
    parts = [(place, name, part) for place in places for name, part in place.items()]
    kinds = (ParametrizationList, HeldWeight)
    return [
        (place, name, HeldWeight(_value(part), HeldWeight.original(part)))
        for place, name, part in parts
        if isinstance(part, kinds)
    ]


def _value(parametrization: nn.Module) -> Tensor:
    if autodiff_modes.inside_transform():  # torch.func refuses to move the vectors of a spectral norm in place
        buffers = {name: buffer.clone() for name, buffer in parametrization.named_buffers()}
        value: Tensor = stateless.call(parametrization, buffers, ())
        return value
    return parametrization()


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """Does FSDP own weights? It then gathers and reduces them around every call, out of functional_call's sight."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in modules)
