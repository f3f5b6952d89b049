"""One examined layer with its findings, as text."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.analysis.diagnosis.examine import Examination, SolveNumbers
from equilibria.analysis.diagnosis.findings import Finding, Severity


@dataclass(frozen=True, repr=False)
class LayerDiagnosis:
    """A layer with its measurements and findings."""

    examination: Examination
    findings: tuple[Finding, ...]

    @property
    def name(self) -> str:
        return f"layer {self.examination.name}" if self.examination.name else "the model itself"

    @property
    def ok(self) -> bool:
        """True if the layer has no finding worse than a hint."""
        return all(finding.severity is Severity.HINT for finding in self.findings)

    def __repr__(self) -> str:
        causes = ", ".join(finding.cause for finding in self.findings)
        return f"LayerDiagnosis({self.name}: {causes or 'nothing found'})"


def text(layer: LayerDiagnosis) -> str:
    """Return the layer as plain text: its main numbers, solvers, gradients and findings."""
    e = layer.examination
    lines = [
        f"{layer.name}: {e.samples} samples of {e.size} numbers ({e.dtype}), {'training' if e.training else 'eval'} mode"
    ]
    lines += [f"  {what:<18} {value}" for what, value in rows(e)]
    lines += ["", f"  {'solver':<28} {'converged':>9} {'steps':>6} {'evaluations':>11} {'ms':>8}"]
    for result in e.solvers:
        if result.out_of_time:
            lines.append(f"  {shortened(result.solver, 28):<28} stopped after {result.seconds:g} s")
            continue
        share = 1 - result.solve.failed / max(e.samples, 1)
        steps, name = max(result.solve.steps, default=0), result.solver + (" (present)" if result.present else "")
        lines.append(
            f"  {shortened(name, 28):<28} {share:>9.0%} {steps:>6} {result.solve.evaluations:>11} "
            f"{1e3 * result.seconds:>8.1f}"
        )
    if e.agreements:
        lines += ["", f"  {'gradient':<44} {'cosine':>7} {'length':>7}"]
        lines += [f"  {shortened(a.name, 44):<44} {a.cosine:>7.4f} {a.norm_ratio:>7.3f}" for a in e.agreements]
    if e.out_of_time:
        lines += ["", f"  Stopped because they took too long: {', '.join(e.out_of_time)}."]
    lines += ["", *([f"  {finding}" for finding in layer.findings] or ["  No problem found."])]
    return "\n".join(lines)


def rows(e: Examination) -> list[tuple[str, str]]:
    """Return the main results as (name, text)."""
    radii = sorted(radius for radius in e.radius.radius if radius == radius)
    radius = f"median {radii[len(radii) // 2]:.3f}, worst {radii[-1]:.3f}" if radii else "unknown"
    sure = sum(e.radius.converged)
    return [
        ("solver", e.solver),
        ("stop", e.stop),
        ("gradient", e.gradient),
        ("forward solve", _solve_line(e.forward)),
        ("backward solve", e.adjoint_error or (_solve_line(e.adjoint) if e.adjoint else "no separate solve")),
        ("spectral radius", f"{radius} (estimate converged for {sure} of {e.samples})"),
        ("kept for backward", f"{_size(e.memory.kept_for_backward)}; a state is {_size(e.memory.state)}"),
    ]


def _solve_line(solve: SolveNumbers) -> str:
    """Return the statistics of a solve in one line."""
    counts = ", ".join(f"{count} {name}" for name, count in solve.status.items())
    steps = max(solve.steps, default=0)
    return f"{counts}; up to {steps} steps, {solve.evaluations} evaluations, worst residual {solve.worst:.1e}"


def _size(count: int) -> str:
    """Return a number of bytes as text in MB or kB."""
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.1f} kB"


def shortened(text: str, length: int) -> str:
    """Return `text` cut to `length` characters, with an ellipsis where something was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"
