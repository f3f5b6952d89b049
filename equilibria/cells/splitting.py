"""Operator splittings: maps with the same solution as a monotone cell, on which iteration converges.

    layer = Readout(eq.DEQ(PeacemanRachford(MonotoneLinear(784, 87)), solver=eq.Picard()))
    z = layer(x)                                          # z = relu(W z + U x + b)

Any solver and any gradient works with them. The paper's backward pass by splitting needs no code of its own:
eq.Implicit(solver=eq.Picard()) iterates the transposed map, which contracts at the same rate. The adjoint of a monotone cell
is also available as a monotone cell, `AdjointCell`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.cells.monotone import Certificate, MonotoneCell, State, Tensors, each, widened


class Splitting(nn.Module):
    """A splitting of a monotone cell with the step alpha > 0, which may be changed between solves."""

    def __init__(self, cell: MonotoneCell, alpha: float) -> None:
        super().__init__()
        if not isinstance(cell, MonotoneCell):
            raise TypeError(
                f"A splitting takes a monotone cell, got {type(cell).__name__}. Pass a MonotoneLinear, MonotoneConv2d or "
                "MonotoneTiers2d that is not yet wrapped in a DEQ."
            )
        self.cell = cell
        self.alpha = alpha

    @property
    def alpha(self) -> float:
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        if not value > 0:
            raise ValueError(
                f"alpha must be positive, got {value}: it is the step length. Start from 1.0 and use tune_alpha."
            )
        self._alpha = float(value)

    def start(self, *inputs: Any) -> State:
        """Return zeros of the shape of the state; the `init` of a DEQ."""
        return self.cell.start(*inputs)

    def readout(self, state: State, *inputs: Any) -> State:
        """Return the cell's equilibrium z for an equilibrium of the splitting; `inputs` are those of the solve."""
        return state

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class ForwardBackward(Splitting):
    """z -> s((1 - alpha) z + alpha (W z + c)); its equilibrium is the cell's z.

    Iteration converges for alpha < 2 m / |I - W|^2, which is `cell.certificate().alpha`; alpha = 1 is the plain map.
    """

    def __init__(self, cell: MonotoneCell, alpha: float) -> None:
        super().__init__(cell, alpha)

    def prepare(self, *inputs: Any) -> tuple[Tensors, Tensors, float]:
        # alpha is passed on: a backward pass runs the map again, possibly after alpha was tuned
        return (*self.cell.prepare(*inputs), self.alpha)

    def forward(self, z: State, source: Tensors, operator: Tensors, alpha: float) -> State:
        pulled = self.cell.affine(z, source, operator)
        return self.cell.project(each(lambda a, b: (1 - alpha) * a + alpha * b, z, pulled), source)


class PeacemanRachford(Splitting):
    """u -> 2 V(r + alpha c) - r with r = 2 s(u) - u and V = ((1 + alpha) I - alpha W)^{-1}; the cell's z is s(u).

    Iteration converges for every alpha > 0, in few steps. `readout` computes z from u; the module `Readout` does so as a
    layer. V is computed once per solve; without gradients, once per change of the weights.
    """

    def __init__(self, cell: MonotoneCell, alpha: float = 1.0) -> None:
        super().__init__(cell, alpha)

    def prepare(self, *inputs: Any) -> tuple[Tensors, Tensors, float]:
        return self.cell.source(*inputs), self.cell.inverse(self.alpha), self.alpha

    def forward(self, u: State, source: Tensors, inverse: Tensors, alpha: float) -> State:
        self.cell.check_state(u)
        # written with -r and V(-r - alpha c): each line is one pass over the state, forward and backward
        minus_r = each(lambda a, s: torch.add(a, s, alpha=-2), u, self.cell.project(u, source))
        right = each(lambda a, c: torch.add(a, c, alpha=-alpha), minus_r, self.cell.injection(source))
        solved = self.cell.solve(each(widened, right), inverse)  # V is at least float32
        return each(lambda a, v: torch.add(a, v.to(a.dtype), alpha=-2), minus_r, solved)

    def readout(self, state: State, *inputs: Any) -> State:
        """Return z = s(u)."""
        return self.cell.readout(state, *inputs)


