"""First-order implicit gradients for cells whose tensors cannot be passed as arguments: closures and FSDP weights.

The cell is run once more at the equilibrium with a graph. In backward, the incoming cotangent is replaced by the solution
of the adjoint equation, and autograd propagates it through that graph to every tensor the cell used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core import autodiff_modes
from equilibria._core.adjoint import any_rank, cotangent, cotangent_scale, file_lost, verified
from equilibria._core.equation import OUT_OF_REACH
from equilibria._core.maps import AdjointEquation, LinearMap
from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria.solution import Status


def attach(problem: Problem, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Return the equilibrium, (batch, n), with first-order gradients for every tensor the cell used."""
    if autodiff_modes.inside_transform():
        raise RuntimeError(OUT_OF_REACH)
    result = problem.run(z0, [arg.detach() for arg in args])
    if not torch.is_grad_enabled():
        return result.z
    z, inputs, good = result.z, args, result.stats.status != Status.NONFINITE
    if problem.result.nonfinite and bool(good.any()):
        z, inputs, _ = quarantine(problem.equation, z, args, z, good)
    # a leaf of its own: the cotangent of z stops here, so that backward through `out` reaches only what the cell closes over
    leaf = z.detach().requires_grad_()
    out = problem.equation(leaf, *inputs)
    return _Attach.apply(problem, result.z, out, leaf, good, [arg.detach() for arg in inputs])


class _Attach(Function):
    """Identity on z in forward; in backward, passes the adjoint solution on to `out` = F(leaf)."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, z: Tensor, out: Tensor, leaf: Tensor, good: Tensor, inputs: list[Tensor]
    ) -> Tensor:
        """Store the graph of the cell for backward, and return a copy of z."""
        # not by save_for_backward: `out` carries the graph that backward differentiates
        ctx.problem, ctx.out, ctx.leaf, ctx.good, ctx.inputs = problem, out, leaf, good, inputs
        return z.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        """Return the adjoint solution as the gradient of `out`, for each cotangent of a batch of them."""
        if torch.is_grad_enabled() or autodiff_modes.inside_transform():
            raise RuntimeError(OUT_OF_REACH)
        (u,) = autodiff_modes.pull_each(lambda v: _Attach._cotangent(ctx, v), v)
        return None, None, u, None, None, None

    @staticmethod
    def _cotangent(ctx: Any, v: Tensor) -> tuple[Tensor]:
        """Return the adjoint solution for v, (batch, n); zero for samples without a finite state or cotangent."""
        lost = ctx.good & ~torch.isfinite(v).all(dim=1)
        keep = (ctx.good & ~lost).unsqueeze(1)
        v = torch.where(keep, v, torch.zeros_like(v))
        equation = ctx.problem.equation
        adjoint = ctx.problem.derived(AdjointEquation)
        # one scale for all rows unless they are known to be apart: nothing would notice a coupled system divided row by row
        size = cotangent_scale(equation, v, measured=False)
        system = _adjoint_map(ctx, v / size)
        u = cotangent(adjoint, system)
        sure = verified(adjoint, system, u, system(u) - u, lambda u: system(u) - u)
        stats = adjoint.result.adjoint
        assert sure is not None and stats is not None
        lost = lost | (ctx.good & (stats.status == Status.NONFINITE))
        u = torch.where((ctx.good & ~lost).unsqueeze(1), sure * size, torch.zeros_like(v))
        overflowing = _overflowing(adjoint, system, u)
        if overflowing is not None:
            lost, u = lost | overflowing, torch.where(overflowing.unsqueeze(1), torch.zeros_like(u), u)
        if any_rank(adjoint, lost):
            # a derivative that is not finite makes nan of the zero that its sample gets, and of every sum over samples
            spoils = not bool(torch.isfinite(system.product(u)).all())
            if bool(lost.any()):
                file_lost(adjoint, ctx.good if spoils else lost)
        return (u,)


def _overflowing(adjoint: Problem, system: LinearMap, u: Tensor) -> Tensor | None:
    """Return (batch,), True for samples whose cotangent overflows in the pull-back through the cell; None if there are none.

    The adjoint system is solved for cotangents of size 1. Autograd propagates them at their own size, which may leave the
    range of half precision, or that of any dtype if they are huge.
    """
    most, narrow = torch.finfo(u.dtype).max ** 0.5, adjoint.equation.precision > torch.finfo(torch.float32).eps
    asked = torch.ones_like(u, dtype=torch.bool) if narrow else ~(u.abs() < most)  # also for nan
    if not any_rank(adjoint, asked):
        return None
    finite = torch.isfinite(system.product(u)).all(dim=1)
    return None if bool(finite.all()) else ~finite


def _adjoint_map(ctx: Any, rhs: Tensor) -> LinearMap:
    """Return the map g -> J'g + rhs, which uses the graph that forward kept."""
    out, leaf, equation = ctx.out, ctx.leaf, ctx.problem.equation

    def transposed(u: Tensor) -> Tensor:
        """Return J'u on the graph that forward kept."""
        (product,) = torch.autograd.grad(out, leaf, u, retain_graph=True, allow_unused=True)
        return torch.zeros_like(u) if product is None else product

    def product(t: Tensor) -> Tensor:
        """Return J t, by forward mode."""
        return autodiff_modes.jvp(lambda z: equation(z, *ctx.inputs), [leaf.detach()], [t])

    return LinearMap(transposed, product, rhs)
