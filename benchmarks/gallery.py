"""Measurements for docs/gallery.md on the 8x8 digits: `python benchmarks/gallery.py`, about ten minutes of one thread.

Cosines of phantom gradients while a model is trained implicitly; accuracies over the steps and the damping of phantom
gradients; the spectral radius over training with many and few steps of the solver, with and without Jacobian regularization;
the memory of inference with Broyden's method, of training steps with Jacobian regularization, and of unrolled Newton steps.
Results go to benchmarks/results/gallery.json; `--only PART` measures one part again and keeps the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equilibria as eq
from equilibria.lab import data
from equilibria.lab.experiments.jacobian_regularization.table import regularized
from equilibria.lab.experiments.source import source_commit

WIDTH, BATCH, RATE = 64, 64, 3e-3
SEEDS, EPOCHS, GRID_EPOCHS = (0, 1, 2), 12, 6
STEPS, DAMPINGS = (1, 3, 5, 9), (0.3, 0.5, 1.0)
STOP = eq.Stop(rtol=1e-3, max_steps=30, on_failure="ignore")
FEW = eq.Stop(rtol=1e-3, max_steps=4, on_failure="ignore")


class Cell(nn.Module):
    """tanh(W z + x), a little expansive at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.2 * torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x)


class Classifier(nn.Sequential):
    def __init__(self, gradient: eq.Gradient, stop: eq.Stop, solver: eq.Solver[Any]) -> None:
        layer = eq.DEQ(Cell(), solver=solver, gradient=gradient, stop=stop)
        super().__init__(nn.Linear(64, WIDTH), layer, nn.Linear(WIDTH, 10))

    @property
    def layer(self) -> eq.DEQ:
        layer = self[1]
        assert isinstance(layer, eq.DEQ)
        return layer


def build(seed: int, gradient: eq.Gradient, stop: eq.Stop = STOP, solver: eq.Solver[Any] | None = None) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(gradient, stop, solver or eq.Anderson())


