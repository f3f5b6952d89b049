"""First-order gradients of an equilibrium: the adjoint system u = J'u + v, solved, verified and pulled back to the args.

The adjoint problem is a `Problem` whose equation is an `AdjointEquation`. Its solution is exact, or given by a formula
(`Problem.linear`). The residual of a solution is measured by the pull-back that gives the gradients, and the status follows
the measured residual. Samples with derivatives that are not finite are found, left out and reported.

Usually one pass through the loop of `backward_first_order` suffices, and `_is_solved` ends it. The loop is repeated without
the samples whose derivatives are not finite, and as one system if the rows turn out to depend on each other. Cotangents are
divided by their size before the solve: products of tiny or huge cotangents would leave the dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equilibria._core.compaction import ROUNDING
from equilibria._core.maps import AdjointEquation, Equation, Linearisation, LinearMap
from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria._core.search import all_finite
from equilibria.native import measures
from equilibria.solution import Stats, Status, empty_stats
from equilibria.stop import FLOOR, RECURRENCE, USUAL, rms_norm

if TYPE_CHECKING:
    from equilibria.remember import AdjointStarts

SEARCHES = 4  # runs of the cell per halving of the batch, at most, to find samples whose gradient is not finite


def backward_first_order(
    problem: Problem, z: Tensor, status: Tensor, args: Sequence[Tensor], needs: Sequence[bool], v: Tensor
) -> Sequence[Tensor | None]:
    """Return first-order gradients of the args: one run of the cell with a graph, then only products."""
    equation, good = problem.equation, status != Status.NONFINITE
    some_bad, adjoint = problem.result.nonfinite, problem.derived(AdjointEquation)
    lost, whole_z = None, z  # `lost`: samples that are found on the way and reported at the end
    while True:
        if some_bad:
            if not bool(good.any()):
                if lost is not None:
                    file_lost(adjoint, lost)
                return [torch.zeros_like(arg) if need else None for arg, need in zip(args, needs, strict=True)]
            z, args, v = quarantine(equation, z, args, v, good)
        at = Linearisation(equation, z, args, needs)
        if problem.result.unmeasured and z is whole_z:
            problem.measure(z, at.run()[1].detach(), args)
        if equation.identity.coupled or (scaled := measures.normalized(v)) is None:
            scale, known_size = cotangent_scale(equation, v, measured=True), None
            rhs = v / scale
        else:
            scale, rhs, known_size = scaled[0], scaled[1], (rms_norm, scaled[2])
        system = LinearMap(at.transposed, at.product, rhs, adjoint.equation, (at.z, rhs, *at.args))
        system.known_size = known_size
        u = cotangent(adjoint, system)
        if some_bad:  # a formula may give a sample with a zero cotangent another value
            u = torch.where(good.unsqueeze(1), u, torch.zeros_like(u))
        # one pull-back gives the gradients and, as a by-product, the residual of the adjoint system
        pull = _Pull(equation, at, scale, rhs)
        residual = pull(u)
        seem_finite = measures.seem_finite(pull.grads, rhs)
        if not some_bad and _is_solved(adjoint, system, residual, seem_finite):
            return pull.grads
        # nan compares false; the residual of a sample in quarantine is not that of its own system
        finite = (adjoint.stop.norm(residual) < float("inf")) | ~good
        sound = bool(finite.all() & seem_finite)
        if not sound:
            bad = good & ~finite
            if not bool(bad.any()):
                bad = good & _responsible(pull, u, good)
            if bool(bad.any()):
                # a derivative of these samples is not finite, which makes the sum over the batch nan even with weight zero
                lost = bad if lost is None else lost | bad
                good, some_bad = good & ~bad, True
                continue
        couples = None if equation.identity.coupled or len(u) < 2 else partial(_couples, at, u, equation.precision)
        if verified(adjoint, system, u, residual, pull, pull.release, couples) is None:
            equation.set_coupled(True)  # solve again, as one system with one scale
            continue
        if not (sound and pull.runs == 1) and not all_finite(pull.grads):
            # the sum of finite gradients overflows, which no single sample causes
            lost = good if lost is None else lost | good
        if lost is not None:
            file_lost(adjoint, lost)
        return pull.grads


def _couples(at: Linearisation, u: Tensor, precision: float) -> bool:
    """Return True if J' mixes rows: J'(D u) differs from D J'u for a D of powers of two per row, which round nothing."""
    factors = torch.exp2(torch.arange(len(u), device=u.device, dtype=u.dtype) % 3).unsqueeze(1)
    plain, scaled = at.transposed(u), at.transposed(u * factors) / factors
    error, scale = torch.linalg.vector_norm(scaled - plain, dim=1), torch.linalg.vector_norm(plain, dim=1)
    return bool((error > ROUNDING * precision * scale).any())


