"""Packing states, which are tensors or nested tuples, lists and dicts of tensors, into one (batch, n) matrix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

State = Any  # a tensor, or nested tuples, lists and dicts of tensors


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state: its shape without the batch dimension, its dtype, and its number of columns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int


@dataclass(frozen=True)
class Layout:
    """The position of each tensor of a state in the (batch, n) matrix that solvers work on.

    The matrix is float32 or float64, because half precision is too coarse for residuals and Gram matrices. Complex
    tensors are stored as pairs of reals. `unpack` returns every tensor in its own dtype. With batched=False the state is
    one row.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    batch: int
    batched: bool
    dtype: torch.dtype
    device: torch.device
    precision: float  # the largest machine epsilon among the dtypes of the state; relative residuals hardly get below it
    narrow: bool  # True if a tensor has a smaller range than the matrix: float16, or float32 beside float64
    single: Leaf | None  # the leaf of a batched state that is one tensor in the dtype of the matrix, for the fast paths
    flat: bool  # True if that tensor is (batch, n) itself, so that packing changes nothing

    @staticmethod
    def of(state: State, *, batched: bool = True) -> Layout:
        """Return the layout of a state; raises if its tensors do not share a batch dimension and a device."""
        if type(state) is Tensor and state.dim() > 0 and state.dtype in (torch.float32, torch.float64):
            return _layout_of_tensor(state.shape, state.dtype, state.device, batched)
        return Layout._of_tree(state, batched)

    @staticmethod
    def _of_tree(state: State, batched: bool) -> Layout:
        """Return the layout of any state."""
        tensors, structure = pytree.tree_flatten(state)
        _check_tensors(tensors, batched)
        # torch.promote_types would be recorded in exported programs, and torch 2.6 cannot load such programs
        double = any(tensor.dtype.to_real() == torch.float64 for tensor in tensors)
        dtype = torch.float64 if double else torch.float32
        shapes, ranges = (
            [tuple(t.shape[1:] if batched else t.shape) for t in tensors],
            [torch.finfo(t.dtype) for t in tensors],
        )
        leaves = tuple(
            Leaf(shape, tensor.dtype, prod(shape) * (2 if tensor.dtype.is_complex else 1))
            for shape, tensor in zip(shapes, tensors, strict=True)
        )
        single = len(leaves) == 1 and structure.is_leaf() and leaves[0].dtype == dtype and batched
        return Layout(
            structure=structure,
            leaves=leaves,
            batch=tensors[0].shape[0] if batched else 1,
            batched=batched,
            dtype=dtype,
            device=tensors[0].device,
            precision=max(each.eps for each in ranges),
            narrow=any(each.max < torch.finfo(dtype).max / 2 for each in ranges),
            single=leaves[0] if single else None,
            flat=single and tensors[0].dim() == 2,
        )

    def on(self, device: torch.device) -> Layout:
        """Return the same layout for states on another device."""
        return dataclasses.replace(self, device=device)

    @property
    def columns(self) -> int:
        """The number of columns of the matrix."""
        return sum(leaf.columns for leaf in self.leaves)

    def refuse_overflow(self, matrix: Tensor, output: Tensor) -> Tensor:
        """Return `output`, (rows, n), with nan in the rows where `matrix` exceeds the range of a tensor's dtype.

        A number such as 1e5 is finite in the float32 matrix, but a float16 cell receives inf.
        """
        if not self.narrow:
            return output
        beyond = (matrix.abs() > self._most(matrix)).any(dim=1, keepdim=True)
        return torch.where(beyond, torch.full_like(output, float("nan")), output)

    def saturate(self, matrix: Tensor) -> Tensor:
        """Return `matrix` clamped to the ranges of the dtypes of the state."""
        if not self.narrow:
            return matrix
        most = self._most(matrix)
        return matrix.clamp(-most, most)

    def _most(self, matrix: Tensor) -> Tensor:
        """Return (n,), the largest finite number of each column's dtype."""
        parts = [torch.full((leaf.columns,), torch.finfo(leaf.dtype).max, dtype=self.dtype) for leaf in self.leaves]
        return torch.cat(parts).to(matrix.device)

    def pack(self, state: State) -> Tensor:
        """Pack a state into a matrix, (batch, n)."""
        single = self.single
        if self.flat:
            matrix = state
        elif single is None:
            matrix = self._join(pytree.tree_leaves(state))
        else:
            matrix = state.reshape(state.shape[0], single.columns).to(self.dtype)
        # forward mode allocates the tangent with the strides of the primal, which fails for an expanded tensor
        return matrix.contiguous() if 0 in matrix.stride() else matrix

    def pack_output(self, output: State, rows: int, *, cast: bool = False) -> Tensor:
        """Check and pack the output of a cell, (rows, n); `cast` as in `check_output`."""
        leaf = self.single
        if leaf is not None and isinstance(output, Tensor) and output.dtype == leaf.dtype:
            if output.shape == (rows, *leaf.shape):
                return output if output.dim() == 2 else output.reshape(rows, leaf.columns)
        return self._join(self.check_output(output, rows, cast=cast))

    def check_output(self, output: State, rows: int, *, cast: bool = False) -> list[Tensor]:
        """Return the tensors of a cell's output; raises if structure, shapes or dtypes differ from those of the state.

        `cast` accepts any floating dtype, for cells under autocast.
        """
        tensors, structure = pytree.tree_flatten(output)
        if structure != self.structure:
            raise TypeError(
                f"The cell must return the structure of its state: got {_describe(structure)}, expected "
                f"{_describe(self.structure)}. Return the tensors in the nesting of z."
            )
        for tensor, leaf in zip(tensors, self.leaves, strict=True):
            expected = self._shape(leaf, rows)
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"The cell must return tensors: got {type(tensor).__name__}, expected a tensor of shape {expected}."
                )
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"The cell must return the shape of its state: got {tuple(tensor.shape)} for z of shape {expected}. "
                    "Project back to z's width at the end of the cell."
                )
            same_kind = cast and tensor.is_floating_point() and leaf.dtype.is_floating_point
            if tensor.dtype != leaf.dtype and not same_kind:
                raise TypeError(
                    f"The cell must return the dtype of its state: got {tensor.dtype} for z of {leaf.dtype}. "
                    f"Start from a state of {tensor.dtype}, or end the cell with .to(z.dtype)."
                )
        return tensors

    def unpack(self, matrix: Tensor) -> State:
        """Unpack a matrix, (rows, n) with any number of rows, into the nested state."""
        if self.single is not None:
            return matrix if len(self.single.shape) == 1 else matrix.reshape(matrix.shape[0], *self.single.shape)
        tensors, first = [], 0
        for leaf in self.leaves:  # narrow, not split: autograd forbids in-place writes to views from a multi-view function
            part = matrix if len(self.leaves) == 1 else matrix.narrow(1, first, leaf.columns)
            shape = self._shape(leaf, part.shape[0])
            if leaf.dtype.is_complex:
                # view_as_complex needs strides that are multiples of two
                pairs = part.to(leaf.dtype.to_real()).reshape(*shape, 2).contiguous()
                tensors.append(torch.view_as_complex(pairs))
            else:
                tensors.append(part.reshape(shape).to(leaf.dtype))
            first += leaf.columns
        return pytree.tree_unflatten(tensors, self.structure)

    def _shape(self, leaf: Leaf, rows: int) -> tuple[int, ...]:
        """Return the shape of a leaf in a state with so many rows."""
        return (rows, *leaf.shape) if self.batched else leaf.shape

    def _join(self, tensors: list[Tensor]) -> Tensor:
        """Return the tensors of a state side by side in one matrix, (rows, n)."""
        parts = []
        for tensor, leaf in zip(tensors, self.leaves, strict=True):
            rows = tensor.shape[0] if self.batched else 1
            real = torch.view_as_real(tensor.resolve_conj()) if leaf.dtype.is_complex else tensor
            parts.append(real.reshape(rows, leaf.columns).to(self.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@functools.lru_cache(maxsize=256)
def _layout_of_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device, batched: bool) -> Layout:
    """Return the layout of a state that is one tensor; cached, because every solve of a layer needs the same one."""
    return Layout._of_tree(torch.empty(shape, dtype=dtype, device="meta"), batched).on(device)


def zeros_like_first(inputs: Sequence[Any]) -> State:
    """Return zeros with the shapes, dtypes and device of the first input; raises if that is not made of numbers."""
    if not inputs:
        raise ValueError(
            "init=None starts from zeros like the first input, but there is no input; use init=eq.Zeros(*shape)."
        )
    if type(inputs[0]) is Tensor and inputs[0].is_floating_point():  # no tree to traverse
        return torch.zeros_like(inputs[0], requires_grad=False)
    for leaf in pytree.tree_leaves(inputs[0]):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            seen = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"init=None starts from zeros like the first input, which holds {seen}, not real numbers; "
                "give the shape of the state with init=eq.Zeros(*shape)."
            )
    return pytree.tree_map(lambda leaf: torch.zeros_like(leaf, requires_grad=False), inputs[0])


