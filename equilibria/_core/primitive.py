"""The one primitive: the fixed point of F(z, *args) in z, differentiable in args to any order and in any mode.

`FixedPoint` is an autograd.Function. Its forward runs the solver without a graph and saves z, the status and the args,
nothing else. Which rule differentiates it depends on who asks:

    backward()                       `backward_first_order`: one run of the cell with a graph at z, then products J'u alone
    create_graph=True, torch.func    `_backward_any_order`: the adjoint g = J'g + v is another FixedPoint, on explicit args
    forward mode                     `_jvp`: the tangent t = J t + b likewise
    vmap                             the mapped dimension is folded into the batch

Invariants. Cotangents are divided by `cotangent_scale` before the solve and multiplied after it, so that adjoint tolerances
are relative to the incoming gradient. A sample that is not finite is replaced by a good one with a cotangent of zero
(`quarantine`), because 0 * nan is nan. The residual of a first-order adjoint is measured by the same pull-back that gives
the gradients, and its status follows the measured residual. The device is waited for once per backward, in
`backward_first_order`, besides the waits of the solver.
"""

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
from equilibria._core.compaction import ROUNDING, rows_mix
from equilibria._core.failures import report_failures
from equilibria._core.linear import AdjointEquation, Fold, FoldedEquation, TangentEquation
from equilibria._core.maps import Linearisation, LinearMap
from equilibria._core.problem import Equation
from equilibria.gradients.approximations import Approximation
from equilibria.gradients.base import Problem, cotangent_scale, quarantine
from equilibria.solution import Stats, Status, empty_stats
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import FLOOR, Stop

SEARCHES = 4  # runs of the cell per halving of the batch, at most, to find samples whose gradient is not finite


