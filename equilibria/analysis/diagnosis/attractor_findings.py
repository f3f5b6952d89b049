"""Findings on the attractors of a layer, from solves with other starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from equilibria.analysis.diagnosis.attractors import DRIFT_STEPS, SAME, Attractors
from equilibria.analysis.diagnosis.findings import Finding, Severity

LAZY = 0.01  # a sample is lazy if one step brings it closer to the equilibrium than this, relative to its norm
MOST = 0.9  # a cell is lazy if at least this share of its samples is
# area under the ROC curve: at SEPARATING or more the residual predicts wrong answers, at NOT_SEPARATING or less it does not
SEPARATING, NOT_SEPARATING = 0.8, 0.6
FEW = 3  # with fewer right or fewer wrong answers the area is noise and not reported


def attractor_findings(a: Attractors | None) -> list[Finding]:
    """Return the findings of restarts, the worst first; empty without restarts."""
    if a is None:
        return []
    found = [finding for rule in _RULES if (finding := rule(a)) is not None]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _several(a: Attractors) -> Finding | None:
    """Report samples with more than one equilibrium."""
    several = sum(count > 1 for count in a.equilibria)
    if several == 0:
        return None
    return Finding(
        "several equilibria",
        Severity.RISK,
        f"{several} of {len(a.equilibria)} samples have more than one equilibrium, up to {max(a.equilibria)} among "
        f"{a.restarts} random starts.",
        f"eq.looped.breadth(deq, starts={a.restarts}) to choose among them, the same start in training and evaluation, or "
        "eq.jacobian_penalty in the loss, which leaves a contraction with one.",
    )


def _path(a: Attractors) -> Finding | None:
    """Report samples whose answer depends on the start."""
    return _away(
        "path dependence",
        a.path,
        "Started at another sample's equilibrium, {moved} of {known} samples end elsewhere, the farthest {most:.2f} of its "
        "norm away: the answer depends on the start.",
        "starts that do not depend on earlier samples (no eq.Remember), or training with random starts "
        "(eq.looped.RandomStart()), which widens attractors.",
    )


def _drift(a: Attractors) -> Finding | None:
    """Report samples that plain iteration leads away from their equilibrium."""
    return _away(
        "drift with depth",
        a.drift,
        f"{DRIFT_STEPS} plain steps from the equilibrium lead {{moved}} of {{known}} samples away from it, the farthest by "
        "{most:.2f} of its norm.",
        "a stop by tolerance instead of more steps, a damped iteration, noise and random starts in training, or "
        "eq.jacobian_penalty in the loss.",
    )


def _away(name: str, distances: Sequence[float], measured: str, advice: str) -> Finding | None:
    """Report samples that end farther than SAME from their equilibrium; None if there are none."""
    known = [distance for distance in distances if math.isfinite(distance)]
    moved = sum(distance > SAME for distance in known)
    if moved == 0:
        return None
    text = measured.format(moved=moved, known=len(known), most=max(known))
    return Finding(name, Severity.RISK, text, advice)


def _lazy(a: Attractors) -> Finding | None:
    """Report a cell that reaches the equilibrium in one step from any start."""
    known = [distance for distance in a.first_step if math.isfinite(distance)]
    near = sum(distance <= LAZY for distance in known)
    if not known or near < MOST * len(known):
        return None
    return Finding(
        "lazy cell",
        Severity.HINT,
        f"One step from any of {a.restarts} random starts leads {near} of {len(known)} samples to within {LAZY:.0%} of the "
        "equilibrium: the cell hardly depends on its state, and iterating it adds nothing.",
        "a smaller weight of the penalty that made it so (skip_penalty, jacobian_penalty), or an explicit layer.",
    )


def _correctness(a: Attractors) -> Finding | None:
    """Report whether the residual separates wrong answers from right ones."""
    right = len(a.equilibria) - (a.wrong or 0)
    if a.auc is None or a.wrong is None or min(a.wrong, right) < FEW or NOT_SEPARATING < a.auc < SEPARATING:
        return None
    measured = (
        f"The residual of a wrong answer is larger than that of a right one with probability {a.auc:.2f} ({a.wrong} of "
    )
    measured += f"{len(a.equilibria)} answers are wrong)."
    if a.auc >= SEPARATING:
        return Finding(
            "residual separates wrong answers",
            Severity.HINT,
            measured,
            f"eq.looped.breadth(deq, starts={a.restarts}), which keeps the best converged start, and "
            'eq.looped.Halting(by="convergence"), which stops a sample once its residual is small.',
        )
    return Finding(
        "residual does not separate wrong answers",
        Severity.HINT,
        measured,
        "another criterion than the residual to choose among starts: wrong answers converge as well as right ones.",
    )


_RULES: tuple[Callable[[Attractors], Finding | None], ...] = (_several, _path, _drift, _lazy, _correctness)