def cotangent(adjoint: Problem, system: LinearMap) -> Tensor:
    """Solve u = J'u + v by the solver or by the formula of the gradient; u has no graph.

    The caller measures the residual when it pulls u back, and then calls `verified`, which reports failures.
    """
    rhs = system.rhs
    if adjoint.linear.approximation is None:
        # J'0 + rhs = rhs; the residual of rows that do not depend on each other is measured by the caller
        exact = adjoint.changed(on_failure="ignore", known=rhs, verify=bool(adjoint.equation.identity.coupled))
        starts = adjoint.result.adjoint_starts
        return exact.run(torch.zeros_like(rhs), f=system).z if starts is None else warm_started(exact, system, starts)
    u = adjoint.linear.approximation(system.product, rhs)
    if adjoint.linear.when is None:
        return u
    # solve d = J'd + (v + J'u - u) for the samples whose residual exceeds `when`; zero for the others
    assert adjoint.linear.when is not None
    residual = system(u) - u
    norm = adjoint.stop.norm
    enough = norm(residual) <= adjoint.linear.when * norm(system.rhs)
    correction = rest(adjoint, system, torch.where(enough.unsqueeze(1), torch.zeros_like(residual), residual), u)
    return u + correction


def warm_started(adjoint: Problem, system: LinearMap, starts: AdjointStarts) -> Tensor:
    """Solve u = J'u + v from the stored solutions of the same samples, and store the new ones.

    Each row is stored divided by the norm of its v, because v is scaled per row in some solves and per batch in others. A
    stored u is multiplied by the factor that minimizes the residual v - A u with A = I - J', because the loss may have
    changed the size or the sign of v. The start is then never worse than zero. This takes one product, which also gives
    the solver the value of the map at its start.
    """
    rhs, u, recalled = system.rhs, torch.zeros_like(system.rhs), None
    size = system.size(adjoint.stop.norm).unsqueeze(1)
    size = torch.where(size > 0, size, 1.0)
    # ranks recall different samples, and must take the same number of products
    if adjoint.stop.process_group is None and (recalled := starts.recall(rhs)) is not None:
        recalled = recalled * size
        product = system.product(recalled)
        image = recalled - product
        along, square = (image * rhs).sum(1, keepdim=True), image.square().sum(1, keepdim=True)
        if adjoint.equation.identity.coupled is not False:  # one system: a factor for each row would change it
            along, square = along.sum().expand_as(along), square.sum().expand_as(square)
        factor = along / square
        helps = along * factor > 0  # the decrease of the squared residual; nan, of rows without a solution, compares false
        u = torch.where(helps, factor * recalled, u)
        adjoint = adjoint.changed(known=torch.where(helps, torch.addcmul(rhs, factor, product), rhs))
    result = adjoint.run(u, f=system)
    starts.store(result.z / size, result.stats.converged)
    if recalled is not None:
        stats = result.stats
        adjoint.result.adjoint = dataclasses.replace(
            stats,
            evaluations=stats.evaluations + 1,
            sample_evaluations=stats.sample_evaluations + len(u),
            products=stats.products + 1,
        )
    return result.z