class Readout(nn.Module):
    """A layer around a DEQ of a splitting or of a monotone cell; it returns the cell's z and starts from zeros."""

    def __init__(self, deq: nn.Module) -> None:
        super().__init__()
        if not isinstance(getattr(deq, "cell", None), (Splitting, MonotoneCell)):
            raise TypeError(f"Readout takes eq.DEQ(splitting) or eq.DEQ(monotone cell), got {deq!r}.")
        self.deq = deq

    def forward(self, *inputs: Any, init: Any = None) -> State:
        """Solve and return z; `init` starts this solve from a state or from an earlier Solution of the inner DEQ."""
        cell: Any = self.deq.cell
        if init is None and self.deq.init is None:
            init = cell.start(*inputs)
        return cell.readout(self.deq(*inputs, init=init), *inputs)


class AdjointCell(MonotoneCell):
    """u = s'(g + W'u): the adjoint of a cell at its equilibrium z for the cotangent g, as a monotone cell.

    s' is 1 where z > 0 and 0 elsewhere, so it is a projection, and I - W' is as monotone as I - W. The inputs are z and g.
    The solution is the gradient with respect to U x + b, from which all other gradients follow:

        adjoint = PeacemanRachford(AdjointCell(cell))
        u = Readout(eq.DEQ(adjoint, solver=eq.Picard()))(z, g)
        torch.autograd.backward(cell.affine(z, *cell.prepare(x)), u)
    """

    def __init__(self, of: MonotoneCell) -> None:
        super().__init__(of.m)
        self.of = of

    def source(self, z: State, g: State) -> tuple[State, State]:
        self.of.check_state(z)
        self.of.check_state(g)
        return g, self.of.active(z)

    def injection(self, source: Tensors) -> State:
        return source[0]

    def project(self, u: State, source: Tensors) -> State:
        return each(lambda part, active: torch.where(active, part, torch.zeros_like(part)), u, source[1])

    def readout(self, u: State, z: State, g: State) -> State:
        return self.project(u, self.source(z, g))

    def active(self, z: State) -> State:
        raise TypeError("An AdjointCell has no adjoint of its own; differentiate with eq.Implicit.")

    def operator(self) -> Tensors:
        return self.of.operator()

    def inverse(self, alpha: float) -> Tensors:
        return self.of.inverse(alpha)

    def invert(self, operator: Tensors, alpha: float) -> Tensors:
        return self.of.invert(operator, alpha)

    def multiply(self, z: State, operator: Tensors) -> State:
        return self.of.multiply_transposed(z, operator)

    def multiply_transposed(self, z: State, operator: Tensors) -> State:
        return self.of.multiply(z, operator)

    def solve(self, y: State, inverse: Tensors) -> State:
        return self.of.solve_transposed(y, inverse)

    def solve_transposed(self, y: State, inverse: Tensors) -> State:
        return self.of.solve(y, inverse)

    def certificate(self) -> Certificate:
        return self.of.certificate()

    def start(self, z: State, g: State) -> State:
        return each(torch.zeros_like, g)

    def check_state(self, z: State) -> None:
        self.of.check_state(z)


def tune_alpha(splitting: Splitting, steps: Callable[[], float | Tensor], largest: float = 1.0, halvings: int = 12) -> float:
    """Halve alpha, starting from `largest`, until the number of steps grows; set the best value and return it.

    steps     solves a batch and returns its number of steps: lambda: deq.solve(x).stats.steps.max()
    halvings  most halvings to try

    The best alpha changes with the weights: tune it from time to time during training.
    """
    before = splitting.alpha
    try:
        splitting.alpha = best = largest
        fewest = float(steps())
        for _ in range(halvings):
            splitting.alpha = best / 2
            taken = float(steps())
            if taken > fewest:  # smaller values are slower still
                break
            best, fewest = splitting.alpha, taken
    except BaseException:  # also an interrupt must not leave a trial value
        splitting.alpha = before
        raise
    splitting.alpha = best
    return best
