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
import torch.distributed.nn  # before a process group exists, or defaults of its functions hold the group until exit
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
    """Create the Fabric object; under torchrun the number of processes is that of torchrun."""
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

    A run of a sharded cell is a collective, so its layer must take as many on every rank: all agree when to stop.
    The outermost module would stay gathered after a forward pass without a backward one, and evaluation is such a pass.
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
    """Inside the block every process has all weights of a sharded model, so that parts of it may be called on their own."""
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
    return stop if stop.process_group is not None else dataclasses.replace(stop, process_group="world")


def agree(fabric: Fabric, flags: Sequence[bool]) -> list[bool]:
    """True for every flag that is set on any process."""
    if fabric.world_size == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int64, device=fabric.device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def gather(fabric: Fabric, value: T) -> list[T]:
    """The value of every process, on every process."""
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
    """State of the generators of torch (every device) and of `random`; numpy's is not used here."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def other_rng(*parts: int) -> Iterator[None]:
    """Inside the block random numbers are a function of the parts; afterwards they go on as if there had been no block."""
    state = rng_state()
    seed_all(*parts)
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside the block torch takes algorithms that give the same bits each time; where it has none, it warns."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # it makes every torch.empty cost a pass
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = benchmark


class Interrupts:
    """Inside the block the first Ctrl-C (or SIGTERM) only sets `asked`; a second one interrupts at once."""

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
        if self.asked:
            raise KeyboardInterrupt("interrupted twice")
        self.asked = True


def step_clock(device: torch.device) -> Callable[[], float]:
    """The clock of training steps: CPU time of the thread on a CPU, independent of other programs; else wall time."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def peak_bytes(device: torch.device, *, alone: bool) -> int | None:
    """The most memory in use so far: on a GPU by torch, elsewhere by the whole process since it began.

    alone  whether the run is the first of its process; on a CPU the peak of a later run is that of all runs before it too,
           and None is returned
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not alone:
        return None
    try:
        import resource
    except ModuleNotFoundError:  # no Unix
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