def rest(adjoint: Problem, system: LinearMap, residual: Tensor, u: Tensor) -> Tensor:
    """Solve for the correction of a cotangent u with this residual; add the statistics to those of finding u."""
    # a formula takes no steps, so that there is nothing to add to
    before = adjoint.result.adjoint if adjoint.linear.approximation is None else None
    remainder = system.with_rhs(residual)
    adjoint = adjoint.changed(known=residual)  # J'0 + residual
    if before is not None:  # both solves together take at most max_steps; the caller applies the failure policy
        stop = dataclasses.replace(adjoint.stop, max_steps=steps_left(adjoint))
        adjoint = adjoint.changed(stop=stop, on_failure="ignore")
        result = adjoint.run(torch.zeros_like(residual), f=remainder, rhs=system.rhs)
        adjoint.result.adjoint = dataclasses.replace(
            result.stats,
            steps=before.steps + result.stats.steps,
            best=before.steps + result.stats.best,
            evaluations=before.evaluations + result.stats.evaluations,
            sample_evaluations=before.sample_evaluations + result.stats.sample_evaluations,
            products=before.products + result.stats.products,
        )
        return result.z
    falls_back = adjoint.on_failure == "fall_back"
    adjoint = adjoint.changed(on_failure="warn") if falls_back else adjoint
    result = adjoint.run(torch.zeros_like(residual), f=remainder, rhs=system.rhs)
    if falls_back:  # u plus this is the Jacobian-free cotangent
        return torch.where(result.stats.failed.unsqueeze(1), system.rhs - u, result.z)
    return result.z


def steps_left(adjoint: Problem) -> int:
    """Return how many of max_steps the adjoint solve has not taken."""
    stats = adjoint.result.adjoint
    taken = int(stats.steps.max()) if stats is not None and stats.steps.numel() else 0
    return max(adjoint.stop.max_steps - adjoint.stop.largest(taken), 0)


def verified(
    adjoint: Problem,
    system: LinearMap,
    u: Tensor,
    residual: Tensor,
    measure: Callable[[Tensor], Tensor],
    release: Callable[[], None] = lambda: None,
    couples: Callable[[], bool] | None = None,
) -> Tensor | None:
    """Set the status by the measured residual; solve further if a sample misses the tolerance it claimed to meet.

    measure  function that returns the residual of a new cotangent
    release  function that frees what the measurement of `residual` keeps in memory
    couples  function that returns True if rows depend on each other, so that they cannot be solved separately; it is called
             if a claimed tolerance is missed. If it returns True, the result is None
    """
    rhs = system.rhs
    if adjoint.linear.approximation is not None:
        file_residual(adjoint, residual, rhs)
        return u
    short, stats = _file_measured(adjoint, residual, rhs)
    if not any_rank(adjoint, stats.status != Status.CONVERGED):
        return u
    if any_rank(adjoint, short):
        if couples is not None and couples():
            return None
        # more steps do not help samples at the rounding of their dtype
        rtol, precision = adjoint.stop.rtol, adjoint.equation.precision
        helped = short if rtol >= precision else short & (stats.residual > rtol + FLOOR * precision)
        if any_rank(adjoint, helped) and steps_left(adjoint):
            release()
            u = u + rest(adjoint, system, residual, u)
            _, stats = _file_measured(adjoint, measure(u), rhs)
    falls_back = adjoint.on_failure == "fall_back"
    action = "warn" if falls_back else adjoint.on_failure
    adjoint.report_failures(stats, action)
    if falls_back and any_rank(adjoint, stats.failed):
        u = torch.where(stats.failed.unsqueeze(1), rhs, u)
        release()
        measure(u)
    return u


