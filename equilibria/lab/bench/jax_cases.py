"""The cases in JAX: the same cells and numbers, with channels last, because XLA's convolutions on CPUs are fast only then.

JAX is imported only when a case is translated, because it is an optional package.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from equilibria._core.packing import State
from equilibria.lab.bench.cases import Case
from equilibria.lab.bench.cells import (
    GROUPS,
    HEADS,
    AffineTanhCell,
    AttentionCell,
    ConvCell,
    GainCell,
    GateCell,
    InjectedAttentionCell,
    TwoScaleCell,
)

Array = Any  # an array of JAX, or a tuple of them for a state of several tensors
JaxWeights = Mapping[str, Array]  # weights by their names in the torch cell
Cell = Callable[..., Array]  # (weights, z, *inputs) -> z

IMAGE = (0, 2, 3, 1)  # N C H W -> N H W C
KERNEL = (2, 3, 1, 0)  # O I H W -> H W I O
EPSILON = 1e-5  # the default of torch's normalizations
ONE_THREAD = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "PJRT_NPROC": "1"}


@cache
def load() -> Any:
    """Import JAX with 32-bit floats and one CPU thread, and return it; environment variables that are set are kept."""
    with _defaults(ONE_THREAD):
        jax = importlib.import_module("jax")
        jax.devices("cpu")  # starts XLA, which reads its settings at this call
    jax.config.update("jax_enable_x64", False)
    return jax


@dataclass(frozen=True, eq=False)
class JaxCase:
    """A case with its numbers in arrays of JAX."""

    cell: Cell
    weights: JaxWeights
    inputs: tuple[Array, ...]
    start: Array
    cotangent: Array

    def state(self, z: Array) -> State:
        """Return z in torch's layout, as a view."""
        return pytree.tree_map(lambda part: _to_torch(part, IMAGE), z)

    def gradients(self, weights: JaxWeights, inputs: tuple[Array, ...]) -> list[Tensor]:
        """Return gradients as views in torch's layout, in the order of `Case.leaves`."""
        first = [_to_torch(weights[name], KERNEL) for name in self.weights]
        return first + [_to_torch(part, IMAGE) for part in inputs]


def translate(case: Case) -> JaxCase:
    """Return the case in JAX. All numbers are copied, so later changes of the torch tensors have no effect."""
    cell = CELLS.get(type(case.cell))
    if cell is None:
        known = ", ".join(kind.__name__ for kind in CELLS)
        raise TypeError(f"There is no JAX cell for {type(case.cell).__name__}, only for {known}. Add one to this module.")
    weights = {name: _to_jax(weight, KERNEL) for name, weight in case.cell.named_parameters()}
    inputs, start, cotangent = (
        pytree.tree_map(lambda part: _to_jax(part, IMAGE), state) for state in (case.inputs, case.start, case.cotangent)
    )
    return JaxCase(cell, weights, inputs, start, cotangent)


def tanh_cell(w: JaxWeights, z: Array, u: Array) -> Array:
    return load().numpy.tanh(u + z @ w["weight"].T)


def gain_cell(w: JaxWeights, z: Array, u: Array, gain: Array) -> Array:
    return load().numpy.tanh(u + gain * (z @ w["weight"].T))


def conv_cell(w: JaxWeights, z: Array, x: Array) -> Array:
    relu = load().nn.relu
    y = _group_norm(w, "norms.0", relu(_conv(w, "first", z)))
    return _group_norm(w, "norms.2", relu(z + _group_norm(w, "norms.1", x + _conv(w, "second", y))))


def branch(w: JaxWeights, z: Array, x: Array) -> Array:
    relu = load().nn.relu
    y = relu(_group_norm(w, "norms.0", _conv(w, "first", z)))
    return _group_norm(w, "norms.2", relu(z + _group_norm(w, "norms.1", x + _conv(w, "second", y))))


def two_scale_cell(w: JaxWeights, z: tuple[Array, Array], fine: Array, coarse: Array) -> tuple[Array, Array]:
    relu = load().nn.relu
    a, b = branch(_below(w, "branches.0"), z[0], fine), branch(_below(w, "branches.1"), z[1], coarse)
    up = _group_norm(w, "up.1", _conv(w, "up.0", b)).repeat(2, axis=1).repeat(2, axis=2)
    down = _group_norm(w, "down.1", _conv(w, "down.0", a, stride=2))
    sums = relu(a + up), relu(b + down)
    first, second = (_group_norm(w, f"outs.{i}.1", _conv(w, f"outs.{i}.0", part)) for i, part in enumerate(sums))
    return first, second


