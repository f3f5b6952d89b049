"""The effect of a penalty on the Jacobian: `python examples/jacobian_regularization.py`

The one-dimensional study of Bai, Koltun and Kolter (2021): z = W2' ReLU(W1 z + U x + b), with z and x numbers, is fitted
to a curve with penalties γ |df/dz|² of four weights. The solver takes at most six steps. For each γ the figure shows the map
over z at a few x (plain iteration is faster if its slope at the diagonal is smaller), the curves that were learnt, and the
residual over the steps. The error of the fit depends on the seed more than on γ, so every γ is trained with three seeds and
the table has medians.

The paper does not specify two things. We assume that the noise N(0, 0.05) has the standard deviation
0.05, and that x is in [-2, 2].
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import equilibria as eq

WIDTH = 50
TRAINING, TEST, BATCH = 4096, 1000, 64
NOISE, RANGE = 0.05, 2.0
GAMMAS = (0.0, 1.0, 2.0, 4.0)
FREQUENCY = 0.4  # the share of training steps with the penalty
INPUTS = (-1.0, 0.6, 1.8)  # the map is drawn near the maximum and the minimum of the curve, and where it is steep
SOLVERS: dict[str, eq.Solver[Any]] = {"plain iteration": eq.Picard(), "Broyden": eq.Broyden()}
ENOUGH = 200  # enough steps to count how many are needed


class Cell(nn.Module):
    """z -> W2' ReLU(W1 z + U x + b): 200 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(1, WIDTH, bias=False)
        self.input = nn.Linear(1, WIDTH)
        self.output = nn.Linear(WIDTH, 1, bias=False)

    def prepare(self, x: Tensor) -> Tensor:
        return self.input(x)

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return self.output(torch.relu(self.state(z) + injected))


@dataclass(frozen=True)
class Pairs:
    x: Tensor  # (n, 1)
    y: Tensor  # (n, 1)


@dataclass(frozen=True)
class Study:
    """A trained model and its results on the test set."""

    cell: Cell
    test: Pairs
    capped: eq.Solution  # with the limit of training
    solved: dict[str, eq.Solution]  # by every solver, without that limit
    slope: Tensor  # (n,) |df/dz| at the equilibrium
    radius: float  # the largest spectral radius

    @property
    def equilibrium(self) -> Tensor:
        return self.solved["Broyden"].z


def curve(x: Tensor) -> Tensor:
    """Return the function that the model learns."""
    return 1.5 * x**3 + x**2 - 5 * x + 2 * x.sin() - 3


def sample(seed: int) -> tuple[Pairs, Pairs]:
    """Return a training set and a test set."""
    generator = torch.Generator().manual_seed(seed)
    x = RANGE * (2 * torch.rand(TRAINING + TEST, 1, generator=generator) - 1)
    y = curve(x) + NOISE * torch.randn(x.shape, generator=generator)
    return Pairs(x[:TRAINING], y[:TRAINING]), Pairs(x[TRAINING:], y[TRAINING:])


def layer(cell: Cell, solver: eq.Solver[Any], max_steps: int) -> eq.DEQ:
    """Return a layer that starts at zero, with a tolerance of 1e-3 and the same limit of steps forward and backward."""
    stop = eq.Stop(rtol=1e-3, max_steps=max_steps, on_failure="ignore")
    return eq.DEQ(cell, init=eq.Zeros(1), solver=solver, stop=stop)


