"""Reporting samples that did not converge: ignore them, warn once per cell and cause, or raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from equilibria._core.user_warnings import warn_user
from equilibria.solution import ConvergenceError, ConvergenceWarning, Stats, Status
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

_ADVICE = {
    Status.MAX_STEPS: "allow more steps, use a stronger solver (Anderson with more history, Broyden, Newton, or a Fallback "
    "of them), or keep the cell contractive (normalisation, Jacobian regularization)",
    Status.NONFINITE: "check the inputs and weights of those samples; they keep their best finite iterate and get no "
    "gradient",
    Status.STALLED: "loosen rtol, or compute in a wider dtype: the residual stopped falling",
    Status.DIVERGED: "use a solver that does not need a contraction (Anderson, Broyden, Newton, or a Fallback of them), use "
    "a better start, or keep the cell contractive (normalisation, Jacobian regularization); those samples keep their best "
    "iterate, which may be the start",
}
_warned: WeakKeyDictionary[Any, set[tuple[str, Status]]] = WeakKeyDictionary()


def report_failures(
    stats: Stats, stop: Stop, solver: AnySolver, *, what: str, owner: Any, on_failure: str | None = None
) -> None:
    """Ignore the failed samples of a solve, warn about them, or raise ConvergenceError.

    what        "forward" or "adjoint", for the message
    owner       the cell; each cause is warned about once per owner
    on_failure  "ignore", "warn" or "raise"; None uses `stop.on_failure`
    """
    action = on_failure or stop.on_failure
    if action == "ignore":
        return
    causes = [status for status in Status if status != Status.CONVERGED and stats.count(status)]
    if not causes:
        return
    if action == "raise":
        raise ConvergenceError(_message(stats, stop, solver, what, causes, owner), stats)
    if owner is not None:
        known = _warned.setdefault(owner, set())
        news = [cause for cause in causes if (what, cause) not in known]
        known.update((what, cause) for cause in causes)
        if not news:
            return
    warn_user(_message(stats, stop, solver, what, causes, owner), ConvergenceWarning)


def _message(stats: Stats, stop: Stop, solver: AnySolver, what: str, causes: Sequence[Status], owner: Any) -> str:
    """Return the number of failed samples, the worst residual, and advice for each cause, as text."""
    batch, failed = stats.status.numel(), int(stats.failed.sum())
    counts = ", ".join(f"{stats.count(cause)} {cause.name.lower()}" for cause in causes)
    worst = float(stats.residual.max())
    advice = "; ".join(f"{cause.name.lower()}: {_ADVICE[cause]}" for cause in causes)
    return (
        f"The {what} solve did not converge for {failed} of {batch} samples ({counts}) with {solver!r} in "
        f"{int(stats.steps.max())} of at most {stop.max_steps} steps: worst relative residual {worst:.1e}, wanted "
        f"{stop.rtol:.1e}. Per sample: Stats.status, .residual, .steps. {_suspects(owner)}Advice for {advice}. "
        "eq.diagnose(model, batch) looks for the cause."
    )


def _suspects(owner: Any) -> str:
    """Return a sentence about layers that keep the cell from having an equilibrium; empty if there are none."""
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    dropouts = {type(m).__name__ for m in modules if isinstance(m, _DropoutNd) and m.training and m.p > 0}
    norms = {type(m).__name__ for m in modules if isinstance(m, _BatchNorm) and m.training}
    sentences = ""
    if dropouts:
        sentences += (
            f"The cell has {', '.join(sorted(dropouts))} in training mode, which makes it another function at every call: "
            "convert it with eq.freeze_dropout(cell), or set its p to 0. "
        )
    if norms:
        sentences += (
            f"The cell has {', '.join(sorted(norms))} in training mode, which couples the samples of a batch: GroupNorm or "
            "LayerNorm keep them apart. "
        )
    return sentences
