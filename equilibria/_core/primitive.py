"""The one primitive: the fixed point of F(z, *args) in z, differentiable in args to any order and in any mode.

`FixedPoint` is an autograd.Function. Its forward runs the solver without a graph and saves z, the status and the args,
nothing else. If nothing is differentiated, its forward is called directly and no node is made. Which rule differentiates it
depends on the mode:

    backward()                       `adjoint.backward_first_order`: one run of the cell with a graph at z, then products J'u
    create_graph=True, torch.func    `_backward_any_order`: the adjoint g = J'g + v is another FixedPoint, on explicit args
    forward mode                     `_jvp`: the tangent t = J t + b likewise
    vmap                             the mapped dimension is folded into the batch

Invariants. Cotangents are divided by `cotangent_scale` before the solve and multiplied after it, so that adjoint tolerances
are relative to the incoming gradient. A sample that is not finite is replaced by a good one with a cotangent of zero
(`quarantine`), because 0 * nan is nan. The residual of a first-order adjoint is measured by the same pull-back that gives
the gradients, and its status follows the measured residual. The device is waited for once per backward, in
`adjoint._is_solved`, besides the waits of the solver; more often only if a sample is not solved or not finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core import autodiff_modes
from equilibria._core.adjoint import backward_first_order, cotangent_scale
from equilibria._core.compaction import rows_mix
from equilibria._core.equation import Fold, FoldedEquation
from equilibria._core.maps import AdjointEquation, Equation, TangentEquation
from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria.solution import Status


def differentiable_fixed_point(problem: Problem, z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `FixedPoint`; refuse nested forward mode, for which torch drops terms silently."""
    if autodiff_modes.is_ordinary():
        if not (torch.is_grad_enabled() and any(arg.requires_grad for arg in args)):
            return FixedPoint.forward(problem, z0, *args)  # nothing is differentiated, and a Function takes 50 us
        # backward evaluates the cell at the answer, and measures the residual of dropped rows there
        problem = problem.changed(measured_later=True)
    elif autodiff_modes.forward_levels() > 1:
        raise RuntimeError(
            "Forward mode twice, as in jacfwd(jacfwd(f)), does not pass through an equilibrium: torch drops terms of it. "
            "Take torch.func.hessian, jacrev of jacfwd, or jacrev twice."
        )
    z, status = FixedPoint.apply(problem, z0, *args)
    return z, status


class FixedPoint(Function):
    """The autograd.Function (z0, *args) -> (z, status) with z = equation(z, *args); z0 gets no derivative."""

    @staticmethod
    def forward(problem: Problem, z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        """Solve without a graph; returns z, (batch, n), and the status of every sample."""
        result = problem.run(z0, args if autodiff_modes.is_ordinary() else [*map(autodiff_modes.primal, args)])
        z = result.z.clone() if result.z is z0 else result.z  # a Function must not return its input unchanged
        return z, result.stats.status

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the derivatives need: the problem, z, the status and the args."""
        problem, _, *args = inputs
        ctx.problem = problem
        ctx.mark_non_differentiable(output[1])  # the status has an integer dtype
        ctx.save_for_backward(*output, *args)
        ctx.save_for_forward(*output, *args)  # for jvp

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the args: of first order without transforms, else by a rule that is differentiable itself."""
        z, status, *args = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        transformed = not autodiff_modes.is_ordinary() and (
            autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level()
        )
        pull = _backward_any_order if torch.is_grad_enabled() or transformed else backward_first_order
        if torch._C._functorch.is_legacy_batchedtensor(cotangents[0]):  # torch.autograd.grad(is_grads_batched=True)
            grads = autodiff_modes.pull_each(lambda v: pull(ctx.problem, z, status, args, needs, v), cotangents[0])
        else:
            grads = pull(ctx.problem, z, status, args, needs, cotangents[0])
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        """Return the tangent of the equilibrium for tangents of the args; the status has none."""
        z, status, *args = [autodiff_modes.primal(saved) for saved in ctx.saved_tensors]
        return _jvp(ctx.problem, z, status, args, tangents[2:]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], problem: Problem, z0: Tensor, *args: Tensor) -> tuple[Any, Any]:
        """Fold the mapped dimension into the batch, so that the solver works on more rows."""
        _, start, *dims = in_dims
        z0 = z0.expand(info.batch_size, *z0.shape) if start is None else z0.movedim(start, 0)
        fold = Fold(info.batch_size, z0.shape[1], tuple(dims), info.randomness)
        z, status = FixedPoint.apply(
            problem.changed(equation=FoldedEquation(problem.equation, fold), known=None, compiler=None),
            z0.flatten(0, 1),
            *args,
        )
        return (fold.unfold(z), fold.unfold(status)), (0, 0)