def train(gamma: float, data: Pairs, epochs: int, max_steps: int, seed: int) -> Cell:
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)  # a separate generator, so that every γ has the same batches
    cell = Cell()
    deq = layer(cell, eq.Broyden(), max_steps)
    optimizer = torch.optim.Adam(deq.parameters(), lr=1e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * TRAINING // BATCH)
    schedule = eq.penalties.PenaltySchedule(weight=gamma, frequency=FREQUENCY, seed=seed)
    batches = (index for _ in range(epochs) for index in torch.randperm(TRAINING, generator=order).split(BATCH))
    for step, index in enumerate(batches):
        solution = deq.solve(data.x[index])
        loss = mse_loss(solution.z, data.y[index])
        weight = schedule(step)
        if weight:
            loss = loss + weight * eq.jacobian_penalty(solution)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cosine.step()
    return cell


@torch.no_grad()
def examine(cell: Cell, test: Pairs, max_steps: int) -> Study:
    """Solve for the test inputs within `max_steps` and with enough steps, and measure the Jacobian there."""
    capped = layer(cell, eq.Broyden(), max_steps).solve(test.x)
    solved = {name: layer(cell, solver, ENOUGH).solve(test.x) for name, solver in SOLVERS.items()}
    slope = eq.analysis.dense_jacobian(solved["Broyden"]).abs().flatten()
    return Study(cell, test, capped, solved, slope, float(eq.spectral_radius(solved["Broyden"]).radius.max()))


def run(gamma: float, epochs: int, max_steps: int, seed: int) -> Study:
    """Train a cell with penalty weight `gamma` and examine it."""
    data, test = sample(seed)
    return examine(train(gamma, data, epochs, max_steps, seed), test, max_steps)


def report(gamma: float, studies: list[Study]) -> None:
    """Print medians over the runs, except for the radius, of which the largest is printed."""

    def median(value: Callable[[Study], Tensor]) -> float:
        return float(torch.stack([value(study) for study in studies]).median())

    print(
        f"{gamma:5.0f}  {median(lambda study: mse_loss(study.capped.z, study.test.y)):8.3f}"
        f"  {median(lambda study: mse_loss(study.equilibrium, study.test.y)):8.3f}"
        f"  {median(lambda study: study.slope.mean()):7.3f}  {max(study.radius for study in studies):6.2f}"
        f"  {median(lambda study: study.solved['plain iteration'].stats.steps.float().mean()):9.1f}"
        f"  {median(lambda study: study.solved['Broyden'].stats.steps.float().mean()):7.1f}"
        f"  {median(lambda study: study.capped.stats.failed.float().mean()):9.1%}",
        flush=True,
    )


@torch.no_grad()
def residuals(study: Study, solver: eq.Solver[Any], steps: int = 15) -> Tensor:
    """Return the residuals of every sample, (n, steps + 1); a sample that has reached rounding errors keeps its residual."""
    stop = eq.Stop(rtol=1e-7, atol=0.0, max_steps=steps, on_failure="ignore", trace=True)
    trace = eq.DEQ(study.cell, init=eq.Zeros(1), solver=solver, stop=stop).solve(study.test.x).stats.trace
    assert trace is not None  # `Stop(trace=True)` was set
    return torch.stack([torch.cat([row, row[-1:].expand(steps + 1 - len(row))]) for row in trace])


@torch.no_grad()
def draw_map(axis: Axes, gamma: float, study: Study) -> None:
    """Draw f(., x) at a few x, the diagonal, and their intersections."""
    z = torch.linspace(-6, 6, 400).unsqueeze(1)
    axis.plot(z, z, color="gray", linestyle="--", linewidth=1, label="z")
    for x in INPUTS:
        (line,) = axis.plot(z, study.cell(z, study.cell.prepare(torch.full_like(z, x))), label=f"f(z; {x:g})")
        end = layer(study.cell, eq.Broyden(), ENOUGH).solve(torch.tensor([[x]])).z
        axis.plot(end, end, marker="o", color=line.get_color(), markeredgecolor="black", linestyle="none")
    axis.set(title=f"γ = {gamma:g}: mean |df/dz| = {float(study.slope.mean()):.2f}", xlabel="z", xlim=(-6, 6), ylim=(-6, 6))


@torch.no_grad()
def draw_fits(axis: Axes, studies: list[Study]) -> None:
    """Draw the curves of all runs, and in black the samples of the first run whose solves failed."""
    x = torch.linspace(-RANGE, RANGE, 400).unsqueeze(1)
    first = studies[0]
    failed = first.capped.stats.failed
    axis.plot(first.test.x[:300], first.test.y[:300], ".", color="lightgray", label="data")
    axis.plot(first.test.x[failed], first.capped.z[failed], "x", color="tab:red", markersize=4, label="cut off on the way")
    for study in studies[1:]:
        axis.plot(x, layer(study.cell, eq.Broyden(), ENOUGH).solve(x).z, color="tab:purple", linewidth=0.8)
    axis.plot(x, layer(first.cell, eq.Broyden(), ENOUGH).solve(x).z, color="black", label="equilibria")
    errors = ", ".join(f"{float(mse_loss(study.equilibrium, study.test.y)):.2f}" for study in studies)
    axis.set(title=f"test MSE {errors}", xlabel="x", ylim=(-8, 6))


def draw_residuals(axis: Axes, solver: str, studies: dict[float, list[Study]]) -> None:
    for gamma, runs in studies.items():
        values = torch.cat([residuals(study, SOLVERS[solver]) for study in runs]).median(dim=0).values
        axis.semilogy(values.clamp_min(1e-8), marker=".", label=f"γ = {gamma:g}")  # a logarithmic axis has no 0
    axis.set(title=f"median residual, {solver}", xlabel="step", ylim=(5e-9, 2))


def draw(studies: dict[float, list[Study]], path: Path) -> None:
    plt.rcParams["font.size"] = 8.5
    figure, axes = plt.subplots(2, len(studies) + 1, figsize=(2.7 * (len(studies) + 1), 5.2), layout="constrained")
    for column, (gamma, runs) in enumerate(studies.items()):
        draw_map(axes[0, column], gamma, runs[0])
        draw_fits(axes[1, column], runs)
    for row, solver in enumerate(SOLVERS):
        draw_residuals(axes[row, -1], solver, studies)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in (axes[0, 0], axes[1, 0], axes[1, -1]):
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=105)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=int, default=3, help="for every γ")
    parser.add_argument("--max-steps", type=int, default=6, help="of the solver in training, forward and backward")
    parser.add_argument("--plot", type=Path, default=Path("jacobian_regularization.png"), help="where the picture goes")
    arguments = parser.parse_args()
    cap = f"{arguments.max_steps} steps"
    print("       test MSE  test MSE  |df/dz|  radius  steps to 1e-3 (mean)  failed in")
    print(f"    γ  {cap:>8}    solved     mean   worst  iteration  Broyden   {cap:>8}")
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    studies: dict[float, list[Study]] = {}
    for gamma in GAMMAS:
        studies[gamma] = [run(gamma, arguments.epochs, arguments.max_steps, seed) for seed in seeds]
        report(gamma, studies[gamma])
    draw(studies, arguments.plot)
    print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    main()
