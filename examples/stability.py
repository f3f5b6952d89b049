"""A training in which solves begin to fail, and three ways to prevent it: `python examples/stability.py`

A cell z -> tanh(W z + U x + b) without a norm learns scikit-learn's digits at a high learning rate. W grows, and
Broyden's method needs more steps from epoch to epoch. In the end half to nine tenths of the samples, depending on the seed,
do not converge within 16 steps. The same model is trained again

- with a Jacobian penalty (Bai, Koltun and Kolter 2021), of weight 5;
- as a Skip DEQ V2 (Pal, Edelman and Rackauckas 2022), which starts from f(0, x), with a penalty on the distance from there,
  of weight 5 as in their MNIST network (the 0.01 of their paper is too weak here: solves fail as well);
- with the spectral norm of W bounded by 0.95.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import equilibria as eq

PIXELS, WIDTH, CLASSES = 64, 64, 10
BATCH, LEARNING_RATE = 32, 2e-2
STOP = eq.Stop(rtol=1e-3, max_steps=16, on_failure="ignore")


@dataclass(frozen=True)
class Arm:
    """One way to stabilise the model, or none."""

    penalty: Callable[[eq.Solution], Tensor] | None = None
    first_step: bool = False  # start from f(0, x), not from 0
    bound: float | None = None  # of the spectral norm of W


ARMS = {
    "nothing": Arm(),
    "Jacobian penalty": Arm(penalty=lambda solution: 5.0 * eq.jacobian_penalty(solution)),
    "Skip V2": Arm(penalty=lambda solution: 5.0 * eq.skip_penalty(solution), first_step=True),
    "spectral norm": Arm(bound=0.95),
}


class Cell(nn.Module):
    """z -> tanh(W z + U x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(WIDTH, WIDTH, bias=False)
        self.input = nn.Linear(PIXELS, WIDTH)

    def prepare(self, x: Tensor) -> Tensor:
        return self.input(x)

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return torch.tanh(self.state(z) + injected)


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) with values in [0, 1] and their labels (n,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Epoch:
    """Statistics of the solves on the training set during an epoch, and on the test set after it."""

    steps: Tensor  # (samples,)
    failed: float  # share of the samples
    seconds: float
    accuracy: float
    radius: float  # mean spectral radius


def load() -> tuple[Digits, Digits]:
    """Return the training and the test set."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in parts)
    return Digits(x.float(), y), Digits(x_test.float(), y_test)


def build(arm: Arm) -> nn.Sequential:
    cell, head = Cell(), nn.Linear(WIDTH, CLASSES)
    if arm.bound is not None:
        eq.constraints.spectral_norm(cell.state, bound=arm.bound, clip=True)
    zeros = eq.Zeros(WIDTH)
    init = eq.FirstStep(zeros) if arm.first_step else zeros
    return nn.Sequential(eq.DEQ(cell, init=init, solver=eq.Broyden(), stop=STOP), head)


def train_epoch(
    model: nn.Module, arm: Arm, optimizer: torch.optim.Optimizer, data: Digits, order: torch.Generator
) -> list[eq.Stats]:
    """Train one epoch; return the statistics of its solves."""
    model.train()
    seen = []
    for index in torch.randperm(len(data.y), generator=order).split(BATCH):
        with eq.record(model) as solutions:
            loss = cross_entropy(model(data.x[index]), data.y[index])
        if arm.penalty is not None:
            loss = loss + arm.penalty(solutions[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(solutions[0].stats)
    return seen


@torch.no_grad()
def look(model: nn.Module, test: Digits) -> tuple[float, float, eq.Stats]:
    """Return accuracy, mean spectral radius and statistics of the solve on the test set."""
    model.eval()
    with eq.record(model) as solutions:
        accuracy = (model(test.x).argmax(dim=1) == test.y).float().mean()
    probes = torch.Generator().manual_seed(0)  # a separate generator, so that measuring does not change the training
    radius = eq.spectral_radius(solutions[0], generator=probes).radius.mean()
    return float(accuracy), float(radius), solutions[0].stats


def summary(model: nn.Module, test: Digits, seen: list[eq.Stats], seconds: float) -> Epoch:
    """Return the record of an epoch: the solves `seen` in training, and accuracy and spectral radius on the test set."""
    accuracy, radius, stats = look(model, test)
    seen = seen or [stats]  # before the first epoch there are only solves of the test set
    steps, failed = (torch.cat([getattr(stats, name) for stats in seen]) for name in ("steps", "failed"))
    return Epoch(steps.float(), float(failed.float().mean()), seconds, accuracy, radius)


def train(arm: Arm, data: Digits, test: Digits, epochs: int, seed: int) -> list[Epoch]:
    """Train a model; returns the results before training and after every epoch."""
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)  # a separate generator, so that all arms have the same batches
    model = build(arm)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    history = [summary(model, test, [], 0.0)]
    for _ in range(epochs):
        start = time.perf_counter()
        seen = train_epoch(model, arm, optimizer, data, order)
        history.append(summary(model, test, seen, time.perf_counter() - start))
    return history


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(name: str, history: list[Epoch], plain: list[Epoch]) -> None:
    """Print the row of one arm; times are relative to those of the arm without stabilisation, `plain`."""
    untrained, first, last = history[0], history[1], history[-1]
    seconds, plain_seconds = (mean([epoch.seconds for epoch in run[1:]]) for run in (history, plain))
    print(
        f"{name:16s}  {mean([epoch.accuracy for epoch in history[1:][-5:]]):8.1%}"
        f"  {untrained.steps.mean():9.1f}  {first.steps.mean():5.1f}  {last.steps.mean():5.1f}"
        f"  {untrained.failed:9.1%}  {first.failed:5.1%}  {last.failed:5.1%}"
        f"  {last.radius:8.2f}  {seconds / plain_seconds:4.2f}",
        flush=True,
    )


def draw(histories: dict[str, list[Epoch]], batches: int, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, history in histories.items():
        at = [batches * epoch for epoch in range(len(history))]
        (line,) = axes[0].plot(at, [epoch.steps.mean() for epoch in history], label=name)
        axes[0].plot(at, [epoch.steps.max() for epoch in history], color=line.get_color(), linestyle=":", linewidth=1)
        axes[1].plot(at, [100 * epoch.failed for epoch in history])
        axes[2].plot(at, [epoch.radius for epoch in history])
    axes[0].axhline(STOP.max_steps, color="black", linestyle="--", linewidth=1, label="cap")
    axes[0].set(title="solver steps, mean (worst: dotted)", ylabel="steps", ylim=(0, STOP.max_steps + 1))
    axes[1].set(title="samples that did not converge", ylabel="%", ylim=(-3, 103))
    worst = max(history[-1].failed for name, history in histories.items() if name != "nothing")
    axes[1].text(0.98, 0.06, f"worst of the others at the end: {worst:.1%}", ha="right", transform=axes[1].transAxes)
    axes[2].axhline(1, color="black", linestyle="--", linewidth=1)
    axes[2].set(title="spectral radius at the equilibrium, test mean", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(histories) + 1)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("stability.png"), help="where the picture goes")
    arguments = parser.parse_args()
    data, test = load()
    print("                      test  steps:    first   last     failed:  first   last  spectral  time")
    print("held by           accuracy  untrained  epoch  epoch  untrained  epoch  epoch    radius")
    histories: dict[str, list[Epoch]] = {}
    for name, arm in ARMS.items():
        histories[name] = train(arm, data, test, arguments.epochs, arguments.seed)
        report(name, histories[name], histories["nothing"])
    draw(histories, -(-len(data.y) // BATCH), arguments.plot)
    print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    main()
