"""Findings on the attractors of a layer, from what restarts showed."""

from __future__ import annotations

import math
from collections.abc import Callable

from equilibria.analysis.diagnosis.attractors import DRIFT_STEPS, SAME, Attractors
from equilibria.analysis.diagnosis.findings import Finding, Severity

LAZY = 0.01  # one step from anywhere leads this near to the equilibrium
MOST = 0.9  # share of the samples that makes a layer lazy
TELLING, BLIND = 0.8, 0.6  # areas under the curve: from here on the residual tells, up to here it does not
FEW = 3  # right or wrong answers below which no area is believed


def attractor_findings(a: Attractors | None) -> list[Finding]:
    """What restarts showed, the worst first; nothing where there were none."""
    if a is None:
        return []
    found = [finding for rule in _RULES if (finding := rule(a)) is not None]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _several(a: Attractors) -> Finding | None:
    several = sum(count > 1 for count in a.equilibria)
    if several == 0:
        return None
    return Finding(
        "several equilibria",
        Severity.RISK,
        f"{several} of {len(a.equilibria)} samples have more than one equilibrium, up to {max(a.equilibria)} among "
        f"{a.restarts} random starts.",
        "eq.breadth(deq, starts=...) to choose among them, the same start in training and evaluation, or "
        "eq.jacobian_penalty in the loss, which leaves a contraction with one.",
    )


def _path(a: Attractors) -> Finding | None:
    known = [distance for distance in a.path if math.isfinite(distance)]
    moved = sum(distance > SAME for distance in known)
    if moved == 0:
        return None
    return Finding(
        "path dependence",
        Severity.RISK,
        f"Started at another sample's equilibrium, {moved} of {len(known)} samples end elsewhere, the farthest "
        f"{max(known):.2f} of its size away: the answer depends on the way there.",
        "starts that do not depend on what came before (no eq.Remember), or training over random starts "
        "(eq.RandomStart()), which makes attractors wide.",
    )


def _drift(a: Attractors) -> Finding | None:
    known = [distance for distance in a.drift if math.isfinite(distance)]
    moved = sum(distance > SAME for distance in known)
    if moved == 0:
        return None
    return Finding(
        "drift with depth",
        Severity.RISK,
        f"{DRIFT_STEPS} plain steps from the equilibrium lead {moved} of {len(known)} samples away from it, the farthest by "
        f"{max(known):.2f} of its size.",
        "a stop by tolerance in place of more steps, a damped iteration, noise and random starts in training, or "
        "eq.jacobian_penalty in the loss.",
    )


def _lazy(a: Attractors) -> Finding | None:
    known = [distance for distance in a.first_step if math.isfinite(distance)]
    near = sum(distance <= LAZY for distance in known)
    if not known or near < MOST * len(known):
        return None
    return Finding(
        "lazy cell",
        Severity.HINT,
        f"One step from any of {a.restarts} random starts leads {near} of {len(known)} samples to within {LAZY:.0%} of the "
        "equilibrium: the cell hardly looks at its state, and iterating it adds nothing.",
        "a smaller weight of the penalty that made it so (skip_penalty, jacobian_penalty), or an explicit layer.",
    )


def _correctness(a: Attractors) -> Finding | None:
    right = len(a.equilibria) - (a.wrong or 0)
    if a.auc is None or a.wrong is None or min(a.wrong, right) < FEW or BLIND < a.auc < TELLING:
        return None
    measured = (
        f"The residual of a wrong answer is larger than that of a right one with probability {a.auc:.2f} ({a.wrong} of "
    )
    measured += f"{len(a.equilibria)} answers are wrong)."
    if a.auc >= TELLING:
        return Finding(
            "residual tells wrong answers",
            Severity.HINT,
            measured,
            "eq.breadth(deq, starts=...), which keeps the best converged start, and "
            'eq.Halting(by="convergence"), which stops where it is small.',
        )
    return Finding(
        "residual blind to wrong answers",
        Severity.HINT,
        measured,
        "no choice by residual among starts: wrong answers converge as well as right ones.",
    )


_RULES: tuple[Callable[[Attractors], Finding | None], ...] = (_several, _path, _drift, _lazy, _correctness)