# `Function.apply` computes the signature of `forward` in every call, which takes 40 us unless it is stored
FixedPoint.forward.__signature__ = inspect.signature(FixedPoint.forward)  # type: ignore[attr-defined]


def _backward_any_order(
    problem: Problem, z: Tensor, status: Tensor, args: Sequence[Tensor], needs: Sequence[bool], v: Tensor
) -> Sequence[Tensor | None]:
    """Return gradients of the args that are themselves differentiable: the adjoint is another fixed point."""
    equation, good = problem.equation, status != Status.NONFINITE
    if problem.result.unmeasured and autodiff_modes.has_values(z, *args):
        problem.measure(z.detach(), equation(z, *args).detach(), args)
    z, args, v = quarantine(equation, z, args, v, good)
    _learn_coupling(equation, z, args)
    scale = cotangent_scale(equation, v, measured=False)
    g = _solve_differentiably(problem, problem.derived(AdjointEquation), z, v / scale, args) * scale
    chosen = [i for i, need in enumerate(needs) if need]
    pulled = autodiff_modes.vjp(_in_args(equation, z, args, chosen), *[args[i] for i in chosen])(g)
    # without a good sample there is none to put in place of the others
    grads = iter([torch.where(good.any(), grad, torch.zeros_like(grad)) for grad in pulled])
    return [next(grads) if need else None for need in needs]


def _jvp(problem: Problem, z: Tensor, status: Tensor, args: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
    """Return the tangent of the equilibrium for tangents of the args; differentiable again."""
    equation, good = problem.equation, status != Status.NONFINITE
    chosen = [i for i, tangent in enumerate(tangents) if tangent is not None]
    given = [tangent for tangent in tangents if tangent is not None]
    z, args, _ = quarantine(equation, z, args, z, good)
    b = autodiff_modes.jvp(_in_args(equation, z, args, chosen), [args[i] for i in chosen], given)
    b = torch.where(good.unsqueeze(1), b, torch.zeros_like(b))
    _learn_coupling(equation, z, args)
    scale = cotangent_scale(equation, b, measured=False)
    return _solve_differentiably(problem, problem.derived(TangentEquation), z, b / scale, args) * scale


def _solve_differentiably(problem: Problem, derived: Problem, z: Tensor, rhs: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Solve an adjoint or tangent system, differentiably in z, `rhs` and the args."""
    if problem.linear.formula is None:
        return FixedPoint.apply(derived, torch.zeros_like(rhs), z, rhs, *args)[0]
    zero = torch.zeros_like(rhs)
    return problem.linear.formula(lambda t: derived.equation(t, z, zero, *args), rhs)


def _learn_coupling(equation: Equation, z: Tensor, args: Sequence[Tensor]) -> None:
    """Set `equation.identity.coupled` if no solve has set it yet and values can be read."""
    if equation.identity.coupled is None and autodiff_modes.has_values(z, *args):
        with torch.no_grad():
            equation.set_coupled(bool(rows_mix(lambda y: equation(y, *args).detach(), z.detach(), equation.precision)))


def _in_args(equation: Equation, z: Tensor, args: Sequence[Tensor], chosen: Sequence[int]) -> Callable[..., Tensor]:
    """Return F(z, *args) as a function of the args at the indices `chosen`."""

    def f(*values: Tensor) -> Tensor:
        """Return F with the chosen args replaced by `values`."""
        changed = list(args)
        for i, value in zip(chosen, values, strict=True):
            changed[i] = value
        return equation(z, *changed)

    return f
