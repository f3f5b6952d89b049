"""Attractor language models on the Penn Treebank, compared with one more layer of as many parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import JFB
from equilibria.lab.experiments.claims import Claim, at_most, value_at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Scale, Table, TableRow
from equilibria.lab.experiments.deq_language.data import Segments, TextData, TextSegment
from equilibria.lab.experiments.deq_language.recipes import small_training, text
from equilibria.lab.training.settings import Optimizer, Schedule, Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.language.attractor import AttractorHead, AttractorModel, CausalBackbone, token_residuals
from equilibria.models.solve_options import relative_stop
from equilibria.penalties import jacobian_penalty
from equilibria.solution import record
from equilibria.solvers.krylov import GMRES

NAME = "ptb-attractor"
SOURCE = "after Attractor models 2026, arXiv:2605.12466; sizes of our own"
LOOSE = 0.01  # relative residual above which a token counts as not converged
TITLES = {
    "layers": "backbone and one more layer",
    "attractor": "attractor head, exact gradient",
    "attractor-jfb": "attractor head, one-step gradient",
    "attractor-jacobian": "attractor head, exact gradient, Jacobian penalty",
}


@dataclass(frozen=True, kw_only=True)
class AttractorSettings:
    """Settings of an attractor language model.

    gradient         gradient of the equilibrium; "none": one more layer of the backbone replaces the head
    layers           number of layers of the backbone
    jacobian_weight  weight of the Jacobian penalty; published: 1e-3
    """

    data: TextData = field(default_factory=TextData)
    gradient: Literal["exact", "jfb", "none"] = "exact"
    width: int = 128
    heads: int = 4
    layers: int = 2
    jacobian_weight: float = 0.0


class AttractorLanguage(Task[TextSegment]):
    """Trains a language model with an equilibrium block on top, and measures the convergence of every token."""

    better = ("nll", "min")

    def __init__(self, settings: AttractorSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        s, tokens = self.settings, self.settings.data.vocabulary
        more = int(s.gradient == "none")
        backbone = CausalBackbone(tokens, s.width, s.heads, s.layers + more)
        exact = Implicit(solver=GMRES(restart=6), stop=relative_stop(1e-2, 6))
        gradient: Gradient = JFB() if s.gradient == "jfb" else exact
        head = None if more else AttractorHead(s.width, s.heads, gradient=gradient)
        return AttractorModel(backbone, head, tokens=tokens, width=s.width)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[TextSegment]:
        data = self.settings.data
        found = data.splits(root)
        rows = {"train": training.batch_size, "valid": training.eval_batch_size, "test": training.eval_batch_size}
        made = {
            name: Segments(name, tokens, rows[name], data.length, rank=rank, world_size=world_size)
            for name, tokens in found.items()
        }
        return Loaders(made["train"], made.get("valid"), made.get("test"))

    def loss(self, model: nn.Module, batch: TextSegment, step: int) -> Outcome:
        with record(model) as solutions:
            nll, _ = model(batch.x, None, batch.y)
        loss = nll
        if self.settings.jacobian_weight and solutions:
            loss = loss + self.settings.jacobian_weight * jacobian_penalty(solutions[0])
        return Outcome(loss, {"nll": nll.detach()}, batch.y.numel())

    def evaluate(self, model: nn.Module, batch: TextSegment) -> Outcome:
        with torch.no_grad(), record(model) as solutions:
            nll, _ = model(batch.x, None, batch.y)
        metrics: dict[str, Tensor | float] = {"nll": nll}
        if solutions:
            residual = token_residuals(solutions[0])
            metrics["token_residual"] = residual.median()
            metrics["token_loose"] = (residual > LOOSE).float().mean()
        return Outcome(nll, metrics, batch.y.numel())

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        return means | {"perplexity": float(torch.tensor(means["nll"]).exp())} if "nll" in means else means


def experiment(row: str, scale: Scale = "full") -> Experiment[AttractorSettings]:
    """Return the experiment of a row."""
    options: dict[str, dict[str, Any]] = {
        "layers": {"gradient": "none"},
        "attractor-jfb": {"gradient": "jfb"},
        "attractor-jacobian": {"jacobian_weight": 1e-3},
    }
    debug = scale == "debug"
    size: dict[str, Any] = {"width": 16, "heads": 2, "layers": 1} if debug else {"width": 64 if scale == "reduced" else 128}
    return Experiment(
        name=f"{NAME}-{row}",
        summary=f"{TITLES[row]}, PTB by words",
        settings=AttractorSettings(data=text(scale, "ptb", length=64), **size, **options.get(row, {})),
        training=small_training(scale) if scale != "full" else _full(),
        make=AttractorLanguage,
        scale=scale,
    )


def _full() -> Training:
    return Training(
        epochs=20,
        batch_size=32,
        eval_batch_size=10,
        optimizer=Optimizer(lr=1e-3),
        schedule=Schedule(name="cosine", warmup_steps=500),
        clip_norm=0.25,
    )


def _claims() -> tuple[Claim, ...]:
    return (
        at_most(
            "valid",
            "attractor",
            "layers",
            1.0,
            "the equilibrium's validation perplexity is at most that of the same parameters as one more layer",
        ),
        at_most("valid", "attractor-jfb", "attractor", 1.02, "the one-step gradient costs at most 2 % of perplexity"),
        value_at_most("loose", "attractor-jacobian", 10.0, "with the penalty at most 10 % of the tokens have not converged"),
    )


def tables() -> tuple[Table, ...]:
    notes = (
        "The attractor head is one causal layer as an equilibrium, started at the backbone's output: Anderson, at most 8 "
        "steps, tolerance 1e-3. The row beside it has the same parameters as one more layer of the backbone.",
        "No memory is carried from segment to segment.",
    )
    return (
        Table(
            name=NAME,
            title="Attractor language models on the Penn Treebank",
            source=SOURCE,
            rows=tuple(TableRow(row, title, partial(experiment, row)) for row, title in TITLES.items()),
            columns=(
                Column("parameters", "parameters", "summary.parameters", digits=0),
                Column("valid", "validation perplexity", "valid.perplexity"),
                Column("perplexity", "test perplexity", "test.perplexity"),
                Column("nfe", "NFE, test", "test.evaluations", digits=1),
                Column("step", "training step, ms", "seconds_step", digits=1, factor=1e3),
                Column("token", "median residual of a token, test", "test.token_residual", digits=5),
                Column("loose", "tokens not converged, test, %", "test.token_loose", digits=1, factor=100),
            ),
            claims=_claims(),
            protocol={
                "debug": ("Debug scale: sentences made by a rule, 16 channels, 1 epoch. It proves nothing.", *notes),
                "reduced": ("Reduced: width 64, two epochs over the first 307,200 tokens, Adam 1e-3.", *notes),
                "full": ("Width 128, 20 epochs, Adam 1e-3.", *notes),
            },
        ),
    )
