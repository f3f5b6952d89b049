"""The properties that the requests of one pool share, detected by running the model on the first request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.deq import DEQ
from equilibria.serving.adapter import Layout, describe
from equilibria.serving.split import Arguments, CellSplit, Reached
from equilibria.serving.tickets import UnservableModelError
from equilibria.stop import Stop

# other rows may change a row by at most AGREEMENT units of rounding, and by at most the share LOOSEST of its norm
AGREEMENT, LOOSEST = 1e3, 0.05


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Let requests of different lengths share a pool: tensors are padded at their end to the next multiple of `multiple`.

    The model must be causal: no position may depend on a later one, as in a causal language model. The engine checks this
    with the first request of every pool. Padded positions are excluded from norms and histories, so every request is solved
    as it would be without padding.

    dim       dimension along which lengths differ, not counting the batch
    multiple  lengths are padded to a multiple of it
    value     padding value, which must be a valid token
    """

    dim: int = 0
    multiple: int = 32
    value: float = 0

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.dim < 0:
            raise ValueError(f"Padding needs dim >= 0 and multiple >= 1, got dim={self.dim}, multiple={self.multiple}.")

    def length(self, arguments: Arguments) -> int:
        return arguments.tensors[0].shape[self.dim]

    def fill(self, arguments: Arguments, length: int | None = None) -> Arguments:
        """Pad the arguments of one sample to `length`; None: to the next multiple."""
        have = self.length(arguments)
        want = -(-have // self.multiple) * self.multiple if length is None else length
        return dataclasses.replace(arguments, tensors=tuple(self._fill(t, want - have) for t in arguments.tensors))

    def _fill(self, tensor: Tensor, missing: int) -> Tensor:
        if missing == 0:
            return tensor
        shape = list(tensor.shape)
        shape[self.dim] = missing
        return torch.cat([tensor, tensor.new_full(shape, self.value)], dim=self.dim)


@dataclass(frozen=True)
class Leaves:
    """A tree of values, divided into tensors with one row per sample and leaves that all samples share."""

    structure: Any
    rowwise: tuple[bool, ...]
    shared: tuple[Any, ...]

    @staticmethod
    def of(two: Any, three: Any, what: str) -> Leaves:
        """Compare the trees of a batch of two and a batch of three samples whose first two samples are equal."""
        first, structure = pytree.tree_flatten(two)
        second, other = pytree.tree_flatten(three)
        if structure != other:
            raise UnservableModelError(f"{what} has different structures for two samples and for three.")
        rows = tuple(_has_rows(a, b, what) for a, b in zip(first, second, strict=True))
        return Leaves(structure, rows, tuple(None if row else leaf for row, leaf in zip(rows, first, strict=True)))

    def flatten(self, tree: Any) -> list[Tensor]:
        """Return the leaves that have one row per sample."""
        return [leaf for leaf, rows in zip(pytree.tree_leaves(tree), self.rowwise, strict=True) if rows]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if rows else leaf for rows, leaf in zip(self.rowwise, self.shared, strict=True)]
        return pytree.tree_unflatten(leaves, self.structure)

    @property
    def count(self) -> int:
        return sum(self.rowwise)


