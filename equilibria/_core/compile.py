"""Compiling a whole solve, loop, check, solver step and cell, into one graph with torch's while_loop operator.

Values that do not depend on the state (input injections, the linearisation of an adjoint) are computed once, before the
loop (`Parts`). The first step is taken before the loop too, because shapes of the state still change in it.

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
import operator
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.while_loop import while_loop_op
from torch.fx.experimental.proxy_tensor import make_fx

from equilibria._core import autodiff_modes
from equilibria._core.autodiff_modes import no_autocast
from equilibria._core.bookkeeping import SolveRecord
from equilibria._core.loop import finished, measure, solve
from equilibria._core.maps import Counter, Equation, FlatMap, Map
from equilibria._core.results import SolveResult
from equilibria.solution import Status
from equilibria.solvers.base import Solver
from equilibria.solvers.picard import Picard
from equilibria.solvers.rowwise import collect, rebuild
from equilibria.stop import FLOOR, Stop, euclidean_norm, rms_norm

SHAPES = 8  # programs made for one layer, of forward solves and of adjoint ones each; further shapes take the plain loop
SIGHTINGS = (
    3  # times a further batch size must come up to be compiled, which takes half a minute; before, the plain loop runs
)
PADDING = 2  # times its rows that a batch may get, so that the program of a larger one runs it
TRIALS = 5  # of either loop, when a shape comes up first
SLACK = 10.0  # residuals may differ by this factor: linear solvers carry theirs by recurrence
log = logging.getLogger("equilibria.compile")
Run = Callable[..., Sequence[Tensor]]
Backend = Callable[[fx.GraphModule, Sequence[Tensor]], Run]


def inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
    """Machine code by torch's own compiler; on a CPU with the loop itself in C++."""
    run: Run = torch._inductor.compile(graph, list(inputs), options={"cpp_wrapper": inputs[0].device.type == "cpu"})
    return run


