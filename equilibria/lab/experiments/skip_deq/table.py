"""The MLP tables of "Mixing Implicit and Explicit Deep Learning with Skip DEQs": published figures, claims, protocols."""

from __future__ import annotations

from functools import partial

from equilibria.lab.experiments.definitions import Claim, Column, Figure, Scale, Table, TableRow
from equilibria.lab.experiments.skip_deq.experiments import (
    MNIST,
    MNIST_TSIT5,
    POLYNOMIAL,
    TITLES,
    VARIANTS,
    mnist_mlp,
    polynomial,
)
from equilibria.models.images.skip_mlp import Method

SOURCE = "Pal, Edelman and Rackauckas 2022, Mixing Implicit and Explicit Deep Learning with Skip DEQs, arXiv:2201.12240"
_PUBLISHED = {  # accuracy %, evaluations, minutes of training, seconds of prediction, each with its deviation
    "deq": ((97.926, 0.107), (18.345, 0.732), (5.197, 1.106), (0.038, 0.009)),
    "skip": ((97.759, 0.080), (4.001, 0.001), (1.711, 0.202), (0.010, 0.001)),
    "v2": ((97.973, 0.134), (4.000, 0.000), (1.295, 0.222), (0.010, 0.001)),
    "deq-jr": ((98.123, 0.025), (5.034, 0.059), (7.321, 0.454), (0.011, 0.005)),
    "skip-jr": ((97.749, 0.141), (4.000, 0.000), (6.019, 0.234), (0.012, 0.001)),
    "v2-jr": ((98.016, 0.049), (4.000, 0.000), (5.128, 0.241), (0.012, 0.000)),
}
_MNIST_COLUMNS = (
    Column("parameters", "parameters", "summary.parameters", digits=0),
    Column("accuracy", "test accuracy, %", "test.accuracy", digits=3, factor=100),
    Column("nfe", "test NFE", "test.nfe", digits=3),
    Column("minutes", "training, min", "summary.seconds_train", digits=3, factor=1 / 60),
    Column("predict", "prediction of a batch, s", "test.predict_seconds", digits=4),
    Column("step", "training step, ms", "seconds_step", digits=2, factor=1e3),
    Column("explicit", "accuracy of the start alone, %", "test.explicit_accuracy", digits=2, factor=100),
    Column("failed", "failed solves, %", "test.failed", digits=2, factor=100),
    Column("radius", "spectral radius", "test.spectral_radius", digits=3),
)


def _mnist_published(row: str) -> dict[str, Figure]:
    count = Figure(151_050 if row.startswith("skip") else 134_538)
    values = zip(("accuracy", "nfe", "minutes", "predict"), _PUBLISHED[row], strict=True)
    return {"parameters": count} | {name: Figure(mean, std) for name, (mean, std) in values}


