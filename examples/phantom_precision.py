"""Accuracy of phantom gradients: `python examples/phantom_precision.py`

The synthetic study of Geng and others (2021) with one spectrally normalised tanh layer. It measures the cosine between the
phantom and the exact gradient of the parameters against the number of steps k and the damping, for both forms, at an
accurate and at an inaccurate equilibrium.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

import equilibria as eq

STEPS = (1, 2, 3, 5, 8, 12, 20, 30)
DAMPINGS = (0.3, 0.5, 0.8, 1.0)
FORMS: dict[str, Any] = {"unrolled": eq.UnrolledPhantom, "Neumann": eq.NeumannPhantom}
STOPS = {"solved to 1e-10": eq.Stop(rtol=1e-10, atol=0, max_steps=500), "solved to 0.1 only": eq.Stop(rtol=0.1, atol=0)}


class Layer(nn.Module):
    """tanh(W z + x) with the spectral norm of W exactly 0.9 and many directions that contract slowly."""

    def __init__(self, n: int) -> None:
        super().__init__()
        q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
        self.w = nn.Parameter((q * torch.linspace(-0.9, 0.9, n, dtype=torch.float64)) @ q.T)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.w.T + x)


def gradient(layer: Layer, x: Tensor, v: Tensor, stop: eq.Stop, how: eq.Gradient) -> Tensor:
    """Return the gradient of <v, output> with a fixed cotangent v, so that only the backward pass is compared."""
    z = eq.DEQ(layer, solver=eq.Picard(), stop=stop, gradient=how)(x)
    return torch.autograd.grad(z, layer.w, v)[0].flatten()


def study(n: int, batch: int) -> dict[str, dict[str, list[float]]]:
    """Return cosines over STEPS by stop and form, then by damping."""
    layer, x = Layer(n), torch.randn(batch, n, dtype=torch.float64)
    v = torch.randn(batch, n, dtype=torch.float64)
    exact = gradient(layer, x, v, STOPS["solved to 1e-10"], eq.Implicit())
    table: dict[str, dict[str, list[float]]] = {}
    for stop_name, stop in STOPS.items():
        for form_name, form in FORMS.items():
            rows = table.setdefault(f"{form_name}, {stop_name}", {})
            for damping in DAMPINGS:
                seen = [gradient(layer, x, v, stop, form(steps=k, damping=damping)) for k in STEPS]
                rows[f"damping {damping}"] = [float(torch.cosine_similarity(g, exact, dim=0)) for g in seen]
    return table


def draw(table: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(table), figsize=(3.6 * len(table), 3.4), sharey=True, layout="constrained")
    for axis, (title, rows) in zip(axes, table.items(), strict=True):
        for label, cosines in rows.items():
            axis.plot(STEPS, [max(1 - c, 1e-12) for c in cosines], marker="o", markersize=3, label=label)
        axis.set(title=title, xlabel="steps k", xscale="log", yscale="log")
        axis.set_xticks(STEPS, [str(step) for step in STEPS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("1 - cosine to the exact gradient")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--plot", type=Path, default=Path("phantom_precision.png"), help="where the picture goes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    table = study(arguments.size, arguments.batch)
    for title, rows in table.items():
        print(f"\n{title}\n{'k':>14}" + "".join(f"{k:>9}" for k in STEPS))
        for label, cosines in rows.items():
            print(f"{label:>14}" + "".join(f"{c:9.5f}" for c in cosines))
    draw(table, arguments.plot)
    print(f"\ndrawn in {arguments.plot}")


if __name__ == "__main__":
    main()
