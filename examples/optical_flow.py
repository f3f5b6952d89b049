"""Train optical flow as an equilibrium, then compute the flow of a video with warm starts.

python examples/optical_flow.py

About a minute on two CPU cores. Needs the extra `train` for the scenes.
"""

import argparse

import torch
from torch import Tensor

import equilibria as eq
from equilibria.lab import data
from equilibria.models import DEQFlow


def train(model: DEQFlow, scenes: data.Dataset[data.Split], steps: int) -> None:
    """Train with a loss on the equilibrium and on two intermediate iterates, which have one-step gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    batches = data.Batches(scenes.train, 8, drop_last=True, transform=scenes.normalize)
    for step in range(steps):
        frames, y = batches.batch(step // len(batches), step % len(batches))
        truth = y[:, 0, :2]
        flows = model(frames, on_the_way=True)
        loss = eq.correction_penalty(flows, lambda flow: (flow - truth).abs().mean())  # noqa: B023
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            print(f"step {step + 1}: end-point error {error(flows[-1], truth):.2f} pixels")


def error(flow: Tensor, truth: Tensor) -> float:
    """Return the mean end-point error in pixels."""
    return (flow - truth).norm(dim=-3).mean().item()


@torch.no_grad()
def follow(model: DEQFlow, scenes: data.Dataset[data.Split]) -> None:
    """Print the errors and costs of estimating every pair from zeros, and of starting at the flow of the pair before."""
    model.eval()
    frames, truth = scenes.normalize(scenes.test.x), scenes.test.y[:, :, :2]
    print(f"no motion: end-point error {error(torch.zeros_like(truth), truth):.2f}")
    with eq.record(model) as solutions:
        cold = torch.stack([torch.as_tensor(model(frames[:, i : i + 2])) for i in range(truth.shape[1])], dim=1)
    print(f"from zeros: end-point error {error(cold, truth):.2f}, {costs(solutions)}")
    with eq.record(model) as solutions:
        warm = model.video(frames)
    print(f"warm starts: end-point error {error(warm, truth):.2f}, {costs(solutions)}")


def costs(solutions: list[eq.Solution]) -> str:
    counts = [s.stats.sample_evaluations / len(s.stats.status) for s in solutions]
    return "evaluations per pair of frames " + ", ".join(f"{count:.1f}" for count in counts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=1000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    scenes = data.load("moving-layers", train=arguments.pairs, test=8, frames=6, motion=6.0)
    model = eq.models.create("deq-flow-nano")
    assert isinstance(model, DEQFlow)
    train(model, scenes, arguments.steps)
    follow(model, scenes)


if __name__ == "__main__":
    main()
