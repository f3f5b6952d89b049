"""`diagnose`: examine every equilibrium layer of a model, and the report that it returns."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria._core.files import replace_file
from equilibria._core.plain import to_plain
from equilibria.analysis.diagnosis.attractor_findings import attractor_findings
from equilibria.analysis.diagnosis.attractors import measure_attractors, wrong_answers
from equilibria.analysis.diagnosis.examine import SEED, Examination, examine
from equilibria.analysis.diagnosis.findings import Finding, Severity, findings
from equilibria.analysis.diagnosis.layers import LayerDiagnosis, text
from equilibria.analysis.measuring import LayerCall, captured, muted, untouched
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient

PAGE, NUMBERS = "diagnosis.html", "diagnosis.json"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The diagnosis of every equilibrium layer of a model.

    It prints as tables with findings; a notebook shows it as HTML.
    """

    layers: tuple[LayerDiagnosis, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all layers."""
        return tuple(finding for layer in self.layers for finding in layer.findings)

    @property
    def ok(self) -> bool:
        """True if no layer has a finding worse than a hint."""
        return all(layer.ok for layer in self.layers)

    def to_json(self) -> str:
        """Return all numbers and findings as JSON; numbers that are not finite are strings."""
        return json.dumps(to_plain(self, _named), indent=1, allow_nan=False)

    def save(self, folder: str | Path, command: str | None = None) -> Path:
        """Write numbers (JSON), plots (PNG) and one self-contained page (HTML) to `folder`; returns the path of the page.

        Needs matplotlib, which comes with the extra `train`. Every file is written atomically. The page shows the date, the
        versions and, if given, the `command` that wrote it.
        """
        from equilibria.analysis.diagnosis.page import page, pictures  # here, since it needs matplotlib

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = pictures(self.layers)
        for name, content in drawn.items():
            replace_file(folder / f"{name}.png", content)
        replace_file(folder / NUMBERS, self.to_json().encode())
        replace_file(folder / PAGE, page(self.layers, drawn, command).encode())
        return folder / PAGE

    def __str__(self) -> str:
        return "\n\n".join(map(text, self.layers))

    def __repr__(self) -> str:
        return f"Diagnosis({', '.join(map(repr, self.layers))})"

    def _repr_html_(self) -> str:
        from equilibria.analysis.diagnosis.page import section

        return "".join(section(layer, {}) for layer in self.layers)


def diagnose(model: nn.Module, batch: Any, *, restarts: int = 0, labels: Tensor | None = None) -> Diagnosis:
    """Examine every DEQ in `model` on the inputs it gets in model(batch), and report problems with advice.

    Measured per layer: convergence of every sample, spectral radius of the Jacobian, the backward solve, other solvers run
    to the same residual, agreement of gradients with the exact one, memory, and whether the cell is a deterministic function
    of each sample alone. The model is examined in its current mode (call model.train() first for training) and left
    unchanged. The random numbers of the measurements have a fixed seed, so the same layer and inputs give the same findings.

    Every other solver may take 10 s, the comparison of gradients 30 s; what takes longer is stopped and reported. The clock
    is read at every run of the cell, so a limit may be exceeded by one run. The layer's own solve, its backward pass and the
    spectral radius have no limit.

    batch     a tensor, or a tuple or list of the model's arguments
    restarts  number of solves from random starts, which detect several equilibria, path dependence, drift with depth and
              lazy cells; 0: these are not measured
    labels    (batch, ...) for logits (batch, ..., classes) that the model returns; together with restarts they show whether
              wrong answers have larger residuals
    """
    require(restarts >= 0, f"restarts must not be negative, got {restarts}.")
    require(labels is None or restarts > 0, "labels need restarts, which are 0: pass restarts=8, for instance.")
    calls = captured(model, batch)
    if not calls:
        raise ValueError(
            "No equilibrium layer was solved in model(batch): the model has eq.DEQ layers but did not call them."
        )
    wrong = None
    if labels is not None:
        layers = [part for part in model.modules() if isinstance(part, DEQ)]
        # the answers are compared with the labels in a run that leaves buffers, random state and warnings as they were
        with untouched(model, batch), torch.no_grad(), muted(layers):
            wrong = wrong_answers(model(*batch) if isinstance(batch, (tuple, list)) else model(batch), labels)
    examinations = [_examined(name, call, restarts, wrong) for name, call in calls.items()]
    return Diagnosis(tuple(LayerDiagnosis(e, (*findings(e), *attractor_findings(e.attractors))) for e in examinations))


def _examined(name: str, call: LayerCall, restarts: int, wrong: Tensor | None) -> Examination:
    """Examine one layer, with restarts if there are any."""
    examination = examine(name, call)
    if restarts == 0:
        return examination
    with untouched(call.deq, call.inputs, seed=SEED):
        found = measure_attractors(call.deq, call.inputs, restarts, wrong)
    return dataclasses.replace(examination, attractors=found)


def _named(value: Any) -> Any:
    """Return a value that JSON can hold: gradients as their repr, severities by name, nan and infinities as strings."""
    if isinstance(value, Gradient):
        return repr(value)
    if isinstance(value, Severity):
        return value.value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
