"""Train a small deep equilibrium classifier on scikit-learn's digits and examine its solves: `python examples/digits.py`."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into a file, without a display

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm

import equilibria as eq

PIXELS, CLASSES = 64, 10
WIDTH = 96
SOLVERS: dict[str, eq.Solver[Any]] = {
    "Picard": eq.Picard(),
    "Anderson": eq.Anderson(),
    "Broyden": eq.Broyden(),
    "Newton": eq.Newton(),
}


class Cell(nn.Module):
    """z -> tanh(W z + U x + b), with the spectral norm of W fixed at 1. Without it, W grows until solves fail."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.state = spectral_norm(nn.Linear(width, width, bias=False))
        self.input = nn.Linear(inputs, width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.state(z) + self.input(x))


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) with values in [0, 1] and their labels (n,)."""

    x: Tensor
    y: Tensor

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.y)).split(size):
            yield self.x[index], self.y[index]


def load() -> tuple[Digits, Digits]:
    """Return the training and the test set."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in parts)
    return Digits(x.float(), y), Digits(x_test.float(), y_test)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data: Digits) -> tuple[float, list[eq.Solution]]:
    """Train one epoch; return the mean loss and the solutions of all batches."""
    solved: list[eq.Solution] = []
    losses = []
    model.train()
    for x, y in data.batches(128):
        with eq.record(model) as solutions:
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        solved += solutions
    return sum(losses) / len(losses), solved


def accuracy(model: nn.Module, data: Digits) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(data.x).argmax(dim=1) == data.y).float().mean())


def train(model: nn.Module, data: Digits, test: Digits, epochs: int) -> None:
    print("epoch   loss   test    steps  evaluations  worst     adjoint  failures")
    print("               acc.    (max)  (mean)       residual  steps")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(1, epochs + 1):
        loss, solved = train_epoch(model, optimizer, data)
        forward = [s.stats for s in solved]
        backward = [s.adjoint for s in solved if s.adjoint is not None]
        print(
            f"{epoch:5d}  {loss:.3f}  {accuracy(model, test):5.1%}"
            f"  {max(int(s.steps.max()) for s in forward):6d}"
            f"  {sum(s.evaluations for s in forward) / len(forward):11.1f}"
            f"  {max(float(s.residual.max()) for s in forward):8.1e}"
            f"  {max(int(s.steps.max()) for s in backward):7d}"
            f"  {sum(int(s.failed.sum()) for s in forward + backward):8d}"
        )


def compare_solvers(cell: Cell, x: Tensor) -> dict[str, eq.Stats]:
    """Compute the same equilibria with every solver, at a tolerance ten times smaller than in training."""
    stop = eq.Stop(rtol=1e-4, max_steps=200, on_failure="ignore", trace=True)
    print("\nsolver    converged  steps  evaluations  samples evaluated  worst residual")
    found = {}
    for name, solver in SOLVERS.items():
        with torch.no_grad():
            stats = eq.DEQ(cell, init=eq.Zeros(WIDTH), solver=solver, stop=stop).solve(x).stats
        print(
            f"{name:8s}  {stats.converged.float().mean():9.0%}  {int(stats.steps.max()):5d}  {stats.evaluations:11d}"
            f"  {stats.sample_evaluations:17d}  {float(stats.residual.max()):14.1e}"
        )
        found[name] = stats
    return found


def check_gradient(cell: Cell, head: nn.Module, x: Tensor, y: Tensor, steps: int = 500) -> None:
    """Compare the implicit gradient with back-propagation through many steps of plain iteration, in float64."""
    cell, head, x = copy.deepcopy(cell).double(), copy.deepcopy(head).double(), x.double()
    deq = eq.DEQ(cell, init=eq.Zeros(WIDTH), stop=eq.Stop(rtol=1e-10, atol=0, max_steps=200))
    z = x.new_zeros(len(x), WIDTH)
    for _ in range(steps):
        z = cell(z, x)
    implicit, unrolled = (
        torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(head(out), y), list(cell.parameters()))])
        for out in (deq(x), z)
    )
    error = float((implicit - unrolled).norm() / unrolled.norm())
    print(f"\nimplicit gradient against {steps} unrolled steps: relative difference {error:.1e}")


def plot(found: dict[str, eq.Stats], path: Path) -> None:
    """Plot the residual of the slowest sample against the steps."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, stats in found.items():
        assert stats.trace is not None  # `compare_solvers` requests traces
        slowest = stats.trace[int(stats.steps.argmax())]
        axes.semilogy(slowest.numpy(), marker=".", label=f"{name}, {stats.evaluations} evaluations")
    axes.set(xlabel="step", ylabel="relative residual, slowest sample", title="Solving the trained model's equilibria")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"residuals drawn in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where the picture goes")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    data, test = load()
    cell = Cell(PIXELS, WIDTH)
    head = nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(eq.DEQ(cell, init=eq.Zeros(WIDTH)), head)
    train(model, data, test, options.epochs)
    found = compare_solvers(cell, test.x)
    check_gradient(cell, head, test.x[:128], test.y[:128])
    plot(found, options.plot)


if __name__ == "__main__":
    main()