def _is_solved(adjoint: Problem, system: LinearMap, residual: Tensor, finite: Tensor | bool) -> bool:
    """Return True if all samples met their tolerances and the gradients seem `finite`; stores the residuals then.

    This is the usual end of a backward pass. It waits for the device once. `verified` treats the other cases, and
    formulas, coupled samples and several ranks.
    """
    stats, stop = adjoint.result.adjoint, adjoint.stop
    special = adjoint.linear.approximation is not None or adjoint.equation.identity.coupled or stop.atol
    if special or stop.process_group is not None:
        return False
    assert stats is not None
    wanted = _tolerance(adjoint, residual.dtype)
    found = measures.ratios(residual, None, system.rhs, status=stats.status) if stop.norm is rms_norm else None
    if found is None:
        relative = stop.norm(residual) / system.size(stop.norm).clamp_min(torch.finfo(residual.dtype).tiny)
        solved = bool((relative <= wanted).all() & finite & ~stats.status.any())  # CONVERGED is 0; nan compares false
    else:
        relative, worst = found
        solved = worst <= wanted and bool(finite)
    if solved:
        adjoint.result.adjoint = dataclasses.replace(stats, residual=relative)
    return solved


def _tolerance(adjoint: Problem, dtype: torch.dtype) -> float:
    """Return the largest measured relative residual of a solved system in this dtype, without atol.

    The solver updates its residual by a recurrence, from other products, so that the measured one rounds differently.
    """
    rtol, precision = adjoint.stop.rtol, adjoint.equation.precision
    return rtol + max(min(FLOOR * precision, RECURRENCE * rtol), FLOOR * torch.finfo(dtype).eps)


def _file_measured(adjoint: Problem, residual: Tensor, rhs: Tensor) -> tuple[Tensor, Stats]:
    """Store measured residuals; set converged samples beyond the tolerance to STALLED.

    Returns these samples, (batch,), and the statistics.
    """
    stats, stop, batch = adjoint.result.adjoint, adjoint.stop, len(rhs)
    assert stats is not None
    if adjoint.equation.identity.coupled:  # one system
        residual, rhs = residual.reshape(1, -1), rhs.reshape(1, -1)
    size = stop.norm(rhs).clamp_min(torch.finfo(rhs.dtype).tiny)
    relative, rtol = stop.norm(residual) / size, _tolerance(adjoint, rhs.dtype)
    wanted = rtol + stop.atol / size if stop.atol else rtol
    short = (stats.status == Status.CONVERGED) & ~(relative <= wanted).expand(batch)
    status = stats.status.masked_fill(short, Status.STALLED)
    adjoint.result.adjoint = stats = dataclasses.replace(stats, residual=relative.expand(batch), status=status)
    return short, stats


def any_rank(adjoint: Problem, rows: Tensor) -> bool:
    """Return True if any sample of any rank is in `rows`."""
    here = bool(rows.any())
    return here if adjoint.stop.process_group is None else bool(adjoint.stop.largest(int(here)))


def cotangent_scale(equation: Equation, v: Tensor, *, measured: bool) -> Tensor:
    """Return (batch, 1), the RMS of each row of the right-hand side v, by which it is divided before the solve.

    The solution then does not depend on the scale of the loss. Coupled samples share one divisor, because dividing rows
    by different numbers would change a coupled system. Samples also share it if it is not known whether they are coupled
    and the solution is not `measured` afterwards.
    """
    if v.numel() == 0:
        return v.new_ones(v.shape[0], 1)
    coupled = equation.identity.coupled
    shared = coupled or (coupled is None and not measured)
    rows = v.detach().reshape(1, -1) if shared else v.detach()
    if v.dtype == torch.float32:  # squares of any of its numbers are within float64
        wide = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
        size = (wide / rows.shape[1] ** 0.5).to(v.dtype)
    else:
        least, most = USUAL[v.dtype]
        size = rms_norm(rows).unsqueeze(1)
        # squares of very small or very large numbers underflow or overflow, so these rows are divided first
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        size = torch.where((size > least) & (size < most), size, largest * rms_norm(rows / largest).unsqueeze(1))
    # a row that is zero or not finite is not divided; nan compares false
    return torch.where((size > 0) & (size < float("inf")), size, 1.0).expand(len(v), 1)


