"""The representation theorems of deep equilibrium models, as constructions that run.

- One DEQ is enough: equilibrium layers in series are one equilibrium on the concatenated state (`stack`).
- Weight tying is universal: any feed-forward network is a weight-tied, input-injected one, and the equilibrium of it
  (`weight_tied_form`).

Both are from Bai, Kolter, Koltun 2019, "Deep Equilibrium Models".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from equilibria._core.loop import Stop
from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.solvers.fallback import AnySolver
from equilibria.starts import Init, prepared, start_of


def stack(
    first: nn.Module,
    second: nn.Module,
    *more: nn.Module,
    solver: AnySolver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    eval_stop: Stop | None = None,
) -> DEQ:
    """DEQs in series as one DEQ: the equilibrium of [f1(w1, x); f2(w2, w1); ...] is (w1, w2, ...).

    Its last part is `second(first(x))`, with the same derivatives: the Jacobian is block triangular, so the joint
    equation has an equilibrium exactly where the series has one, and plain iteration converges where it does for every
    part. The weights are those of the parts, not copies.

    first, second, more  DEQs, or cells (taken with the defaults of a DEQ); the equilibrium of each is the one input of
                         the next. A stack may be `second`; as `first` it hands the tuple of its parts on
    solver               None: that of the last
    stop, eval_stop      None: that of the last with the strictest tolerances and the steps of all together
    gradient             None: that of the last, where all are Implicit. One of another kind may be given, but what is
                         approximate for each part is another approximation for all: JFB of a stack sends nothing to
                         the first
    """
    parts = [_as_deq(part) for part in (first, second, *more)]
    _check_stackable(parts, gradient)
    cell = Stacked([part.cell for part in parts])
    joined = DEQ(
        cell,
        _StackedStart(cell, [part.init for part in parts], parts[0].batched),
        solver=solver or parts[-1].solver,
        stop=stop or reduce(_both, [part.stop for part in parts]),
        gradient=gradient or parts[-1].gradient,
        eval_stop=eval_stop or (None if stop else _joint_eval_stop(parts)),
        batched=parts[0].batched,
    )
    # keep the training mode of the parts, which .train() would change
    joined.training = cell.training = any(part.training for part in parts)
    return joined


class Stacked(nn.Module):
    """(w1, w2, ...) -> (f1(w1, x), f2(w2, w1), ...): cells in series as one cell."""

    def __init__(self, cells: Sequence[Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(cells)

    def prepare(self, *inputs: Any) -> tuple[Any, ...]:
        """The inputs that the first cell prepares; those of the other cells are states and are prepared in every step."""
        return prepared(self.parts[0], inputs)

    def forward(self, z: Sequence[State], *given: Any) -> tuple[State, ...]:
        first, *rest = self.parts
        out = [first(z[0], *given)]
        out += [cell(w, *prepared(cell, (before,))) for cell, (before, w) in zip(rest, pairwise(z), strict=True)]
        return tuple(out)


class _StackedStart(nn.Module):
    """The start of every part, computed by its `init` from the start of the part before it."""

    def __init__(self, cell: Stacked, inits: Sequence[Init], batched: bool) -> None:
        super().__init__()
        # in tuples, or the cells would be listed among the weights of the DEQ a second time
        self.cells, self.inits = tuple(cell.parts), tuple(inits)
        self.predictors = nn.ModuleList(init for init in inits if isinstance(init, nn.Module))
        self.batched = batched

    def forward(self, *inputs: Any) -> tuple[State, ...]:
        starts: list[State] = []
        for cell, init in zip(self.cells, self.inits, strict=True):
            starts.append(start_of(init, cell, _bound(cell, inputs), inputs, batched=self.batched))
            inputs = (starts[-1],)
        return tuple(starts)


def _bound(cell: nn.Module, inputs: Sequence[Any]) -> Callable[[State], State]:
    return lambda z: cell(z, *prepared(cell, inputs))


def _both(first: Stop, second: Stop) -> Stop:
    """The stop with the stricter tolerances and the sum of both numbers of steps, which the series may take."""
    return dataclasses.replace(
        second,
        rtol=min(first.rtol, second.rtol),
        atol=min(first.atol, second.atol),
        max_steps=first.max_steps + second.max_steps,
        compact=first.compact and second.compact,
        process_group=second.process_group or first.process_group,
    )


def _joint_eval_stop(parts: Sequence[DEQ]) -> Stop | None:
    if all(part.eval_stop is None for part in parts):
        return None
    return reduce(_both, [part.eval_stop or part.stop for part in parts])


def _as_deq(part: Any) -> DEQ:
    if isinstance(part, WeightTied):
        raise TypeError(
            f"Equilibria are stacked, and a WeightTied of depth {part.depth} is none: give stack its cell, or eq.DEQ(cell)."
        )
    cell = part.cell if isinstance(part, DEQ) else part
    if not isinstance(cell, nn.Module):
        raise TypeError(
            "stack takes DEQs whose cells are nn.Modules, or such cells: gradients do not reach what a plain callable "
            f"inside another cell closes over. Got {cell!r}; make it the forward of an nn.Module."
        )
    return part if isinstance(part, DEQ) else DEQ(cell)


def _check_stackable(parts: Sequence[DEQ], gradient: Gradient | None) -> None:
    if len({part.batched for part in parts}) > 1:
        raise ValueError(
            "One state has a batch dimension or it has none: got DEQs with batched=True and batched=False. Build them alike."
        )
    approximate = [part.gradient for part in parts if not isinstance(part.gradient, Implicit)]
    if gradient is None and approximate:
        raise ValueError(
            f"DEQs in series are one DEQ for exact gradients only: got {approximate[0]!r}, which for all parts at once is "
            "another approximation. Say which gradient the stack is to have, as gradient=eq.Implicit()."
        )


def weight_tied_form(layers: Any) -> TiedLayers:
    """A feed-forward network as the cell of a weight-tied one: L layers are L steps, and an equilibrium.

        cell = weight_tied_form(mlp)
        cell.readout(WeightTied(cell, cell.depth, cell.start)(x))       # mlp(x)
        cell.readout(DEQ(cell, cell.start, solver=Picard())(x))         # mlp(x), after cell.depth steps

    `layers` is an nn.Sequential, or any sequence, of nn.Linear, each followed by its activations if any; widths and
    activations may differ from layer to layer. Pairs (linear, activation), nested sequences, and None for no activation
    are understood. The weights are those of the layers, not copies.
    """
    linears: list[nn.Linear] = []
    activations: list[nn.Sequential] = []
    for part in _flat(layers):
        if isinstance(part, nn.Linear):
            _check_linear(part, linears)
            linears.append(part)
            activations.append(nn.Sequential())
        else:
            _check_activation(part, linears)
            activations[-1].append(part)
    if not linears:
        raise ValueError("A network has at least one nn.Linear, got none.")
    return TiedLayers(linears, activations)


class TiedLayers(nn.Module):
    """z <- σ(W_z z + W_x x + b) on the concatenated activations z = [z_1; ...; z_L] of a network of L layers.

        W_z = [0            ]    W_x = [W_1]    b = [b_1]    σ = σ_i on the i-th block
              [W_2 0        ]          [ 0 ]        [b_2]
              [    .  .     ]          [ . ]        [ . ]
              [      W_L  0 ]          [ 0 ]        [b_L]

    After i steps from anywhere the first i blocks hold the activations of the first i layers, and stay. W_z is nilpotent:
    the only equilibrium is reached after L steps, exactly. The price is the width, the sum of all widths.
    """

    def __init__(self, linears: Sequence[nn.Linear], activations: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.activations = nn.ModuleList(activations)
        self.widths = tuple(linear.out_features for linear in linears)

    @property
    def depth(self) -> int:
        """L, the steps to the equilibrium."""
        return len(self.widths)

    def start(self, x: Tensor) -> Tensor:
        """Zeros to start from, an `init`; x: (..., inputs of the first layer)."""
        return x.new_zeros(*x.shape[:-1], sum(self.widths))

    def blocks(self, z: Tensor) -> tuple[Tensor, ...]:
        """The activations of every layer."""
        return z.split(self.widths, dim=-1)

    def readout(self, z: Tensor) -> Tensor:
        """The activations of the last layer: the output of the network."""
        return z[..., -self.widths[-1] :]

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_z, W_x and b, made of the weights of the layers: gradients reach these."""
        first, *rest = (cast(nn.Linear, linear) for linear in self.linears)
        n = sum(self.widths)
        w = torch.block_diag(*[linear.weight for linear in rest]) if rest else first.weight.new_zeros(0, 0)
        w = F.pad(w, (0, self.widths[-1], self.widths[0], 0))  # (n, n), one block below the diagonal
        u = F.pad(first.weight, (0, 0, 0, n - self.widths[0]))  # (n, inputs)
        return w, u, torch.cat([_bias(linear) for linear in (first, *rest)])

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W_z and W_x x + b."""
        w, u, b = self.matrices()
        # a leading 1: a matrix of as many rows as the batch has samples would be taken for one row per sample
        return w.unsqueeze(0), F.linear(x, u, b)

    def forward(self, z: Tensor, w: Tensor, injected: Tensor) -> Tensor:
        """z: (..., n); w: (1, n, n); injected: (..., n)."""
        blocks = self.blocks(F.linear(z, w[0]) + injected)
        return torch.cat([sigma(block) for sigma, block in zip(self.activations, blocks, strict=True)], dim=-1)


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _flat(layers: Any) -> Iterator[Any]:
    """The modules of nested sequences, one after the other."""
    if isinstance(layers, nn.Sequential | nn.ModuleList | list | tuple):
        for part in layers:
            yield from _flat(part)
    elif layers is not None:
        yield layers


def _check_linear(linear: nn.Linear, before: Sequence[nn.Linear]) -> None:
    if type(linear).forward is not nn.Linear.forward:
        raise TypeError(
            f"A layer is its weight and its bias: got {linear!r}, a Linear with a forward of its own. Merge what it adds "
            "into an nn.Linear."
        )
    if before and linear.in_features != before[-1].out_features:
        raise ValueError(
            f"Each layer takes the width of the one before: layer {len(before) + 1} takes {linear.in_features}, "
            f"layer {len(before)} gives {before[-1].out_features}."
        )


def _check_activation(activation: Any, before: Sequence[nn.Linear]) -> None:
    if not isinstance(activation, nn.Module):
        raise TypeError(f"Layers and activations are modules, as nn.Linear(3, 3) and nn.Tanh(), got {activation!r}.")
    if not before:
        raise ValueError(
            f"A network begins with an nn.Linear, got {activation!r} first. Apply what comes before it to the input."
        )
    if isinstance(activation, _DropoutNd) and activation.p > 0:
        raise ValueError(
            f"A cell is the same function in every step, and dropout is not: got {activation!r}. Leave it out, or set p=0."
        )
