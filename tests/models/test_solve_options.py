"""Solver, stop and gradient by name."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

import equilibria as eq
from equilibria.gradients.phantom import JFB, NeumannPhantom, UnrolledPhantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.models.solve_options import AdjointName, GradientName, SolveOptions, SolverName, relative_stop
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.krylov import GMRES
from equilibria.solvers.picard import Picard
from equilibria.solvers.steady_state import SteadyState

OPTIONS = SolveOptions(stop=relative_stop(1e-3, 12), adjoint_stop=relative_stop(1e-4, 7))


def test_every_solver_has_a_name() -> None:
    made = {name: dataclasses.replace(OPTIONS, solver=name, history=9).make_solver() for name in get_args(SolverName)}
    assert made == {
        "anderson": eq.Anderson(),
        "broyden": Broyden(history=9),
        "picard": Picard(),
        "tsit5": SteadyState(method="tsit5"),
        "bs3": SteadyState(method="bs3"),
    }
    assert dataclasses.replace(OPTIONS, solver="broyden").make_solver() == Broyden()


def test_every_gradient_has_a_name() -> None:
    made = {name: dataclasses.replace(OPTIONS, gradient=name).make_gradient() for name in get_args(GradientName)}
    assert made == {
        "implicit": eq.Implicit(solver=GMRES(restart=None), stop=OPTIONS.adjoint_stop),
        "upg": UnrolledPhantom(steps=5, damping=0.5),
        "npg": NeumannPhantom(steps=5, damping=0.5),
        "jfb": JFB(),
        "bptt": Unrolled(depth=12),
    }


@pytest.mark.parametrize(
    ("adjoint", "solver"), [("gmres", GMRES(restart=3)), ("broyden", Broyden(history=7)), ("solver", Picard(damping=0.5))]
)
def test_every_adjoint_solver_has_a_name(adjoint: AdjointName, solver: object) -> None:
    options = dataclasses.replace(OPTIONS, solver="picard", relaxation=0.5, directions=3, adjoint=adjoint)
    gradient = options.parts()["gradient"]
    assert gradient == eq.Implicit(solver=solver, stop=OPTIONS.adjoint_stop)  # type: ignore[arg-type]
