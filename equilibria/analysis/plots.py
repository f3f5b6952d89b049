"""Plots of solves; they need matplotlib, which comes with the extra `train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equilibria._core.files import optional
from equilibria.solution import Solution, Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.2, 3.4)  # inches
INK, MUTED = "#1f2a44", "#8a94a6"
COLOURS = ("#3b5bdb", "#e8590c", "#2b8a3e", "#9c36b5", "#0c8599")


def plot_trace(s: Solution | Stats, axes: Axes | None = None) -> Axes:
    """Plot the residual of every sample over the steps, the slowest in bold; needs a solve with `Stop(trace=True)`."""
    stats = s.stats if isinstance(s, Solution) else s
    if stats.trace is None:
        raise ValueError("This solve kept no trace of its residuals; solve with Stop(trace=True).")
    axes = _shown_axes() if axes is None else axes
    slowest = int(stats.steps.argmax()) if len(stats.steps) else 0
    for sample, trace in enumerate(stats.trace):
        bold = sample == slowest
        axes.plot(trace.tolist(), color=COLOURS[0] if bold else MUTED, lw=2 if bold else 0.7, zorder=3 if bold else 2)
    return finish(axes, "step", "relative residual", log=True)


def plot_steps(s: Solution | Stats, axes: Axes | None = None) -> Axes:
    """Plot a histogram of steps per sample; failed samples have another colour."""
    stats = s.stats if isinstance(s, Solution) else s
    axes = _shown_axes() if axes is None else axes
    return histogram(axes, stats.steps[stats.converged].tolist(), stats.steps[stats.failed].tolist())


def plot_spectrum(eigenvalues: Tensor, axes: Axes | None = None) -> Axes:
    """Plot the eigenvalues of `jacobian_spectrum` in the complex plane; inside the unit circle plain iteration converges."""
    axes = _shown_axes() if axes is None else axes
    values = eigenvalues.detach().cpu().flatten()
    circle = torch.linspace(0, 2 * torch.pi, 200)
    axes.plot(circle.cos().tolist(), circle.sin().tolist(), color=MUTED, lw=1)
    axes.plot(values.real.tolist(), values.imag.tolist(), ".", color=COLOURS[0], ms=4, alpha=0.6)
    axes.set_aspect("equal")
    return finish(axes, "real part", "imaginary part")


def histogram(axes: Axes, converged: Sequence[int], failed: Sequence[int]) -> Axes:
    """Plot a stacked histogram of the steps of converged and of failed samples."""
    top = max([*converged, *failed, 1])
    width = max(1, -(-top // 40))  # at most about 40 bars
    # edges lie between integers, so that every number of steps is the middle of a bar
    bins = [edge - 0.5 for edge in range(0, top + 2 * width, width)]
    parts = [part for part in (converged, failed) if len(part)]
    labels = [name for name, part in (("converged", converged), ("failed", failed)) if len(part)]
    colours = [colour for colour, part in ((COLOURS[0], converged), (COLOURS[1], failed)) if len(part)]
    axes.hist(parts, bins=bins, stacked=True, color=colours, label=labels)
    return finish(axes, "steps", "samples", legend=bool(len(failed)))


def _shown_axes() -> Axes:
    """Return the axes of a new pyplot figure, which notebooks and `plt.show()` display."""
    _, axes = optional("matplotlib.pyplot", "train").subplots(figsize=SIZE, layout="constrained")
    found: Axes = axes
    return found


def new_axes(width: float = SIZE[0], height: float = SIZE[1]) -> Axes:
    """Return the axes of a new figure for a file; it needs no display and is not registered with pyplot."""
    figure = optional("matplotlib.figure", "train").Figure(figsize=(width, height), layout="constrained")
    optional("matplotlib.backends.backend_agg", "train").FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    return axes


def finish(axes: Axes, x: str, y: str, *, log: bool = False, legend: bool = False) -> Axes:
    """Set labels and a light grid, and remove the frame."""
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    if legend:
        axes.legend(frameon=False)
    return axes


def png(axes: Axes) -> bytes:
    """Return the figure of these axes as a PNG file."""
    from io import BytesIO

    figure: Any = axes.figure
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
