"""What to do about samples that did not converge: nothing, warn once per cell and cause, or raise."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from equilibria._core.loop import Stop
from equilibria.solution import ConvergenceError, ConvergenceWarning, Stats, Status
from equilibria.solvers.fallback import AnySolver

_ADVICE = {
    Status.MAX_STEPS: "allow more steps, take a stronger solver (Anderson with more history, Broyden, Newton, or a Fallback "
    "of them), or keep the cell contractive (normalisation, Jacobian regularization)",
    Status.NONFINITE: "look at the inputs and weights of those samples; they keep their best finite iterate and get no "
    "gradient",
    Status.STALLED: "loosen rtol, or compute in a wider dtype: the residual stopped falling",
    Status.DIVERGED: "take a solver that does not need a contraction (Anderson, Broyden, Newton, or a Fallback of them), a "
    "better start, or keep the cell contractive (normalisation, Jacobian regularization); those samples have their best "
    "iterate, or the start where none was better",
}
_warned: WeakKeyDictionary[Any, set[tuple[str, Status]]] = WeakKeyDictionary()


def report_failures(
    stats: Stats, stop: Stop, solver: AnySolver, *, what: str, owner: Any, on_failure: str | None = None
) -> None:
    """Ignore, warn about or raise for the failed samples of a solve, as `on_failure` says; None: as `stop` says.

    what   "forward" or "adjoint", for the message
    owner  the cell; each cause is warned about once per owner
    """
    action = on_failure or stop.on_failure
    if action == "ignore":
        return
    causes = [status for status in Status if status != Status.CONVERGED and stats.count(status)]
    if not causes:
        return
    if action == "raise":
        raise ConvergenceError(_message(stats, stop, solver, what, causes), stats)
    if owner is not None:
        known = _warned.setdefault(owner, set())
        news = [cause for cause in causes if (what, cause) not in known]
        known.update((what, cause) for cause in causes)
        if not news:
            return
    warnings.warn(_message(stats, stop, solver, what, causes), ConvergenceWarning, stacklevel=2)


def _message(stats: Stats, stop: Stop, solver: AnySolver, what: str, causes: Sequence[Status]) -> str:
    batch, failed = stats.status.numel(), int(stats.failed.sum())
    counts = ", ".join(f"{stats.count(cause)} {cause.name.lower()}" for cause in causes)
    worst = float(stats.residual.max())
    advice = "; ".join(f"{cause.name.lower()}: {_ADVICE[cause]}" for cause in causes)
    return (
        f"The {what} solve did not converge for {failed} of {batch} samples ({counts}) with {solver!r} in "
        f"{int(stats.steps.max())} of at most {stop.max_steps} steps: worst relative residual {worst:.1e}, wanted "
        f"{stop.rtol:.1e}. Per sample: Stats.status, .residual, .steps. To do about {advice}. "
        "eq.diagnose(model, batch) looks for the cause."
    )
