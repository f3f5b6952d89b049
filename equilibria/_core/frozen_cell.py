"""Freezing a cell: from the first evaluation of a solve to the end of its backward, the cell is one and the same function.

What a module may recompute at every call is fixed for the solve:

    parametrized weights (weight norm, spectral norm)   computed once, in the autograd graph of the forward (`HeldWeight`)
    masks of `VariationalDropout`                       drawn at the first evaluation, then reused
    buffers (running statistics)                        constant; every evaluation that writes to them works on copies

States. A `FrozenCell` is built before the solve. It copies the module tree if there is something to hold and the tree is
copyable; `cell` is then the copy and `original` the user's module. `in_place()` installs the held weights and masks in
`cell` for the duration of a block and restores what was there before, also when blocks of nested solves or of other
threads overlap. `hand_back` copies attributes that the module set on itself while it ran to the original.

`Autocast` is the precision that the cell runs in, which belongs to what is fixed. The solver runs without autocast.

Invariants. The user's module is never modified while it can be copied, so that any number of solves may run at once. No
method here waits for the device.
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
        return self.value

    @staticmethod
    def original(part: nn.Module) -> nn.Module:
        """The parametrization that `part` replaces; `part` itself if it is not a HeldWeight."""
        return part._original[0] if isinstance(part, HeldWeight) else part


@dataclass(frozen=True)
class CellTensors:
    """The tensors a cell depends on besides its arguments, by their names in the module under `FrozenCell.in_place`."""

    parameters: dict[str, Tensor]
    weights: dict[str, Tensor]  # of HeldWeight modules
    masks: dict[str, Tensor]
    buffers: dict[str, Tensor]


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
        held = any(hasattr(m, "parametrizations") or (isinstance(m, VariationalDropout) and m.active) for m in self.modules)
        if self.module is not None and held and not self.sharded:
            snapshot = stateless.Snapshot(self.module)
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
        """A snapshot of the module with its held weights and masks, taken on the first call."""
        assert self.module is not None
        if self._snapshot is None and not self.holds:
            self._snapshot = stateless.Snapshot(self.module)
        elif self._snapshot is None:
            with self.in_place():
                self._snapshot = stateless.Snapshot(self.module)
        return self._snapshot

    def hand_back(self) -> None:
        """Copy the attributes and buffers that were assigned on the copy during the solve to the original module."""
        for source, module, before in zip(self.sources, self.modules, self._before, strict=False):
            if isinstance(module, VariationalDropout):
                continue
            changed = {name: value for name, value in vars(module).items() if value is not before.get(name)}
            vars(source).update({name: value for name, value in changed.items() if name not in stateless.REGISTERED})
            source._buffers.update(
                {name: buffer for name, buffer in module._buffers.items() if buffer is not source._buffers.get(name)}
            )

    def in_place(self) -> AbstractContextManager[None]:
        """A context in which `cell` has the held weights and masks; it may be entered again while it is active."""
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
        """True if the next run draws a dropout mask, whose shape is not known before."""
        with self.in_place():
            return any(dropout.mask is None for dropout in self.dropouts)

    def tensors(self) -> CellTensors:
        """The tensors of the module; empty if the cell is a plain function or its weights are sharded."""
        if self.module is None or self.sharded:
            return CellTensors({}, {}, {}, {})
        if not self.holds and not any(isinstance(module, VariationalDropout) for module in self.modules):
            return CellTensors(dict(self.module.named_parameters()), {}, {}, dict(self.module.named_buffers()))
        with self.in_place():
            buffers = dict(self.module.named_buffers())
            weights = {name: b for name, b in buffers.items() if _owned_by(self.module, name, HeldWeight)}
            masks = {name: b for name, b in buffers.items() if _owned_by(self.module, name, VariationalDropout)}
            others = {name: b for name, b in buffers.items() if name not in weights and name not in masks}
            return CellTensors(dict(self.module.named_parameters()), weights, masks, others)


def _owned_by(module: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    """True if the tensor of this name is an attribute of a submodule of type `kind`."""
    return isinstance(module.get_submodule(name.rpartition(".")[0]), kind)


def _computed_weights(modules: Sequence[nn.Module]) -> list[tuple[nn.ModuleDict, str, HeldWeight]]:
    """(ModuleDict, key, computed weight) of every parametrized weight; weights held by an enclosing solve are reused."""
    places = [place for m in modules if isinstance(place := getattr(m, "parametrizations", None), nn.ModuleDict)]
    parts = [(place, name, part) for place in places for name, part in place.items()]
    kinds = (ParametrizationList, HeldWeight)
    return [
        (place, name, HeldWeight(_value(part), HeldWeight.original(part)))
        for place, name, part in parts
        if isinstance(part, kinds)
    ]


def _value(parametrization: nn.Module) -> Tensor:
    """The weight that a parametrization computes; a spectral norm updates its vectors."""
    if autodiff_modes.inside_transform():  # torch.func forbids the in-place update of the vectors of a spectral norm
        buffers = {name: buffer.clone() for name, buffer in parametrization.named_buffers()}
        value: Tensor = stateless.call(parametrization, buffers, ())
        return value
    return parametrization()


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """True if FSDP shards weights of these modules: it gathers them around every call, which functional_call cannot see."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in modules)


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a forward pass, stored because backward must evaluate the cell in the same state."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> Autocast:
        """The autocast state that is active now for this type of device."""
        if not torch.amp.is_autocast_available(device.type):
            return Autocast(device.type, False, torch.float32)
        return Autocast(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def inside(self) -> AbstractContextManager[Any]:
        """A context that restores this state, for evaluations of the cell."""
        return torch.autocast(self.device, dtype=self.dtype) if self.enabled else nullcontext()


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """A context without autocast, for the solver: Gram matrices and small systems need full precision."""
    if not Autocast.current(device).enabled:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
    # casts cached under no_grad have no graph; reused in a later evaluation, they would cut the gradient
    torch.clear_autocast_cache()
