"""The torch methods: configurations of equilibria and of TorchDEQ, each set up as a user would."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.gradients.implicit import Implicit
from equilibria.lab.bench.cases import Case
from equilibria.native import disabled
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import AnySolver
from equilibria.solvers.krylov import BiCGSTAB
from equilibria.solvers.picard import Picard
from equilibria.stop import Stop

OURS, TORCHDEQ = "equilibria", "TorchDEQ"
DEFAULT = f"{OURS} default"
PLAIN, COMPILED = f"{DEFAULT}, plain", f"{DEFAULT}, compiled"

SolveCall = Callable[[bool], State]  # runs a solve: True in training mode


class Method(ABC):
    """A library with its settings. The functions in `rules` count and time all methods in the same way."""

    library: str
    name: str

    @abstractmethod
    def solve(self, case: Case, tol: float) -> State:
        """Return z without gradients, solved to `tol` by the definition of tolerance of this method."""

    @abstractmethod
    def step(self, case: Case, tol: float) -> tuple[State, Sequence[Tensor]]:
        """Return z and the gradients of `case.loss(z)` with respect to `case.leaves`, both solved to `tol`."""

    def counted(self) -> Method:
        """Return the same method without compilation, so that hooks see every call of the cell."""
        return self


class LayerMethod(Method):
    """A method whose layer is built once for a case and a tolerance, and then called in every step."""

    _built: tuple[Case, float, SolveCall] | None = None

    @abstractmethod
    def build(self, case: Case, tol: float) -> SolveCall: ...

    def solve(self, case: Case, tol: float) -> State:
        with torch.no_grad():
            return self._layer(case, tol)(False)

    def step(self, case: Case, tol: float) -> tuple[State, Sequence[Tensor]]:
        z = self._layer(case, tol)(True)
        gradients = torch.autograd.grad(case.loss(z), case.leaves)
        return pytree.tree_map(Tensor.detach, z), gradients

    def _layer(self, case: Case, tol: float) -> SolveCall:
        if self._built is None or self._built[0] is not case or self._built[1] != tol:
            self._built = (case, tol, self.build(case, tol))
        return self._built[2]


@dataclass(eq=False)
class Ours(LayerMethod):
    """An eq.DEQ. Settings that are None keep their default; native=False makes the solvers step in torch."""

    name: str = DEFAULT
    solver: AnySolver | None = None
    adjoint: AnySolver | None = None
    compile: bool = False
    native: bool = True
    library: str = OURS

    def solve(self, case: Case, tol: float) -> State:
        with self._steps():
            return super().solve(case, tol)

    def step(self, case: Case, tol: float) -> tuple[State, Sequence[Tensor]]:
        with self._steps():
            return super().step(case, tol)

    def _steps(self) -> AbstractContextManager[None]:
        return nullcontext() if self.native else disabled()

    def build(self, case: Case, tol: float) -> SolveCall:
        deq = self.deq(case, tol)

        def layer(training: bool) -> State:
            return deq.train(training)(*case.inputs)

        return layer

    def deq(self, case: Case, tol: float) -> DEQ:
        stop = Stop(rtol=tol, atol=0, max_steps=case.max_steps, on_failure="ignore")
        options: dict[str, Any] = {} if self.solver is None else {"solver": self.solver}
        if self.adjoint is not None:
            options["gradient"] = Implicit(solver=self.adjoint)
        start = case.start
        # the default start of a DEQ is zeros in the shape of its first input
        if not (isinstance(start, Tensor) and start.shape == case.inputs[0].shape and not bool(start.any())):
            options["init"] = lambda *inputs: case.start
        return DEQ(case.cell, stop=stop, compile=self.compile, **options)

    def counted(self) -> Method:
        return replace(self, compile=False) if self.compile else self


@dataclass(eq=False)
class TorchDEQ(LayerMethod):
    """TorchDEQ with the same solver forward and backward.

    solver   name of the solver in TorchDEQ
    hook     compute the gradient by a backward hook instead of an autograd function
    options  options of the forward solver; TorchDEQ cannot pass them to the backward solver
    """

    name: str
    solver: str
    hook: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    library: str = TORCHDEQ

    def build(self, case: Case, tol: float) -> SolveCall:
        from torchdeq import get_deq

        both = {"solver": self.solver, "max_iter": case.max_steps, "tol": tol, "stop_mode": "rel"}
        settings = {f"{side}_{key}": value for side in "fb" for key, value in both.items()}
        deq = get_deq(**settings, **{"hook_ift" if self.hook else "ift": True})
        single = isinstance(case.start, Tensor)

        def cell(*z: Tensor) -> State:
            return case.cell(z[0] if single else z, *case.inputs)

        def layer(training: bool) -> State:
            start = case.start if single else list(case.start)
            z = deq.train(training)(cell, start, solver_kwargs=dict(self.options))[0][-1]
            return z if single else tuple(z)

        return layer


def ours(compile: bool = False) -> list[Method]:
    """Return the default configuration of equilibria and common alternatives."""
    found: list[Method] = [
        Ours(),
        Ours(PLAIN, native=False),
        Ours(f"{OURS} Picard", Picard()),
        Ours(f"{OURS} Anderson, Anderson adjoint", Anderson(), Anderson()),
        Ours(f"{OURS} Anderson, BiCGSTAB adjoint", Anderson(), BiCGSTAB()),
        Ours(f"{OURS} Broyden", Broyden()),
    ]
    return found + ([Ours(COMPILED, compile=True)] if compile else [])


def torchdeq() -> list[Method]:
    """Return TorchDEQ's solvers with both of its implicit gradients; none if TorchDEQ is not installed."""
    if importlib.util.find_spec("torchdeq") is None:
        return []
    # the ridge of TorchDEQ's Anderson is absolute and dominates small residuals; "ridge repaired" makes it negligible
    repaired = {"lam": 1e-9}
    return [
        TorchDEQ(f"{TORCHDEQ} Picard", "fixed_point_iter"),
        TorchDEQ(f"{TORCHDEQ} Anderson", "anderson"),
        TorchDEQ(f"{TORCHDEQ} Anderson, hook", "anderson", hook=True),
        TorchDEQ(f"{TORCHDEQ} Anderson, ridge repaired", "anderson", options=repaired),
        TorchDEQ(f"{TORCHDEQ} Anderson, ridge repaired, hook", "anderson", hook=True, options=repaired),
        TorchDEQ(f"{TORCHDEQ} Broyden", "broyden"),
    ]
