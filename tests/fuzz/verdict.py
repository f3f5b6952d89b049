"""The result of one call of the library, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import equilibria as eq
from tests.fuzz.problems import Cell, Problem


@dataclass
class Finding:
    """A false statement of the library, or an unclear crash: an error whose message does not say what to do."""

    kind: str
    detail: str
    row: int | None = None


@dataclass
class Verdict:
    """Counts of what was compared, and the findings."""

    samples: int = 0  # rows that were judged
    converged: int = 0  # rows of these that are reported as converged
    gradients: int = 0  # rows whose gradient was compared
    findings: list[Finding] = field(default_factory=list)
    refused: str | None = None  # text of the clear error, if the library refused the case

    def add(self, kind: str, detail: str, row: int | None = None) -> None:
        self.findings.append(Finding(kind, detail, row))

    def merge(self, other: Verdict) -> None:
        self.samples += other.samples
        self.converged += other.converged
        self.gradients += other.gradients
        self.findings += other.findings
        self.refused = self.refused or other.refused


@dataclass
class Run:
    """The result of one call, with the cell as it was during the forward pass."""

    problem: Problem
    cell: Cell
    solution: eq.Solution
    grad_x: Tensor | None = None
    grad_w: Tensor | None = None
    measured: Tensor | None = (
        None  # residuals of the returned state, if the statistics describe the state before extra steps
    )
    tangents: Any = None  # tangents of z in forward mode


def samples_of(problem: Problem) -> int:
    """Return the number of samples; 1 if the batch is one problem."""
    return 1 if problem.whole else problem.case.batch