@dataclass(frozen=True)
class ImplicitProblem:
    """A problem and how the linear systems of its derivatives are solved.

    solver, stop, on_failure  for the exact solution
    approximation             a formula used in place of the exact solution; None: no formula
    when                      the largest relative residual at which the formula is used; None: it is always used
    """

    problem: Problem
    solver: AnySolver
    stop: Stop
    on_failure: Any = None
    approximation: Approximation | None = None
    when: float | None = None

    @property
    def formula(self) -> Approximation | None:
        """The formula for derivatives of any order: `approximation` if it is always used, else None."""
        return self.approximation if self.when is None else None

    def adjoint(self) -> ImplicitProblem:
        """The system g = J'g + v, with v among its args."""
        equation = AdjointEquation(self.problem.equation)
        return dataclasses.replace(self, problem=self._derived(equation, "adjoint", self.on_failure))

    def tangent(self) -> ImplicitProblem:
        """The system t = J t + b, with b among its args."""
        equation = TangentEquation(self.problem.equation)
        return dataclasses.replace(self, problem=self._derived(equation, "tangent", self.on_failure))

    def folded(self, fold: Fold) -> ImplicitProblem:
        """The same problem over the rows of all mapped samples."""
        equation = FoldedEquation(self.problem.equation, fold)
        return dataclasses.replace(
            self, problem=dataclasses.replace(self.problem, equation=equation, known=None, compiler=None)
        )

    def _derived(self, equation: Equation, what: Any, on_failure: Any, **options: Any) -> Problem:
        """The problem of a linear system of the derivatives, which is solved with the settings for them."""
        compiler, report = self.problem.compiler, self.problem.report
        return Problem(equation, self.solver, self.stop, report, what, on_failure, compiler=compiler, **options)

    def cotangent(self, system: LinearMap) -> Tensor:
        """Solve u = J'u + v, exactly or by the formula; without derivatives of its own.

        The caller measures the residual when it pulls u back, and then calls `verified`, which reports failures.
        """
        rhs = system.rhs
        if self.approximation is None:
            coupled = bool(self.problem.equation.coupled)
            adjoint = self._derived(AdjointEquation(self.problem.equation), "adjoint", "ignore", known=rhs, verify=coupled)
            return adjoint.run_map(system, torch.zeros_like(rhs), rhs).z
        u = self.approximation(system.product, rhs)
        if self.when is None:
            return u
        return u + self._correction(system, u)

    def _correction(self, system: LinearMap, u: Tensor) -> Tensor:
        """Solve d = J'd + (v + J'u - u) for the samples whose residual exceeds `when`; zero for the others."""
        assert self.when is not None
        residual = system(u) - u
        norm = self.stop.norm
        enough = norm(residual) <= self.when * norm(system.rhs)
        return self.rest(system, torch.where(enough.unsqueeze(1), torch.zeros_like(residual), residual), u)

    def rest(self, system: LinearMap, residual: Tensor, u: Tensor) -> Tensor:
        """Solve for the correction of a cotangent u with this residual; add the statistics to those of finding u."""
        before = self.problem.report.adjoint if self.approximation is None else None
        remainder = system.with_rhs(residual)
        adjoint = dataclasses.replace(self.adjoint().problem, known=residual)  # J'0 + residual
        if before is not None:  # both solves together take at most max_steps; the caller applies the failure policy
            stop = dataclasses.replace(self.stop, max_steps=self.steps_left())
            adjoint = dataclasses.replace(adjoint, stop=stop, on_failure="ignore")
            result = adjoint.run_map(remainder, torch.zeros_like(residual), system.rhs)
            self.problem.report.adjoint = _added(before, result.stats)
            return result.z
        falls_back = self.on_failure == "fall_back"
        adjoint = dataclasses.replace(adjoint, on_failure="warn") if falls_back else adjoint
        result = adjoint.run_map(remainder, torch.zeros_like(residual), system.rhs)
        if falls_back:  # u plus this is the Jacobian-free cotangent
            return torch.where(result.stats.failed.unsqueeze(1), system.rhs - u, result.z)
        return result.z

    def steps_left(self) -> int:
        """max_steps less the steps that the adjoint solve has taken."""
        stats = self.problem.report.adjoint
        taken = int(stats.steps.max()) if stats is not None and stats.steps.numel() else 0
        return max(self.stop.max_steps - self.stop.largest(taken), 0)

    def verified(
        self,
        system: LinearMap,
        u: Tensor,
        residual: Tensor,
        measure: Callable[[Tensor], Tensor],
        release: Callable[[], None] = lambda: None,
        couples: Callable[[], bool] | None = None,
    ) -> Tensor | None:
        """Set the status by the measured residual; solve further if a sample misses the tolerance it claimed to meet.

        measure  returns the residual of another cotangent
        release  frees what the first measurement keeps in memory
        couples  called if a claim does not hold; if it returns True, the rows are not systems of their own, and the result
                 is None
        """
        rhs = system.rhs
        if self.approximation is not None:
            file_residual(self, residual, rhs)
            return u
        short, stats = self._file_measured(residual, rhs)
        if not self._any(stats.failed):
            return u
        if self._any(short):
            if couples is not None and couples():
                return None
            if self._any(self._worth_more(short)) and self.steps_left():
                release()
                u = u + self.rest(system, residual, u)
                _, stats = self._file_measured(measure(u), rhs)
        falls_back = self.on_failure == "fall_back"
        action = "warn" if falls_back else self.on_failure
        owner = self.problem.equation.identity.owner
        report_failures(stats, self.stop, self.solver, what="adjoint", owner=owner, on_failure=action)
        if falls_back and self._any(stats.failed):
            u = torch.where(stats.failed.unsqueeze(1), rhs, u)
            release()
            measure(u)
        return u

    def _holds(self, residual: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """(batch,) whether a measured residual is within the tolerance, and (batch,) the relative residual."""
        batch = len(rhs)
        if self.problem.equation.coupled:  # one system
            residual, rhs = residual.reshape(1, -1), rhs.reshape(1, -1)
        length = self.stop.norm(rhs)
        relative = self.stop.norm(residual) / length.clamp_min(torch.finfo(rhs.dtype).tiny)
        precision = self.problem.equation.precision
        # scaled and in other products than the solver's, a residual rounds differently
        rounding = FLOOR * torch.finfo(rhs.dtype).eps
        holds = self.stop.holds(relative, precision, length) | (relative <= self.stop.rtol + rounding)
        return holds.expand(batch), relative.expand(batch)

    def _file_measured(self, residual: Tensor, rhs: Tensor) -> tuple[Tensor, Stats]:
        """Store measured residuals; set converged samples beyond the tolerance to STALLED.

        Returns these samples, (batch,), and the statistics.
        """
        stats = self.problem.report.adjoint
        assert stats is not None
        holds, relative = self._holds(residual, rhs)
        short = stats.converged & ~holds
        status = stats.status.masked_fill(short, Status.STALLED)
        self.problem.report.adjoint = stats = dataclasses.replace(stats, residual=relative, status=status)
        return short, stats

    def _worth_more(self, short: Tensor) -> Tensor:
        """(batch,) the samples of `short` that more steps can help: not those at the rounding of their dtype."""
        stats, precision = self.problem.report.adjoint, self.problem.equation.precision
        assert stats is not None
        return short if self.stop.rtol >= precision else short & (stats.residual > self.stop.rtol + FLOOR * precision)

    def _any(self, rows: Tensor) -> bool:
        """True if any sample of any rank is in `rows`."""
        here = bool(rows.any())
        return here if self.stop.process_group is None else bool(self.stop.largest(int(here)))


def differentiable_fixed_point(task: ImplicitProblem, z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `FixedPoint`; refuse nested forward mode, for which torch drops terms silently."""
    ordinary = autodiff_modes.is_ordinary()
    if not ordinary and autodiff_modes.forward_levels() > 1:
        raise RuntimeError(
            "Forward mode twice, as in jacfwd(jacfwd(f)), does not pass through an equilibrium: torch drops terms of it. "
            "Take torch.func.hessian, jacrev of jacfwd, or jacrev twice."
        )
    if torch.is_grad_enabled() and ordinary:
        # backward evaluates the cell at the answer, and measures the residual of dropped rows there
        followed = any(arg.requires_grad for arg in args)
        task = dataclasses.replace(task, problem=dataclasses.replace(task.problem, measured_later=followed))
    z, status = FixedPoint.apply(task, z0, *args)
    return z, status


class FixedPoint(Function):
    """(z, status) with z = equation(z, *args); z0 gets no derivative, because the equilibrium does not depend on it."""

    @staticmethod
    def forward(task: ImplicitProblem, z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        result = task.problem.run(z0, args if autodiff_modes.is_ordinary() else [*map(autodiff_modes.primal, args)])
        z = result.z.clone() if result.z is z0 else result.z  # a Function must not return its input unchanged
        return z, result.stats.status

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
        pull = _backward_any_order if any_order else backward_first_order
        grads = autodiff_modes.pull_each(lambda v: pull(ctx.task, z, status, args, needs, v), cotangents[0])
        return (None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        z, status, *args = [autodiff_modes.primal(saved) for saved in ctx.saved_tensors]
        return _jvp(ctx.task, z, status, args, tangents[2:]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], task: ImplicitProblem, z0: Tensor, *args: Tensor) -> tuple[Any, Any]:
        """Fold the mapped dimension into the batch, so that the solver works on more rows."""
        _, start, *dims = in_dims
        z0 = z0.expand(info.batch_size, *z0.shape) if start is None else z0.movedim(start, 0)
        fold = Fold(info.batch_size, z0.shape[1], tuple(dims), info.randomness)
        z, status = FixedPoint.apply(task.folded(fold), z0.flatten(0, 1), *args)
        return (fold.unfold(z), fold.unfold(status)), (0, 0)


def backward_first_order(
    task: ImplicitProblem, z: Tensor, status: Tensor, args: Sequence[Tensor], needs: Sequence[bool], v: Tensor
) -> Sequence[Tensor | None]:
    """Gradients of the args without derivatives of their own: one run of the cell with a graph, then only products."""
    equation, good = task.problem.equation, status != Status.NONFINITE
    some_bad = task.problem.report.nonfinite
    lost, whole_z = None, z
    while True:
        if some_bad:
            if not bool(good.any()):
                if lost is not None:
                    file_lost(task, lost)
                return [torch.zeros_like(arg) if need else None for arg, need in zip(args, needs, strict=True)]
            z, args, v = quarantine(equation, z, args, v, good)
        at = Linearisation(equation, z, args, needs)
        if task.problem.report.unmeasured and z is whole_z:
            task.problem.measure(z, at.run()[1].detach(), args)
        scale = cotangent_scale(equation, v, measured=True)
        rhs = v / scale
        system = AdjointEquation(equation).bind_at(at, rhs)
        u = task.cotangent(system)
        if some_bad:  # a formula may give a sample with a zero cotangent another value
            u = torch.where(good.unsqueeze(1), u, torch.zeros_like(u))
        pull = _Pull(equation, at, scale, rhs)
        residual = pull(u)
        # nan compares false; the residual of a sample in quarantine is not that of its own system
        finite = (task.stop.norm(residual) < float("inf")) | ~good
        sound = bool(finite.all() & pull.seems_finite())
        if not sound:
            bad = good & ~finite
            if not bool(bad.any()):
                bad = good & _responsible(pull, u, good)
            if bool(bad.any()):
                # a derivative of these samples is not finite, which makes the sum over the batch nan even with weight zero
                lost = bad if lost is None else lost | bad
                good, some_bad = good & ~bad, True
                continue
        couples = None if equation.coupled or len(u) < 2 else partial(_couples, at, u, equation.precision)
        if task.verified(system, u, residual, pull, pull.release, couples) is None:
            equation.set_coupled(True)  # solve again, as one system with one scale
            continue
        if not (sound and pull.runs == 1) and not pull.is_finite():
            # the sum of finite gradients overflows, which no single sample causes
            lost = good if lost is None else lost | good
        if lost is not None:
            file_lost(task, lost)
        return pull.grads


def _couples(at: Linearisation, u: Tensor, precision: float) -> bool:
    """True if J' mixes rows: J'(D u) differs from D J'u for a D of powers of two per row, which round nothing."""
    factors = torch.exp2(torch.arange(len(u), device=u.device, dtype=u.dtype) % 3).unsqueeze(1)
    plain, scaled = at.transposed(u), at.transposed(u * factors) / factors
    error, scale = torch.linalg.vector_norm(scaled - plain, dim=1), torch.linalg.vector_norm(plain, dim=1)
    return bool((error > ROUNDING * precision * scale).any())


def _learn_coupling(equation: Equation, z: Tensor, args: Sequence[Tensor]) -> None:
    """Set `equation.coupled` if no solve has set it yet and values can be read."""
    if equation.coupled is None and autodiff_modes.has_values(z, *args):
        with torch.no_grad():
            equation.set_coupled(bool(rows_mix(lambda y: equation(y, *args).detach(), z.detach(), equation.precision)))


class _Pull:
    """Called with a scaled cotangent, stores the gradients of the args and returns the residual of the adjoint system."""

    def __init__(self, equation: Equation, at: Linearisation, scale: Tensor, rhs: Tensor) -> None:
        self.equation, self.at, self.scale, self.rhs = equation, at, scale, rhs
        self.common = _common_scale(scale, rhs) if equation.precision > torch.finfo(torch.float32).eps else None
        self.grads: list[Tensor | None] = []
        self.runs = 0

    def __call__(self, u: Tensor) -> Tensor:
        self.runs += 1
        if self.common is None:
            self.grads, product = self.at.pull(u * self.scale)
        else:  # half precision has few exponents, so gradients are multiplied by their scale after they are computed
            grads, product = self.at.pull(u * (self.scale / self.common))
            self.grads = [None if grad is None else grad * self.common for grad in grads]
            product = product * self.common
        return product / self.scale + self.rhs - u

    def seems_finite(self) -> Tensor:
        """A scalar, False if any gradient is not finite, or rarely if a sum of finite numbers overflows."""
        sums = [_sum(grad).to(self.rhs.dtype) for grad in self.grads if grad is not None]
        sound = torch.isfinite(torch.stack(sums).sum()) if sums else torch.ones((), dtype=torch.bool)
        return sound.to(self.rhs.device)

    def is_finite(self) -> bool:
        # sums first, because torch.isfinite allocates as much memory as the gradient has
        if bool(self.seems_finite()):
            return True
        return all(bool(torch.isfinite(grad).all()) for grad in self.grads if grad is not None)

    def release(self) -> None:
        """Free the gradients before another run of the cell."""
        self.grads = []


def _common_scale(scale: Tensor, rhs: Tensor) -> Tensor:
    """The power of two, which rounds nothing, just below the largest scale of a nonzero cotangent."""
    if not len(scale):
        return scale.new_ones(())
    largest = torch.where((rhs != 0).any(dim=1, keepdim=True), scale, torch.zeros_like(scale)).amax()
    return torch.where(largest > 0, torch.exp2(largest.log2().floor()), torch.ones_like(largest))


def _sum(grad: Tensor) -> Tensor:
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    return grad.sum(dtype=torch.float32) if grad.dtype in (torch.float16, torch.bfloat16) else grad.sum()


def _responsible(pull: _Pull, u: Tensor, rows: Tensor) -> Tensor:
    """(batch,) samples whose own share of the gradients is not finite; none where only sums over samples are not."""
    equation, at, found = pull.equation, pull.at, torch.zeros_like(rows)
    groups, searches = [rows], SEARCHES * max(len(rows).bit_length(), 1)
    while groups and searches and not equation.coupled:
        group, searches = groups.pop(), searches - 1
        z, args, alone = quarantine(equation, at.z, [arg.detach() for arg in at.args], u, group)
        needs = [i in at.needed for i in range(len(args))]
        share = _Pull(equation, Linearisation(equation, z, args, needs), pull.scale, pull.rhs)
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
    """The statistics of the second of two solves, with the steps and evaluations of both."""
    return dataclasses.replace(
        then,
        steps=first.steps + then.steps,
        best=first.steps + then.best,
        evaluations=first.evaluations + then.evaluations,
        sample_evaluations=first.sample_evaluations + then.sample_evaluations,
        products=first.products + then.products,
    )


def file_lost(task: ImplicitProblem, lost: Tensor) -> None:
    """Set samples with derivatives that are not finite to NONFINITE in the adjoint statistics, and report them."""
    stats = task.problem.report.adjoint or empty_stats(len(lost), lost.device)
    status = stats.status.masked_fill(lost, Status.NONFINITE)
    residual = stats.residual.masked_fill(lost, float("inf"))
    task.problem.report.adjoint = stats = dataclasses.replace(stats, status=status, residual=residual)
    action = "warn" if task.on_failure == "fall_back" else task.on_failure
    report_failures(
        stats, task.stop, task.solver, what="adjoint", owner=task.problem.equation.identity.owner, on_failure=action
    )


def _backward_any_order(
    task: ImplicitProblem, z: Tensor, status: Tensor, args: Sequence[Tensor], needs: Sequence[bool], v: Tensor
) -> Sequence[Tensor | None]:
    """Gradients of the args that are themselves differentiable: the adjoint is another fixed point."""
    equation, good = task.problem.equation, status != Status.NONFINITE
    if task.problem.report.unmeasured and autodiff_modes.has_values(z, *args):
        task.problem.measure(z.detach(), equation(z, *args).detach(), args)
    z, args, v = quarantine(equation, z, args, v, good)
    _learn_coupling(equation, z, args)
    scale = cotangent_scale(equation, v, measured=False)
    g = _solve_differentiably(task, task.adjoint(), z, v / scale, args) * scale
    chosen = [i for i, need in enumerate(needs) if need]
    pulled = iter(autodiff_modes.vjp(_in_args(equation, z, args, chosen), *[args[i] for i in chosen])(g))
    return [_zero_unless(good.any(), next(pulled)) if need else None for need in needs]


def _jvp(
    task: ImplicitProblem, z: Tensor, status: Tensor, args: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> Tensor:
    """The tangent of z, itself differentiable."""
    equation, good = task.problem.equation, status != Status.NONFINITE
    chosen = [i for i, tangent in enumerate(tangents) if tangent is not None]
    given = [tangent for tangent in tangents if tangent is not None]
    z, args, _ = quarantine(equation, z, args, z, good)
    b = autodiff_modes.jvp(_in_args(equation, z, args, chosen), [args[i] for i in chosen], given)
    b = torch.where(good.unsqueeze(1), b, torch.zeros_like(b))
    _learn_coupling(equation, z, args)
    scale = cotangent_scale(equation, b, measured=False)
    return _solve_differentiably(task, task.tangent(), z, b / scale, args) * scale


def _solve_differentiably(
    task: ImplicitProblem, derived: ImplicitProblem, z: Tensor, rhs: Tensor, args: Sequence[Tensor]
) -> Tensor:
    """The solution of an adjoint or tangent system as a function of all it depends on."""
    if task.formula is None:
        return FixedPoint.apply(derived, torch.zeros_like(rhs), z, rhs, *args)[0]
    zero = torch.zeros_like(rhs)
    return task.formula(lambda t: derived.problem.equation(t, z, zero, *args), rhs)


def file_residual(task: ImplicitProblem, residual: Tensor, rhs: Tensor) -> None:
    """Store how far a cotangent by formula is from the solution of its system."""
    norm, report = task.stop.norm, task.problem.report
    relative = norm(residual) / norm(rhs).clamp_min(torch.finfo(rhs.dtype).tiny)
    before = report.adjoint or empty_stats(len(rhs), rhs.device)
    converged = relative <= task.stop.rtol
    status = torch.where(converged, Status.CONVERGED, Status.MAX_STEPS).to(torch.int8)
    report.adjoint = dataclasses.replace(before, status=status, residual=relative)


def _in_args(equation: Equation, z: Tensor, args: Sequence[Tensor], chosen: Sequence[int]) -> Callable[..., Tensor]:
    """The equation at z as a function of some of its args."""

    def f(*values: Tensor) -> Tensor:
        changed = list(args)
        for i, value in zip(chosen, values, strict=True):
            changed[i] = value
        return equation(z, *changed)

    return f


def _zero_unless(condition: Tensor, grad: Tensor) -> Tensor:
    """`grad` if the scalar condition holds, else zeros."""
    return torch.where(condition, grad, torch.zeros_like(grad))
