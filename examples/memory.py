"""Memory of a training step against the number of solver steps: `python examples/memory.py`

For each gradient, this script measures the bytes that autograd stores between forward and backward, and the peak of
allocated memory over the whole training step (from events of the profiler), for 5, 10, 20, 40 and 80 solver steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import equilibria as eq

STEPS = (5, 10, 20, 40, 80)
GRADIENTS: dict[str, Callable[[int], eq.Gradient]] = {
    "implicit": lambda steps: eq.Implicit(stop=eq.Stop(max_steps=20, on_failure="ignore")),
    "JFB": lambda steps: eq.JFB(),
    "Neumann phantom": lambda steps: eq.NeumannPhantom(),
    "reversible": lambda steps: eq.Reversible(),
    "BPTT": lambda steps: eq.Unrolled(depth=steps),
    "BPTT, sqrt checkpoints": lambda steps: eq.Unrolled(depth=steps, checkpoint="sqrt"),
    "BPTT, recursive checkpoints": lambda steps: eq.Unrolled(depth=steps, checkpoint="recursive"),
}


class Cell(nn.Module):
    """A residual block of two linear layers. As in most cells, its activations take more memory than its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x + 0.3 * self.b(torch.tanh(self.a(z))))


def model(gradient: eq.Gradient, steps: int, width: int) -> eq.DEQ:
    """Return a layer that takes exactly `steps` solver steps."""
    torch.manual_seed(0)
    stop = eq.Stop(rtol=0.0, atol=0.0, max_steps=steps, on_failure="ignore", patience=10_000, compact=False)
    return eq.DEQ(Cell(width), solver=eq.Picard(), stop=stop, gradient=gradient)


def stored_bytes(deq: eq.DEQ, x: Tensor) -> int:
    """Return the bytes that autograd stores between forward and backward, without weights; every storage counts once."""
    weights = {p.untyped_storage().data_ptr() for p in deq.parameters()}
    storages: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        z = deq(x)
    z.sum().backward()
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(deq: eq.DEQ, x: Tensor) -> int:
    """Return the peak of allocated memory over forward and backward, above that at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        deq(x).sum().backward()
    level = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def draw(stored: dict[str, list[int]], peak: dict[str, list[int]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for axis, rows, title in ((axes[0], stored, "stored between forward and backward"), (axes[1], peak, "peak of the step")):
        for name, values in rows.items():
            axis.plot(STEPS, [value / 1e6 for value in values], marker="o", markersize=3, label=name)
        axis.set(title=title, xlabel="solver steps", ylabel="MB", xscale="log", yscale="log")
        axis.set_xticks(STEPS, [str(step) for step in STEPS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)


def draw_peak(peak: dict[str, list[int]], path: Path) -> None:
    """Draw the peaks of four gradients, large enough for the screen of a phone."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name in ("BPTT", "BPTT, sqrt checkpoints", "implicit", "JFB"):
        values = [value / 1e6 for value in peak[name]]
        axis.plot(STEPS, values, marker="o", markersize=4)
        label = name.replace(", ", ",\n")
        axis.annotate(label, (STEPS[-1], values[-1]), (8, 0), textcoords="offset points", va="center", fontsize=11)
    axis.set_xlabel("solver steps", fontsize=11)
    axis.set_ylabel("peak memory of a step, MB", fontsize=11)
    axis.set(xscale="log", yscale="log", xlim=(STEPS[0] / 1.2, 3.0 * STEPS[-1]))
    axis.set_yticks((2, 5, 10, 20, 50), ("2", "5", "10", "20", "50"))
    axis.set_xticks(STEPS, [str(step) for step in STEPS])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--plot", type=Path, default=Path("memory.png"), help="where the picture goes")
    parser.add_argument("--peak", type=Path, help="where the picture of the peaks alone goes")
    arguments = parser.parse_args()
    x = torch.randn(arguments.batch, arguments.width)
    stored: dict[str, list[int]] = {}
    peak: dict[str, list[int]] = {}
    print(f"{'MB stored | peak':>30}" + "".join(f"{steps:>16}" for steps in STEPS) + f"{'last/first':>18}")
    for name, make in GRADIENTS.items():
        layers = [model(make(steps), steps, arguments.width) for steps in STEPS]
        stored[name], peak[name] = [stored_bytes(deq, x) for deq in layers], [peak_bytes(deq, x) for deq in layers]
        cells = "".join(f"{s / 1e6:8.2f} |{p / 1e6:6.1f}" for s, p in zip(stored[name], peak[name], strict=True))
        print(f"{name:>30}{cells}{stored[name][-1] / stored[name][0]:10.2f} |{peak[name][-1] / peak[name][0]:5.2f}")
    draw(stored, peak, arguments.plot)
    if arguments.peak is not None:
        draw_peak(peak, arguments.peak)
    print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    main()
