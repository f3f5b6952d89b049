"""Reasoners on generated puzzles as a task: deep supervision with carried states, and explicit stacks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.gradients.unrolled import Unrolled
from equilibria.lab.data.augment import Augmentation
from equilibria.lab.data.batches import Batches
from equilibria.lab.data.catalogue import load
from equilibria.lab.data.mazes import MazeSymmetry
from equilibria.lab.data.sets import Dataset, Split
from equilibria.lab.data.sudoku import SudokuSymmetry
from equilibria.lab.experiments.image_task import Batch, inside
from equilibria.lab.experiments.reasoning.losses import HALT_WEIGHT, Likelihood, answer_loss, halting_loss
from equilibria.lab.experiments.reasoning.scaling import measure_scaling, plain_steps
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.looped.carry import Carry
from equilibria.looped.halting import By, Halting
from equilibria.models.reasoning.cell import PairStart
from equilibria.models.reasoning.configs import ReasonerConfig
from equilibria.models.reasoning.reasoner import Reasoner, Thought, recursions
from equilibria.models.reasoning.stack import ReasonerStack
from equilibria.models.solve_options import relative_stop
from equilibria.penalties import jacobian_penalty
from equilibria.solution import record
from equilibria.solvers.krylov import GMRES
from equilibria.stop import Stop

ReasonerKind = Literal["jfb", "exact", "bptt", "stack"]
EXACT_STEPS = 12  # number of products with the Jacobian in the adjoint solve of the exact gradient


@dataclass(frozen=True, kw_only=True)
class PuzzleData:
    """Settings of the puzzles.

    size        side of a Sudoku or a maze, or length of a sequence of bits
    low, high   range of the givens of a Sudoku, or of the path lengths of a maze
    repeats     number of passes through the training puzzles in an epoch, each with other symmetries
    valid       number of puzzles for the choice of settings, depth and breadth; none is an image of a puzzle of other splits
    held_size   size of the validation and test puzzles; None: `size`
    """

    name: Literal["sudoku", "mazes", "prefix-sums"] = "sudoku"
    size: int = 4
    train: int = 400
    valid: int = 64
    test: int = 128
    low: int = 4
    high: int = 7
    repeats: int = 1
    held_size: int | None = None
    seed: int = 0

    def load(self) -> Dataset[Split]:
        if self.held_size is None:
            return self._load()
        held = dataclasses.replace(self, size=self.held_size, held_size=None, train=1)._load()
        return dataclasses.replace(self._load(), valid=held.valid, test=held.test)

    def _load(self) -> Dataset[Split]:
        options: dict[str, Any] = {"train": self.train, "valid": self.valid, "test": self.test, "seed": self.seed}
        match self.name:
            case "sudoku":
                return load("sudoku", size=self.size, givens=(self.low, self.high), **options)
            case "mazes":
                return load("mazes", size=self.size, lengths=(self.low, self.high), **options)
            case _:
                return load("prefix-sums", length=self.size, **options)

    def symmetries(self) -> list[Augmentation]:
        match self.name:
            case "sudoku":
                return [SudokuSymmetry(self.size)]
            case "mazes":
                return [MazeSymmetry(self.size)]
            case _:
                return []


@dataclass(frozen=True, kw_only=True)
class ReasoningSettings:
    """Settings of a reasoner, or of the explicit stack beside it, on puzzles.

    kind             "jfb": the published one-step gradient; "exact": the exact one; "bptt": back-propagation through
                     `unrolled` recursions from the start; "stack": an explicit stack of `stack_layers` layers
    halt_by, rtol    the rule by which a row is replaced in training, see `Halting`
    eval_rtol        rtol of halting in evaluation, which may be smaller: evaluation does not learn from changing states
    max_steps        largest number of supervised steps of a row
    jacobian_weight  weight of the penalty on the Jacobian at the state after a step
    depths, starts   numbers of supervised steps and of starts that are measured on the validation and test splits
    """

    data: PuzzleData = field(default_factory=PuzzleData)
    config: ReasonerConfig = field(default_factory=ReasonerConfig)
    kind: ReasonerKind = "jfb"
    stack_layers: int = 1
    unrolled: int = 8
    halt_by: By = "head"
    rtol: float = 0.05
    eval_rtol: float = 0.01
    max_steps: int = 16
    explore: float = 0.1
    likelihood: Likelihood = "softmax"
    jacobian_weight: float = 0.0
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    starts: tuple[int, ...] = (1, 4)


class Reasoning(Task[Batch]):
    """Trains a reasoner on puzzles; the carried samples and states are part of the run's state."""

    better = ("exact", "max")

    def __init__(self, settings: ReasoningSettings) -> None:
        s = self.settings = settings
        # rows of unrolled models are replaced in every step, because one step computes their whole answer
        steps = s.max_steps if s.kind in ("jfb", "exact") else 1
        self.halting = Halting(by=s.halt_by, stop=Stop(rtol=s.rtol), max_steps=steps, explore=s.explore)
        self.carry = Carry(stagger=steps)

    def model(self) -> nn.Module:
        s = self.settings
        if s.kind == "stack":
            return ReasonerStack(s.config, s.stack_layers)
        gradient: Gradient = JFB()
        stop = None
        if s.kind == "bptt":
            stop, gradient = recursions(s.unrolled), Unrolled(depth=s.unrolled)
        if s.kind == "exact":
            stop = recursions(s.config.h_cycles)
            gradient = Implicit(solver=GMRES(restart=EXACT_STEPS), stop=relative_stop(1e-2, EXACT_STEPS))
        # the penalty needs a recorded solution, which a direct step does not have
        direct = s.kind == "jfb" and not s.jacobian_weight
        return Reasoner(s.config, stop=stop, gradient=gradient, direct=direct)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        data = self.settings.data
        found = data.load()
        split = Split(found.train.x.repeat(data.repeats, 1), found.train.y.repeat(data.repeats, 1))
        train = Batches(
            split,
            training.batch_size,
            seed=training.seed,
            augment=data.symmetries(),
            drop_last=True,
            rank=rank,
            world_size=world_size,
        )
        valid, test = (
            None
            if part is None
            else Batches(part, training.eval_batch_size, shuffle=False, rank=rank, world_size=world_size)
            for part in (found.valid, found.test)
        )
        return Loaders(train, valid, test)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        if self.settings.kind == "stack":
            return self._plain(model, batch)
        net = inside(model, Reasoner)
        (x, y), state = self.carry.admit(batch, lambda fresh: net.start(fresh[0]))
        with record(net) as solutions:
            thought: Thought = model(x, state, with_thought=True)
        right = (thought.logits.argmax(dim=-1) == y).all(dim=-1)
        answer = answer_loss(thought.logits, y, self.settings.likelihood)
        loss = answer + HALT_WEIGHT * halting_loss(thought.halt, right)
        if self.settings.jacobian_weight and solutions:
            loss = loss + self.settings.jacobian_weight * jacobian_penalty(solutions[0])
        halted = self.halting.in_training(self.carry.steps + 1, thought.halt, thought.residual)
        self.carry.advance(thought.state, halted)
        metrics = {"answer_loss": answer.detach(), "exact": right.float().mean(), "halted": halted.float().mean()}
        return Outcome(loss, metrics, len(y))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Return accuracies and halting steps, computed in full precision because changes of a converged state are small."""
        with torch.no_grad(), torch.autocast(batch[0].device.type, enabled=False):
            if self.settings.kind == "stack":
                return self._plain(inside(model, ReasonerStack), batch)
            return self._scaled(inside(model, Reasoner), *batch)

    def conclude(self, splits: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """Add "chosen": the accuracy at the depth and breadth that are best on the validation split.

        Of equally good choices the cheapest counts. Without a validation split nothing is added.
        """
        if "valid" not in splits or self.settings.kind == "stack":
            return splits
        cells = [(depth, width) for depth in self.settings.depths for width in self.settings.starts]
        known = [cell for cell in sorted(cells, key=math.prod) if _key(*cell) in splits["valid"]]
        depth, width = max(known, key=lambda cell: splits["valid"][_key(*cell)])
        chosen = {"chosen_depth": float(depth), "chosen_starts": float(width)}
        return {name: {**means, "chosen": means[_key(depth, width)], **chosen} for name, means in splits.items()}

    def state(self) -> Any:
        return self.carry.state_dict()

    def resume(self, state: Any) -> None:
        pair = torch.zeros(0), torch.zeros(0)  # samples (x, y) and states (z_H, z_L) are pairs of tensors
        self.carry.load_state_dict(state, (pair, pair))

    def _plain(self, model: nn.Module, batch: Batch) -> Outcome:
        x, y = batch
        logits = model(x)
        exact = (logits.argmax(dim=-1) == y).all(dim=-1).float().mean()
        return Outcome(answer_loss(logits, y, self.settings.likelihood), {"exact": exact, "chosen": exact}, len(y))

    def _scaled(self, model: Reasoner, x: Tensor, y: Tensor) -> Outcome:
        """Return the accuracy over depth and breadth; "exact" is the accuracy at the largest depth and breadth.

        The area under the curve is computed per batch. It is exact if `eval_batch_size` is at least the size of the split.
        """
        s, random = self.settings, not isinstance(model.layer.init, PairStart)
        widths = s.starts if random else (1,)  # a fixed start gives equal results for all starts
        found = measure_scaling(model, x, y, s.depths, max(widths))
        metrics: dict[str, Tensor | float] = {}
        for depth in s.depths:
            for width in widths:
                metrics[_key(depth, width)] = found.exact(depth, width)
            metrics[f"change_{depth}"] = float(found.change[found.depths.index(depth)].median())
        metrics["exact"] = found.exact(max(s.depths), max(widths))
        metrics |= {f"auc_{depth}": auc for depth in s.depths if (auc := found.auc(depth)) == auc}
        metrics |= self._halted(model, x, y)
        return Outcome(answer_loss(model.think(x).logits, y, s.likelihood), metrics, len(y))

    def _halted(self, model: Reasoner, x: Tensor, y: Tensor) -> dict[str, Tensor | float]:
        """Return accuracy and steps with halting by the rule of training, up to the largest measured depth."""
        s = self.settings
        halting = dataclasses.replace(self.halting, stop=Stop(rtol=s.eval_rtol), max_steps=max(s.depths))
        found = halting.run(plain_steps(model), x)
        right = (found.answer.argmax(dim=-1) == y).all(dim=-1)
        return {"exact_halted": right.float().mean(), "steps_halted": found.steps.float().mean()}


def _key(depth: int, width: int) -> str:
    """Return the name of the accuracy at a depth, with the best converged of `width` starts."""
    return f"exact_{depth}x{width}"
