"""Implicit graph networks on the citation graphs of Planetoid, and a comparison of solvers on one of them."""

from __future__ import annotations

from functools import partial

from equilibria.lab.experiments.claims import Claim, alike, at_least, at_most
from equilibria.lab.experiments.definitions import Column, Experiment, Figure, Scale, Table, TableRow
from equilibria.lab.experiments.ignn.node_table import EVALUATIONS, GU, PARAMETERS, PRODUCTS, STEP, upg
from equilibria.lab.experiments.ignn.node_task import Nodes, NodeSet, NodeSettings
from equilibria.lab.experiments.ignn.task import GraphSolverName, LayerOptions
from equilibria.lab.training.settings import Optimizer, Training

PLANETOID, SOLVERS = "ignn-planetoid", "ignn-solvers"
_KINDS = {"implicit": "IGNN, implicit", "upg": "IGNN, UPG, 5 steps", "gcn": "2 graph convolutions"}
_GCN: dict[NodeSet, float] = {"cora": 81.5, "citeseer": 70.3, "pubmed": 79.0}  # published, Kipf and Welling 2017


def planetoid(row: str, scale: Scale = "full") -> Experiment[NodeSettings]:
    """Return the experiment of a row, such as "cora-upg": a network on a citation graph."""
    data, kind = _parts(row)
    return Experiment(
        name=f"{PLANETOID}-{row}",
        summary=f"{_KINDS[kind]}, on {data.capitalize()}",
        settings=NodeSettings(
            data="random" if scale == "debug" else data,
            net="gcn" if kind == "gcn" else "ignn",
            layers=upg() if kind == "upg" else LayerOptions(),
        ),
        training=_citations({"debug": 2, "reduced": 100, "full": 200}[scale]),
        make=Nodes,
        scale=scale,
    )


def _citations(epochs: int) -> Training:
    optimizer = Optimizer(lr=1e-2, weight_decay=5e-4)
    return Training(epochs=epochs, batch_size=1, eval_batch_size=1, optimizer=optimizer)


def _parts(row: str) -> tuple[NodeSet, str]:
    data: NodeSet = next(name for name in _GCN if row.startswith(f"{name}-"))
    return data, row.removeprefix(f"{data}-")


def _planetoid_claims() -> tuple[Claim, ...]:
    close = [
        alike(
            "accuracy",
            f"{data}-upg",
            f"{data}-implicit",
            1.0,
            f"on {data.capitalize()} UPG is as accurate as implicit training, to 1 point",
            id="C13",
        )
        for data in _GCN
    ]
    faster = [
        at_least(
            "epoch",
            f"{data}-implicit",
            f"{data}-upg",
            1.4,
            f"on {data.capitalize()} an epoch with UPG is at least 1.4 times faster than an implicit one",
            id="C7",
        )
        for data in _GCN
    ]
    return (*close, *faster)


def _planetoid_table() -> Table:
    rows = {f"{data}-{kind}": f"{data.capitalize()}: {title}" for data in _GCN for kind, title in _KINDS.items()}
    notes = (
        "The public splits. One implicit layer of 16 channels, kappa 0.9, dropout 0.5; two graph convolutions of 16 "
        "channels; Adam 1e-2, decay 5e-4 on all weights; an epoch is a step on the whole graph. Validation chose the epoch. "
        "The published figures are those of Kipf and Welling 2017; there are none of implicit networks.",
    )
    return Table(
        name=PLANETOID,
        title="Citation graphs: implicit networks and graph convolutions",
        source=f"{GU}; Kipf and Welling 2017, arXiv:1609.02907, Table 2",
        rows=tuple(TableRow(name, title, partial(planetoid, name), _gcn_published(name)) for name, title in rows.items()),
        columns=(
            PARAMETERS,
            Column("accuracy", "test accuracy, %", "test.accuracy", digits=1, factor=100, epochs="selected"),
            Column("last", "test accuracy, last epoch, %", "test.accuracy", digits=1, factor=100),
            Column("epoch", "epoch, ms", "seconds_train", digits=1, factor=1e3, epochs="mean"),
            EVALUATIONS,
            PRODUCTS,
        ),
        claims=_planetoid_claims(),
        protocol={
            "debug": ("Debug scale: a random graph of 120 nodes, 2 epochs. It proves nothing.",),
            "reduced": ("Reduced: 100 epochs in place of 200.", *notes),
            "full": ("200 epochs.", *notes),
        },
    )


def _gcn_published(row: str) -> dict[str, Figure]:
    data, kind = _parts(row)
    return {"accuracy": Figure(_GCN[data])} if kind == "gcn" else {}


# solvers


_SOLVERS: dict[GraphSolverName, str] = {"picard": "Picard", "anderson": "Anderson", "broyden": "Broyden"}


def solving(row: GraphSolverName, scale: Scale = "full") -> Experiment[NodeSettings]:
    """Return an experiment on Cora with contraction factors up to 0.98 and one solver for states and adjoints."""
    return Experiment(
        name=f"{SOLVERS}-{row}",
        summary=f"IGNN on Cora, kappa 0.98, {_SOLVERS[row]}'s method",
        settings=NodeSettings(
            data="random" if scale == "debug" else "cora",
            layers=LayerOptions(solver=row, kappa=0.98),
        ),
        training=_citations({"debug": 2, "reduced": 60, "full": 200}[scale]),
        make=Nodes,
        scale=scale,
    )


def _solver_table() -> Table:
    notes = (
        "One implicit layer of 16 channels on Cora, kappa 0.98, states and adjoints to 3e-6 within 300 steps. All train "
        "from the same weights with the same masks. The last epoch tells of a layer that has been trained.",
    )
    return Table(
        name=SOLVERS,
        title="Solvers on a graph",
        source=GU,
        rows=tuple(TableRow(name, f"{title}'s method", partial(solving, name)) for name, title in _SOLVERS.items()),
        columns=(
            Column("evaluations", "evaluations, last epoch", "train.evaluations", digits=1),
            Column("products", "products with the Jacobian, last epoch", "train.adjoint_evaluations", digits=1),
            Column("test", "evaluations, test, last epoch", "test.evaluations", digits=1),
            Column("failed", "failed solves, %", "train.failed", factor=100, epochs="mean"),
            STEP,
            Column("speed", "speed over Picard", "seconds_step", over="picard", epochs="mean"),
            Column("radius", "spectral radius", "valid.spectral_radius", digits=3),
            Column("accuracy", "test accuracy, %", "test.accuracy", digits=1, factor=100, epochs="selected"),
        ),
        claims=tuple(
            at_most(
                column, "anderson", "picard", 0.5, f"Anderson's method needs at most half of Picard's {what} at kappa 0.98"
            )
            for column, what in (("evaluations", "evaluations"), ("products", "products with the Jacobian"))
        ),
        protocol={
            "debug": ("Debug scale: a random graph of 120 nodes, 2 epochs. It proves nothing.",),
            "reduced": ("Reduced: 60 epochs.", *notes),
            "full": ("200 epochs.", *notes),
        },
    )


def tables() -> tuple[Table, ...]:
    return _planetoid_table(), _solver_table()
