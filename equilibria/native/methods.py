"""What the loop does between two calls of a kernel: evaluate the map, or take a product with its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria._core.maps import Map
from equilibria.native.workspace import ANDERSON, BROYDEN, GMRES, GMRES_BEGIN, PICARD, Workspace
from equilibria.solvers import anderson, krylov
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import SMALL_STATE, Solver, memory
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.picard import Picard


class Iteration:
    """A solver with one evaluation a step: Picard, Anderson, Broyden.

    z, fz  the iterate recorded last, (rows, n)
    out    where to evaluate next
    """

    def __init__(self, kernels: Any, f: Map, z0: Tensor, fz: Tensor, solver: Any, settings: dict[str, Any]) -> None:
        self.f, self.kind = f, KINDS[type(solver)]
        self.z, self.fz = _rows(z0, z0), _rows(fz, z0)
        most, vectors, more = _needs(solver, z0)
        self.work = Workspace(kernels, self.z, most, vectors, settings | more)

    def begin(self, last: bool) -> int:
        return self._record(self.z, 0, last)

    def step(self, step: int, last: bool) -> int:
        before, self.z = self.z, self.out
        self.fz = _rows(self.f(self.z), self.z)
        return self._record(before, step, last)

    def _record(self, before: Tensor, step: int, last: bool) -> int:
        self.out = torch.empty_like(self.z)
        running = self.work.advance(self.kind, self.z, self.fz, before, None if last else self.out, step)
        self.work.make_room()
        if self.kind == BROYDEN:
            self.work.make_room_in_core()
        return running

    def drop(self, f: Map, index: Tensor) -> None:
        """Carry on with the rows at `index` alone, on which the map is `f`."""
        self.f = f
        self.z, self.fz, self.out = (tensor.index_select(0, index) for tensor in (self.z, self.fz, self.out))
        self.work.drop(index)


class Krylov:
    """GMRES: one product a step, z and its residual in the workspace."""

    def __init__(self, kernels: Any, f: Map, z0: Tensor, fz: Tensor, solver: krylov.GMRES, settings: dict[str, Any]) -> None:
        self.f, self.base, self.taken = f, z0, 0
        self.start = _rows(z0, z0), _rows(fz, z0)
        n = z0.shape[1]
        most = memory(solver.restart, solver.budget, z0, small=n, medium=20, large=20)
        first = most if solver.restart is not None or n <= SMALL_STATE else min(krylov.FEW, most)
        settings = settings | {
            "first_limit": first,
            "threshold": 10 * torch.finfo(z0.dtype).eps,
            "slow": krylov.SLOW,
        }
        self.work = Workspace(kernels, self.start[0], most, ("iterate", "other", "residual"), settings)

    @property
    def z(self) -> Tensor:
        return self.work.vector(self.taken % 2)

    @property
    def fz(self) -> Tensor:
        return self.z + self.work.vector(2)

    def begin(self, last: bool) -> int:
        z, fz = self.start
        return self._record(GMRES_BEGIN, z, fz, 0, last)

    def step(self, step: int, last: bool) -> int:
        if self.taken and self.taken % krylov.ANEW == 0:
            self._compute_residual()
        product = self.f.jacobian(self.base).product(self.out)
        self.taken += 1
        return self._record(GMRES, self.out, _rows(product, self.out), step, last)

    def _record(self, method: int, a: Tensor, b: Tensor, step: int, last: bool) -> int:
        self.out = torch.empty_like(a)
        running = self.work.advance(method, a, b, a, None if last else self.out, step)
        self.work.make_room()
        return running

    def drop(self, f: Map, index: Tensor) -> None:
        self.f = f
        self.base, self.out = self.base.index_select(0, index), self.out.index_select(0, index)
        self.work.drop(index)

    def _compute_residual(self) -> None:
        """Drop all directions and compute r = f(base) - base - A (z - base): errors of images grow with every step."""
        away = self.z - self.base
        left = self.f(self.base) - self.base - away + self.f.jacobian(self.base).product(away)
        place = slice(None) if self.work.place is None else self.work.place
        self.work.vectors[2][place] = left
        self.work.counter("count")[place] = 0
        self.work.context.wanted = 1
        running = self.work.status[place] < 0
        self.out = torch.where(running.unsqueeze(1), left, torch.zeros_like(left))


KINDS: dict[type[Solver[Any]], int] = {Picard: PICARD, Anderson: ANDERSON, Broyden: BROYDEN, krylov.GMRES: GMRES}


def _needs(solver: Any, z0: Tensor) -> tuple[int, tuple[str, ...], dict[str, Any]]:
    """Slots at most, vectors to keep per row, and settings."""
    n = z0.shape[1]
    if isinstance(solver, Picard):
        return 1, (), {"first_limit": 0, "damping": solver.damping}
    if isinstance(solver, Broyden):
        most = memory(solver.history, solver.budget, z0, small=2 * n, medium=20, large=20)
        return most, ("residual", "value"), {"first_limit": most}
    assert isinstance(solver, Anderson)
    most = memory(solver.history, solver.budget, z0, small=n, medium=4, large=3)
    settings = {"first_limit": most, "damping": solver.damping, "slow": float("inf")}
    settings |= {"threshold": solver._threshold(z0.dtype), "patience_of_trust": anderson.PATIENCE}
    return most, ("residual", "value"), settings


def _rows(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with contiguous rows, for kernels that read memory."""
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"The map must keep shape and dtype of its state: got {tuple(tensor.shape)}, {tensor.dtype} for a state of "
            f"{tuple(like.shape)}, {like.dtype}."
        )
    return tensor.contiguous()
