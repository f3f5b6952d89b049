"""Fit a photograph by networks from coordinates to grey values, and compare an equilibrium with an explicit network.

python examples/fit_image.py --plot fit_image.png

About a minute on one CPU core. Needs the extra `train` for the photograph and the picture.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor

import equilibria as eq
from equilibria.models import EquilibriumField, ExplicitField, FieldConfig, coordinate_grid, parameters

CONFIG = FieldConfig(kind="fourier", width=40, scale=40.0)


def equilibrium() -> EquilibriumField:
    """Train with exact gradients; every solve starts at the equilibrium of the last training step."""
    gradient = eq.Implicit(solver=eq.GMRES(), stop=eq.Stop(rtol=1e-2, max_steps=15, on_failure="ignore"))
    stop = eq.Stop(rtol=1e-3, max_steps=8, on_failure="ignore")
    accurate = eq.Stop(rtol=1e-4, max_steps=60)
    return EquilibriumField(CONFIG, stop=stop, gradient=gradient, eval_stop=accurate)


def fit(field: EquilibriumField | ExplicitField, x: Tensor, y: Tensor, steps: int, rate: float) -> Tensor:
    optimizer = torch.optim.Adam(field.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state: Tensor | None = None
    for _ in range(steps):
        if isinstance(field, EquilibriumField):
            values, state = field(x, state, with_state=True)
        else:
            values = field(x)
        loss = (values - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    field.eval()
    with torch.no_grad():
        return torch.as_tensor(field(x))


def flower(size: int) -> Tensor:
    """Return the grey values of a photograph, (size², 1), in [-1, 1]."""
    grey = torch.from_numpy(load_sample_image("flower.jpg").copy()).float().mean(-1)[60:400, 180:520] / 127.5 - 1
    return torch.nn.functional.interpolate(grey[None, None], size=(size, size), mode="area").reshape(-1, 1)


def decibels(values: Tensor, y: Tensor) -> float:
    """Return the peak signal-to-noise ratio of values in [-1, 1]."""
    return 10 * torch.log10(4 / (values - y).square().mean()).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--size", type=int, default=48, help="pixels on a side")
    parser.add_argument("--plot", type=Path, default=Path("fit_image.png"), help="where the picture goes")
    arguments = parser.parse_args()
    x, y = coordinate_grid(arguments.size, arguments.size), flower(arguments.size)
    pictures = {"photograph": y}
    torch.manual_seed(0)
    for name, field, rate in (
        ("equilibrium", equilibrium(), 5e-3),
        ("two layers", ExplicitField(CONFIG, layers=2), 2e-2),
    ):
        values = fit(field, x, y, arguments.steps, rate)
        label = f"{name}, {parameters(field):,} weights\n{decibels(values, y):.1f} dB"
        print(label.replace("\n", ": "))
        pictures[label] = values
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
    for panel, (title, values) in zip(panels, pictures.items(), strict=True):
        panel.imshow(values.view(arguments.size, -1).tolist(), cmap="gray", vmin=-1, vmax=1)
        panel.set(title=title, xticks=[], yticks=[])
    figure.savefig(arguments.plot, dpi=120)


if __name__ == "__main__":
    main()
