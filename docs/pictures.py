"""Draws the pictures of docs/concepts.md.

python docs/pictures.py --folder docs/images
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import equilibria as eq

TRACED = eq.Stop(rtol=1e-5, max_steps=40, trace=True, on_failure="ignore")


class Cell(nn.Module):
    """tanh(W z + x); how many rows each run had is noted."""

    def __init__(self, gain: float, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(gain * torch.randn(width, width) / width**0.5)
        self.rows: list[int] = []

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.rows.append(len(z))
        return torch.tanh(z @ self.weight.T + x)


def inputs(samples: int = 64) -> Tensor:
    """Weakly to strongly driven samples: strong ones saturate the cell and converge sooner."""
    return torch.linspace(0.05, 4, samples)[:, None] * torch.randn(samples, 64)


def residuals(cell: Cell, x: Tensor) -> None:
    """Every sample has a trace and a number of steps of its own."""
    s = eq.DEQ(cell, solver=eq.Picard(), stop=TRACED).solve(x)
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    eq.analysis.plot_trace(s, left).axhline(TRACED.rtol, color="0.4", ls=":", lw=1)
    eq.analysis.plot_steps(s, right)


def rows(cell: Cell, x: Tensor) -> None:
    """Rows that are evaluated in every step, with and without compaction."""
    _, axes = plt.subplots(figsize=(5.2, 3.4))
    for compact, label in ((False, "the whole batch"), (True, "compacted")):
        layer = eq.DEQ(cell, solver=eq.Picard(), stop=eq.Stop(rtol=1e-5, max_steps=60, compact=compact, on_failure="ignore"))
        layer.solve(x)  # the first solve tries whether rows may be left out
        cell.rows.clear()
        layer.solve(x)
        axes.step(range(1, len(cell.rows) + 1), cell.rows, where="mid", label=f"{label}: {sum(cell.rows):,} rows")
    axes.set(xlabel="evaluation", ylabel="rows", ylim=(0, None))
    axes.legend(frameon=False)


def spectra(x: Tensor) -> None:
    """Where the Jacobian's eigenvalues lie, and what plain iteration and Anderson's method make of it."""
    _, panels = plt.subplots(2, 3, figsize=(10, 6.4))
    for (spectrum, *traces), gain in zip(panels, (0.7, 1.6), strict=True):
        torch.manual_seed(1)
        cell = Cell(gain)
        for axes, solver in zip(traces, (eq.Picard(), eq.Anderson()), strict=True):
            s = eq.DEQ(cell, solver=solver, stop=TRACED).solve(0.3 * x)
            eq.analysis.plot_trace(s, axes).set(
                title=f"{type(solver).__name__}: {int(s.stats.converged.sum())} of {len(x)} converge"
            )
            axes.set_ylim(3e-6, 2)
        eq.analysis.plot_spectrum(eq.analysis.jacobian_spectrum(s), spectrum).set(title="eigenvalues of the Jacobian")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    cell, x = Cell(0.9), inputs()
    for name, draw in (
        ("residuals", lambda: residuals(cell, x)),
        ("rows", lambda: rows(cell, x)),
        ("spectra", lambda: spectra(x)),
    ):
        draw()
        plt.tight_layout()
        plt.savefig(folder / f"concepts-{name}.png", dpi=90)
        plt.close()


if __name__ == "__main__":
    main()
