"""Solvers side by side with TorchDEQ, at equal achieved accuracy: `python benchmarks/solvers.py --quick`.

The problem is z = tanh(W z + x) with 128 numbers per sample in float32 and |W| = contraction, W symmetric, orthogonal or
Gaussian. Libraries stop on different quantities, so each gets the loosest tolerance with which the worst sample's
relative residual, recomputed here in float64, is at most 1e-3, for the equilibrium and for the adjoint alike. Then come

evaluations  forward runs of the cell per training step, and
products     backward runs of it, both counted inside the cell, not taken from anybody's statistics
step time    of forward and backward pass, in units of ours: median over rounds in which all methods take turns

The adjoint is solved as each library does by default: by GMRES here, by the solver of the forward pass there. TorchDEQ
keeps its default settings but for a relative tolerance, and gets the step limit that its solve turned out to need.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import equilibria as eq

try:
    import torchdeq
except ImportError:
    torchdeq = None

N = 128
ACCURACY = 1e-3
LOOSEST, TIGHTEN, ATTEMPTS = 0.1, 0.7, 30  # tolerances to try: 0.1, 0.07, ... down to 3e-6
LIMIT = 1000  # steps of a solve

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "symmetric": lambda normal: normal + normal.T,
    "orthogonal": lambda normal: torch.linalg.qr(normal).Q,
    "gaussian": lambda normal: normal,
}
SOLVERS = ("Picard", "Anderson", "Broyden")

Solve = Callable[..., Tensor]  # inputs -> equilibrium with its gradient


class Cell(nn.Module):
    """tanh(W z + x) + probe, counting how often it is run forwards and backwards when `counting`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.counting = False
        self.evaluations = self.products = 0

    def forward(self, z: Tensor, x: Tensor, probe: Tensor | None = None) -> Tensor:
        inside = torch.addmm(x, z, self.weight.T)
        if self.counting:
            self.evaluations += 1
            if inside.requires_grad:
                inside.register_hook(self._count_product)
        return torch.tanh(inside) if probe is None else torch.tanh(inside) + probe

    def _count_product(self, _: Tensor) -> None:
        self.products += 1


@dataclass(frozen=True)
class Problem:
    """One cell with its inputs and the gradient v that arrives at the equilibrium."""

    kind: str
    contraction: float
    batch: int
    cell: Cell = field(repr=False)
    x: Tensor = field(repr=False)
    v: Tensor = field(repr=False)

    @staticmethod
    def make(kind: str, contraction: float, batch: int) -> Problem:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        weight = KINDS[kind](normal(N, N))
        weight = contraction * weight / torch.linalg.matrix_norm(weight, ord=2)
        # inputs this small leave tanh nearly linear at the equilibrium, so that its slope is the contraction promised
        x = 0.1 * normal(batch, N)
        return Problem(kind, contraction, batch, Cell(weight.float()), x.float(), normal(batch, N).float())

    def train(self, solve: Solve) -> None:
        """The pass that is timed."""
        self.cell.weight.grad = None
        solve(self.x).backward(self.v)

    def inspect(self, solve: Solve) -> Found:
        """The same pass, counted and judged. The adjoint is the gradient of a zero added to the cell."""
        probe = torch.zeros_like(self.x, requires_grad=True)
        cell = self.cell
        cell.evaluations, cell.products, cell.counting = 0, 0, True
        z = solve(self.x, probe)
        forward = cell.evaluations
        z.backward(self.v)
        cell.counting = False
        assert probe.grad is not None
        residual, adjoint_residual = self._residuals(z.detach(), probe.grad)
        return Found(residual, adjoint_residual, forward, cell.evaluations, cell.products)

    def _residuals(self, z: Tensor, g: Tensor) -> tuple[float, float]:
        """Of z = f(z) and of g = J'g + v, each of the worst sample, relative, in float64."""
        z, g, weight = z.double(), g.double(), self.cell.weight.detach().double()
        fz = torch.tanh(z @ weight.T + self.x.double())
        image = ((1 - fz.square()) * g) @ weight + self.v.double()
        return _worst(fz - z, fz), _worst(image - g, image)


