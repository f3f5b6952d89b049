"""Sample digits from a diffusion model, solving for all states of the chain at once; then find the noise of a given image.

python examples/parallel_sampling.py --plot parallel_sampling.png

About a minute on one CPU core. Needs the extra `train` for the digits and the picture.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import equilibria as eq
from equilibria.lab import data
from equilibria.models import Denoiser, ParallelSampler, diffusion_loss


def train(images: Tensor, steps: int) -> Denoiser:
    denoiser = Denoiser()
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        loss = diffusion_loss(denoiser, images[torch.randint(len(images), (64,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return denoiser.eval().requires_grad_(False)


@torch.no_grad()
def rounds(sampler: ParallelSampler, noise: Tensor) -> list[Tensor]:
    """Return the last state of the chain after every round of the solver, followed by that of the sequential chain."""
    solution = sampler.solve(noise)
    exact = sampler.sequential(noise)[:, -1]
    error = (torch.as_tensor(solution.z)[:, -1] - exact).norm() / exact.norm()
    print(f"sequential chain: {sampler.steps} rounds")
    print(f"parallel chain: {1 + solution.stats.evaluations} rounds, distance {float(error):.1e} of the sequential samples")
    iterates = [z.view(len(noise), sampler.steps, *noise.shape[1:])[:, -1] for z in solution.stats.iterates]
    return [noise, *iterates, exact]


def invert(sampler: ParallelSampler, image: Tensor, iterations: int) -> Tensor:
    """Optimise the noise of a sample to reproduce `image`, with implicit gradients through the chain; returns the sample."""
    noise = torch.randn_like(image).requires_grad_()
    optimizer, chain = torch.optim.Adam([noise], lr=0.1), None
    for step in range(iterations):
        chain = sampler.solve(noise, init=chain)  # starts at the chain of the last iteration
        loss = torch.nn.functional.mse_loss(torch.as_tensor(chain.z)[:, -1], image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, iterations - 1):
            print(f"inversion, iteration {step + 1}: squared error {loss.item():.4f}")
    with torch.no_grad():
        return sampler.sequential(noise)[:, -1]


def draw(columns: list[Tensor], images: Tensor, inverted: Tensor, path: Path) -> None:
    names = ["noise", *(f"round {i + 2}" for i in range(len(columns) - 2)), "sequential"]
    shown = sorted({0, 1, 2, 3, 5, 8, len(columns) - 2, len(columns) - 1} & set(range(len(columns))))
    pictures = [(names[i], columns[i]) for i in shown] + [("image", images), ("inverted", inverted)]
    figure, panels = plt.subplots(4, len(pictures), figsize=(1.1 * len(pictures), 4.6), layout="constrained")
    for column, (name, values) in zip(panels.T, pictures, strict=True):
        column[0].set_title(name, fontsize=9)
        for axes, value in zip(column, values[:4, 0], strict=True):
            axes.imshow(value.clamp(-1, 1).tolist(), cmap="gray", vmin=-1, vmax=1)
            axes.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", type=int, default=2000, help="steps")
    parser.add_argument("--steps", type=int, default=100, help="of the chain")
    parser.add_argument("--iterations", type=int, default=60, help="of inversion")
    parser.add_argument("--plot", type=Path, default=Path("parallel_sampling.png"), help="where the picture goes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    digits = data.load("digits")
    denoiser = train(2 * digits.train.x - 1, arguments.training)
    sampler = ParallelSampler(denoiser, arguments.steps, stop=eq.Stop(rtol=1e-4, atol=0, keep_every=1))
    columns = rounds(sampler, torch.randn(4, 1, 8, 8))
    images = 2 * digits.test.x[:4] - 1
    short = ParallelSampler(denoiser, 25, stop=eq.Stop(rtol=1e-3, atol=0), gradient=eq.Implicit(solver=eq.Picard()))
    draw(columns, images, invert(short, images, arguments.iterations), arguments.plot)


if __name__ == "__main__":
    main()
