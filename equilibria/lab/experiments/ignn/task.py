"""Cross-validated classification of graphs as a task, and solver options of implicit graph networks in all tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.lab.data.batches import GraphBatches
from equilibria.lab.data.catalogue import load
from equilibria.lab.data.graphs import Graph
from equilibria.lab.experiments.ignn.data import DEGREES, parted, random_graphs
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.graphs.gcn import GraphGCN, GraphGCNConfig
from equilibria.models.graphs.graph_nets import GraphClassifier, GraphClassifierConfig
from equilibria.models.graphs.ignn import PUBLISHED_STOP
from equilibria.models.solve_options import SolveOptions

Net = Literal["ignn", "gcn"]
GraphSolverName = Literal["picard", "anderson", "broyden"]
GraphSet = Literal["cox2", "proteins", "mutag", "nci1", "ptc-mr", "bzr", "enzymes", "random"]

SIZES: dict[GraphSet, tuple[int, int]] = {  # features, classes
    "cox2": (35, 2),
    "proteins": (3, 2),
    "mutag": (7, 2),
    "nci1": (37, 2),
    "ptc-mr": (18, 2),
    "bzr": (53, 2),
    "enzymes": (3, 6),
    "random": (DEGREES, 2),
}


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Settings by which the implicit layers of a network are solved and differentiated.

    solver          solver of the state, and of the adjoint if the gradient is exact
    gradient        "implicit", which is exact, or "upg" with `phantom_steps` steps from the equilibrium
    kappa           largest contraction factor of a layer
    tolerance       largest entry of a residual; for the adjoint equation relative to the incoming gradient
    """

    solver: GraphSolverName = "picard"
    gradient: Literal["implicit", "upg"] = "implicit"
    phantom_steps: int = 5
    damping: float = 0.5
    kappa: float = 0.9
    tolerance: float = 3e-6
    max_steps: int = 300

    def parts(self) -> dict[str, Any]:
        """Return solver, stop and gradient for the networks; failed solves do not warn, the trainer counts them."""
        limits: dict[str, Any] = {"max_steps": self.max_steps, "on_failure": "ignore"}
        stop = dataclasses.replace(PUBLISHED_STOP, atol=self.tolerance, **limits)
        adjoint = dataclasses.replace(PUBLISHED_STOP, rtol=self.tolerance, atol=0.0, **limits)
        options = SolveOptions(
            stop=stop,
            adjoint_stop=adjoint,
            solver=self.solver,
            gradient=self.gradient,
            adjoint="solver",
            phantom_steps=self.phantom_steps,
            damping=self.damping,
        )
        return options.parts()


class GraphTask(Task[Graph]):
    """Cross entropy and accuracy of graphs, or of the nodes in `mask`."""

    better = ("accuracy", "max")

    def loss(self, model: nn.Module, batch: Graph, step: int) -> Outcome:
        scores, y = chosen(model(batch), batch)
        right = (scores.detach().argmax(dim=1) == y).float().mean()
        return Outcome(F.cross_entropy(scores, y), {"accuracy": right}, len(y))


@dataclass(frozen=True, kw_only=True)
class FoldSettings:
    """Settings of graph classification by cross-validation.

    data      a set of the TU collection; "random": 60 generated graphs
    width     width of the layers
    depth     number of layers
    folds     number of folds; the fold to test on is the run's seed modulo this number
    hold_out  use one of the other folds for validation instead of training
    """

    data: GraphSet = "cox2"
    net: Net = "ignn"
    layers: LayerOptions = field(default_factory=LayerOptions)
    width: int = 64
    depth: int = 3
    dropout: float = 0.5
    folds: int = 10
    hold_out: bool = False

    def __post_init__(self) -> None:
        least = 3 if self.hold_out else 2
        if self.folds < least:
            raise ValueError(f"folds must be at least {least} with hold_out={self.hold_out}, got {self.folds}.")


class Folds(GraphTask):
    """Trains a graph classifier and tests it on fold `seed % folds`."""

    def __init__(self, settings: FoldSettings) -> None:
        self.settings = settings

    def model(self) -> nn.Module:
        s = self.settings
        features, classes = SIZES[s.data]
        sizes: dict[str, Any] = {"features": features, "classes": classes, "width": s.width, "layers": s.depth}
        if s.net == "gcn":
            return GraphGCN(GraphGCNConfig(**sizes, dropout=s.dropout))
        return GraphClassifier(GraphClassifierConfig(**sizes, dropout=s.dropout, kappa=s.layers.kappa), **s.layers.parts())

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Graph]:
        train, valid, test = self.splits(root, training.seed)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        held = {"shuffle": False, **place}
        return Loaders(
            GraphBatches(train, training.batch_size, seed=training.seed, **place),
            GraphBatches(valid, training.eval_batch_size, **held) if valid else None,
            GraphBatches(test, training.eval_batch_size, **held),
        )

    def splits(self, root: Path | None, seed: int) -> tuple[Sequence[Graph], Sequence[Graph], Sequence[Graph]]:
        """Return training, validation and test graphs; without `hold_out` there are no validation graphs."""
        s = self.settings
        fold = seed % s.folds
        if s.data == "random":
            train, test = parted(random_graphs(), s.folds, fold)
        else:
            found = load(s.data, root, fold=fold, folds=s.folds)
            train, test = found.train, found.test
        if not s.hold_out:
            return train, (), test
        # the other folds, divided again: one of folds - 1 parts has the size of the test fold
        kept, held = parted(train, s.folds - 1, 0)
        return kept, held, test


def chosen(scores: Tensor, batch: Graph) -> tuple[Tensor, Tensor]:
    """Return scores and targets of the graphs, or of the nodes that belong to the split."""
    return (scores, batch.y) if batch.mask is None else (scores[batch.mask], batch.y[batch.mask])
