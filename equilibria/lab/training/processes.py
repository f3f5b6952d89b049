"""Devices and strategy, random number generators, signals, clocks and memory of a training process."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # must precede any process group: defaults of its functions would hold the group until exit
from lightning_fabric import Fabric
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from equilibria.deq import DEQ
from equilibria.lab.choices import Strategy
from equilibria.stop import Stop

T = TypeVar("T")


def make_fabric(devices: int, strategy: Strategy, accelerator: str, precision: Any) -> Fabric:
    """Return the Fabric object; torchrun, if used, determines the number of processes."""
    nodes = 1
    if dist.is_available() and dist.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    chosen: Any = strategy
    if strategy == "fsdp":
        chosen = ModelParallelStrategy(_shard, data_parallel_size=devices * nodes, tensor_parallel_size=1)
    return Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, strategy=chosen, precision=precision)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the cell of every equilibrium layer separately, then the rest of the model.

    A run of a sharded cell is a collective, so every rank must make equally many: the layers' stops get a process group.
    The outermost module reshards after forward too; otherwise it would stay gathered after an evaluation, which has no
    backward pass.
    """
    options: dict[str, Any] = {"mesh": mesh["data_parallel"], "reshard_after_forward": True}
    for module in list(model.modules()):
        if isinstance(module, DEQ) and isinstance(module.cell, nn.Module) and list(module.cell.parameters()):
            fully_shard(module.cell, **options)
            if hasattr(module.cell, "prepare"):
                register_fsdp_forward_method(module.cell, "prepare")
            module.stop = _together(module.stop)
            module.eval_stop = None if module.eval_stop is None else _together(module.eval_stop)
    fully_shard(model, **options)
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights of a sharded model on every process inside the block, so that parts of it can be called."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def _together(stop: Stop) -> Stop:
    """Return a stop with which all processes end a solve together."""
    return stop if stop.process_group is not None else dataclasses.replace(stop, process_group="world")


def agree(fabric: Fabric, flags: Sequence[bool]) -> list[bool]:
    """Return for every flag whether it is set on any process; a collective call."""
    if fabric.world_size == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int64, device=fabric.device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def gather(fabric: Fabric, value: T) -> list[T]:
    """Return the values of all processes, on every process; a collective call."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(values, value)
    return values


def seed_all(*parts: int) -> None:
    """Seed torch on every device and python's `random` with a function of these parts."""
    seed = Random(" ".join(map(str, parts))).getrandbits(63)
    torch.manual_seed(seed)
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of the generators of torch (all devices) and of `random`; numpy's is not used."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state of `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def other_rng(*parts: int) -> Iterator[None]:
    """Seed all generators with the parts inside the block, and restore their state after it."""
    state = rng_state()
    seed_all(*parts)
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch use deterministic algorithms inside the block; it warns if an operation has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # otherwise every torch.empty fills its memory
    torch.backends.cudnn.benchmark = False  # it would choose algorithms by time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = benchmark


class Interrupts:
    """A context in which the first Ctrl-C or SIGTERM only sets `asked`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            raise KeyboardInterrupt("interrupted twice")
        self.asked = True


def step_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock of training steps: processor time on a CPU with one thread, which other programs do not affect;
    else wall-clock time.
    """
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def peak_bytes(device: torch.device, *, alone: bool) -> int | None:
    """Return the peak memory so far: on a GPU that of torch, elsewhere that of the process since it began; None if unknown.

    alone  True if the run is the first of its process; on a CPU the peak of a later run would include the runs before it
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not alone:
        return None
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