_MNIST_CLAIMS = (
    Claim(id="C1", text="Skip needs at most half of DEQ's evaluations", column="nfe", left="skip", right="deq", at_most=0.5),
    Claim(id="C1", text="V2 needs at most half of DEQ's evaluations", column="nfe", left="v2", right="deq", at_most=0.5),
    Claim(
        id="C1",
        text="Skip loses less than 0.5 points of accuracy to DEQ",
        column="accuracy",
        left="skip",
        right="deq",
        by="difference",
        at_least=-0.5,
    ),
    Claim(
        id="C1",
        text="V2 loses less than 0.5 points of accuracy to DEQ",
        column="accuracy",
        left="v2",
        right="deq",
        by="difference",
        at_least=-0.5,
    ),
    Claim(
        id="C1",
        text="V2 trains in less time than DEQ (published: a quarter)",
        column="minutes",
        left="v2",
        right="deq",
        at_most=1.0,
    ),
    Claim(text="V2 predicts faster than DEQ (published: a quarter)", column="predict", left="v2", right="deq", at_most=1.0),
    Claim(
        id="C3",
        text="Jacobian regularization at least halves DEQ's evaluations",
        column="nfe",
        left="deq-jr",
        right="deq",
        at_most=0.5,
    ),
    Claim(
        id="C3",
        text="Jacobian regularization does not lower DEQ's accuracy by more than 0.1 points",
        column="accuracy",
        left="deq-jr",
        right="deq",
        by="difference",
        at_least=-0.1,
    ),
    Claim(
        text="Jacobian regularization makes DEQ take longer to train (published: 1.4 times)",
        column="minutes",
        left="deq-jr",
        right="deq",
        at_least=1.0,
    ),
    Claim(
        id="C4",
        text="a step with Jacobian regularization takes longer than one of Skip",
        column="step",
        left="deq-jr",
        right="skip",
        at_least=1.0,
    ),
    Claim(
        text="DEQ with Jacobian regularization takes longer to train than V2 (published: six times)",
        column="minutes",
        left="deq-jr",
        right="v2",
        at_least=1.0,
    ),
    Claim(
        text="DEQ with Jacobian regularization beats V2 by less than 0.4 points",
        column="accuracy",
        left="deq-jr",
        right="v2",
        by="difference",
        at_most=0.4,
    ),
)
_FLOOR = (
    Claim(
        text="Skip with Jacobian regularization stays at the floor of 4",
        column="nfe",
        left="skip-jr",
        at_most=4.1,
    ),
    Claim(text="V2 with Jacobian regularization stays at the floor of 4", column="nfe", left="v2-jr", at_most=4.1),
)
_FLOOR_TSIT5 = (
    Claim(
        text="Skip with Jacobian regularization stays within two steps of the floor of 11",
        column="nfe",
        left="skip-jr",
        at_most=23.0,
    ),
    Claim(
        text="V2 with Jacobian regularization stays within two steps of the floor of 11",
        column="nfe",
        left="v2-jr",
        at_most=23.0,
    ),
)
_MNIST_NOTES = (
    "Settings of the released script, which produced the published table: AdamW 1e-3 to 1e-6 by a cosine, weight decay "
    "2.5e-6, skip weight 5 (the paper prints Adam, 1e-3 constant, and 0.01); batch 32; pixels in [0, 1].",
    "Forward: relative tolerance 0.005 over the batch as one system, 50 steps at most; backward: GMRES, 0.005, 15 products.",
)
_BROYDEN_NOTE = (
    "NFE is the solver's evaluations + 2 as in the script (a residual after the solve, f of its answer), one count per "
    "batch of 32. The published floor is 4, as its Broyden takes a step before it looks; ours looks first: floor 3. The "
    "published counts are those of this discrete solver, although the caption says continuous."
)
_TSIT5_NOTE = (
    "Tsit5 in place of the discrete solver that produced the published counts: 6 evaluations a step, the first of length "
    "0.5, and 5 more. Compare the order of the rows, not the published NFE."
)


def _mnist_protocol(note: str) -> dict[Scale, tuple[str, ...]]:
    debug = "Debug scale: the 8x8 digits of scikit-learn in place of MNIST (encoder 64 to 128), 2 epochs. It proves nothing."
    reduced = "Reduced scale: 5 epochs in place of 25, one seed in place of three."
    return {
        "debug": (debug, *_MNIST_NOTES, note),
        "reduced": (reduced, *_MNIST_NOTES, note),
        "full": ("The full protocol: 25 epochs, three seeds.", *_MNIST_NOTES, note),
    }


def _mnist_table(name: str, title: str, method: Method, note: str, claims: tuple[Claim, ...]) -> Table:
    return Table(
        name=name,
        title=title,
        source=f"{SOURCE}, Table 1",
        rows=tuple(
            TableRow(row, TITLES[row], partial(mnist_mlp, row, method=method), _mnist_published(row)) for row in VARIANTS
        ),
        columns=_MNIST_COLUMNS,
        claims=(*_MNIST_CLAIMS, *claims),
        protocol=_mnist_protocol(note),
    )


def _polynomial_row(row: str) -> TableRow:
    published = {"skip": {"reduction": Figure(2.8)}, "v2": {"reduction": Figure(1.5)}}
    return TableRow(row, TITLES[row], partial(polynomial, row), published.get(row, {}))


