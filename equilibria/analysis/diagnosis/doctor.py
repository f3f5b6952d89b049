"""diagnose: examine every equilibrium layer of a model and report."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._core.files import replace_file
from equilibria._core.plain import to_plain
from equilibria.analysis.diagnosis.attractor_findings import attractor_findings
from equilibria.analysis.diagnosis.attractors import measure_attractors, wrong_answers
from equilibria.analysis.diagnosis.examine import Examination, examine
from equilibria.analysis.diagnosis.findings import Finding, Severity, findings
from equilibria.analysis.diagnosis.layers import LayerDiagnosis, text
from equilibria.analysis.measuring import Call, captured, muted, untouched
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.solvers.base import require

PAGE, NUMBERS = "diagnosis.html", "diagnosis.json"


@dataclass(frozen=True)
class Diagnosis:
    """Every equilibrium layer of a model; prints as a table with findings in words."""

    layers: tuple[LayerDiagnosis, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all layers."""
        return tuple(finding for layer in self.layers for finding in layer.findings)

    @property
    def healthy(self) -> bool:
        """True if no layer has a finding worse than a hint."""
        return all(layer.healthy for layer in self.layers)

    def to_json(self) -> str:
        """All numbers and findings; what is not finite is written as a string, so that any reader takes it."""
        return json.dumps(to_plain(self, _named), indent=1, allow_nan=False)

    def save(self, folder: str | Path) -> Path:
        """Write numbers (JSON), plots (PNG) and one self-contained page (HTML) to `folder`; the path of the page.

        Needs matplotlib, which comes with the extra `train`. A file is there whole or not at all.
        """
        from equilibria.analysis.diagnosis.page import page, pictures

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = pictures(self.layers)
        for name, content in drawn.items():
            replace_file(folder / f"{name}.png", content)
        replace_file(folder / NUMBERS, self.to_json().encode())
        replace_file(folder / PAGE, page(self.layers, drawn).encode())
        return folder / PAGE

    def __str__(self) -> str:
        return "\n\n".join(map(text, self.layers))


def diagnose(model: nn.Module, batch: Any, *, restarts: int = 0, labels: Tensor | None = None) -> Diagnosis:
    """Examine every DEQ in `model` on the inputs it gets in model(batch), and say what is wrong and what to try.

    Measured per layer: convergence of every sample, spectral radius of the Jacobian, the backward solve, other solvers to
    the same residual, agreement of gradients with the exact one, memory, whether the cell is one function of one sample. The
    model is examined in the mode it is in (call model.train() first to see it as in training) and left as it was.

    Other solvers get 10 s each, the comparison of gradients 30 s; what takes longer is stopped, and the report says so. The
    clock is read at every run of the cell, so a limit may be passed by the time of one run. The layer's own solve, its
    backward pass and the spectral radius have no limit.

    batch     a tensor, or a tuple or list of the model's arguments
    restarts  solves from random starts, which tell of several equilibria, path dependence, drift with depth and lazy cells;
              0: none of these is looked for
    labels    (batch, ...) for logits (batch, ..., classes) that the model returns; with restarts, they tell whether the
              residual of wrong answers is larger
    """
    require(restarts >= 0, f"restarts must not be negative, got {restarts}.")
    require(labels is None or restarts > 0, "labels are used with restarts, which are 0: give restarts=8, for instance.")
    calls = captured(model, batch)
    if not calls:
        raise ValueError(
            "No equilibrium layer was solved in model(batch): the model has eq.DEQ layers, and did not call them."
        )
    wrong = None if labels is None else _wrong(model, batch, labels)
    examinations = [_examined(name, call, restarts, wrong) for name, call in calls.items()]
    return Diagnosis(tuple(LayerDiagnosis(e, (*findings(e), *attractor_findings(e.attractors))) for e in examinations))


def _examined(name: str, call: Call, restarts: int, wrong: Tensor | None) -> Examination:
    examination = examine(name, call)
    if restarts == 0:
        return examination
    with untouched(call.deq, call.inputs):
        found = measure_attractors(call.deq, call.inputs, restarts, wrong)
    return dataclasses.replace(examination, attractors=found)


def _wrong(model: nn.Module, batch: Any, labels: Tensor) -> Tensor:
    with untouched(model, batch), torch.no_grad(), muted([part for part in model.modules() if isinstance(part, DEQ)]):
        return wrong_answers(model(*batch) if isinstance(batch, (tuple, list)) else model(batch), labels)


def _named(value: Any) -> Any:
    """Gradients and severities by their names, numbers that JSON does not have as strings."""
    if isinstance(value, Gradient):
        return repr(value)
    if isinstance(value, Severity):
        return value.value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
