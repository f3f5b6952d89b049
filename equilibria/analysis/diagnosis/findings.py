"""Turn measurements into findings: the problem, its evidence, and advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from equilibria.analysis.agreement import Agreement
from equilibria.analysis.diagnosis.examine import RANDOM, Examination, SolverResult
from equilibria.stop import FLOOR

SLOW = 2.0  # a solver faster by this factor is reported
COSINE = 0.9  # a gradient with a smaller cosine to the exact one is reported
GOOD_GRADIENT = 1e-2  # relative error of the gradient up to which a backward solve that missed its tolerance does not matter
TAIL = 3.0  # ratio of the slowest sample's steps to the median from which a batch has mixed difficulty


class Severity(Enum):
    """The severity of a finding."""

    ERROR = "error"  # solves or gradients are wrong
    RISK = "risk"  # correct now, but not reliably
    HINT = "hint"  # correct, and could be cheaper


@dataclass(frozen=True)
class Finding:
    """One problem, with evidence and advice."""

    cause: str  # short name of the problem
    severity: Severity
    seen: str  # evidence, with numbers
    advice: str  # what to try

    def __str__(self) -> str:
        return f"[{self.severity.value}] {self.cause}: {self.seen} Try: {self.advice}"


def findings(e: Examination) -> list[Finding]:
    """Return the findings, the worst first; empty if the layer has no problem."""
    found = [finding for rule in _RULES if (finding := rule(e)) is not None]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _random_cell(e: Examination) -> Finding | None:
    """Report a cell whose value changes from call to call."""
    if e.trial.random <= RANDOM * e.precision:
        return None
    where = f" Modules that drop at random at every call: {', '.join(e.trial.dropouts)}." if e.trial.dropouts else ""
    return Finding(
        "dropout without a fixed mask" if e.trial.dropouts else "random cell",
        Severity.ERROR,
        f"Two runs of the cell at the same point differ by {e.trial.random:.1e} relative to its values, so there is no "
        f"equilibrium to find.{where}",
        "eq.nn.VariationalDropout, whose mask is drawn once per solve, in place of nn.Dropout; draw any other noise before "
        "the solve and pass it as an input.",
    )


def _coupled(e: Examination) -> Finding | None:
    """Report a cell in which samples depend on each other."""
    # matrix products of another batch size round differently: differences up to 1e3 spacings are no coupling
    measured = e.trial.coupled is not None and e.trial.coupled > max(1e3 * e.precision, 1e-12)
    if _random_cell(e) is not None and not e.trial.batch_statistics:
        return None  # rows differ because every run does
    if not e.trial.batch_statistics and not measured:
        return None
    names = ", ".join(e.trial.batch_statistics)
    by = f"by batch statistics ({names})" if names else "without a batch norm"
    return Finding(
        "batch statistics couple samples" if names else "samples depend on each other",
        Severity.RISK,
        f"A sample's value depends on the other samples, {by}: the batch is solved as one problem, a hard sample delays all "
        "others, and a sample alone has a different equilibrium than in its batch.",
        "GroupNorm or LayerNorm inside the cell; or accept it: statistics then move once per forward, at the equilibrium."
        if names
        else "make every tensor that belongs to a sample an input of the cell, batch first, or set batched=False.",
    )


def _below_reach(e: Examination) -> Finding | None:
    """Report a tolerance that the dtype cannot reach."""
    floor = FLOOR * e.precision
    if e.rtol >= floor:
        return None
    stalled = e.forward.status.get("stalled", 0)
    # round up to one digit
    digit = 10.0 ** math.floor(math.log10(floor))
    return Finding(
        "tolerance below the reach of the dtype",
        Severity.ERROR,
        f"rtol={e.rtol:.1e} is asked of {e.dtype}, whose numbers are {e.precision:.1e} apart: rounding alone leaves a "
        f"residual of up to about {floor:.0e}. {stalled} of {e.samples} samples stalled there, the worst at "
        f"{e.forward.worst:.1e}.",
        f"rtol={(math.ceil(floor / digit) * digit):.0e} or more, or compute in float64.",
    )


def _nonfinite(e: Examination) -> Finding | None:
    """Report samples that became nan or inf."""
    count = e.forward.status.get("nonfinite", 0)
    if count == 0:
        return None
    return Finding(
        "samples that are not finite",
        Severity.ERROR,
        f"{count} of {e.samples} samples gave nan or inf; they keep their best finite iterate and get no gradient.",
        "check the inputs of the samples with status NONFINITE; if they are finite, the cell overflows: bound its output "
        "with a norm or tanh, or damp the solver.",
    )


def _not_contractive(e: Examination) -> Finding | None:
    """Report a spectral radius of 1 or more."""
    radii = [radius for radius in e.radius.radius if math.isfinite(radius)]
    if not radii or max(radii) < 1 or _random_cell(e) is not None:
        return None
    expansive = sum(radius >= 1 for radius in radii)
    failing = e.forward.failed > 0
    reached = f"{e.forward.failed} of {e.samples} samples did not converge with" if failing else "All converged with"
    return Finding(
        "cell not contractive",
        Severity.ERROR if failing else Severity.RISK,
        f"The spectral radius of its Jacobian is {max(radii):.2f} at worst, 1 or more for {expansive} of {len(radii)} "
        f"samples: plain iteration moves away from the equilibrium there. {reached} {e.solver}.",
        "eq.jacobian_penalty or eq.skip_penalty in the loss, eq.constraints.spectral_norm or weight norm on the cell's "
        "weights, a norm at its end" + (f"; for this model as it is: {_best_solver(e)}" if failing else "."),
    )


def _too_few_steps(e: Examination) -> Finding | None:
    """Report samples that converge with ten times the steps."""
    more = e.more_steps
    # if more than half of the failed samples fail with more steps too, something else is the cause
    if more is None or 2 * more.failed > e.forward.failed or _random_cell(e) is not None:
        return None
    needed = max((steps for steps in more.steps if steps < 10 * e.max_steps), default=10 * e.max_steps)
    enough = f"Stop(max_steps={needed + needed // 4 + 1})"  # a margin of a quarter, for other batches
    return Finding(
        "too few steps",
        Severity.ERROR,
        f"{e.forward.failed} of {e.samples} samples ran out of max_steps={e.max_steps}; with ten times as many "
        f"{more.failed} do, and the others need up to {needed}.",
        f"{enough}, or a stronger solver: {_best_solver(e)}"
        if more.failed == 0
        else f"a stronger solver: {_best_solver(e)} {enough} helps {e.forward.failed - more.failed} of {e.forward.failed}.",
    )


def _unexplained(e: Examination) -> Finding | None:
    """Report samples that failed for no reason found by the other rules."""
    if e.forward.failed == 0 or any(rule(e) is not None for rule in _FAILURES):
        return None
    return Finding(
        "not converging",
        Severity.ERROR,
        f"{e.forward.failed} of {e.samples} samples did not converge ({_counts(e.forward.status)}), worst residual "
        f"{e.forward.worst:.1e}, though the cell contracts where the solver ended.",
        _best_solver(e),
    )


def _adjoint(e: Examination) -> Finding | None:
    """Report a backward solve that did not converge."""
    if e.adjoint is None or e.adjoint.failed == 0:
        return None
    a_formula = e.adjoint.evaluations == 0  # a closed formula: its agreement shows its quality
    at_the_floor = e.adjoint.worst <= FLOOR * e.precision  # solved as well as the dtype allows
    own = _own_gradient(e)
    # Without an equilibrium the adjoint belongs to an arbitrary state, and its convergence says nothing about the layer. The
    # other rules report why the forward solve failed.
    without_equilibria = own is None and e.forward.failed == e.samples
    if a_formula or at_the_floor or without_equilibria:
        return None
    measured = (
        f"The gradient as measured has a cosine of {own.cosine:.3f} with the exact one and a relative error of "
        f"{own.relative_error:.1e}."
        if own is not None
        else "The error of the gradient was not measured; it can be far larger than the residual."
    )
    steps = 4 * max(50, *e.adjoint.steps)
    return Finding(
        "backward solve not converged",
        Severity.HINT if own is not None and own.relative_error <= GOOD_GRADIENT else Severity.ERROR,
        f"{e.adjoint.failed} of {e.samples} adjoint systems were not solved ({_counts(e.adjoint.status)}), worst relative "
        f"residual {e.adjoint.worst:.1e}. {measured}",
        f"eq.Implicit(solver=eq.GMRES(restart=40), stop=eq.Stop(max_steps={steps})), and eq.jacobian_penalty in the loss, "
        "which keeps the eigenvalues of the Jacobian away from 1.",
    )


def _own_gradient(e: Examination) -> Agreement | None:
    """Return the comparison of the layer's own gradient with the exact one; None if there is none."""
    own = e.agreements[0] if e.agreements else None
    return None if own is None or own.error is not None or own.cosine != own.cosine else own