_POLYNOMIAL_NOTES = (
    "h(x) = 3/2 x^3 + x^2 - 5x + 2 sin x - 3 (the paper prints - x^2, its code adds it), 512 noisy points, 128 exact ones "
    "to test; Adam 1e-3, a tenth of it after half of the epochs, batch 32, the same batches every epoch; skip weight 0.01.",
    "Weights N(0, 0.01) but for the last layer, which has the default (Glorot) as in the released script: with N(0, 0.01) "
    "there too, the spectral radius passes 1 within 16 steps and training diverges.",
    "BS3 to a relative tolerance of 0.001 over the batch as one system, 50 steps at most, first step by Hairer's rule; "
    "backward: GMRES, 0.001. NFE is 3 evaluations a step, rejected ones too, and 5 more.",
    "Published are only curves, and a caption: about 2.8 times (Skip) and 1.5 times (V2) fewer evaluations than DEQ.",
)


def _polynomial_table() -> Table:
    return Table(
        name=POLYNOMIAL,
        title="Skip DEQ: polynomial regression",
        source=f"{SOURCE}, polynomial regression figure",
        rows=tuple(_polynomial_row(row) for row in VARIANTS),
        columns=(
            Column("parameters", "parameters", "summary.parameters", digits=0),
            Column("loss", "test loss", "test.loss", digits=6),
            Column("nfe", "test NFE", "test.nfe", digits=2),
            Column("reduction", "NFE of DEQ over this, all epochs", "test.nfe", digits=2, over="deq", epochs="mean"),
            Column("final_reduction", "NFE of DEQ over this, last epoch", "test.nfe", digits=2, over="deq"),
            Column("train_nfe", "training NFE, all epochs", "train.nfe", digits=2, epochs="mean"),
            Column("minutes", "training, min", "summary.seconds_train", digits=2, factor=1 / 60),
            Column("step", "training step, ms", "seconds_step", digits=2, factor=1e3),
            Column("explicit", "test loss of the start alone", "test.explicit_loss", digits=6),
            Column("failed", "failed solves, %", "test.failed", digits=2, factor=100),
        ),
        claims=(
            Claim(
                id="C1",
                text="Skip needs fewer evaluations than DEQ (published: 2.8 times)",
                column="reduction",
                left="skip",
                at_least=1.1,
            ),
            Claim(
                id="C1",
                text="V2 needs fewer evaluations than DEQ (published: 1.5 times)",
                column="reduction",
                left="v2",
                at_least=1.1,
            ),
            Claim(text="Skip saves more than V2", column="reduction", left="skip", right="v2", at_least=1.0),
            Claim(
                text="Skip ends at a similar loss as DEQ: at most twice",
                column="loss",
                left="skip",
                right="deq",
                at_most=2.0,
            ),
            Claim(
                text="V2 ends at a similar loss as DEQ: at most twice", column="loss", left="v2", right="deq", at_most=2.0
            ),
            Claim(
                text="Jacobian regularization changes DEQ's evaluations by less than a quarter",
                column="nfe",
                left="deq-jr",
                right="deq",
                at_least=0.75,
                at_most=1.25,
            ),
            Claim(
                id="C4",
                text="Jacobian regularization makes DEQ's training steps slower",
                column="step",
                left="deq-jr",
                right="deq",
                at_least=1.05,
            ),
        ),
        protocol={
            "debug": ("Debug scale: 2 epochs. It proves nothing.", *_POLYNOMIAL_NOTES),
            "reduced": ("Reduced scale: 60 epochs in place of 300, one seed.", *_POLYNOMIAL_NOTES),
            "full": ("The full protocol: 300 epochs, three seeds.", *_POLYNOMIAL_NOTES),
        },
    )


def tables() -> tuple[Table, ...]:
    discrete, continuous = "Skip DEQ: MNIST with dense layers", "Skip DEQ: MNIST with dense layers, continuous"
    return (
        _mnist_table(MNIST, discrete, "broyden", _BROYDEN_NOTE, _FLOOR),
        _mnist_table(MNIST_TSIT5, continuous, "tsit5", _TSIT5_NOTE, _FLOOR_TSIT5),
        _polynomial_table(),
    )
