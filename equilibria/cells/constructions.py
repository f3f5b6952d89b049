"""The representation theorems of deep equilibrium models, as constructions that run.

- One DEQ is enough: equilibrium layers in series are one equilibrium on the concatenated state (`stack`).
- Weight tying is universal: any feed-forward network equals a weight-tied network with input injection, and its output is
  the equilibrium of the tied cell (`weight_tied_form`).

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

from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.solvers.fallback import AnySolver
from equilibria.starts import Init, prepared, start_of
from equilibria.stop import Stop


def stack(
    first: nn.Module,
    second: nn.Module,
    *more: nn.Module,
    solver: AnySolver | None = None,
    stop: Stop | None = None,
    gradient: Gradient | None = None,
    eval_stop: Stop | None = None,
) -> DEQ:
    """Join DEQs in series into one DEQ with the state (w1, w2, ...) and the cell (f1(w1, x), f2(w2, w1), ...).

    The last part of its state is `second(first(x))`, with the same derivatives. The Jacobian is block triangular, so the
    joint equation has an equilibrium exactly where the series has one, and plain iteration converges where it converges for
    every part. The weights are shared with the parts, not copied.

    first, second, more  DEQs, or cells (wrapped in a DEQ with default settings); each takes the equilibrium of the one
                         before as its only input. A part may be a stack; the part after it then gets a tuple of states
    solver               default: that of the last part
    stop, eval_stop      default: that of the last part, with the strictest tolerances and the sum of all `max_steps`
    gradient             default: that of the last part, if all are Implicit. Other gradients must be passed explicitly:
                         an approximate gradient of the joint equation differs from those of the parts. JFB of a stack
                         gives no gradient to the first part
    """
    parts = [_as_deq(part) for part in (first, second, *more)]
    _check_stackable(parts, gradient)
    cell = Stacked([part.cell for part in parts])
    joined = DEQ(
        cell,
        _StackedStart(cell, [part.init for part in parts], parts[0].batched),
        solver=solver or parts[-1].solver,
        stop=stop or reduce(_both, [part.stop for part in parts]),  # a part begins to converge once those before it have
        gradient=gradient or parts[-1].gradient,
        eval_stop=eval_stop or (None if stop else _joint_eval_stop(parts)),
        batched=parts[0].batched,
    )
    # keep each part's training mode, which .train() would change
    joined.training = cell.training = any(part.training for part in parts)
    return joined


class Stacked(nn.Module):
    """Cells in series as one cell: (w1, w2, ...) -> (f1(w1, x), f2(w2, w1), ...)."""

    def __init__(self, cells: Sequence[Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(cells)

    def prepare(self, *inputs: Any) -> tuple[Any, ...]:
        """Prepare the inputs of the first cell; the other cells take states, which they prepare in every step."""
        return prepared(self.parts[0], inputs)

    def forward(self, z: Sequence[State], *given: Any) -> tuple[State, ...]:
        first, *rest = self.parts
        out = [first(z[0], *given)]
        out += [cell(w, *prepared(cell, (before,))) for cell, (before, w) in zip(rest, pairwise(z), strict=True)]
        return tuple(out)


class _StackedStart(nn.Module):
    """An `init` that computes the start of every part by the part's own `init`, from the start of the part before."""

    def __init__(self, cell: Stacked, inits: Sequence[Init], batched: bool) -> None:
        super().__init__()
        # tuples, not modules: otherwise the DEQ would list the weights of the cells twice
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
    """Return the cell as a function of its state alone; a function of its own, since a loop's lambda binds late."""
    return lambda z: cell(z, *prepared(cell, inputs))


def _both(first: Stop, second: Stop) -> Stop:
    """Return a Stop with the stricter tolerances of both and the sum of their `max_steps`."""
    return dataclasses.replace(
        second,
        rtol=min(first.rtol, second.rtol),
        atol=min(first.atol, second.atol),
        max_steps=first.max_steps + second.max_steps,
        compact=first.compact and second.compact,
        process_group=second.process_group or first.process_group,
    )


def _joint_eval_stop(parts: Sequence[DEQ]) -> Stop | None:
    """Return the combined `eval_stop` of the parts; None if no part has one."""
    if all(part.eval_stop is None for part in parts):
        return None
    return reduce(_both, [part.eval_stop or part.stop for part in parts])


def _as_deq(part: Any) -> DEQ:
    """Return `part` as a DEQ. Raises TypeError for a WeightTied and for cells that are not nn.Modules."""
    if isinstance(part, WeightTied):
        raise TypeError(
            f"stack takes DEQs or their cells, got a WeightTied of depth {part.depth}, which has no equilibrium. Pass its "
            "cell, or eq.DEQ(cell)."
        )
    cell = part.cell if isinstance(part, DEQ) else part
    if not isinstance(cell, nn.Module):
        raise TypeError(
            "stack takes nn.Module cells, or DEQs of such cells: a plain callable inside another cell gets no gradients "
            f"for the tensors it closes over. Got {cell!r}; make it the forward of an nn.Module."
        )
    return part if isinstance(part, DEQ) else DEQ(cell)


def _check_stackable(parts: Sequence[DEQ], gradient: Gradient | None) -> None:
    """Raise ValueError if the parts disagree on `batched`, or if their gradients are approximate and none was passed."""
    if len({part.batched for part in parts}) > 1:
        raise ValueError(
            "All parts of a stack must agree on `batched`: got DEQs with batched=True and batched=False. Build them alike."
        )
    approximate = [part.gradient for part in parts if not isinstance(part.gradient, Implicit)]
    if gradient is None and approximate:
        raise ValueError(
            f"A stack takes over the gradients of its parts only if all are Implicit: got {approximate[0]!r}, which is a "
            "different approximation for the joint equation. Pass the gradient of the stack, as in gradient=eq.Implicit()."
        )


