"""Draws the pictures of docs/reasoners.md from a run of a table of reasoners.

python docs/reasoner_pictures.py RUN --folder docs/images

RUN is the folder of a run, as `equilibria train reasoner-sudoku-6x6-eqr --scale reduced` writes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from torch import Tensor

from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.experiments.reasoning.scaling import Scaling, measure_scaling
from equilibria.lab.training import Run
from equilibria.models import Reasoner

STARTS = 8
BINS = 6  # of samples with like residuals


def opened(folder: Path) -> tuple[Reasoner, Tensor, Tensor]:
    """The model of a run with its averaged weights, and the test puzzles."""
    run = Run.open(folder)
    task = experiment_of(run).task()
    model = run.model(task, "last")
    assert isinstance(model, Reasoner)
    test = task.settings.data.load().test  # type: ignore[attr-defined]
    return model.eval(), test.x, test.y


@torch.no_grad()
def filling_in(model: Reasoner, x: Tensor, y: Tensor, steps: int, path: Path) -> None:
    """One board filling in over the supervised steps: givens bold, right digits green, wrong ones red, by confidence."""
    size, frames, state = int(x.shape[0] ** 0.5), [], None
    for _ in range(steps):
        thought = model.think(x.unsqueeze(0), state)
        state = thought.state
        frames.append(thought.logits[0].softmax(dim=-1).max(dim=-1))
    figure, axes = plt.subplots(figsize=(3.6, 3.9))

    def draw(step: int) -> None:
        axes.clear()
        axes.set(xlim=(0, size), ylim=(size, 0), xticks=range(size + 1), yticks=range(size + 1), aspect="equal")
        axes.set_title(f"supervised step {step + 1}", fontsize=10)
        axes.tick_params(labelbottom=False, labelleft=False, length=0)
        axes.grid(color="0.8")
        sure, digits = frames[step]
        for cell in range(size**2):
            given, digit = int(x[cell]), int(digits[cell])
            colour = "black" if given else "tab:green" if digit == int(y[cell]) else "tab:red"
            alpha = 1.0 if given else max(0.15, float(sure[cell]))
            where = (cell % size + 0.5, cell // size + 0.55)
            axes.text(*where, str(given or digit), ha="center", va="center", color=colour, alpha=alpha, fontsize=15,
                      fontweight="bold" if given else "normal")  # fmt: skip

    FuncAnimation(figure, draw, frames=steps).save(str(path), writer=PillowWriter(fps=2))  # type: ignore[arg-type]
    plt.close(figure)


def heat_map(found: Scaling, path: Path) -> None:
    """Exact answers over depth and breadth."""
    widths = [1, 2, 4, 8]
    share = torch.tensor([[100 * found.exact(depth, width) for depth in found.depths] for width in widths])
    figure, axes = plt.subplots(figsize=(6.4, 3.0))
    image = axes.imshow(share.numpy(), origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=100)
    axes.set(xticks=range(len(found.depths)), xticklabels=found.depths, yticks=range(len(widths)), yticklabels=widths)
    axes.set(xlabel="depth: supervised steps", ylabel="breadth: starts")
    for i, row in enumerate(share.tolist()):
        for j, value in enumerate(row):
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black", fontsize=9)
    figure.colorbar(image, label="exact, %")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def residual_and_accuracy(found: Scaling, depth: int, path: Path) -> None:
    """Share of right answers among starts with like changes of the state, and the two distributions."""
    i = found.depths.index(depth)
    change, right = found.change[i].flatten(), found.right[i].flatten()
    figure, (left, other) = plt.subplots(1, 2, figsize=(8.4, 3.0))
    for part, label, colour in ((right, "right", "tab:green"), (~right, "wrong", "tab:red")):
        if bool(part.any()):
            left.hist(change[part].log10().numpy(), bins=30, alpha=0.6, label=label, color=colour)
    left.set(xlabel="log10 of the relative change of the state", ylabel="starts")
    left.legend(frameon=False)
    groups = change.argsort().tensor_split(BINS)
    centres = [float(change[group].median()) for group in groups]
    other.plot(centres, [100 * float(right[group].double().mean()) for group in groups], marker="o")
    other.set(xscale="log", xlabel="relative change, median of the group", ylabel="exact, %", ylim=(-3, 103))
    other.set_title(f"AUC {found.auc(depth):.3f} at depth {depth}", fontsize=10)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, x, y = opened(arguments.run)
    found = measure_scaling(model, x, y, arguments.depths, STARTS)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    heat_map(found, arguments.folder / "reasoner-scaling.png")
    depth = min(arguments.depths, key=lambda each: abs(each - 32))  # where the tables take the AUC
    residual_and_accuracy(found, depth, arguments.folder / "reasoner-residual.png")
    last = found.right[-1, 0].nonzero().flatten()
    board = int(last[(x[last] > 0).sum(dim=1).argmin()]) if len(last) else 0  # the solved one with the fewest givens
    filling_in(model, x[board], y[board], 12, arguments.folder / "reasoner-filling.gif")


if __name__ == "__main__":
    main()
