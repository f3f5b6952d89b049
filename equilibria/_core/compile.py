"""Choosing between compiled solves (`program`) and the plain loop, for every kind of call of a layer.

States. A call is identified by its equation, solver, stop and shapes. The first batch size is compiled at once. Further
ones are padded to a compiled size, and compiled themselves after `SIGHTINGS` calls. A new program must reproduce the result
of the plain loop; then both are timed, and the faster one runs this kind of call from then on. If anything fails to trace or
compile, the layer warns once and uses the plain loop.

Invariants. Shapes are fixed, so that no row is dropped; where dropping rows saves time, or kernels are large, the plain loop
is faster. A compiled result is checked by the cell itself; a program that fails the check is dropped.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from equilibria._core import autodiff_modes
from equilibria._core.loop import measure, solve
from equilibria._core.maps import Equation, FlatMap, Map
from equilibria._core.program import Backend, Call, Program, Run
from equilibria.solution import SolveResult, Status
from equilibria.solvers.base import Solver
from equilibria.solvers.picard import Picard
from equilibria.stop import FLOOR, Stop, euclidean_norm, rms_norm

SHAPES = 8  # programs made for one layer, of forward solves and of adjoint ones each; further shapes take the plain loop
# times a further batch size must come up to be compiled, which takes half a minute; before, the plain loop runs
SIGHTINGS = 3
PADDING = 2  # times its rows that a batch may get, so that the program of a larger one runs it
TRIALS = 5  # of either loop, when a shape comes up first
SLACK = 10.0  # residuals may differ by this factor: linear solvers carry theirs by recurrence
log = logging.getLogger("equilibria.compile")


def inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
    """Compile to machine code by torch's own compiler; on a CPU with the loop itself in C++."""
    run: Run = torch._inductor.compile(graph, list(inputs), options={"cpp_wrapper": inputs[0].device.type == "cpu"})
    return run