def _poor_gradient(e: Examination) -> Finding | None:
    """Report a gradient with a small cosine to the exact one."""
    own = _own_gradient(e)
    if own is None or not own.cosine < COSINE or _random_cell(e) is not None:
        return None
    unsolved = f" {e.forward.failed} of {e.samples} samples did not converge, and count with their best iterate."
    return Finding(
        "gradient far from the exact one",
        Severity.RISK,
        f"{e.gradient} has a cosine of {own.cosine:.3f} with the exact gradient and {own.norm_ratio:.2g} times its length."
        + (unsolved if e.forward.failed else "")
        + (f" {e.reference_problem}" if e.reference_problem else ""),
        "a forward and a backward solve that converge."
        if e.forward.failed or (e.adjoint is not None and e.adjoint.failed)
        else "eq.Implicit(); or more steps of the phantom gradient, or eq.Escalate(cheap, exact, when).",
    )


def _refused(e: Examination) -> Finding | None:
    """Report a gradient that raises."""
    if e.adjoint_error is None:
        return None
    return Finding(
        "backward fails", Severity.ERROR, f"{e.gradient} raises {e.adjoint_error}", "another gradient, or eq.Implicit()."
    )


def _slow_solver(e: Examination) -> Finding | None:
    """Report another solver that is much faster."""
    own, *others = e.solvers
    good = [other for other in others if other.solve.failed == 0]
    best = min(good, key=lambda other: other.seconds, default=None)
    if best is None or own.solve.failed or own.seconds < SLOW * best.seconds:
        return None
    return Finding(
        "a faster solver",
        Severity.HINT,
        f"{best.solver} finds the same equilibria in {best.seconds / own.seconds:.0%} of the time ({best.solve.evaluations} "
        f"evaluations instead of {own.solve.evaluations}).",
        f"solver=eq.{best.solver}, or let eq.tune(model, batch) choose.",
    )