class Compiler:
    """Compiled solves of one layer, by what they depend on; where one cannot be had the plain loop runs, with a warning.

    backend  what makes a function of a graph
    trials   how often either loop is timed for the choice between them; 0: the compiled one is taken unasked
    """

    def __init__(self, backend: Backend = inductor, trials: int = TRIALS) -> None:
        self.backend, self.trials = backend, trials
        self._programs: dict[Hashable, Program | None] = {}  # what runs a call; None: the plain loop
        self._made: dict[type[Equation], int] = {}  # programs so far
        self._families: dict[Hashable, list[Program]] = {}  # those in use, of calls that differ in their batch size alone
        self._sightings: dict[Hashable, int] = {}
        self._failed = False

    def solve(self, f: FlatMap, z0: Tensor, solver: Any, stop: Stop, **options: Any) -> SolveResult:
        """As `equilibria._core.loop.solve`, by the compiled or the plain loop, whichever is faster."""

        def plain() -> SolveResult:
            return solve(f, z0, solver, stop, **options)

        if self._failed or not isinstance(f, Map) or (equation := f.equation) is None:
            return plain()
        if not _compilable(equation, solver, stop, options):
            return plain()
        if (cause := equation.untraceable()) is not None:
            self._give_up(cause)
            return plain()
        call = _Call(f, equation, z0, solver, stop, options)
        try:
            program = self._program(call, plain)
            found = None if program is None else program(call)
        except Exception as error:  # whatever a cell may do that cannot be traced or compiled, the plain loop can
            self._give_up(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300])
            return plain()
        if program is None or found is None or found.faint is not None:
            return plain()
        if equation.linear:  # measured by whoever asked for the solution
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

    def _program(self, call: _Call, plain: Callable[[], SolveResult]) -> Program | None:
        """What runs this call; None: the plain loop.

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

    def _faster(self, program: Program, call: _Call, plain: Callable[[], SolveResult]) -> Program | None:
        """The program, if it gives a right answer in less time than the plain loop."""

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


class Program:
    """A compiled solve for one equation, solver, stop and set of shapes."""

    def __init__(self, backend: Backend, call: _Call) -> None:
        self.solver, self.stop, self.precision, self.rows = call.solver, call.stop, call.options["precision"], call.rows
        self.extra = call.extra
        with torch.no_grad(), autodiff_modes.tracing(), no_autocast(call.z0.device):
            parts = Parts.of(call.equation, call.z0, call.f.args)
            graph = make_fx(lambda *given: self._loop(parts, *given), tracing_mode="fake")(*call.inputs())
            self.run = backend(graph, call.inputs())

    def __call__(self, call: _Call) -> SolveResult | None:
        """The solve; None if its start is so small or large that squares leave the dtype: the plain loop copes with that."""
        inputs, rows = call.inputs(), call.rows
        with torch.no_grad():
            step, *tensors = self.run(*(inputs if rows == self.rows else self._padded(call, inputs)))
        if rows != self.rows:
            tensors = [each[:rows] for each in tensors]
        record = SolveRecord(self.stop, call.z0, call.options["scale"], self.precision)
        record.load(tensors)
        if record.unusual() and record.unusual_rows():
            return None
        taken = int(step)
        evaluations = taken + (call.options["known"] is None)
        counter = Counter(evaluations, evaluations * self.rows, taken if call.equation.linear else 0)
        return finished(record.close(), counter, taken)

    def _padded(self, call: _Call, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of fewer rows than the program has, with the first row in place of those that are missing."""
        place = torch.arange(self.rows, device=inputs[0].device)
        index = torch.where(place < len(inputs[0]), place, torch.zeros_like(place))
        rows = [True] * (1 + sum(self.extra)) + list(call.equation.rowwise)
        return [tensor.index_select(0, index) if has else tensor for tensor, has in zip(inputs, rows, strict=True)]

    def _loop(self, parts: Parts, z0: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The solve as it is traced: steps taken, and the tensors."""
        rest = list(given)
        scale = rest.pop(0) if self.extra[0] else None
        known = rest.pop(0) if self.extra[1] else None
        saved = parts.prepare(*rest)
        state, record = self._begin(_Traced(parts, saved, (z0, known)), z0, scale)
        fixed = [*saved, *([] if scale is None else [scale])]
        own = collect(state, Tensor)
        one = torch.ones((), dtype=torch.int64, device=z0.device)
        # the loop takes no tensor twice, nor any view
        moving = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, *own, *record.tensors())]

        def read(tensors: Sequence[Tensor]) -> tuple[Tensor, Any, SolveRecord]:
            """The step, the state of the solver and the record, from the tensors that the loop carries."""
            step, *rest = tensors[: len(moving)]
            record = SolveRecord(self.stop, rest[0], None if scale is None else tensors[-1], self.precision)
            record.load(rest[len(own) :])
            return step, rebuild(state, iter(rest[: len(own)]), iter(collect(state, int))), record

        def body(*tensors: Tensor) -> tuple[Tensor, ...]:
            step, now, record = read(tensors)
            f = _Traced(parts, tensors[len(moving) :][: len(saved)])
            f.fell = record.fell
            now = self.solver.step(f, now)  # type: ignore[arg-type]
            record.record_rows(now, step + 1)
            out = (step + 1, *collect(now, Tensor), *record.tensors())
            # contiguous() leaves tensors of one row the strides they have, and the loop wants always the same
            return tuple(new.clone(memory_format=torch.contiguous_format) for new in out)

        def running(*tensors: Tensor) -> Tensor:
            step, _, record = read(tensors)
            assert record.open is not None
            return (step < self.stop.max_steps) & record.open.any()

        step, *after = while_loop_op(running, body, tuple(moving), tuple(fixed))  # type: ignore[arg-type]
        return (step, *after[len(own) :])

    def _begin(self, f: _Traced, z0: Tensor, scale: Tensor | None) -> tuple[Any, SolveRecord]:
        """State and tensors after the first step, which comes before the loop since shapes still change in it."""
        record = SolveRecord(self.stop, z0, scale, self.precision)
        state = self.solver.init(f, z0)  # type: ignore[arg-type]
        record.record_rows(state, 0)
        f.growth = 0.0  # as in the plain loop: before the first step nothing can have grown
        state = self.solver.step(f, state)  # type: ignore[arg-type]
        f.growth = _Traced.growth
        record.record_rows(state, 1)
        return self.solver.fixed_shape_state(state), record


@dataclass(frozen=True)
class Parts:
    """A map in two: what does not depend on the state, and what does."""

    prepare: Callable[..., Sequence[Tensor]]
    apply: Callable[..., Tensor]

    @staticmethod
    def of(equation: Equation, z: Tensor, args: Sequence[Tensor]) -> Parts:
        function = equation.product if equation.linear else equation
        given = [z, *[arg.detach() for arg in args]]
        written = make_fx(lambda z, *args: function(z, *args), tracing_mode="fake")(*given)
        # in a trace of the trace: what torch takes apart below functionalize writes into memory of its own
        pure = torch.func.functionalize(written, remove="mutations")
        return _split(_plain(make_fx(pure, tracing_mode="fake")(*given)))


def _plain(graph: fx.GraphModule) -> fx.GraphModule:
    """Without what torch's compiler gets wrong: a + alpha b where b is a product of matrices loses its alpha there."""
    for node in list(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise RuntimeError(f"{node.target} writes into memory")
        if node.target is torch.ops.aten.add.Tensor and (alpha := node.kwargs.get("alpha", 1)) != 1:
            a, b = node.args
            with graph.graph.inserting_before(node):
                scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (b, alpha))
                scaled.meta = dict(node.meta)
            node.args, node.kwargs = (a, scaled), {}
    graph.recompile()
    return graph


def _split(whole: fx.GraphModule) -> Parts:
    """At the first placeholder, the state: what can be computed without it comes first."""
    nodes = list(whole.graph.nodes)
    state, output = nodes[0], nodes[-1]
    late = {state}
    for node in nodes[1:-1]:
        if any(source in late for source in node.all_input_nodes):
            late.add(node)
    inner, saved = _inner(output, late)

    before, after = fx.Graph(), fx.Graph()
    early: dict[fx.Node, fx.Node] = {}
    inside = {state: after.placeholder("z")} | {node: after.placeholder(f"saved_{node.name}") for node in saved}
    for node in nodes[1:-1]:
        if node not in late:
            early[node] = before.node_copy(node, early.__getitem__)
        if node in inner and node is not state:
            inside[node] = after.node_copy(node, inside.__getitem__)
    before.output([early[node] for node in saved])
    (result,) = output.args if isinstance(output.args[0], fx.Node) else output.args[0]
    after.output(inside[result])
    before.eliminate_dead_code()
    return Parts(fx.GraphModule(whole, before), fx.GraphModule(whole, after))


def _inner(output: fx.Node, late: set[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes of the part that depends on the state, and the values from outside that it needs.

    A view is no value of its own, and costs nothing to be taken inside.
    """
    inner: set[fx.Node] = set()
    saved: dict[fx.Node, None] = {}
    queue = list(output.all_input_nodes)
    while queue:
        node = queue.pop()
        if node in inner or node in saved:
            continue
        if node in late or _is_view(node):
            inner.add(node)
            queue += node.all_input_nodes
        else:
            saved[node] = None
    return inner, list(saved)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


class _Traced:
    """The map as solvers see it in a trace: nothing is counted, nothing is known about values."""

    growth = float("inf")
    fell: Tensor | None = None

    def __init__(self, parts: Parts, saved: Sequence[Tensor], known: tuple[Tensor, Tensor | None] | None = None) -> None:
        self.parts, self.saved, self.known = parts, saved, known

    def __call__(self, z: Tensor) -> Tensor:
        if self.known is not None and z is self.known[0] and self.known[1] is not None:
            return self.known[1].clone()
        return self.product(z)

    def jacobian(self, z: Tensor) -> _Traced:
        return self

    def product(self, z: Tensor) -> Tensor:
        return self.parts.apply(z, *self.saved)


def _believable(found: SolveResult, expected: SolveResult, call: _Call) -> bool:
    """True if the result of a program is finite where that of the plain loop is, and its residual is the measured one."""
    lost = found.stats.status == Status.NONFINITE
    if not torch.equal(lost, expected.stats.status == Status.NONFINITE):
        return False
    given = call.options | {"known": None, "verify": False}
    stop = dataclasses.replace(call.stop, max_steps=0)
    seen = solve(call.f, found.z, Picard(), stop, **given).stats.residual
    within = SLACK * found.stats.residual.clamp_min(stop.rtol) + FLOOR * given["precision"]
    return bool((lost | (seen <= within)).all())


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _compilable(equation: Equation, solver: Any, stop: Stop, options: dict[str, Any]) -> bool:
    """True if a solve can be compiled: independent rows, a solver with fixed shapes, no trace and no stored iterates."""
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


@dataclass(frozen=True)
class _Call:
    """A solve that is to be run by a program."""

    f: Map
    equation: Equation  # of `f`
    z0: Tensor
    solver: Solver[Any]
    stop: Stop
    options: dict[str, Any]

    @property
    def rows(self) -> int:
        return len(self.z0)

    @property
    def extra(self) -> list[bool]:
        """Whether the inputs contain a scale and a known value."""
        return [self.options["scale"] is not None, self.options["known"] is not None]

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a program takes."""
        extra = (tensor for tensor in (self.options["scale"], self.options["known"]) if tensor is not None)
        return tuple(tensor.detach() for tensor in (self.z0, *extra, *self.f.args))

    def key(self) -> Hashable:
        """All that a program depends on."""
        return self._identity([tensor.shape for tensor in self._tensors()])

    def family(self) -> Hashable:
        """The same but for the batch size."""
        rows = (True, *self.equation.rowwise)
        shapes = [tensor.shape for tensor in self._tensors()]
        return self._identity([shape[1:] if has else shape for shape, has in zip(shapes, rows, strict=True)])

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.z0, *self.f.args

    def _identity(self, shapes: Sequence[torch.Size]) -> Hashable:
        tensors = tuple((tensor.stride(), tensor.dtype, tensor.device) for tensor in self._tensors())
        given = tuple(name for name in ("scale", "known") if self.options[name] is not None)
        return type(self.equation), self.equation.fingerprint(), tuple(shapes), tensors, self.solver, self.stop, given
