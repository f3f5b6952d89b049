"""Implicit graph layers (IGNN: Gu, Chang, Zhu, Sojoudi and El Ghaoui 2020).

    X = phi(W X A + b(U)),   b(U) = Omega1 U A

U holds the features of the nodes and A is the adjacency matrix. At the equilibrium every node depends on the entire graph,
at any distance. States are stored by nodes, (nodes, width), so the equation becomes X = phi(A'X W' + b).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from equilibria._core.checks import require
from equilibria.constraints import project_, project_rows
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.models.graphs.graph_input import GraphLike, read_graph
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.solution import Solution
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop, max_norm

GraphStart = Literal["injection", "zeros"]

ROUNDING = 1e-5  # a row that exceeds the bound by less than this, relatively, counts as projected: float32 rounds
PICARD = Picard()
PUBLISHED_STOP = Stop(rtol=0.0, atol=3e-6, max_steps=300, norm=max_norm)
# the tolerance is relative to the incoming gradient; an absolute one would depend on the scale of the loss
PUBLISHED_GRADIENT = Implicit(solver=PICARD, stop=Stop(rtol=3e-6, atol=0.0, max_steps=300, norm=max_norm))


class IGNNCell(nn.Module):
    """f(X) = phi(A'X W' + b) with b = A'U Omega1', X of shape (nodes, width) and U of shape (nodes, features).

    It has one equilibrium if phi is non-expansive and |W|_inf, the largest row sum of |W|, times the Perron-Frobenius value
    of A is at most kappa < 1. `prepare` ensures this by taking the nearest W for which it holds.

    The published layer has parameters Omega2 and a bias that it does not use. This one has them too and leaves them unused
    by default; DistributedDataParallel then needs find_unused_parameters=True.

    features    width of the node features
    width       width of the state
    kappa       largest contraction factor
    omega2      add U Omega2' to b
    bias        add the bias to b
    columns     bound the columns of W too
    activation  phi; relu, tanh and others with slopes in [-1, 1]
    """

    def __init__(
        self,
        features: int,
        width: int,
        *,
        kappa: float = 0.9,
        omega2: bool = False,
        bias: bool = False,
        columns: bool = False,
        activation: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        require(features >= 1 and width >= 1, f"features and width must be at least 1, got {features} and {width}.")
        require(0 < kappa < 1, f"kappa must lie in (0, 1) for an equilibrium to exist, got {kappa}.")
        self.features, self.width, self.kappa = features, width, kappa
        self.uses_omega2, self.uses_bias, self.columns, self.activation = omega2, bias, columns, activation
        self.W = nn.Parameter(torch.empty(width, width))
        self.Omega1 = nn.Parameter(torch.empty(width, features))
        self.Omega2 = nn.Parameter(torch.empty(width, features))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters uniformly from [-1 / sqrt(width), 1 / sqrt(width)]."""
        bound = 1 / math.sqrt(self.width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that do not appear in the equation."""
        return [*([] if self.uses_omega2 else [self.Omega2]), *([] if self.uses_bias else [self.bias])]

    def prepare(self, u: Tensor, adjacency: Adjacency) -> tuple[Tensor, Tensor, Adjacency]:
        """Return b, W within its bound, and the adjacency; computed once per solve."""
        return self.injection(u, adjacency), self.weight(adjacency), adjacency

    def forward(self, x: Tensor, b: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
        return self.activation(torch.addmm(b, adjacency.propagate(x), weight.t()))

    def injection(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        """Return b, (nodes, width)."""
        if u.shape != (adjacency.nodes, self.features):
            raise ValueError(
                f"Expected features of shape {(adjacency.nodes, self.features)}, (nodes, features): got {tuple(u.shape)}. "
                f"The layer has features={self.features}, the graph has {adjacency.nodes} nodes."
            )
        if self.features <= self.width:  # apply the sparse product to the narrower matrix
            b = linear(adjacency.propagate(u), self.Omega1)
        else:
            b = adjacency.propagate(linear(u, self.Omega1))
        b = b + linear(u, self.Omega2) if self.uses_omega2 else b
        return b + self.bias if self.uses_bias else b

    def start_at_injection(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        """Return X = b in the dtype of the features; autocast may compute b in a narrower one."""
        return self.injection(u, adjacency).to(u.dtype)

    def start_at_zeros(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        return u.new_zeros(len(u), self.width)

    def bound(self, adjacency: Adjacency) -> float:
        """Return the largest |W|_inf allowed on this graph; infinite for a graph without cycles."""
        return self.kappa / adjacency.perron if adjacency.perron else math.inf

    def weight(self, adjacency: Adjacency) -> Tensor:
        """Return a copy of W if it is within the bound, else the nearest matrix that is."""
        bound, weight = self.bound(adjacency), self.W.clone()
        if bound == math.inf:
            return weight
        weight = _within(weight, bound)
        return _within(weight.mT, bound).mT if self.columns else weight

    @torch.no_grad()
    def project_(self, adjacency: Adjacency) -> None:
        """Project W onto the bound in place, as in projected gradient descent.

        A W within the bound is not changed. A parametrized W cannot be changed in place; `weight` projects it instead.
        """
        weight = self.W
        if not isinstance(weight, nn.Parameter):
            return
        bound = self.bound(adjacency)
        longest = max(float(weight.abs().sum(dim=dim).amax()) for dim in ((0, 1) if self.columns else (1,)))
        if longest > bound * (1 + ROUNDING):
            # hidden from autograd: solves on other graphs may still need their backward, and hold copies of W
            project_(weight.data, bound, columns=self.columns)

    def extra_repr(self) -> str:
        used = f"omega2={self.uses_omega2}, bias={self.uses_bias}, columns={self.columns}"
        return f"{self.features}, {self.width}, kappa={self.kappa}, {used}"


class IGNNLayer(nn.Module):
    """The equilibrium of an `IGNNCell` on a graph, (nodes, features) -> (nodes, width).

    It is called like the convolutions of torch_geometric.nn and can be used among them:

        layer = IGNNLayer(16, 64)
        layer(x, edge_index)                  # or (x, edge_index, edge_weight), (graph), (x, adjacency)

    In training mode every forward first projects W onto its bound in place; with the preceding optimizer step this is
    projected gradient descent. In eval mode W stays unchanged, and a graph whose bound it exceeds is solved with the nearest
    W within it.

    features, width, kappa, omega2, bias, columns, activation  of the `IGNNCell`
    normalize  use D^(-1/2) (A + I) D^(-1/2) as A; an `Adjacency` is used unchanged
    start      "injection": start from X = b; "zeros": from zeros
    solver, stop, gradient, eval_stop  of the DEQ; by default those of the paper
    """

    def __init__(
        self,
        features: int,
        width: int,
        *,
        kappa: float = 0.9,
        normalize: bool = False,
        omega2: bool = False,
        bias: bool = False,
        columns: bool = False,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        start: GraphStart = "injection",
        solver: AnySolver = PICARD,
        stop: Stop = PUBLISHED_STOP,
        gradient: Gradient = PUBLISHED_GRADIENT,
        eval_stop: Stop | None = None,
    ) -> None:
        super().__init__()
        starts = get_args(GraphStart)
        require(start in starts, f"start must be one of {', '.join(starts)}, got {start!r}.")
        self.normalize, self.start = normalize, start
        cell = IGNNCell(features, width, kappa=kappa, omega2=omega2, bias=bias, columns=columns, activation=activation)
        init = cell.start_at_injection if start == "injection" else cell.start_at_zeros
        self.deq = DEQ(cell, init, solver, stop, gradient, eval_stop, batched=False)

    @property
    def cell(self) -> IGNNCell:
        """The cell, which holds the parameters."""
        cell = self.deq.cell
        assert isinstance(cell, IGNNCell)
        return cell

    def forward(
        self,
        x: Tensor | GraphLike,
        edge_index: Tensor | Adjacency | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the equilibrium, (nodes, width)."""
        z: Tensor = self.solve(x, edge_index, edge_weight).z
        return z

    def solve(
        self,
        x: Tensor | GraphLike,
        edge_index: Tensor | Adjacency | None = None,
        edge_weight: Tensor | None = None,
        *,
        init: Solution | Tensor | None = None,
    ) -> Solution:
        """Return the Solution. `init` starts this solve from a state or an earlier Solution."""
        graph = read_graph(x, edge_index, edge_weight, normalize=self.normalize)
        if self.training:
            self.cell.project_(graph.adjacency)
        return self.deq.solve(graph.x, graph.adjacency, init=init)

    def reset_parameters(self) -> None:
        self.cell.reset_parameters()

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}, start={self.start!r}"


def _within(weight: Tensor, bound: float) -> Tensor:
    """Project rows of |W| sums above the bound; rows that exceed it only by rounding stay, with their gradients intact."""
    length = weight.abs().sum(dim=1, keepdim=True)
    return torch.where(length <= bound * (1 + ROUNDING), weight, project_rows(weight, bound))