def attention_cell(w: JaxWeights, z: Array, x: Array) -> Array:
    nn = load().nn
    batch, length, width = z.shape
    split = (z @ w["split.weight"].T).reshape(batch, length, 3, HEADS, width // HEADS)
    heads = nn.dot_product_attention(split[:, :, 0], split[:, :, 1], split[:, :, 2])
    y = _layer_norm(w, "norms.0", z + x + heads.reshape(batch, length, width) @ w["join.weight"].T)
    wide = nn.relu(y @ w["widen.weight"].T + w["widen.bias"])
    return _layer_norm(w, "norms.1", y + wide @ w["narrow.weight"].T + w["narrow.bias"])


def injected_attention_cell(w: JaxWeights, z: Array, u: Array) -> Array:
    nn = load().nn
    batch, length, width = z.shape
    split = (z @ w["split.weight"].T + u).reshape(batch, length, 3, HEADS, width // HEADS)
    heads = nn.dot_product_attention(split[:, :, 0], split[:, :, 1], split[:, :, 2], is_causal=True)
    y = _layer_norm(w, "norms.0", z + heads.reshape(batch, length, width) @ w["join.weight"].T)
    wide = nn.relu(y @ w["widen.weight"].T + w["widen.bias"])
    return _layer_norm(w, "norms.1", y + wide @ w["narrow.weight"].T + w["narrow.bias"])


def gate_cell(w: JaxWeights, z: tuple[Array, Array], u: Array) -> tuple[Array, Array]:
    sigmoid, tanh = load().nn.sigmoid, load().numpy.tanh
    h, memory = z
    keep, renew, show, new = load().numpy.split(u + h @ w["weight"].T, 4, axis=1)
    memory = sigmoid(keep) * memory + sigmoid(renew) * tanh(new)
    return sigmoid(show) * tanh(memory), memory


CELLS: dict[type[nn.Module], Cell] = {
    AffineTanhCell: tanh_cell,
    GainCell: gain_cell,
    ConvCell: conv_cell,
    TwoScaleCell: two_scale_cell,
    AttentionCell: attention_cell,
    InjectedAttentionCell: injected_attention_cell,
    GateCell: gate_cell,
}


def _below(w: JaxWeights, name: str) -> JaxWeights:
    return {key.removeprefix(f"{name}."): value for key, value in w.items() if key.startswith(f"{name}.")}


def _conv(w: JaxWeights, name: str, z: Array, stride: int = 1) -> Array:
    """Return a convolution whose transposed Jacobian is computed as a convolution with the reversed kernel.

    JAX's own rule exchanges the channels of the kernel in the description of its axes. Inside a loop XLA then takes 70 times
    as long as for the convolution itself, and this time would hide the differences between solvers.
    """
    convolution = load().custom_jvp(lambda kernel, z: _convolved(kernel, z, stride))

    @convolution.defjvp  # type: ignore[untyped-decorator]
    def rule(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        kernel, z = primals
        change = _linear(kernel, tangents[1], stride) + _convolved(tangents[0], z, stride)
        return convolution(kernel, z), change

    return convolution(w[f"{name}.weight"], z)


def _linear(kernel: Array, z: Array, stride: int) -> Array:
    forward, transposed = partial(_convolved, stride=stride), partial(_transposed, stride=stride)
    return load().custom_derivatives.linear_call(forward, transposed, kernel, z)


def _transposed(kernel: Array, z: Array, stride: int) -> Array:
    """Return the convolution of the reversed kernel with z, after zeros were inserted between the numbers of z."""

    def forward(kernel: Array, z: Array) -> Array:
        between = (0, stride - 1, stride - 1)  # numbers of zeros before, after and between
        spread = load().lax.pad(z, load().numpy.zeros((), z.dtype), [(0, 0, 0), between, between, (0, 0, 0)])
        return _convolved(kernel[::-1, ::-1].swapaxes(2, 3), spread)

    return load().custom_derivatives.linear_call(forward, partial(_linear, stride=stride), kernel, z)


def _convolved(kernel: Array, z: Array, stride: int = 1) -> Array:
    padding = [(size // 2, size // 2) for size in kernel.shape[:2]]
    axes = ("NHWC", "HWIO", "NHWC")
    return load().lax.conv_general_dilated(z, kernel, (stride, stride), padding, dimension_numbers=axes)


def _group_norm(w: JaxWeights, name: str, z: Array) -> Array:
    groups = z.reshape(*z.shape[:-1], GROUPS, -1)
    return _normalized(groups, (1, 2, 4)).reshape(z.shape) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _layer_norm(w: JaxWeights, name: str, z: Array) -> Array:
    return _normalized(z, (-1,)) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _normalized(z: Array, axes: tuple[int, ...]) -> Array:
    centred = z - z.mean(axes, keepdims=True)
    return centred * load().lax.rsqrt((centred * centred).mean(axes, keepdims=True) + EPSILON)


def _to_jax(tensor: Tensor, order: tuple[int, ...]) -> Array:
    jax = load()
    ordered = tensor.detach().permute(order) if tensor.ndim == 4 else tensor.detach()
    return jax.device_put(ordered.clone(memory_format=torch.contiguous_format).numpy(), jax.devices("cpu")[0])


def _to_torch(array: Array, order: tuple[int, ...]) -> Tensor:
    tensor = from_dlpack(array)
    return tensor.permute(sorted(range(4), key=order.__getitem__)) if tensor.ndim == 4 else tensor


@contextmanager
def _defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that are already set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