def _describe(structure: pytree.TreeSpec) -> str:
    """Return a structure as text, with "tensor" for each leaf."""
    placeholder = pytree.tree_unflatten(["z"] * structure.num_leaves, structure)
    return str(placeholder).replace("'z'", "tensor") if structure.num_leaves != 1 or placeholder != "z" else "a tensor"


def _check_tensors(tensors: list[Any], batched: bool) -> None:
    """Raise unless all are floating or complex tensors on one device, with a common batch dimension if batched."""
    if not tensors:
        raise ValueError("The state holds no tensor: give init a tensor, or tuples, lists or dicts of tensors.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"A state must consist of tensors, got {type(tensor).__name__}.")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"A state must have a floating or complex dtype, got {tensor.dtype}. If the first input has an integer "
                "dtype, pass the start of the state: init=eq.Zeros(*shape), or z0 of a floating dtype."
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"All tensors of a state must be on one device, got {tensors[0].device} and {tensor.device}. "
                "Move them with .to(device)."
            )
        if batched and tensor.dim() == 0:
            raise ValueError(
                "A batched state must have a leading batch dimension, got a scalar. Use batched=False for one whole problem."
            )
        if batched and tensor.shape[0] != tensors[0].shape[0]:
            raise ValueError(
                f"All tensors of a state must share the leading batch dimension: got {tensors[0].shape[0]} and "
                f"{tensor.shape[0]}. Use batched=False if the state is one whole problem."
            )
