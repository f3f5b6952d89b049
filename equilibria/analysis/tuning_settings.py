"""Settings of a DEQ that tuning tries, and their measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import cast

import torch
from torch import nn

from equilibria.analysis.measuring import brief
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB, NeumannPhantom, UnrolledPhantom
from equilibria.gradients.warmup import Warmup
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import AnySolver, check_solver
from equilibria.solvers.krylov import GMRES, BiCGSTAB
from equilibria.solvers.newton import Newton
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

MAX_STEPS = 200  # max_steps of a candidate's solves; the tolerance should end them
HEADS = ("step", "ms", "residual", "cosine", "setting")
WIDEST = 100  # characters of a reason shown in a table


def _implicit() -> Iterator[Implicit]:
    """Yield Implicit with several adjoint solvers and tolerances."""
    for solver in (GMRES(), BiCGSTAB(), Anderson()):
        yield Implicit(solver=solver)  # to the tolerance of the forward solve
        for rtol in (1e-2, 1e-1, 3e-1):
            yield Implicit(solver=solver, stop=Stop(rtol=rtol, max_steps=MAX_STEPS))


SOLVERS: tuple[AnySolver, ...] = (
    Picard(),
    Picard(damping=0.5),
    *(Anderson(history=history) for history in (3, 5, None, 10)),
    *(Broyden(history=history) for history in (10, None)),
    Newton(),
)
GRADIENTS: tuple[Gradient, ...] = (
    *_implicit(),
    JFB(),
    *(NeumannPhantom(steps=steps, damping=1.0) for steps in (3, 5, 10)),
    UnrolledPhantom(),
)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The settings that `tune` tries: solvers, and gradients to combine with the fast ones."""

    solvers: tuple[AnySolver, ...] = SOLVERS
    gradients: tuple[Gradient, ...] = GRADIENTS

    def __post_init__(self) -> None:
        for solver in self.solvers:
            check_solver(solver)
        for gradient in self.gradients:
            if not isinstance(gradient, Gradient):
                raise TypeError(f"Gradients to try must be objects such as eq.JFB(), got {gradient!r}.")


@dataclass(frozen=True)
class Setting:
    """Settings of a DEQ; without a gradient they are for inference only."""

    solver: AnySolver
    stop: Stop
    gradient: Gradient | None

    def apply(self, deq: DEQ) -> DEQ:
        """Set these settings on `deq` in place. For inference only solver and `eval_stop` are set."""
        deq.solver = self.solver
        if self.gradient is None:
            deq.eval_stop = self.stop
            return deq
        deq.stop, deq.gradient = self.stop, self.gradient
        if isinstance(self.gradient, Warmup) and deq.solves is None:
            deq.solves = torch.zeros((), dtype=torch.int64)
        return deq

    def __str__(self) -> str:
        return ", ".join(brief(part) for part in (self.solver, self.stop, self.gradient) if part is not None)


@dataclass(frozen=True)
class Measurement:
    """The measurement of a setting; nan for what was not measured."""

    setting: Setting
    seconds: float  # median time of solve and backward pass; for inference, of the solve
    residual: float  # largest relative residual of a sample
    cosine: float  # cosine of the angle to the exact gradient
    evaluations: int  # runs of the cell in the solve
    reason: str | None  # why it was rejected

    @property
    def accepted(self) -> bool:
        """True if the setting meets the requirements of the search."""
        return self.reason is None