def training(model: Classifier, seed: int, epochs: int, jacobian: float = 0.0) -> Iterator[tuple[int, Tensor]]:
    """Train; yields every step with its batch, before the weights are updated."""
    digits = data.load("digits")
    batches = data.Batches(digits.train, BATCH, seed=seed, transform=digits.normalize)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    step = 0
    for _ in range(epochs):
        for x, y in batches:
            x = x.flatten(1)
            yield step, x
            with eq.record(model) as solutions:
                loss = F.cross_entropy(model(x), y)
            if jacobian:
                loss = loss + jacobian * eq.jacobian_penalty(solutions[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1


def accuracy(model: Classifier) -> float:
    digits = data.load("digits")
    with torch.no_grad():
        scores = model(digits.normalize(digits.test.x).flatten(1))
    return 100 * float((scores.argmax(1) == digits.test.y).float().mean())


def cosines(seed: int) -> list[dict[str, float]]:
    """Cosines with the exact gradient along implicit training, every 12 steps."""
    model = build(seed, eq.Implicit())
    gradients: dict[str, eq.Gradient] = {f"UPG, {k}": eq.UnrolledPhantom(steps=k, damping=0.5) for k in STEPS}
    gradients |= {f"NPG, {k}": eq.NeumannPhantom(steps=k, damping=0.5) for k in STEPS}
    found = []
    for step, x in training(model, seed, EPOCHS):
        if step % 12 == 0:
            inputs = model[0](x[:16]).detach()
            agreed = eq.gradient_agreement(model.layer, inputs, gradients, generator=torch.Generator().manual_seed(seed))
            found.append({"step": float(step)} | {a.name: a.cosine for a in agreed})
    return found


def grid(seed: int) -> list[dict[str, Any]]:
    """Accuracy after training with every phantom gradient."""
    found = []
    for kind, steps, damping in product((eq.UnrolledPhantom, eq.NeumannPhantom), STEPS, DAMPINGS):
        model = build(seed, kind(steps=steps, damping=damping))
        for _ in training(model, seed, GRID_EPOCHS):
            pass
        name = "UPG" if kind is eq.UnrolledPhantom else "NPG"
        found.append({"gradient": name, "steps": steps, "damping": damping, "accuracy": accuracy(model)})
    return found


def radii(seed: int) -> dict[str, list[dict[str, float]]]:
    """The spectral radius and the share of failed solves along training, by recipe."""
    recipes = {"30 steps": (STOP, 0.0), "4 steps": (FEW, 0.0), "4 steps and Jacobian regularization": (FEW, 2.0)}
    found: dict[str, list[dict[str, float]]] = {}
    for name, (stop, weight) in recipes.items():
        model = build(seed, eq.Implicit(), stop, eq.Picard())
        for step, x in training(model, seed, EPOCHS, weight):
            if step % 12 == 0:
                s = model.layer.solve(model[0](x[:16]).detach())
                radius = eq.spectral_radius(s, generator=torch.Generator().manual_seed(seed)).radius
                failed = float(s.stats.failed.float().mean())
                entry = {"step": float(step), "radius": float(radius.nanmean()), "failed": failed}
                found.setdefault(name, []).append(entry)
    return found


def inference_memory() -> list[dict[str, Any]]:
    """Peak of a prediction of nano MDEQ by Broyden's method, with the steps of a plain and of a regularized model."""
    x = torch.randn(16, 3, 16, 16)
    found = []
    for name, steps in (("18 steps, as without regularization", 18), ("7 steps, as with it", 7)):
        stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=steps, on_failure="ignore")
        model = eq.models.create("mdeq-nano", num_classes=10, solver=eq.Broyden(history=steps), stop=stop).eval()

        def predict(model: nn.Module = model) -> Tensor:
            with torch.no_grad():
                return model(x)

        predict()
        found.append({"name": name, "steps": steps, "bytes": eq.analysis.peak_memory(predict)})
    return found


def training_memory() -> list[dict[str, Any]]:
    """Peak of a training step of every row of the table `jr-cifar10`, on a batch of random images, after pre-training."""
    batch = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
    found = []
    for row in ("resnet", "mdeq", "mdeq-short", "mdeq-jr"):
        task = regularized(row, "reduced").task()
        model = task.model().train()
        penalty = getattr(task, "jacobian", lambda step: 0.0)
        step = next((step for step in range(100) if penalty(step)), 0)  # the largest step is one with the penalty

        def train(task: Any = task, model: nn.Module = model, step: int = step) -> None:
            model.zero_grad()
            task.loss(model, batch, step).loss.backward()

        train()
        found.append({"name": row, "bytes": eq.analysis.peak_memory(train)})
    return found


def newton_memory() -> list[dict[str, Any]]:
    """Peak of a training step of a layer on digits over the steps of the solver, unrolled and implicit."""
    kinds: dict[str, tuple[eq.Solver[Any], eq.Gradient]] = {
        "Newton, unrolled": (eq.Newton(linear="dense", line_search=False), eq.Unrolled()),
        "Picard, unrolled": (eq.Picard(), eq.Unrolled()),
        "Newton, implicit": (eq.Newton(linear="dense", line_search=False), eq.Implicit()),
    }
    x, found = torch.randn(BATCH, 64), []
    for (name, (solver, gradient)), steps in product(kinds.items(), (1, 2, 4, 8)):
        stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=steps, on_failure="ignore")
        model = build(0, gradient, stop, solver)

        def train(model: nn.Module = model) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        train()
        found.append({"name": name, "steps": steps, "bytes": eq.analysis.peak_memory(train)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gallery.json")
    once = {"inference_memory": inference_memory, "training_memory": training_memory, "newton_memory": newton_memory}
    seeded = {"cosines": cosines, "radii": radii, "grid": grid}
    parser.add_argument("--only", choices=[*once, *seeded], help="measure this part alone")
    options = parser.parse_args()
    out: Path = options.out
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(out.read_text()) if options.only else {"seeds": list(SEEDS), "commits": {}}
    found["torch"] = torch.__version__
    for name in [options.only] if options.only else [*once, *seeded]:
        found[name] = once[name]() if name in once else [seeded[name](seed) for seed in SEEDS]
        found["commits"][name] = source_commit()
        print(f"{name}: done", flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