class Compiler:
    """The compiled solves of one layer; a call that cannot be compiled runs in the plain loop, with a warning.

    backend  function that turns a traced graph into a function
    trials   how often each loop is timed for the choice between them; 0: the compiled one is used untimed
    """

    def __init__(self, backend: Backend = inductor, trials: int = TRIALS) -> None:
        self.backend, self.trials = backend, trials
        self._programs: dict[Hashable, Program | None] = {}  # what runs a call; None: the plain loop
        self._made: dict[type[Equation], int] = {}  # programs so far
        self._families: dict[Hashable, list[Program]] = {}  # those in use, of calls that differ in their batch size alone
        self._sightings: dict[Hashable, int] = {}
        self._failed = False

    def solve(self, f: FlatMap, z0: Tensor, solver: Any, stop: Stop, **options: Any) -> SolveResult:
        """Solve as `loop.solve` does, by the compiled or the plain loop, whichever is faster."""

        def plain() -> SolveResult:
            return solve(f, z0, solver, stop, **options)

        if self._failed or not isinstance(f, Map) or (equation := f.equation) is None:
            return plain()
        if not _compilable(equation, solver, stop, options):
            return plain()
        if (cause := equation.untraceable()) is not None:
            self._give_up(cause)
            return plain()
        call = Call(f, equation, z0, solver, stop, options)
        try:
            program = self._program(call, plain)
            found = None if program is None else program(call)
        except Exception as error:  # the plain loop runs cells that cannot be traced or compiled
            self._give_up(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300])
            return plain()
        if program is None or found is None or found.faint is not None:
            return plain()
        if equation.linear:  # the caller measures the residual
            return found
        measured = measure(found, f, stop, options["precision"])
        if not bool((found.stats.converged & measured.stats.failed).any()):
            return measured
        self._drop(program)
        return plain()

    def _drop(self, program: Program) -> None:
        """Run without a program: what the cell computes has changed since it was compiled."""
        self._programs = {key: None if used is program else used for key, used in self._programs.items()}
        self._families = {
            family: [used for used in programs if used is not program] for family, programs in self._families.items()
        }
        warnings.warn(
            "A compiled solve gave an answer that the cell itself does not confirm, so solves of its kind run without being "
            "compiled from now on. Something that the cell reads has changed without being a parameter, a buffer, an input "
            "or an attribute of a module: make it one of these.",
            stacklevel=2,
        )

    def _program(self, call: Call, plain: Callable[[], SolveResult]) -> Program | None:
        """Return the program that runs this call; None for the plain loop.

        The first batch size is compiled at once. A further one is padded to one that is compiled already, if that is not
        much larger, and compiled itself when it has come up several times: the last batch of an epoch need not be.
        """
        key, family = call.key(), call.family()
        if key in self._programs:
            return self._programs[key]
        if family in self._families:
            fitting = [program for program in self._families[family] if call.rows <= program.rows <= PADDING * call.rows]
            if fitting:
                self._programs[key] = self._faster(min(fitting, key=lambda program: program.rows), call, plain)
                return self._programs[key]
            self._sightings[key] = self._sightings.get(key, 0) + 1
            if self._sightings[key] < SIGHTINGS:
                return None
        kind = type(call.equation)
        if self._made.get(kind, 0) >= SHAPES:
            return None
        self._made[kind] = self._made.get(kind, 0) + 1
        what = f"the {'adjoint' if call.equation.linear else 'forward'} solve for a batch of {call.rows}"
        _tell(f"compiling {what}; this may take a minute and happens once per shape ...")
        begun = time.perf_counter()
        program = Program(self.backend, call)
        self._programs[key] = chosen = self._faster(program, call, plain)
        used = "the plain loop is as fast and is used" if chosen is None else "the compiled loop is used"
        _tell(f"compiled {what} in {time.perf_counter() - begun:.0f} s: {used}.")
        self._families.setdefault(family, []).extend([] if chosen is None else [chosen])
        return chosen

    def _faster(self, program: Program, call: Call, plain: Callable[[], SolveResult]) -> Program | None:
        """Return the program, if it gives a right answer in less time than the plain loop."""

        def compiled() -> SolveResult | None:
            return program(call)

        found = compiled()
        if found is None:
            return None
        if not _believable(found, plain(), call):
            self._give_up("the machine code made of this cell gives other values than the cell does")
            return None
        times = [(_seconds(plain), _seconds(compiled)) for _ in range(self.trials)]
        ours, theirs = min((mine for _, mine in times), default=0.0), min((other for other, _ in times), default=0.0)
        return program if ours <= theirs else None

    def _give_up(self, cause: str) -> None:
        """Warn once, and use the plain loop for all later calls."""
        self._failed = True
        warnings.warn(
            f"Solves run without being compiled: {cause}. Leave compile=True out, or make the cell one that torch can "
            "trace: an nn.Module with its tensors as parameters, buffers or inputs, and no control flow on values.",
            stacklevel=2,
        )


def _tell(text: str) -> None:
    """Log a message, and show it where a person waits: on a terminal or in a notebook."""
    log.info(text)
    if sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        print(f"equilibria: {text}", file=sys.stderr, flush=True)


def _believable(found: SolveResult, expected: SolveResult, call: Call) -> bool:
    """Return True if a program's result is finite where the plain loop's is, and its residual is the measured one."""
    lost = found.stats.status == Status.NONFINITE
    if not torch.equal(lost, expected.stats.status == Status.NONFINITE):
        return False
    given = call.options | {"known": None, "verify": False}
    stop = dataclasses.replace(call.stop, max_steps=0)
    seen = solve(call.f, found.z, Picard(), stop, **given).stats.residual
    within = SLACK * found.stats.residual.clamp_min(stop.rtol) + FLOOR * given["precision"]
    return bool((lost | (seen <= within)).all())


def _seconds(run: Callable[[], Any]) -> float:
    """Return the time of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _compilable(equation: Equation, solver: Any, stop: Stop, options: dict[str, Any]) -> bool:
    """Return True if a solve can be compiled: independent rows, fixed shapes, no trace, no stored iterates."""
    if (
        autodiff_modes.inside_transform()
        or not isinstance(solver, Solver)
        or type(solver).fixed_shape_state is Solver.fixed_shape_state
        or options.get("keep_state")
    ):
        return False
    if equation.linear == solver.evaluates_residual:  # a linear solver on a cell, or another one on a linear system
        return False
    if equation.linear and options.get("known") is None:  # its right-hand side is not in the graph
        return False
    plain = not (stop.trace or stop.keep_every or stop.process_group) and stop.max_steps >= 1
    return plain and stop.norm in (rms_norm, euclidean_norm)
