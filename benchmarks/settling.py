"""How far a layer moves its state, over depth, for texts of several lengths: `python benchmarks/settling.py RUN [RUN ...]`

RUN is the folder of a language experiment with one layer applied over and over, such as `equilibria train
ptb-transformer-tied --scale reduced` or `ptb-trellisnet-trellisnet`. The layer is iterated from zero on the first tokens of
the test text (Bai, Kolter and Koltun 2019, the figure on convergence to an equilibrium).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from equilibria.lab.experiments.deq_language.data import TextSegment
from equilibria.lab.experiments.deq_language.measurements import changes
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.training.folder import Run

LENGTHS = (100, 200, 400, 800)
DEPTHS = tuple(range(2, 65))
SHOWN = (2, 8, 16, 32, 64)
ROWS = 4


def moved(folder: Path, data: Path | None) -> dict[int, dict[int, float]]:
    """By length of the text and depth."""
    run = Run.open(folder)
    experiment = experiment_of(run)
    task: Any = experiment.task()
    task.prepare(data, experiment.training)
    tokens = task.settings.data.load(data).test[: ROWS * (LENGTHS[-1] + 1)].view(ROWS, -1)
    model: Any = run.model(task)
    found = {}
    for length in LENGTHS:
        segment = TextSegment(tokens[:, :length], tokens[:, 1 : length + 1], "test", 0, False)
        found[length] = changes(model, segment, (), DEPTHS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--picture", type=Path, help="draw it into this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {run: moved(run, args.data) for run in args.runs}
    for run, found in results.items():
        print(f"{run}\n{'tokens':>8}" + "".join(f"{f'depth {depth}':>12}" for depth in SHOWN))
        for length, by_depth in found.items():
            print(f"{length:8}" + "".join(f"{by_depth[depth]:12.1e}" for depth in SHOWN))
    if args.picture is not None:
        draw(results, args.picture)


def draw(results: dict[Path, dict[int, dict[int, float]]], picture: Path) -> None:
    _, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 3.4), sharey=True, squeeze=False)
    for place, (run, found) in zip(axes[0], results.items(), strict=True):
        for length, by_depth in found.items():
            place.semilogy(list(by_depth), list(by_depth.values()), label=f"{length} tokens")
        place.set(xlabel="depth", title=Run.open(run).config["experiment"])
    axes[0][0].set(ylabel="relative change of the state")
    axes[0][0].legend(frameon=False)
    plt.tight_layout()
    plt.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
