"""Train a looped model on Sudoku 4x4, then solve boards with more steps and more starts than in training.

python examples/sudoku.py

About a minute on two CPU cores. Needs the extra `train` for the boards.
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria.lab import data
from equilibria.models import Reasoner


def train(model: Reasoner, boards: data.Split, steps: int) -> None:
    """Train with deep supervision: every row keeps its board and its state until it halts, then gets another board."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    carry, halting = eq.looped.Carry(), eq.looped.Halting(by="both", max_steps=8)
    batches = data.Batches(boards, 64, augment=[data.SudokuSymmetry(4)], drop_last=True)
    for step in range(steps):
        batch = batches.batch(step // len(batches), step % len(batches))
        (x, y), state = carry.admit(batch, lambda fresh: model.start(fresh[0]))
        thought = model.think(x, state)  # one supervised step, with the one-step gradient
        right = (thought.logits.argmax(-1) == y).all(1)
        loss = F.cross_entropy(thought.logits.flatten(0, 1), y.flatten())
        loss = loss + 0.5 * F.binary_cross_entropy_with_logits(thought.halt, right.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        carry.advance(thought.state, halting.in_training(carry.steps + 1, thought.halt, thought.residual))
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, {right.float().mean().item():.0%} of the rows right")


def exact(answer: Tensor, y: Tensor) -> str:
    """Return the share of boards with all cells correct, as text."""
    return f"{(answer == y).all(1).float().mean().item():.1%} of unseen boards"


@torch.no_grad()
def evaluate(model: Reasoner, boards: data.Split) -> None:
    """Print the accuracy after 1 to 32 steps, and that of halting."""
    model.eval()
    thought = model.think(boards.x)
    print(f"depth 1: {exact(thought.logits.argmax(-1), boards.y)}")
    for depth in range(2, 33):
        thought = model.think(boards.x, thought.state)
        if depth in (2, 4, 8, 16, 32):
            print(f"depth {depth}: {exact(thought.logits.argmax(-1), boards.y)}")
    halted = eq.looped.Halting(by="both", max_steps=32).run(model.think, boards.x)
    steps = halted.steps.float().mean().item()
    print(f"halting: {exact(halted.answer.argmax(-1), boards.y)}, {steps:.1f} steps on average")
    wide = eq.looped.breadth(model.layer, starts=8, first=2, stop=eq.Stop(rtol=0.02, max_steps=64, on_failure="ignore"))
    found = wide(model.embed(boards.x))
    tried = found.starts.float().mean().item()
    print(f"breadth: {exact(model.read(found.z)[0].argmax(-1), boards.y)}, {tried:.1f} starts on average")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    boards = data.load("sudoku", size=4, train=250, test=128, givens=(4, 6))
    model = eq.models.create("reasoner-nano")
    assert isinstance(model, Reasoner)
    train(model, boards.train, steps)
    evaluate(model, boards.test)


if __name__ == "__main__":
    main()