def weight_tied_form(layers: Any) -> TiedLayers:
    """Return a feed-forward network of L layers as a weight-tied cell, which computes it in L steps and then stands still.

        cell = weight_tied_form(mlp)
        cell.readout(WeightTied(cell, cell.depth, cell.start)(x))       # mlp(x)
        cell.readout(DEQ(cell, cell.start, solver=Picard())(x))         # mlp(x), after cell.depth steps

    `layers` is an nn.Sequential, or any sequence, of nn.Linear, each followed by zero or more activations; widths and
    activations may differ from layer to layer. Pairs (linear, activation), nested sequences, and None for no activation are
    accepted. The weights are shared with the layers, not copied.
    """
    linears: list[nn.Linear] = []
    activations: list[nn.Sequential] = []
    for part in _flat(layers):
        if isinstance(part, nn.Linear):
            if type(part).forward is not nn.Linear.forward:
                raise TypeError(
                    f"A layer must be a plain nn.Linear: got {part!r}, which overrides forward. Merge what it adds into an "
                    "nn.Linear."
                )
            if linears and part.in_features != linears[-1].out_features:
                raise ValueError(
                    f"The widths of consecutive layers must match: layer {len(linears) + 1} takes {part.in_features} "
                    f"inputs, layer {len(linears)} has {linears[-1].out_features} outputs."
                )
            linears.append(part)
            activations.append(nn.Sequential())
        else:
            if not isinstance(part, nn.Module):
                raise TypeError(
                    f"Layers and activations must be modules such as nn.Linear(3, 3) or nn.Tanh(), got {part!r}."
                )
            if not linears:
                raise ValueError(
                    f"The network must begin with an nn.Linear, got {part!r} first. Apply it to the input instead."
                )
            if isinstance(part, _DropoutNd) and part.p > 0:
                raise ValueError(
                    f"A cell must be the same function in every step, so dropout is not allowed: got {part!r}. Remove it or "
                    "set p=0."
                )
            activations[-1].append(part)
    if not linears:
        raise ValueError("The network has no nn.Linear; at least one is needed.")
    return TiedLayers(linears, activations)


class TiedLayers(nn.Module):
    """z <- σ(W_z z + W_x x + b) on the concatenated activations z = [z_1; ...; z_L] of a network of L layers.

        W_z = [0            ]    W_x = [W_1]    b = [b_1]    σ = σ_i on the i-th block
              [W_2 0        ]          [ 0 ]        [b_2]
              [    .  .     ]          [ . ]        [ . ]
              [      W_L  0 ]          [ 0 ]        [b_L]

    After i steps from any start, the first i blocks hold the activations of the first i layers and no longer change. W_z is
    nilpotent, so L steps reach the only equilibrium exactly. The width of the state is the sum of all widths.
    """

    def __init__(self, linears: Sequence[nn.Linear], activations: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.activations = nn.ModuleList(activations)
        self.widths = tuple(linear.out_features for linear in linears)

    @property
    def depth(self) -> int:
        """Number of layers L, which is the number of steps to the equilibrium."""
        return len(self.widths)

    def start(self, x: Tensor) -> Tensor:
        """Return zeros to start from, (..., n), for x of shape (..., inputs of the first layer); an `init` of a DEQ."""
        return x.new_zeros(*x.shape[:-1], sum(self.widths))

    def blocks(self, z: Tensor) -> tuple[Tensor, ...]:
        """Split a state into the activations of every layer."""
        return z.split(self.widths, dim=-1)

    def readout(self, z: Tensor) -> Tensor:
        """Return the activations of the last layer, which are the output of the network."""
        return z[..., -self.widths[-1] :]

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return W_z, W_x and b, assembled from the weights of the layers so that gradients reach them."""
        first, *rest = (cast(nn.Linear, linear) for linear in self.linears)
        n = sum(self.widths)
        w = torch.block_diag(*[linear.weight for linear in rest]) if rest else first.weight.new_zeros(0, 0)
        w = F.pad(w, (0, self.widths[-1], self.widths[0], 0))  # (n, n), one block below the diagonal
        u = F.pad(first.weight, (0, 0, 0, n - self.widths[0]))  # (n, inputs)
        layers = (first, *rest)
        biases: list[Tensor] = [
            layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers
        ]
        return w, u, torch.cat(biases)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return W_z, (1, n, n), and W_x x + b, (..., n)."""
        w, u, b = self.matrices()
        # leading dimension of 1: a matrix with as many rows as the batch has samples would be taken for one row per sample
        return w.unsqueeze(0), F.linear(x, u, b)

    def forward(self, z: Tensor, w: Tensor, injected: Tensor) -> Tensor:
        """Apply one step to z, (..., n), with w, (1, n, n), and injected, (..., n)."""
        blocks = self.blocks(F.linear(z, w[0]) + injected)
        return torch.cat([sigma(block) for sigma, block in zip(self.activations, blocks, strict=True)], dim=-1)


def _flat(layers: Any) -> Iterator[Any]:
    """Yield the modules of nested sequences in order."""
    if isinstance(layers, nn.Sequential | nn.ModuleList | list | tuple):
        for part in layers:
            yield from _flat(part)
    elif layers is not None:
        yield layers
