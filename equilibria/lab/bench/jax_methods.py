"""The JAX methods: jaxopt and optimistix, each training step compiled as a whole by XLA."""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.packing import State
from equilibria.lab.bench.cases import Case
from equilibria.lab.bench.jax_cases import Array, JaxCase, load, translate
from equilibria.lab.bench.methods import Method, Ours

JAXOPT, OPTIMISTIX = "jaxopt", "optimistix"
RESTART = 20  # restart length of GMRES, the default of both libraries


@dataclass(frozen=True)
class JaxProblem:
    """The equation z = f(z, arguments) inside a traced function.

    norm  norm of the solution, as root mean square over samples; absolute tolerances of both libraries are multiples of it
    """

    f: Callable[[Array, Array], Array]
    start: Array
    arguments: Array
    tol: Array
    norm: float
    max_steps: int


@dataclass(frozen=True)
class Compiled:
    """The compiled functions of a case; the tolerance is an argument, so changing it needs no compilation."""

    case: JaxCase
    solve: Callable[[float], Array]
    step: Callable[[float], tuple[Any, Array]]


class JaxMethod(Method):
    """A method of a JAX library. The numbers of a case are copied to JAX once; results are views in torch."""

    _built: tuple[Case, Compiled] | None = None

    @abstractmethod
    def fixed_point(self, problem: JaxProblem) -> Array:
        """Return the solution z, which has an implicit gradient with respect to the arguments."""

    def solve(self, case: Case, tol: float) -> State:
        compiled = self._compiled(case)
        return compiled.case.state(load().block_until_ready(compiled.solve(tol)))

    def step(self, case: Case, tol: float) -> tuple[State, Sequence[Tensor]]:
        compiled = self._compiled(case)
        gradients, z = load().block_until_ready(compiled.step(tol))
        return compiled.case.state(z), compiled.case.gradients(*gradients)

    def _compiled(self, case: Case) -> Compiled:
        if self._built is None or self._built[0] is not case:
            self._built = (case, self._compile(case))
        return self._built[1]

    def _compile(self, case: Case) -> Compiled:
        jax, own, norm = load(), translate(case), _norm(case)

        def f(z: Array, arguments: Array) -> Array:
            return own.cell(arguments[0], z, *arguments[1])

        def solve(arguments: Array, start: Array, tol: Array) -> Array:
            return self.fixed_point(JaxProblem(f, start, arguments, tol, norm, case.max_steps))

        def loss(arguments: Array, start: Array, cotangent: Array, tol: Array) -> tuple[Array, Array]:
            z = solve(arguments, start, tol)
            products = jax.tree_util.tree_map(lambda v, part: (v * part).sum(), cotangent, z)
            return sum(jax.tree_util.tree_leaves(products)), z

        arguments = (own.weights, own.inputs)
        solution, gradient = jax.jit(solve), jax.jit(jax.grad(loss, has_aux=True))
        return Compiled(own, partial(solution, arguments, own.start), partial(gradient, arguments, own.start, own.cotangent))


@dataclass(eq=False)
class JaxOpt(JaxMethod):
    """A solver of jaxopt with one of its linear solvers for the gradient.

    solver   AndersonAcceleration or FixedPointIteration
    linear   "solve_normal_cg", jaxopt's default, or "solve_gmres"
    options  options of the solver
    """

    name: str
    solver: str
    linear: str
    options: dict[str, Any] = field(default_factory=dict)
    library: str = JAXOPT

    def fixed_point(self, problem: JaxProblem) -> Array:
        jaxopt = _jaxopt()
        restart = RESTART if self.linear == "solve_gmres" else 1  # the maxiter of solve_gmres counts restarts
        linear = partial(
            getattr(jaxopt.linear_solve, self.linear), tol=problem.tol, maxiter=math.ceil(problem.max_steps / restart)
        )
        samples = len(load().tree_util.tree_leaves(problem.start)[0])
        solver = getattr(jaxopt, self.solver)(
            problem.f,
            maxiter=problem.max_steps,
            tol=problem.tol * problem.norm * samples**0.5,  # jaxopt compares the norm of the whole batch
            implicit_diff_solve=linear,
            **self.options,
        )
        return solver.run(problem.start, problem.arguments).params


@dataclass(eq=False)
class Optimistix(JaxMethod):
    """FixedPointIteration of optimistix, with gradients by lineax's GMRES."""

    name: str
    library: str = OPTIMISTIX

    def fixed_point(self, problem: JaxProblem) -> Array:
        optimistix, lineax = importlib.import_module("optimistix"), importlib.import_module("lineax")
        atol = problem.tol * problem.norm / _numbers(problem.start) ** 0.5
        linear = lineax.GMRES(rtol=problem.tol, atol=1e-3 * atol, restart=RESTART, max_steps=problem.max_steps)
        found = optimistix.fixed_point(
            problem.f,
            optimistix.FixedPointIteration(rtol=problem.tol, atol=atol, norm=_worst_sample),
            problem.start,
            problem.arguments,
            max_steps=problem.max_steps,
            adjoint=optimistix.ImplicitAdjoint(linear),
            throw=False,
        )
        return found.value


def jax() -> list[Method]:
    """Return the methods of jaxopt and optimistix; none if JAX is not installed."""
    if not _installed("jax"):
        return []
    return (_jaxopt_methods() if _installed("jaxopt") else []) + (
        [Optimistix(f"{OPTIMISTIX} Picard, GMRES")] if _installed("optimistix") else []
    )


def _jaxopt_methods() -> list[Method]:
    anderson, picard = "AndersonAcceleration", "FixedPointIteration"
    # the ridge of jaxopt's Anderson is absolute and dominates small residuals; "ridge repaired" makes it negligible
    repaired = {"ridge": 1e-9}
    return [
        JaxOpt(f"{JAXOPT} Anderson, normal CG", anderson, "solve_normal_cg"),
        JaxOpt(f"{JAXOPT} Anderson, GMRES", anderson, "solve_gmres"),
        JaxOpt(f"{JAXOPT} Anderson, ridge repaired, normal CG", anderson, "solve_normal_cg", repaired),
        JaxOpt(f"{JAXOPT} Picard, normal CG", picard, "solve_normal_cg"),
        JaxOpt(f"{JAXOPT} Picard, GMRES", picard, "solve_gmres"),
    ]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _jaxopt() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxopt warns at its import that it is no longer maintained
        return importlib.import_module("jaxopt")


def _norm(case: Case) -> float:
    parts = pytree.tree_leaves(Ours().solve(case, case.rtol))
    return float(torch.cat([part.flatten() for part in parts]).norm()) / case.batch**0.5


def _worst_sample(state: Array) -> Array:
    """Return the largest root mean square over samples, the norm that `Judge` uses."""
    parts = [part.reshape(len(part), -1) for part in load().tree_util.tree_leaves(state)]
    return (sum((part * part).sum(1) for part in parts) / _numbers(state)).max() ** 0.5


def _numbers(state: Array) -> int:
    """Return the number of entries per sample."""
    return sum(math.prod(part.shape[1:]) for part in load().tree_util.tree_leaves(state))
