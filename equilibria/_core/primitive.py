"""The one primitive: the fixed point of F(z, *args) in z, differentiable in args to any order and in any mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core import autodiff_modes
from equilibria._core.bookkeeping import FLOOR
from equilibria._core.compaction import ROUNDING, rows_mix
from equilibria._core.failures import judge
from equilibria._core.folded import Fold, FoldedEquation
from equilibria._core.linear import AdjointEquation, Linearisation, TangentEquation
from equilibria._core.loop import Stop
from equilibria._core.maps import Affine
from equilibria._core.problem import Equation
from equilibria.gradients.approximations import Approximation
from equilibria.gradients.base import Problem, quarantine, unit
from equilibria.solution import Stats, Status, empty_stats
from equilibria.solvers.fallback import AnySolver

SEARCHES = 4  # runs of the cell per halving of the batch, at most, to find samples whose gradient is not finite


@dataclass(frozen=True)
class Differentiable:
    """A problem and how the linear systems of its derivatives are solved.

    solver, stop, on_failure  the exact solution
    approximation             a formula in its place
    when                      the relative residual up to which the formula will do; None: always
    """

    problem: Problem
    solver: AnySolver
    stop: Stop
    on_failure: Any = None
    approximation: Approximation | None = None
    when: float | None = None

    @property
    def formula(self) -> Approximation | None:
        """What serves where a derivative is to be differentiable itself: a formula that is not checked, or none."""
        return self.approximation if self.when is None else None

    def adjoint(self) -> Differentiable:
        return self._derived(AdjointEquation(self.problem.equation), "adjoint")

    def tangent(self) -> Differentiable:
        return self._derived(TangentEquation(self.problem.equation), "tangent")

    def folded(self, fold: Fold) -> Differentiable:
        equation = FoldedEquation(self.problem.equation, fold)
        return dataclasses.replace(
            self, problem=dataclasses.replace(self.problem, equation=equation, known=None, compiler=None)
        )

    def _derived(self, equation: Equation, what: Any) -> Differentiable:
        compiler = self.problem.compiler
        problem = Problem(equation, self.solver, self.stop, self.problem.report, what, self.on_failure, compiler=compiler)
        return dataclasses.replace(self, problem=problem)

    def cotangent(self, system: Affine) -> Tensor:
        """The solution u = J'u + v of an adjoint system, exact or by the formula; first order."""
        adjoint, right = self.adjoint().problem, system.offset
        if self.approximation is None:  # whoever asked pulls it back through the cell next, which verifies it
            adjoint = dataclasses.replace(adjoint, verify=bool(adjoint.equation.coupled), known=right)
            return adjoint.run_map(system, torch.zeros_like(right), right).z
        u = self.approximation(system.product, right)
        if self.when is None:
            return u
        return u + self._correction(system, u)

    def _correction(self, system: Affine, u: Tensor) -> Tensor:
        """The exact remainder of the samples for which the formula does not do: d = J'd + (v + J'u - u)."""
        assert self.when is not None
        left = system(u) - u
        norm = self.stop.norm
        enough = norm(left) <= self.when * norm(system.offset)
        return self.rest(system, torch.where(enough.unsqueeze(1), torch.zeros_like(left), left), u)

    def rest(self, system: Affine, left: Tensor, u: Tensor) -> Tensor:
        """What is missing from a cotangent u that leaves a residual of `left`; statistics add to those of finding u."""
        before = self.problem.report.adjoint if self.approximation is None else None
        remainder = Affine(system.product, system.transposed, left)
        adjoint = dataclasses.replace(self.adjoint().problem, known=left)  # J'0 + left
        if before is not None:  # together the two solves take at most max_steps; whoever asked applies the failure policy
            stop = dataclasses.replace(self.stop, max_steps=self.steps_left())
            adjoint = dataclasses.replace(adjoint, stop=stop, on_failure="ignore")
            flat = adjoint.run_map(remainder, torch.zeros_like(left), system.offset)
            self.problem.report.adjoint = _added(before, flat.stats)
            return flat.z
        falls_back = self.on_failure == "fall_back"
        adjoint = dataclasses.replace(adjoint, on_failure="warn") if falls_back else adjoint
        flat = adjoint.run_map(remainder, torch.zeros_like(left), system.offset)
        if falls_back:  # to the Jacobian-free answer, all in all
            return torch.where(flat.stats.failed.unsqueeze(1), system.offset - u, flat.z)
        return flat.z

    def steps_left(self) -> int:
        """Steps that the adjoint solve so far leaves of max_steps."""
        stats = self.problem.report.adjoint
        taken = int(stats.steps.max()) if stats is not None and stats.steps.numel() else 0
        return max(self.stop.max_steps - self.stop.largest(taken), 0)

    def verified(
        self,
        system: Affine,
        u: Tensor,
        left: Tensor,
        measure: Callable[[Tensor], Tensor],
        release: Callable[[], None] = lambda: None,
        couples: Callable[[], bool] | None = None,
    ) -> Tensor | None:
        """A cotangent with its status by the measured residual, `left`; solved further where it fell short of its claim.

        measure  the residual that another cotangent leaves
        release  frees what measuring this one has left in memory
        couples  asked where the claim does not hold: True means that the rows were not systems of their own, and None is
                 returned
        """
        right = system.offset
        if self.approximation is not None:
            file_residual(self, left, right)
            return u
        short = self._file_measured(left, right)
        if not self._any(short):
            return u
        if couples is not None and couples():
            return None
        if self._any(self._worth_more(short)) and self.steps_left():
            release()
            u = u + self.rest(system, left, u)
            short = self._file_measured(measure(u), right)
        stats, falls_back = self.problem.report.adjoint, self.on_failure == "fall_back"
        assert stats is not None
        action = "warn" if falls_back else self.on_failure
        owner = self.problem.equation.owner
        judge(stats, self.stop, self.solver, what="adjoint", owner=owner, on_failure=action)
        if falls_back and self._any(stats.failed):
            u = torch.where(stats.failed.unsqueeze(1), right, u)
            release()
            measure(u)
        return u

    def _holds(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """(batch,) whether a measured residual is within the tolerance, and the relative residual."""
        batch = len(right)
        if self.problem.equation.coupled:  # one system
            left, right = left.reshape(1, -1), right.reshape(1, -1)
        scale = self.stop.norm(right)
        residual = self.stop.norm(left) / scale.clamp_min(torch.finfo(right.dtype).tiny)
        return self.stop.holds(residual, self.problem.equation.precision, scale).expand(batch), residual.expand(batch)

    def _file_measured(self, left: Tensor, right: Tensor) -> Tensor:
        """(batch,) samples whose status said converged and whose residual does not: they are STALLED now."""
        stats = self.problem.report.adjoint
        assert stats is not None
        holds, residual = self._holds(left, right)
        short = stats.converged & ~holds
        status = stats.status.masked_fill(short, Status.STALLED)
        self.problem.report.adjoint = dataclasses.replace(stats, residual=residual, status=status)
        return short

    def _worth_more(self, short: Tensor) -> Tensor:
        """Of samples short of the tolerance, those that more steps can bring there: not where it is out of reach."""
        stats, precision = self.problem.report.adjoint, self.problem.equation.precision
        assert stats is not None
        return short if self.stop.rtol >= precision else short & (stats.residual > self.stop.rtol + FLOOR * precision)

    def _any(self, rows: Tensor) -> bool:
        """For any sample, on any rank."""
        return bool(self.stop.largest(int(rows.any())))


def differentiable_fixed_point(task: Differentiable, z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
    """`FixedPoint` where torch follows it: of forward mode inside of forward mode it loses terms without a word."""
    if autodiff_modes.forward_levels() > 1:
        raise RuntimeError(
            "Forward mode twice, as in jacfwd(jacfwd(f)), does not pass through an equilibrium: torch drops terms of it. "
            "Take torch.func.hessian, jacrev of jacfwd, or jacrev twice."
        )
    if torch.is_grad_enabled() and not autodiff_modes.inside_transform() and not autodiff_modes.inside_dual_level():
        # `backward_first_order` evaluates the cell at the answer, as does whoever differentiates that in turn
        followed = any(arg.requires_grad for arg in args)
        task = dataclasses.replace(task, problem=dataclasses.replace(task.problem, measured_later=followed))
    z, status = FixedPoint.apply(task, z0, *args)
    return z, status


class FixedPoint(Function):
    """(z, status) with z = equation(z, *args). The starting point gets no derivative: the equilibrium has none in it."""

    @staticmethod
    def forward(task: Differentiable, z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        flat = task.problem.run(z0, [autodiff_modes.primal(arg) for arg in args])
        z = flat.z.clone() if flat.z is z0 else flat.z  # autograd does not take back what it has given
        return z, flat.stats.status

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        task, _, *args = inputs
        ctx.task = task
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *args)
        ctx.save_for_forward(*output, *args)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        z, status, *args = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        any_order = torch.is_grad_enabled() or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level()
        pull = _pull_any_order if any_order else pull_once
        grads = autodiff_modes.pull_each(lambda v: pull(ctx.task, z, status, args, needs, v), cotangents[0])
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        z, status, *args = [autodiff_modes.primal(saved) for saved in ctx.saved_tensors]
        return _push(ctx.task, z, status, args, tangents[2:]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], task: Differentiable, z0: Tensor, *args: Tensor) -> tuple[Any, Any]:
        """Fold the mapped dimension into the batch: the solver sees more samples, and stays per sample."""
        _, start, *dims = in_dims
        z0 = z0.expand(info.batch_size, *z0.shape) if start is None else z0.movedim(start, 0)
        fold = Fold(info.batch_size, z0.shape[1], tuple(dims), info.randomness)
        z, status = FixedPoint.apply(task.folded(fold), z0.flatten(0, 1), *args)
        return (fold.unfold(z), fold.unfold(status)), (0, 0)


def pull_once(
    task: Differentiable, z: Tensor, status: Tensor, args: Sequence[Tensor], needs: Sequence[bool], v: Tensor
) -> Sequence[Tensor | None]:
    """Gradients of the args, first order: one run of the cell with a graph, then only products."""
    equation, good = task.problem.equation, status != Status.NONFINITE
    some_bad = task.problem.report.nonfinite
    adjoint, lost, whole_z = AdjointEquation(equation), None, z
    while True:
        if some_bad:
            if not bool(good.any()):
                if lost is not None:
                    file_lost(task, lost)
                return [torch.zeros_like(arg) if need else None for arg, need in zip(args, needs, strict=True)]
            z, args, v = quarantine(equation, z, args, v, good)
        at = Linearisation(equation, z, args, needs)
        if task.problem.report.unmeasured and z is whole_z:
            task.problem.measure(z, at.value())
        size = unit(equation, v, measured=True)
        right = v / size
        system = adjoint.bind_at(at, right)
        u = task.cotangent(system)
        if some_bad:  # zero for those whose cotangent is, whatever a formula made of them
            u = torch.where(good.unsqueeze(1), u, torch.zeros_like(u))
        pull = _Pull(at, size, right)
        left = pull(u)
        # not where it is nan; of samples set aside, which others may depend on, the residual means nothing
        finite = (task.stop.norm(left) < float("inf")) | ~good
        sound = bool(finite.all() & pull.seems_finite())
        if not sound:
            bad = good & ~finite
            if not bool(bad.any()):
                bad = good & _responsible(pull, u, good)
            if bool(bad.any()):
                # a derivative of this sample is not finite: it would poison the sum over the batch even with weight zero
                lost = bad if lost is None else lost | bad
                good, some_bad = good & ~bad, True
                continue
        couples = None if equation.coupled or len(u) < 2 else partial(_couples, at, u)
        if task.verified(system, u, left, pull, pull.release, couples) is None:
            equation.set_coupled(True)  # one system with one scale, which is solved anew
            continue
        if not (sound and pull.runs == 1) and not pull.is_finite():
            # a sum of finite gradients, too large for its dtype: it belongs to every sample
            lost = good if lost is None else lost | good
        if lost is not None:
            file_lost(task, lost)
        return pull.grads


def _couples(at: Linearisation, u: Tensor) -> bool:
    """True if J' mixes rows: factors per row, powers of two and so without rounding, do not come out as they went in."""
    factors = torch.exp2(torch.arange(len(u), device=u.device, dtype=u.dtype) % 3).unsqueeze(1)
    plain, scaled = at.transposed(u), at.transposed(u * factors) / factors
    at.forget()
    error, size = torch.linalg.vector_norm(scaled - plain, dim=1), torch.linalg.vector_norm(plain, dim=1)
    return bool((error > ROUNDING * at.equation.precision * size).any())


def _learn_coupling(equation: Equation, z: Tensor, args: Sequence[Tensor]) -> None:
    """Find out whether rows depend on each other, where no solve has."""
    if equation.coupled is None and autodiff_modes.has_values(z, *args):
        with torch.no_grad():
            equation.set_coupled(rows_mix(lambda y: equation(y, *args).detach(), z.detach(), equation.precision))


class _Pull:
    """The gradients of the args for a cotangent of unit scale, and the residual it leaves in the adjoint system."""

    def __init__(self, at: Linearisation, size: Tensor, right: Tensor) -> None:
        self.at, self.size, self.right = at, size, right
        self.common = _common_scale(size, right) if at.equation.precision > torch.finfo(torch.float32).eps else None
        self.grads: list[Tensor | None] = []
        self.runs = 0

    def __call__(self, u: Tensor) -> Tensor:
        self.runs += 1
        if self.common is None:
            self.grads, product = self.at.pull(u * self.size)
        else:  # half precision has few exponents: gradients get their size after they were computed
            grads, product = self.at.pull(u * (self.size / self.common))
            self.grads = [None if grad is None else grad * self.common for grad in grads]
            product = product * self.common
        self.at.forget()
        return product / self.size + self.right - u

    def seems_finite(self) -> Tensor:
        """A scalar, False where any gradient is not finite; rarely also where a sum of finite numbers is not."""
        sums = [_sum(grad).to(self.right.dtype) for grad in self.grads if grad is not None]
        sound = torch.isfinite(torch.stack(sums).sum()) if sums else torch.ones((), dtype=torch.bool)
        return sound.to(self.right.device)

    def is_finite(self) -> bool:
        # the sums first: torch.isfinite needs as much memory again as a gradient has
        if bool(self.seems_finite()):
            return True
        return all(bool(torch.isfinite(grad).all()) for grad in self.grads if grad is not None)

    def release(self) -> None:
        """Free the gradients, or they would be held through another run of the cell."""
        self.grads = []


def _common_scale(size: Tensor, right: Tensor) -> Tensor:
    """A power of two, which rounds nothing, near the largest size of a cotangent that is not zero."""
    if not len(size):
        return size.new_ones(())
    largest = torch.where((right != 0).any(dim=1, keepdim=True), size, torch.zeros_like(size)).amax()
    return torch.where(largest > 0, torch.exp2(largest.log2().floor()), torch.ones_like(largest))


def _sum(grad: Tensor) -> Tensor:
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    return grad.sum(dtype=torch.float32) if grad.dtype in (torch.float16, torch.bfloat16) else grad.sum()


def _responsible(pull: _Pull, u: Tensor, rows: Tensor) -> Tensor:
    """(batch,) samples whose own share of the gradients is not finite; none where only sums over samples are not."""
    at, found = pull.at, torch.zeros_like(rows)
    groups, left = [rows], SEARCHES * max(len(rows).bit_length(), 1)
    while groups and left and not at.equation.coupled:
        group, left = groups.pop(), left - 1
        z, args, alone = quarantine(at.equation, at.z, [arg.detach() for arg in at.args], u, group)
        needs = [i in at.needed for i in range(len(args))]
        share = _Pull(Linearisation(at.equation, z, args, needs), pull.size, pull.right)
        share(alone)
        if share.is_finite():
            continue
        index = group.nonzero().squeeze(1)
        if len(index) == 1:
            found = found | group
            continue
        for half in index.chunk(2):
            groups.append(torch.zeros_like(group).index_fill(0, half, True))
    return found


def _added(first: Stats, then: Stats) -> Stats:
    """Of two solves in a row, with what both took."""
    return dataclasses.replace(
        then,
        steps=first.steps + then.steps,
        best=first.steps + then.best,
        evaluations=first.evaluations + then.evaluations,
        sample_evaluations=first.sample_evaluations + then.sample_evaluations,
        products=first.products + then.products,
    )


def file_lost(task: Differentiable, lost: Tensor) -> None:
    """Statistics of samples that were left out since a derivative of theirs is not finite."""
    stats = task.problem.report.adjoint or empty_stats(len(lost), lost.device)
    status = stats.status.masked_fill(lost, Status.NONFINITE)
    residual = stats.residual.masked_fill(lost, float("inf"))
    task.problem.report.adjoint = stats = dataclasses.replace(stats, status=status, residual=residual)
    action = "warn" if task.on_failure == "fall_back" else task.on_failure
    judge(stats, task.stop, task.solver, what="adjoint", owner=task.problem.equation.owner, on_failure=action)


def _pull_any_order(
    task: Differentiable, z: Tensor, status: Tensor, args: Sequence[Tensor], needs: Sequence[bool], v: Tensor
) -> Sequence[Tensor | None]:
    """Gradients of the args that are themselves differentiable: the adjoint is another fixed point."""
    equation, good = task.problem.equation, status != Status.NONFINITE
    if task.problem.report.unmeasured and autodiff_modes.has_values(z, *args):
        task.problem.measure(z.detach(), equation(z, *args).detach())
    z, args, v = quarantine(equation, z, args, v, good)
    _learn_coupling(equation, z, args)
    size = unit(equation, v, measured=False)
    g = _solve_differentiably(task, task.adjoint(), z, v / size, args) * size
    chosen = [i for i, need in enumerate(needs) if need]
    pulled = iter(autodiff_modes.vjp(_in_args(equation, z, args, chosen), *[args[i] for i in chosen])(g))
    return [_zero_unless(good.any(), next(pulled)) if need else None for need in needs]


def _push(
    task: Differentiable, z: Tensor, status: Tensor, args: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> Tensor:
    """The tangent of z, differentiable as the pull is."""
    equation, good = task.problem.equation, status != Status.NONFINITE
    chosen = [i for i, tangent in enumerate(tangents) if tangent is not None]
    given = [tangent for tangent in tangents if tangent is not None]
    z, args, _ = quarantine(equation, z, args, z, good)
    b = autodiff_modes.jvp(_in_args(equation, z, args, chosen), [args[i] for i in chosen], given)
    b = torch.where(good.unsqueeze(1), b, torch.zeros_like(b))
    _learn_coupling(equation, z, args)
    size = unit(equation, b, measured=False)
    return _solve_differentiably(task, task.tangent(), z, b / size, args) * size


def _solve_differentiably(
    task: Differentiable, derived: Differentiable, z: Tensor, right: Tensor, args: Sequence[Tensor]
) -> Tensor:
    """The solution of an adjoint or tangent system as a function of all it depends on."""
    if task.formula is None:
        return FixedPoint.apply(derived, torch.zeros_like(right), z, right, *args)[0]
    zero = torch.zeros_like(right)
    return task.formula(lambda t: derived.problem.equation(t, z, zero, *args), right)


def file_residual(task: Differentiable, left: Tensor, right: Tensor) -> None:
    """Statistics of a cotangent that was not solved for: how far from a solution it is."""
    norm, report = task.stop.norm, task.problem.report
    residual = norm(left) / norm(right).clamp_min(torch.finfo(right.dtype).tiny)
    before = report.adjoint or empty_stats(len(right), right.device)
    converged = residual <= task.stop.rtol
    status = torch.where(converged, Status.CONVERGED, Status.MAX_STEPS).to(torch.int8)
    report.adjoint = dataclasses.replace(before, status=status, residual=residual)


def _in_args(equation: Equation, z: Tensor, args: Sequence[Tensor], chosen: Sequence[int]) -> Callable[..., Tensor]:
    """The equation at z as a function of some of its args."""

    def f(*values: Tensor) -> Tensor:
        changed = list(args)
        for i, value in zip(chosen, values, strict=True):
            changed[i] = value
        return equation(z, *changed)

    return f


def _zero_unless(condition: Tensor, grad: Tensor) -> Tensor:
    return torch.where(condition, grad, torch.zeros_like(grad))