@dataclass(frozen=True, repr=False)
class Tuning:
    """The result for one DEQ.

    best          the fastest setting that reaches residual and agreement; if there is none (`reached` is False), the one
                  that comes nearest
    measurements  all settings: accepted ones from fast to slow, then rejected ones
    """

    name: str  # name of the DEQ in the model
    residual: float  # required residual
    agreement: float | None  # required cosine; None: inference
    present: Setting
    best: Setting
    measurements: tuple[Measurement, ...]

    @property
    def reached(self) -> bool:
        """True if any setting meets the requirements of the search."""
        return any(measurement.accepted for measurement in self.measurements)

    def __str__(self) -> str:
        return "\n".join([*self._heading(), *self._table()])

    def __repr__(self) -> str:
        found = "best" if self.reached else "none reaches the requirements, nearest"
        return f"Tuning({self.name or 'DEQ'}: {len(self.measurements)} settings, {found}: {self.best})"

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(row, "td") for row in self._rows())
        return f"<p>{'<br>'.join(map(escape, self._heading()))}</p><table>{_html_row(HEADS, 'th')}{rows}</table>"

    def _heading(self) -> list[str]:
        """Return the lines above the table: requirements, best setting and advice."""
        target = f"residual <= {self.residual:.1e}"
        target += "" if self.agreement is None else f", cosine >= {self.agreement:g}"
        found = f"{'best' if self.reached else 'nearest'}: {self.best}"
        return [f"{self.name or 'DEQ'}: {target}", found, *self._advice()]

    def _advice(self) -> list[str]:
        """Return advice if no setting meets the requirements."""
        if self.reached:
            return []
        nearest = nearest_to(self.measurements, self.residual)
        if not nearest.residual <= self.residual:
            return [
                f"No setting reaches the residual; this one ends at {nearest.residual:.1e}. Require less, give the layer a "
                "Stop with more max_steps, compute in a wider dtype, or keep the cell contractive."
            ]
        return [
            f"No setting reaches the cosine; this one has {nearest.cosine:.4f}. Require a smaller residual too, since the "
            "gradient is that of the solution found, or add gradients to the Candidates."
        ]

    def _table(self) -> list[str]:
        """Return the lines of the table: aligned columns, then the text of the setting."""
        rows = [HEADS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the texts of the table, one tuple per measurement."""
        unit = next(m.seconds for m in self.measurements if m.setting == self.present)
        return [self._row(m, unit) for m in self.measurements]

    def _row(self, m: Measurement, unit: float) -> tuple[str, ...]:
        """Return the time relative to the present setting and in milliseconds, residual, cosine and description."""
        parts = (m.setting.solver, m.setting.gradient)
        text = ", ".join(brief(part) for part in parts if part is not None)
        text = f"present: {text}, {brief(m.setting.stop)}" if m.setting == self.present else text
        text = text if m.reason is None else f"{text}; refused: {m.reason.splitlines()[0][:WIDEST]}"
        numbers = (f"{m.seconds / unit:.2f}", f"{1e3 * m.seconds:.2f}", f"{m.residual:.1e}", f"{m.cosine:.4f}")
        return (*("-" if number == "nan" else number for number in numbers), text)


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


@dataclass(frozen=True, eq=False, repr=False)
class Tunings(Mapping[str, Tuning]):
    """A Tuning for every DEQ in a model, by name; prints all tables."""

    layers: dict[str, Tuning]

    @property
    def best(self) -> Setting:
        """The best setting of a model with one DEQ."""
        if len(self.layers) != 1:
            raise ValueError(f"The model has {len(self)} DEQs, {list(self)}: use tunings[name].best.")
        return next(iter(self.layers.values())).best

    def apply(self, model: nn.Module) -> nn.Module:
        """Set the best settings on every DEQ of the model in place, except where they miss the requirements."""
        for name, tuning in self.layers.items():
            if tuning.reached:
                tuning.best.apply(cast(DEQ, model.get_submodule(name)))
        return model

    def __getitem__(self, name: str) -> Tuning:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.layers.values()))

    def __repr__(self) -> str:
        return f"Tunings({', '.join(map(repr, self.layers.values()))})"

    def _repr_html_(self) -> str:
        return "".join(tuning._repr_html_() for tuning in self.layers.values())


def nearest_to(measurements: Sequence[Measurement], residual: float) -> Measurement:
    """Return the measurement nearest to the requirements; the residual comes first, then the cosine."""

    def distance(m: Measurement) -> tuple[bool, float]:
        solved = m.residual <= residual
        value = -m.cosine if solved else m.residual
        return not solved, (math.inf if math.isnan(value) else value)

    return min(measurements, key=distance)