def _tail(e: Examination) -> Finding | None:
    """Report a batch in which a few samples take many more steps than the others."""
    steps = sorted(e.forward.steps)
    median = steps[len(steps) // 2] if steps else 0
    # coupled samples stop together, and in short solves a ratio of steps means little
    if median == 0 or steps[-1] < TAIL * median or steps[-1] < 10 or e.trial.batch_statistics:
        return None
    return Finding(
        "a few hard samples",
        Severity.HINT,
        f"The slowest sample takes {steps[-1]} steps, the median {median}; {e.forward.sample_evaluations} rows were "
        f"evaluated in {e.forward.evaluations} runs.",
        "eq.Fallback(eq.Picard(), eq.Anderson(), eq.Newton()) spends strong solvers on hard samples alone; eq.Remember() "
        "starts known samples at their last equilibrium.",
    )


_FAILURES: tuple[Callable[[Examination], Finding | None], ...] = (
    _random_cell,
    _below_reach,
    _nonfinite,
    _not_contractive,
    _too_few_steps,
)
_RULES = (*_FAILURES, _unexplained, _coupled, _refused, _adjoint, _poor_gradient, _slow_solver, _tail)


def _best_solver(e: Examination) -> str:
    """Return a sentence on the solver that did best on this model."""
    finished = [result for result in e.solvers if not result.out_of_time]
    best: SolverResult = min(finished, key=lambda result: (result.solve.failed, result.seconds))
    if best.solve.failed == 0:
        return f"{best.solver} finds all of its equilibria ({best.solve.evaluations} evaluations)."
    return f"no solver finds all of its equilibria, {best.solver} misses {best.solve.failed} of {e.samples}."


def _counts(status: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in status.items() if name != "converged")