@dataclass(eq=False)
class _Pull:
    """Called with a scaled cotangent, stores the gradients of the args and returns the residual of the adjoint system."""

    equation: Equation
    at: Linearisation
    scale: Tensor
    rhs: Tensor
    grads: Sequence[Tensor | None] = ()
    runs: int = 0

    def __call__(self, u: Tensor) -> Tensor:
        """Pull the scaled cotangent u back, store the gradients, and return the residual of u."""
        self.runs += 1
        if self.equation.precision <= torch.finfo(torch.float32).eps:
            self.grads, product = self.at.pull(u * self.scale)
        else:  # half precision has few exponents, so gradients are multiplied by their scale after they are computed
            # the power of two, which rounds nothing, just below the largest scale of a nonzero cotangent
            nonzero = (self.rhs != 0).any(dim=1, keepdim=True)
            largest = torch.where(nonzero, self.scale, 0.0).amax() if len(u) else self.scale.new_ones(())
            common = torch.where(largest > 0, torch.exp2(largest.log2().floor()), torch.ones_like(largest))
            grads, product = self.at.pull(u * (self.scale / common))
            self.grads = [None if grad is None else grad * common for grad in grads]
            product = product * common
        return torch.addcdiv(self.rhs - u, product, self.scale)

    def release(self) -> None:
        """Free the gradients before another run of the cell."""
        self.grads = ()


def _responsible(pull: _Pull, u: Tensor, rows: Tensor) -> Tensor:
    """Return (batch,), True for samples whose own share of the gradients is not finite; there may be none."""
    equation, at, found = pull.equation, pull.at, torch.zeros_like(rows)
    groups, searches = [rows], SEARCHES * max(len(rows).bit_length(), 1)
    while groups and searches and not equation.identity.coupled:
        group, searches = groups.pop(), searches - 1
        z, args, alone = quarantine(equation, at.z, [arg.detach() for arg in at.args], u, group)
        needs = [i in at.needed for i in range(len(args))]
        share = _Pull(equation, Linearisation(equation, z, args, needs), pull.scale, pull.rhs)
        share(alone)
        if all_finite(share.grads):
            continue
        index = group.nonzero().squeeze(1)
        if len(index) == 1:
            found = found | group
            continue
        for half in index.chunk(2):
            groups.append(torch.zeros_like(group).index_fill(0, half, True))
    return found


def file_lost(adjoint: Problem, lost: Tensor) -> None:
    """Set samples with derivatives that are not finite to NONFINITE in the adjoint statistics, and report them."""
    stats = adjoint.result.adjoint or empty_stats(len(lost), lost.device)
    status = stats.status.masked_fill(lost, Status.NONFINITE)
    residual = stats.residual.masked_fill(lost, float("inf"))
    adjoint.result.adjoint = stats = dataclasses.replace(stats, status=status, residual=residual)
    adjoint.report_failures(stats, "warn" if adjoint.on_failure == "fall_back" else adjoint.on_failure)


def file_residual(adjoint: Problem, residual: Tensor, rhs: Tensor) -> None:
    """Store how far a cotangent by formula is from the solution of its system."""
    norm, result = adjoint.stop.norm, adjoint.result
    relative = norm(residual) / norm(rhs).clamp_min(torch.finfo(rhs.dtype).tiny)
    before = result.adjoint or empty_stats(len(rhs), rhs.device)
    converged = relative <= adjoint.stop.rtol
    status = torch.where(converged, Status.CONVERGED, Status.MAX_STEPS).to(torch.int8)
    result.adjoint = dataclasses.replace(before, status=status, residual=relative)
