"""Deblur photographs by an equilibrium with a contractive denoiser, and compare with the same cell unrolled five times.

python examples/deblurring.py --plot deblurring.png

About a minute on one CPU core. Needs the extra `train` for the photographs and the picture.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor

import equilibria as eq
from equilibria.models import Blur, ContractiveDenoiser, ProximalGradient, Restoration, gaussian_kernel

SIZE, NOISE = 24, 0.02
OPERATOR = Blur(gaussian_kernel(5, 1.0), (SIZE, SIZE))


def photograph_tiles() -> Tensor:
    """Return square grey tiles of two photographs in random order, (tiles, 1, SIZE, SIZE), with values in [0, 1]."""
    grey = [torch.from_numpy(image.copy()).float().mean(-1) / 255 for image in load_sample_images().images]
    tiles = torch.cat([g.unfold(0, SIZE, SIZE).unfold(1, SIZE, SIZE).reshape(-1, 1, SIZE, SIZE) for g in grey])
    return tiles[torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))]


def make(depth: int | None) -> Restoration:
    """Return a model that solves for the equilibrium, or with `depth` one that unrolls so many iterations."""
    cell = ProximalGradient(OPERATOR, ContractiveDenoiser((SIZE, SIZE), contraction=0.99))
    gradient = eq.Implicit(solver=eq.GMRES(), stop=eq.Stop(rtol=3e-2, max_steps=30, on_failure="ignore"))
    stop = eq.Stop(rtol=1e-4, max_steps=50, on_failure="ignore")
    return Restoration(cell, depth=depth, stop=stop, gradient=gradient)


def train(model: Restoration, tiles: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = tiles[torch.randint(len(tiles), (8,))]
        y = OPERATOR(x) + NOISE * torch.randn_like(x)
        loss = (model(y) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def after(model: Restoration, y: Tensor, steps: int) -> Tensor:
    """Return the reconstructions after the given number of plain iterations, which may differ from that of training."""
    return model.cell.image(eq.WeightTied(model.cell, steps, model.cell.start)(y))


def decibels(found: Tensor, x: Tensor) -> float:
    """Return the peak signal-to-noise ratio of images in [0, 1]."""
    return -10 * (found - x).square().mean().log10().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--plot", type=Path, default=Path("deblurring.png"), help="where the picture goes")
    arguments = parser.parse_args()
    x, rest = photograph_tiles().tensor_split([64])
    y = OPERATOR(x) + NOISE * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    depths, curves, last = (1, 2, 3, 5, 10, 20, 50, 100), {}, {}
    for name, depth in (("equilibrium", None), ("5 unrolled steps", 5)):
        torch.manual_seed(0)
        model = make(depth)
        train(model, rest, arguments.steps)
        curves[name] = [decibels(after(model, y, steps), x) for steps in depths]
        last[name] = after(model, y, 100)
        told = ", ".join(f"{steps}: {value:.2f}" for steps, value in zip(depths, curves[name], strict=True))
        print(f"{name}: PSNR in dB after {told}; measured {decibels(y, x):.2f}")
    chosen = x.flatten(1).std(dim=1).argsort(descending=True)[:3]
    columns = {"image": x, "measured": y} | {f"{name},\n100 steps": found for name, found in last.items()}
    figure = plt.figure(figsize=(11, 4.2), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    panels = parts[0].subplots(3, len(columns))
    for column, (title, values) in zip(panels.T, columns.items(), strict=True):
        column[0].set_title(title, fontsize=9)
        for panel, index in zip(column, chosen, strict=True):
            panel.imshow(values[index, 0].tolist(), cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
    axes = parts[1].subplots()
    for name, values in curves.items():
        axes.plot(depths, values, marker="o", label=name)
    axes.set(xscale="log", xlabel="plain iterations", ylabel="PSNR, dB")
    axes.legend()
    figure.savefig(arguments.plot, dpi=120)


if __name__ == "__main__":
    main()