@dataclass(frozen=True)
class Found:
    """What one training step reached and cost."""

    residual: float
    adjoint_residual: float
    forward_evaluations: int
    evaluations: int
    products: int

    @property
    def good(self) -> bool:
        return self.residual <= ACCURACY and self.adjoint_residual <= ACCURACY


@dataclass(frozen=True)
class Knobs:
    """Tolerances and step limits of the two solves."""

    forward: float = LOOSEST
    adjoint: float = LOOSEST
    forward_limit: int = LIMIT
    adjoint_limit: int = LIMIT


@dataclass(frozen=True)
class Method(ABC):
    solver: str
    library: ClassVar[str]

    @abstractmethod
    def prepare(self, cell: Cell, knobs: Knobs) -> Solve:
        """What a user builds once and calls in every training step."""


class Ours(Method):
    library = "equilibria"

    def prepare(self, cell: Cell, knobs: Knobs) -> Solve:
        solvers: dict[str, eq.Solver[Any]] = {"Picard": eq.Picard(), "Anderson": eq.Anderson(), "Broyden": eq.Broyden()}
        stop = eq.Stop(rtol=knobs.forward, atol=0, max_steps=knobs.forward_limit, on_failure="ignore")
        adjoint = eq.Stop(rtol=knobs.adjoint, atol=0, max_steps=knobs.adjoint_limit, on_failure="ignore")
        return eq.DEQ(cell, solver=solvers[self.solver], stop=stop, gradient=eq.Implicit(stop=adjoint))


class TorchDEQ(Method):
    library = "TorchDEQ"

    def prepare(self, cell: Cell, knobs: Knobs) -> Solve:
        name = {"Picard": "fixed_point_iter", "Anderson": "anderson", "Broyden": "broyden"}[self.solver]
        limits = {"f_max_iter": knobs.forward_limit, "b_max_iter": knobs.adjoint_limit}
        tolerances = {"f_tol": knobs.forward, "b_tol": knobs.adjoint, "f_stop_mode": "rel", "b_stop_mode": "rel"}
        deq = torchdeq.get_deq(ift=True, f_solver=name, b_solver=name, **limits, **tolerances)

        def solve(x: Tensor, *probe: Tensor) -> Tensor:
            found: Tensor = deq(lambda z: cell(z, x, *probe), torch.zeros_like(x))[0][-1]
            return found

        return solve


@dataclass
class Result:
    """A method on a problem; `found` and `seconds` are empty where it never reached the accuracy."""

    problem: Problem
    method: Method
    knobs: Knobs
    found: Found | None
    seconds: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        problem = {name: getattr(self.problem, name) for name in ("kind", "contraction", "batch")}
        method = {"library": self.method.library, "solver": self.method.solver}
        found = asdict(self.found) if self.found else None
        return problem | method | {"knobs": asdict(self.knobs), "found": found, "seconds": self.seconds}


def calibrate(method: Method, problem: Problem) -> Result:
    """Find the loosest tolerances that reach the accuracy."""
    knobs = Knobs()
    for _ in range(ATTEMPTS):
        found = problem.inspect(method.prepare(problem.cell, knobs))
        if found.good:
            if isinstance(method, TorchDEQ):  # it lays out memory for all the steps it may take: allow what it takes
                knobs = replace(knobs, forward_limit=found.forward_evaluations, adjoint_limit=found.products)
            return Result(problem, method, knobs, found)
        if found.residual > ACCURACY:
            knobs = replace(knobs, forward=knobs.forward * TIGHTEN)
        if found.adjoint_residual > ACCURACY:
            knobs = replace(knobs, adjoint=knobs.adjoint * TIGHTEN)
    return Result(problem, method, knobs, None)


