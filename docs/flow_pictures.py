"""Draws the pictures of docs/flow.md.

python docs/flow_pictures.py RUN --folder docs/images

RUN is the folder of a run, as `equilibria train flow-scenes-deq --scale reduced` writes it. The evaluations along a video
are those of results/flow-scenes/table.json.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.analysis.plots import COLOURS, finish, new_axes, png
from equilibria.lab.experiments.evaluation import experiment_of
from equilibria.lab.training import Run
from equilibria.models import DEQFlow

TABLE = Path(__file__).parent.parent / "results" / "flow-scenes" / "table.json"
ROWS = {"deq": "one-step gradient", "deq-upg": "phantom gradient", "deq-exact": "implicit gradient"}


def coloured(flow: Tensor, largest: float) -> Tensor:
    """A flow (2, height, width) as colours (height, width, 3): hue by direction, saturation by length."""
    import matplotlib.colors

    angle = torch.atan2(flow[1], flow[0]) / (2 * math.pi) % 1.0
    length = (flow.norm(dim=0) / largest).clamp(0, 1)
    return torch.as_tensor(
        matplotlib.colors.hsv_to_rgb(torch.stack([angle, length, torch.ones_like(angle)], dim=-1).numpy())
    )


@torch.no_grad()
def flow_fields(folder: Path, videos: int = 4) -> bytes:
    """Frames, true flow and found flow of test videos, at the last pair."""
    run = Run.open(folder)
    task = experiment_of(run).task()
    model = run.model(task, "last").eval()
    assert isinstance(model, DEQFlow)
    scenes = task.settings.data.load()  # type: ignore[attr-defined]
    x, truth = scenes.test.x[:videos], scenes.test.y[:videos, -1, :2]
    found = model.video(scenes.normalize(x))[:, -1]
    largest = float(truth.norm(dim=1).max())
    figure: Any = new_axes(1.9 * videos + 0.4, 5.6).figure
    figure.clear()
    panels = figure.subplots(4, videos, squeeze=False)
    for i in range(videos):
        frames = [x[i, t].movedim(0, -1) for t in (-2, -1)]
        for row, image in zip(panels, [*frames, coloured(truth[i], largest), coloured(found[i], largest)], strict=True):
            row[i].imshow(image.tolist(), interpolation="nearest")
            row[i].set(xticks=[], yticks=[])
    for row, name in zip(panels, ("frame", "next frame", "true flow", "found flow"), strict=True):
        row[0].set_ylabel(name)
    return png(panels[0][0])


def evaluations() -> bytes:
    """Evaluations of the cell along a video, from zeros and from the last equilibrium."""
    table = json.loads(TABLE.read_text())
    axes = new_axes(6.0, 3.2)
    for colour, (row, title) in zip(COLOURS, ROWS.items(), strict=False):
        ours = table["rows"].get(row, {}).get("ours", {})
        for start, style, words in (("cold", "--", "from zeros"), ("warm", "-", "warm starts")):
            points = [(i, ours[key]["mean"]) for i in range(1, 20) if (key := f"nfe_{start}_{i}") in ours]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", label=f"{title}, {words}")
    axes.set_ylim(bottom=0)
    return png(finish(axes, "pair of frames", "evaluations of the cell", legend=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "flow-fields.png").write_bytes(flow_fields(arguments.run))
    if TABLE.is_file():
        (arguments.folder / "flow-evaluations.png").write_bytes(evaluations())


if __name__ == "__main__":
    main()
