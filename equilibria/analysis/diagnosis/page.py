"""The diagnosis as plots, and as one self-contained HTML page."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

import torch

import equilibria
from equilibria.analysis.diagnosis.examine import Examination
from equilibria.analysis.diagnosis.findings import Severity
from equilibria.analysis.diagnosis.layers import LayerDiagnosis, rows, shortened
from equilibria.analysis.html_document import document, plots
from equilibria.analysis.plots import COLOURS, INK, MUTED, finish, histogram, new_axes, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "convergence": "Residual over the steps, quantiles over the samples",
    "steps": "Steps per sample",
    "radius": "Spectral radius per sample; plain iteration converges below 1",
    "solvers": "Worst residual of every solver over its steps",
    "gradients": "Agreement of gradients with the exact one",
}
LABEL = 24  # characters of a label in a plot
WORDS = {Severity.ERROR: "Error", Severity.RISK: "Risk", Severity.HINT: "Hint"}


def pictures(layers: Sequence[LayerDiagnosis]) -> dict[str, bytes]:
    """Return PNG files by name, `<layer>-<plot>`."""
    found = {}
    for layer in layers:
        for what, draw in _PICTURES.items():
            axes = new_axes()
            if draw(layer.examination, axes):
                found[f"{_stem(layer)}-{what}"] = png(axes)
    return found


def page(layers: Sequence[LayerDiagnosis], drawn: dict[str, bytes], command: str | None = None) -> str:
    """Return one HTML document with the pictures `drawn` and the style inlined; it shows the `command` that wrote it."""
    sections = "\n".join(section(layer, drawn) for layer in layers)
    verdict = "no errors or risks" if all(layer.ok for layer in layers) else "errors or risks found"
    count = len(layers)
    heading = f"<h1>Diagnosis of {count} equilibrium layer{'s' if count > 1 else ''}</h1>"
    versions = f"equilibria {equilibria.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    by = f" Command: <code>{escape(command)}</code>." if command else ""
    written = f"<p>Written {datetime.now():%Y-%m-%d %H:%M} with {versions}.{by}</p>"
    return document(f"Diagnosis: {verdict}", f"{heading}\n{written}\n{sections}")


def section(layer: LayerDiagnosis, drawn: dict[str, bytes]) -> str:
    """Return the HTML section of one layer, with those of its pictures that are in `drawn`."""
    e = layer.examination
    title = f"Layer “{e.name}”" if e.name else "The model itself"
    about = f"{e.samples} samples of {e.size} numbers ({e.dtype}), {'training' if e.training else 'eval'} mode"
    found = "".join(
        f'<li class="{f.severity.value}"><b>{WORDS[f.severity]}: {escape(f.cause)}.</b> {escape(f.seen)} '
        f"<i>What to try:</i> {escape(f.advice)}</li>"
        for f in layer.findings
    )
    found = found or '<li class="ok">No problem found.</li>'
    table = "".join(f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in rows(e))
    shown = {
        what: (TITLES[what], content) for what in _PICTURES if (content := drawn.get(f"{_stem(layer)}-{what}")) is not None
    }
    if e.out_of_time:
        about += f". Stopped because they took too long: {', '.join(e.out_of_time)}"
    return (
        f"<section><h2>{escape(title)}</h2><p>{escape(about)}</p><ul>{found}</ul><table>{table}</table>"
        f"{plots(shown) if shown else ''}{_solver_table(e)}{_gradient_table(e)}</section>"
    )


def _solver_table(e: Examination) -> str:
    """Return the comparison of solvers as an HTML table."""
    heads = ("solver", "converged", "steps", "evaluations", "rows evaluated", "worst residual", "ms")
    body = "".join(
        f"<tr><td>{escape(r.solver)}</td><td colspan='6'>stopped after {r.seconds:g} s</td></tr>"
        if r.out_of_time
        else f"<tr><td>{escape(r.solver)}{' (present)' if r.present else ''}</td>"
        f"<td>{e.samples - r.solve.failed} of {e.samples}</td><td>{max(r.solve.steps, default=0)}</td>"
        f"<td>{r.solve.evaluations}</td><td>{r.solve.sample_evaluations}</td><td>{r.solve.worst:.1e}</td>"
        f"<td>{1e3 * r.seconds:.1f}</td></tr>"
        for r in e.solvers
    )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{body}</table>"


def _gradient_table(e: Examination) -> str:
    """Return the comparison of gradients as an HTML table; empty if none was compared."""
    if not e.agreements:
        return ""
    heads = ("gradient", "cosine with the exact one", "length relative to it")
    body = "".join(
        f"<tr><td>{escape(a.name)}</td>"
        + (
            f"<td colspan='2'>{escape(str(a.error))}</td></tr>"
            if a.error is not None
            else f"<td>{a.cosine:.4f}</td><td>{a.norm_ratio:.3f}</td></tr>"
        )
        for a in e.agreements
    )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{body}</table>"


def _labels(names: Sequence[str]) -> list[str]:
    """Return short and different labels: the class name, with its settings if two are equal, and then with a number."""
    short = [name.split("(")[0] for name in names]
    long = [own if short.count(own) == 1 else shortened(name, LABEL) for own, name in zip(short, names, strict=True)]
    return [name if long.count(name) == 1 else f"{name} {i}" for i, name in enumerate(long, start=1)]


def _convergence(e: Examination, axes: Axes) -> bool:
    """Plot quantiles of the residual over the steps; returns False if there is nothing to plot, like all these functions."""
    curve = _finite(e.forward.curve)
    steps = range(len(curve))
    low, middle, high, worst = ([row[i] for row in curve] for i in range(4)) if curve else ([], [], [], [])
    axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.2, label="10 to 90 %", lw=0)
    axes.plot(steps, middle, color=COLOURS[0], lw=2, label="median")
    axes.plot(steps, worst, color=COLOURS[1], lw=1.5, label="worst")
    axes.axhline(e.rtol, color=MUTED, ls="--", lw=1, label=f"rtol {e.rtol:.0e}")
    finish(axes, "step", "relative residual", log=True, legend=True)
    return bool(curve)


def _steps(e: Examination, axes: Axes) -> bool:
    """Plot a histogram of the steps of samples that reached rtol and of those that did not."""
    done = [r <= e.rtol for r in e.forward.residual]
    paired = list(zip(e.forward.steps, done, strict=True))
    histogram(axes, [s for s, good in paired if good], [s for s, good in paired if not good])
    return bool(paired)


def _radius(e: Examination, axes: Axes) -> bool:
    """Plot a histogram of the spectral radii."""
    radii = [radius for radius in e.radius.radius if radius == radius]  # without nan, which has no place on the axis
    if not radii:
        return False
    axes.hist(radii, bins=min(30, max(5, len(radii) // 2)), color=COLOURS[0])
    axes.axvline(1.0, color=COLOURS[1], lw=1.5, ls="--")
    finish(axes, "spectral radius", "samples")
    return True


def _solvers(e: Examination, axes: Axes) -> bool:
    """Plot the worst residual over the steps for every solver."""
    names = _labels([result.solver for result in e.solvers])
    for colour, result, name in zip(COLOURS, e.solvers, names, strict=False):
        worst = [row[-1] for row in _finite(result.solve.curve)]
        axes.plot(
            worst, color=colour, lw=2 if result.present else 1.3, label=f"{name}, {result.solve.evaluations} evaluations"
        )
    axes.axhline(e.rtol, color=MUTED, ls="--", lw=1)
    finish(axes, "step", "relative residual, worst sample", log=True, legend=True)
    return bool(e.solvers)


def _gradients(e: Examination, axes: Axes) -> bool:
    """Plot the cosine of every gradient with the exact one."""
    shown = [a for a in e.agreements if a.error is None]
    names = _labels([a.name for a in shown])
    axes.barh(names[::-1], [a.cosine for a in shown][::-1], color=COLOURS[0], height=0.55)
    for position, agreement in enumerate(shown[::-1]):
        place = max(agreement.cosine, 0) + 0.01
        axes.text(
            place, position, f"{agreement.cosine:.3f}, length {agreement.norm_ratio:.2f}", va="center", color=INK, fontsize=8
        )
    axes.set_xlim(min([0.0, *[a.cosine for a in shown]]), 1.45)  # leaves space for the text right of a bar of length 1
    finish(axes, "cosine with the exact gradient", "")
    return bool(shown)


_PICTURES: dict[str, Callable[[Examination, Axes], bool]] = {
    "convergence": _convergence,
    "steps": _steps,
    "radius": _radius,
    "solvers": _solvers,
    "gradients": _gradients,
}


def _finite(curve: list[list[float]]) -> list[list[float]]:
    """Clip infinities and zeros for a logarithmic axis."""
    return [[min(max(value, 1e-20), 1e20) for value in row] for row in curve]


def _stem(layer: LayerDiagnosis) -> str:
    """Return the name of the layer with characters that file names may not have replaced by "_"."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", layer.examination.name) or "model"