def measure(problem: Problem, methods: Sequence[Method], rounds: int) -> list[Result]:
    """Calibrate every method, then time them in turns, in another order each round."""
    results = [calibrate(method, problem) for method in methods]
    ready = [(result, result.method.prepare(problem.cell, result.knobs)) for result in results if result.found]
    order = random.Random(0)
    for round in range(rounds + 1):
        for result, solve in order.sample(ready, len(ready)):
            start = time.perf_counter()
            problem.train(solve)
            if round:  # the first one warms up
                result.seconds.append(time.perf_counter() - start)
    return results


def report(results: Sequence[Result]) -> str:
    """Markdown: every solver of every problem, then the fastest of each library."""
    lines = [
        "| W | contraction | batch | solver | evaluations | TorchDEQ | products | TorchDEQ | step time, TorchDEQ : ours |"
    ]
    lines += ["|---|---:|---:|---|---:|---:|---:|---:|---:|"]
    problems = list({id(result.problem): result.problem for result in results}.values())
    for problem in problems:
        here = [result for result in results if result.problem is problem]
        for solver in SOLVERS:
            ours, theirs = (_pick(here, library, solver) for library in (Ours.library, TorchDEQ.library))
            lines.append(_row(problem, solver, ours, theirs))
        fastest = [_fastest(here, library) for library in (Ours.library, TorchDEQ.library)]
        names = " : ".join(result.method.solver if result else "–" for result in reversed(fastest))
        lines.append(_row(problem, f"**fastest** ({names})", *fastest))
    return "\n".join(lines)


def _row(problem: Problem, solver: str, ours: Result | None, theirs: Result | None) -> str:
    cells: list[Any] = [problem.kind, problem.contraction, problem.batch, solver]
    for name in ("evaluations", "products"):
        cells += [getattr(result.found, name) if result and result.found else "–" for result in (ours, theirs)]
    both = bool(ours and theirs and ours.seconds and theirs.seconds)
    cells.append(f"{_ratio(theirs, ours):.2f}" if both and ours and theirs else "–")
    return f"| {' | '.join(map(str, cells))} |"


def _ratio(a: Result, b: Result) -> float:
    return statistics.median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))


def _pick(results: Sequence[Result], library: str, solver: str) -> Result | None:
    found = [result for result in results if (result.method.library, result.method.solver) == (library, solver)]
    return found[0] if found else None


def _fastest(results: Sequence[Result], library: str) -> Result | None:
    timed = [result for result in results if result.method.library == library and result.seconds]
    return min(timed, key=lambda result: statistics.median(result.seconds), default=None)


def _worst(difference: Tensor, of: Tensor) -> float:
    return float((difference.norm(dim=1) / of.norm(dim=1)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small batch and few rounds, under a minute")
    parser.add_argument("--rounds", type=int, help="timing rounds, default 15 (5 with --quick)")
    parser.add_argument("--json", type=Path, help="write everything measured there")
    options = parser.parse_args()
    torch.set_num_threads(1)  # kernels this small vary far more with threads than methods differ
    methods = [library(solver) for library in (Ours, TorchDEQ) for solver in SOLVERS if library is Ours or torchdeq]
    results: list[Result] = []
    for batch in (32,) if options.quick else (32, 512):
        for kind in KINDS:
            for contraction in (0.9, 0.99):
                problem = Problem.make(kind, contraction, batch)
                results += measure(problem, methods, options.rounds or (5 if options.quick else 15))
    print(report(results))
    if torchdeq is None:
        print("\nTorchDEQ is not installed: `pip install torchdeq` puts it next to ours.")
    if options.json:
        setting: dict[str, Any] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        setting |= {"equilibria": eq.__version__, "accuracy": ACCURACY, "n": N}
        everything = {"setting": setting, "results": [result.as_dict() for result in results]}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
