"""diagnose: examine every equilibrium layer of a model and report."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from equilibria.diagnosis.examine import Examination, examine
from equilibria.diagnosis.findings import Finding, Severity, findings
from equilibria.gradients.base import Gradient
from equilibria.measuring import captured

PAGE, NUMBERS = "diagnosis.html", "diagnosis.json"


@dataclass(frozen=True)
class LayerDiagnosis:
    """A layer, what was measured on it and what is the matter."""

    examination: Examination
    findings: tuple[Finding, ...]

    @property
    def name(self) -> str:
        return f"layer {self.examination.name}" if self.examination.name else "the model itself"

    @property
    def healthy(self) -> bool:
        """Is nothing the matter but hints?"""
        return all(finding.severity is Severity.HINT for finding in self.findings)


@dataclass(frozen=True)
class Diagnosis:
    """Every equilibrium layer of a model; prints as a table with findings in words."""

    layers: tuple[LayerDiagnosis, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for layer in self.layers for finding in layer.findings)

    @property
    def healthy(self) -> bool:
        return all(layer.healthy for layer in self.layers)

    def to_json(self) -> str:
        """All numbers and findings; what is not finite is written as a string, so that any reader takes it."""
        return json.dumps(_plain(self), indent=1, allow_nan=False)

    def save(self, folder: str | Path) -> Path:
        """Write numbers (JSON), plots (PNG) and one self-contained page (HTML) to `folder`; the path of the page.

        Needs matplotlib, which comes with the extra `train`. A file is there whole or not at all.
        """
        from equilibria.diagnosis.page import page, pictures

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = pictures(self)
        for name, content in drawn.items():
            _write(folder / f"{name}.png", content)
        _write(folder / NUMBERS, self.to_json().encode())
        _write(folder / PAGE, page(self, drawn).encode())
        return folder / PAGE

    def __str__(self) -> str:
        return "\n\n".join(map(_text, self.layers))


def diagnose(model: nn.Module, batch: Any) -> Diagnosis:
    """Examine every DEQ in `model` on the inputs it gets in model(batch), and say what is wrong and what to try.

    Measured per layer: convergence of every sample, spectral radius of the Jacobian, the backward solve, other solvers to
    the same residual, agreement of gradients with the exact one, memory, whether the cell is one function of one sample. The
    model is examined in the mode it is in (call model.train() first to see it as in training) and left as it was.

    batch  a tensor, or a tuple or list of the model's arguments
    """
    calls = captured(model, batch)
    if not calls:
        raise ValueError(
            "No equilibrium layer was solved in model(batch): the model has eq.DEQ layers, and did not call them."
        )
    examinations = [examine(name, call) for name, call in calls.items()]
    return Diagnosis(tuple(LayerDiagnosis(e, tuple(findings(e))) for e in examinations))


def _text(layer: LayerDiagnosis) -> str:
    e = layer.examination
    lines = [
        f"{layer.name}: {e.samples} samples of {e.size} numbers ({e.dtype}), {'training' if e.training else 'eval'} mode"
    ]
    lines += [f"  {what:<18} {value}" for what, value in rows(e)]
    lines += ["", f"  {'solver':<28} {'converged':>9} {'steps':>6} {'evaluations':>11} {'ms':>8}"]
    for result in e.solvers:
        share = 1 - result.solve.failed / max(e.samples, 1)
        steps, name = max(result.solve.steps, default=0), result.solver + (" (present)" if result.present else "")
        lines.append(
            f"  {_short(name, 28):<28} {share:>9.0%} {steps:>6} {result.solve.evaluations:>11} {1e3 * result.seconds:>8.1f}"
        )
    if e.agreements:
        lines += ["", f"  {'gradient':<44} {'cosine':>7} {'length':>7}"]
        lines += [f"  {_short(a.name, 44):<44} {a.cosine:>7.4f} {a.norm_ratio:>7.3f}" for a in e.agreements]
    lines += ["", *([f"  {finding}" for finding in layer.findings] or ["  Healthy: nothing found."])]
    return "\n".join(lines)


def rows(e: Examination) -> list[tuple[str, str]]:
    """What a reader wants to see first, in words."""
    radii = sorted(radius for radius in e.radius.radius if radius == radius)
    radius = f"median {radii[len(radii) // 2]:.3f}, worst {radii[-1]:.3f}" if radii else "unknown"
    sure = sum(e.radius.converged)
    return [
        ("solver", e.solver),
        ("stop", e.stop),
        ("gradient", e.gradient),
        ("forward solve", _solve_line(e.forward)),
        ("backward solve", e.adjoint_error or (_solve_line(e.adjoint) if e.adjoint else "none of its own")),
        ("spectral radius", f"{radius} (estimate converged for {sure} of {e.samples})"),
        ("kept for backward", f"{_size(e.memory.kept_for_backward)}; a state is {_size(e.memory.state)}"),
    ]


def _solve_line(solve: Any) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in solve.status.items())
    steps = max(solve.steps, default=0)
    return f"{counts}; up to {steps} steps, {solve.evaluations} evaluations, worst residual {solve.worst:.1e}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.1f} kB"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _plain(value: Any) -> Any:
    """Of strings, numbers, lists and dicts."""
    if isinstance(value, Gradient):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Severity):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value


def _write(path: Path, content: bytes) -> None:
    """Beside its place first: a file that is cut short never stands there as if whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