class Template:
    """The properties of one kind of request: its layer, the layout of its state, and which tensors have a row per sample."""

    def __init__(self, split: CellSplit, sample: Arguments, padding: Padding | None = None, length: int = 0) -> None:
        """Run the model on batches of two and three samples; raises UnservableModelError if rows depend on each other."""
        self.split, self.spec, self.padding = split, sample.spec, padding
        # another sample of the same kind, with the numbers in reverse order
        mirrored = dataclasses.replace(sample, tensors=tuple((t.flip(-1) if t.dim() else t) for t in sample.tensors))
        batches = stack([sample, mirrored]), stack([sample, mirrored, mirrored])
        self.layer: DEQ = split.find(batches[0])
        two, three = self._reach(batches)
        self.layout = Layout.of(two.start)
        self.given = Leaves.of(two.given, three.given, "What the equilibrium layer is given")
        self.kept = Leaves.of(two.outputs, three.outputs, "The output of a module before the equilibrium layer")
        _agree(self.layout.pack(two.start), self.layout.pack(three.start), "the start of the solve", self.layout)
        self.stop: Stop = split.stop_of(self.layer).reachable(self.layout.precision)
        self.solver = split.solver or self.layer.solver
        # raise if the state of one row changes the value of the cell at the other row
        z = self.layout.pack(two.start)
        noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(z)
        z = z + noise
        other = torch.cat([z[:1], -z[1:]])
        with torch.no_grad():
            _agree(self.evaluate(z, two.given), self.evaluate(other, two.given), "the cell", self.layout)
        outputs = [self._finish(batch, reached) for batch, reached in zip(batches, (two, three), strict=True)]
        self.output = Leaves.of(outputs[0], outputs[1], "The output of the model")
        self._dims: tuple[tuple[int | None, ...], tuple[int | None, ...]] | None = None
        self._masks: dict[int, Tensor] = {}
        self.filled = 0 if padding is None else padding.length(sample)  # length with padding
        if padding is not None:
            self._find_lengths(sample, two, outputs[0], length)

    def _reach(self, batches: tuple[Arguments, Arguments]) -> tuple[Reached, Reached]:
        """Return both batches at the layer, with the outputs of the modules that need not run again after the solve."""
        if not self.split.before:
            calls: list[Any] = []
            two = self.split.reach(batches[0], watch=calls)
            three = self.split.reach(batches[1], watch=[])
            worth = [_all_rows(a, b) for a, b in zip(two.outputs, three.outputs, strict=True)]
            self.split.keep([module for module, keep in zip(calls, worth, strict=True) if keep])
        return self.split.reach(batches[0]), self.split.reach(batches[1])

    def evaluate(self, z: Tensor, given: tuple[Any, ...]) -> Tensor:
        """Apply the cell to packed states, (rows, n) -> (rows, n)."""
        layout = self.layout
        return layout.refuse_overflow(z, layout.pack_output(self.layer.cell(layout.unpack(z), *given), len(z)))

    def _finish(self, batch: Arguments, reached: Reached) -> Any:
        z = self.layout.pack(reached.start)
        rows = len(z)
        stats = describe([0] * rows, [0] * rows, [0.0] * rows, z)
        return self.split.finish(batch, reached, z, self.layout, stats)

    def _find_lengths(self, sample: Arguments, two: Reached, output: Any, length: int) -> None:
        """Find the dimensions of the state and of the output that grow with the length of the inputs."""
        assert self.padding is not None
        filled = self.padding.length(sample)
        longer = stack([self.padding.fill(sample, filled + 1)] * 2)
        reached = self.split.reach(longer)
        longer_layout = Layout.of(reached.start)
        state = tuple(
            _length_dim(a.shape, b.shape, filled, "state")
            for a, b in zip(self.layout.leaves, longer_layout.leaves, strict=True)
        )
        z = longer_layout.pack(reached.start)
        stats = describe([0, 0], [0, 0], [0.0, 0.0], z)
        finished = self.split.finish(longer, reached, z, longer_layout, stats)
        pairs = zip(self.output.flatten(output), self.output.flatten(finished), strict=True)
        self._dims = state, tuple(_length_dim(a.shape[1:], b.shape[1:], filled, "output") for a, b in pairs)
        self._check_causal(sample, two, length)

    def _check_causal(self, sample: Arguments, two: Reached, length: int) -> None:
        """Raise UnservableModelError if the cell at the first `length` positions depends on later positions."""
        assert self.padding is not None
        filled = self.padding.length(sample)
        if not 0 < length < filled:
            return
        dim = self.padding.dim
        short = dataclasses.replace(sample, tensors=tuple(t.narrow(dim, 0, length) for t in sample.tensors))
        reached = self.split.reach(stack([short, short]))
        layout = Layout.of(reached.start)
        z = torch.randn(2, layout.columns, generator=torch.Generator().manual_seed(0)).to(layout.dtype)
        state = pytree.tree_leaves(layout.unpack(z))
        wide = [_widened(leaf, d, filled) for leaf, d in zip(state, self._state_dims(), strict=True)]
        with torch.no_grad():
            whole = self.layer.cell(pytree.tree_unflatten(wide, self.layout.structure), *two.given)
            alone = self.layer.cell(layout.unpack(z), *reached.given)
        cut = [_cut(leaf, d, length) for leaf, d in zip(pytree.tree_leaves(whole), self._state_dims(), strict=True)]
        first = layout.pack(pytree.tree_unflatten(cut, layout.structure))[:1]
        if not _close(layout.pack(alone)[:1], first, self.layout.precision):
            raise UnservableModelError(
                "Padding needs a model in which no position depends on a later one, but this cell depends on later "
                "positions. Leave padding out: every length then gets its own pool."
            )

    def _state_dims(self) -> tuple[int | None, ...]:
        return self._dims[0] if self._dims is not None else ()

    def mask(self, length: int) -> Tensor:
        """Return a mask (n,): 1 for numbers of the first `length` positions, else 0."""
        found = self._masks.get(length)
        if found is None:
            found = self._masks[length] = self._mask(length)
        return found

    def sizes(self) -> list[int]:
        """Return the sizes that the state of a request may have, without padding."""
        if self.padding is None:
            return [self.layout.columns]
        lengths = range(1, self.filled + 1)
        pairs = list(zip(self.layout.leaves, self._state_dims(), strict=True))
        return [sum(leaf.columns if d is None else leaf.columns // self.filled * m for leaf, d in pairs) for m in lengths]

    def _mask(self, length: int) -> Tensor:
        """Compute `mask` from the layout of the state."""
        parts = []
        for leaf, dim in zip(self.layout.leaves, self._state_dims(), strict=True):
            ones = torch.ones(leaf.shape, dtype=self.layout.dtype, device=self.layout.device)
            if dim is not None:
                ones.narrow(dim, length, leaf.shape[dim] - length).zero_()
            parts.append(ones.reshape(-1))
        return torch.cat(parts)

    def split_output(self, output: Any, lengths: Sequence[int | None]) -> list[Any]:
        """Return the output of every row, without its padding."""
        if isinstance(output, Tensor) and self._dims is None:
            return list(output.unbind(0)[: len(lengths)])
        leaves = [leaf.unbind(0) for leaf in self.output.flatten(output)]
        dims = self._dims[1] if self._dims is not None else (None,) * len(leaves)
        found = []
        for row, length in enumerate(lengths):
            own = [leaf[row] for leaf in leaves]
            if length is not None:
                own = [t if d is None else t.narrow(d, 0, length) for t, d in zip(own, dims, strict=True)]
            found.append(self.output.unflatten(own))
        return found


def stack(samples: Sequence[Arguments]) -> Arguments:
    """Join samples into a batch."""
    columns = zip(*(sample.tensors for sample in samples), strict=True)
    return dataclasses.replace(samples[0], tensors=tuple(torch.stack(column) for column in columns))


def _has_rows(two: Any, three: Any, what: str) -> bool:
    """Return True if the leaf has a row per sample, False if all samples share it; raises UnservableModelError otherwise."""
    if not isinstance(two, Tensor) or not isinstance(three, Tensor):
        if two is three or two == three:
            return False
        raise UnservableModelError(f"{what} holds {two!r} for two samples and {three!r} for three.")
    if two.dim() and tuple(two.shape) == (2, *two.shape[1:]) and tuple(three.shape) == (3, *two.shape[1:]):
        if not _close(two, three[:2], torch.finfo(two.dtype).eps if two.is_floating_point() or two.is_complex() else 0.0):
            raise UnservableModelError(
                f"{what} changes for a sample with the other samples of its batch, so rows cannot enter and leave."
            )
        return True
    if two.shape == three.shape and torch.equal(two, three):
        return False
    raise UnservableModelError(
        f"{what} holds a tensor of shape {tuple(two.shape)} for two samples and {tuple(three.shape)} for three; "
        "expected the batch first, or a tensor that does not depend on the samples."
    )


def _all_rows(two: Any, three: Any) -> bool:
    """Return True if every leaf is a tensor with a row per sample."""
    a, b = pytree.tree_leaves(two), pytree.tree_leaves(three)
    return len(a) == len(b) > 0 and all(
        isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() > 0 and x.shape[0] == 2 and y.shape[0] == 3
        for x, y in zip(a, b, strict=True)
    )


def _close(a: Tensor, b: Tensor, spacing: float) -> bool:
    """Return True if both are equal up to rounding differences between batch sizes; ignores rows that are not finite."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    error, size = torch.linalg.vector_norm(a - b, dim=1), torch.linalg.vector_norm(a, dim=1)
    return bool(((error <= min(AGREEMENT * spacing, LOOSEST) * size) | ~torch.isfinite(error)).all())


def _agree(one: Tensor, other: Tensor, what: str, layout: Layout) -> None:
    """Raise UnservableModelError unless the first row is the same in both batches."""
    if not _close(one[:1], other[:1], layout.precision):
        raise UnservableModelError(
            f"This model cannot be served: in {what} a row depends on the other rows of its batch, so rows cannot enter and "
            "leave. A common cause is batch statistics; use norms with running statistics, or norms over each sample."
        )


def _length_dim(shape: Sequence[int], longer: Sequence[int], filled: int, what: str) -> int | None:
    """Return the dimension that grew with the length of the inputs; None if none did."""
    grown = [i for i, (a, b) in enumerate(zip(shape, longer, strict=True)) if a != b]
    if not grown:
        return None
    if len(grown) > 1 or (shape[grown[0]], longer[grown[0]]) != (filled, filled + 1):
        raise UnservableModelError(
            f"Padding needs a {what} with one entry per position: for inputs of length {filled} its shape is "
            f"{tuple(shape)}, for {filled + 1} it is {tuple(longer)}. Choose the output with output=, or leave padding out."
        )
    return grown[0]


def _widened(leaf: Tensor, dim: int | None, length: int) -> Tensor:
    """Append zeros along dimension `dim` of the sample up to `length`."""
    if dim is None:
        return leaf
    shape = list(leaf.shape)
    shape[dim + 1] = length - shape[dim + 1]
    return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim + 1)


def _cut(leaf: Tensor, dim: int | None, length: int) -> Tensor:
    return leaf if dim is None else leaf.narrow(dim + 1, 0, length)
