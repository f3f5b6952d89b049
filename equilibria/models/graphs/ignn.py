"""Implicit graph layers (IGNN: Gu, Chang, Zhu, Sojoudi and El Ghaoui 2020).

    X = phi(W X A + b(U)),   b(U) = Omega1 U A

U are the features of the nodes, A the adjacency matrix: an equilibrium has seen the whole graph, however far apart two
nodes are. States are kept by nodes, (nodes, width), the equation is then X = phi(A'X W' + b).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from equilibria._core.loop import Stop
from equilibria._core.norms import max_norm
from equilibria.constraints import project_, project_rows
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.models.graphs.graph_input import GraphLike, read_graph
from equilibria.models.graphs.graph_ops import Adjacency
from equilibria.solution import Solution
from equilibria.solvers.base import require
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.picard import Picard

Start = Literal["injection", "zeros"]

ROUNDING = 1e-5  # share by which a projected row may miss the bound: it is not projected once more
PICARD = Picard()
PUBLISHED_STOP = Stop(rtol=0.0, atol=3e-6, max_steps=300, norm=max_norm)
# relative to the incoming gradient, or the answer would depend on the scale of the loss
PUBLISHED_GRADIENT = Implicit(solver=PICARD, stop=Stop(rtol=3e-6, atol=0.0, max_steps=300, norm=max_norm))


class IGNNCell(nn.Module):
    """f(X) = phi(A'X W' + b), b = A'U Omega1', X being (nodes, width) and U (nodes, features).

    It has one equilibrium where phi does not expand and |W|_inf, the largest sum of a row of |W|, times the
    Perron-Frobenius value of A is at most kappa < 1. `prepare` sees to it: it takes the nearest W for which that holds.

    The published layer owns Omega2 and a bias, counts them among its parameters, and does not use them. So does this one,
    unless told to: DistributedDataParallel needs find_unused_parameters=True then.

    features    of the nodes
    width       of the state
    kappa       how much the equation may contract at worst
    omega2      add U Omega2' to b
    bias        add the bias to b
    columns     bound the columns of W, too
    activation  phi; relu, tanh and others whose slope is within [-1, 1]
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
        require(0 < kappa < 1, f"kappa must lie in (0, 1), or there need not be an equilibrium, got {kappa}.")
        self.features, self.width, self.kappa = features, width, kappa
        self.uses_omega2, self.uses_bias, self.columns, self.activation = omega2, bias, columns, activation
        self.W = nn.Parameter(torch.empty(width, width))
        self.Omega1 = nn.Parameter(torch.empty(width, features))
        self.Omega2 = nn.Parameter(torch.empty(width, features))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """All of them uniform between -1 / sqrt(width) and 1 / sqrt(width)."""
        bound = 1 / math.sqrt(self.width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Those that are owned but take no part in the equation."""
        return [*([] if self.uses_omega2 else [self.Omega2]), *([] if self.uses_bias else [self.bias])]

    def prepare(self, u: Tensor, adjacency: Adjacency) -> tuple[Tensor, Tensor, Adjacency]:
        return self.injection(u, adjacency), self.weight(adjacency), adjacency

    def forward(self, x: Tensor, b: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
        return self.activation(torch.addmm(b, adjacency.propagate(x), weight.t()))

    def injection(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        """b, (nodes, width)."""
        if u.shape != (adjacency.nodes, self.features):
            raise ValueError(
                f"Features of shape {(adjacency.nodes, self.features)} were expected, (nodes, features): got "
                f"{tuple(u.shape)}. The layer has features={self.features}, the graph {adjacency.nodes} nodes."
            )
        if self.features <= self.width:  # the sparse product on whichever is narrower
            b = linear(adjacency.propagate(u), self.Omega1)
        else:
            b = adjacency.propagate(linear(u, self.Omega1))
        b = b + linear(u, self.Omega2) if self.uses_omega2 else b
        return b + self.bias if self.uses_bias else b

    def start_at_injection(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        """X = b, in the precision of the features: autocast may give b in less."""
        return self.injection(u, adjacency).to(u.dtype)

    def start_at_zeros(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        return u.new_zeros(len(u), self.width)

    def bound(self, adjacency: Adjacency) -> float:
        """What |W|_inf may be on this graph; infinite where no way leads back to any node."""
        return self.kappa / adjacency.perron if adjacency.perron else math.inf

    def weight(self, adjacency: Adjacency) -> Tensor:
        """A copy of W where that is within the bound, else the nearest matrix that is."""
        bound, weight = self.bound(adjacency), self.W.clone()
        if bound == math.inf:
            return weight
        weight = _within(weight, bound)
        return _within(weight.mT, bound).mT if self.columns else weight

    @torch.no_grad()
    def project_(self, adjacency: Adjacency) -> None:
        """Bring W within the bound, in place: the projection of projected gradient descent.

        A W that is there already is not touched. One that a parametrization computes cannot be: `weight` has to do.
        """
        weight = self.W
        if not isinstance(weight, nn.Parameter):
            return
        bound = self.bound(adjacency)
        longest = max(float(weight.abs().sum(dim=dim).amax()) for dim in ((0, 1) if self.columns else (1,)))
        if longest > bound * (1 + ROUNDING):
            # past autograd's notice: solves on other graphs may wait for their backward, and have worked on copies of W
            project_(weight.data, bound, columns=self.columns)

    def extra_repr(self) -> str:
        used = f"omega2={self.uses_omega2}, bias={self.uses_bias}, columns={self.columns}"
        return f"{self.features}, {self.width}, kappa={self.kappa}, {used}"


class IGNNLayer(nn.Module):
    """The equilibrium of an `IGNNCell` on a graph, (nodes, features) -> (nodes, width).

    Called as the convolutions of torch_geometric.nn are, and for use among them:

        layer = IGNNLayer(16, 64)
        layer(x, edge_index)                  # or (x, edge_index, edge_weight), (graph), (x, adjacency)

    In training mode W is brought within its bound at the beginning of every forward, in place: together with the step of
    the optimizer before it that is projected gradient descent. In eval mode W stays as it is, and a graph whose bound it
    misses is solved with the nearest W that does not.

    features, width, kappa, omega2, bias, columns, activation  of the `IGNNCell`
    normalize  take D^(-1/2) (A + I) D^(-1/2) for A; an `Adjacency` is taken as it is
    start      "injection": from X = b; "zeros"
    solver, stop, gradient, eval_stop  of the DEQ; those of the paper unless given
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
        start: Start = "injection",
        solver: AnySolver = PICARD,
        stop: Stop = PUBLISHED_STOP,
        gradient: Gradient = PUBLISHED_GRADIENT,
        eval_stop: Stop | None = None,
    ) -> None:
        super().__init__()
        starts = get_args(Start)
        require(start in starts, f"start must be one of {', '.join(starts)}, got {start!r}.")
        self.normalize, self.start = normalize, start
        cell = IGNNCell(features, width, kappa=kappa, omega2=omega2, bias=bias, columns=columns, activation=activation)
        init = cell.start_at_injection if start == "injection" else cell.start_at_zeros
        self.deq = DEQ(cell, init, solver, stop, gradient, eval_stop, batched=False)

    @property
    def cell(self) -> IGNNCell:
        """The equation and its parameters."""
        cell = self.deq.cell
        assert isinstance(cell, IGNNCell)
        return cell

    def forward(
        self,
        x: Tensor | GraphLike,
        edge_index: Tensor | Adjacency | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """The equilibrium, (nodes, width)."""
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
        """The equilibrium with its record. `init` starts this solve from a state or an earlier Solution instead."""
        graph = read_graph(x, edge_index, edge_weight, normalize=self.normalize)
        if self.training:
            self.cell.project_(graph.adjacency)
        return self.deq.solve(graph.x, graph.adjacency, init=init)

    def reset_parameters(self) -> None:
        self.cell.reset_parameters()

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}, start={self.start!r}"


def _within(weight: Tensor, bound: float) -> Tensor:
    """`project_rows`, but for rows that miss the bound by rounding alone: gradients should not know of those."""
    length = weight.abs().sum(dim=1, keepdim=True)
    return torch.where(length <= bound * (1 + ROUNDING), weight, project_rows(weight, bound))
