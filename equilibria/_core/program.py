"""A solve as one compiled program: the cell is traced, split, and put into torch's while_loop operator with the solver.

States. `Parts.of` traces the map and splits the graph: values that do not depend on the state (input injections, the
linearisation of an adjoint) are computed once, before the loop. `Program` traces init and the first step, because shapes of
the state still change in them, then the loop over the tensors of solver state and record. A call with fewer rows is padded.

Invariants. All shapes are fixed, so that no row is dropped. The loop takes no tensor twice and no view. Nothing here reads a
value while it is traced; a run of the program waits for the device once, for the number of steps.
"""

from __future__ import annotations

import operator
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
from equilibria._core.loop import finished
from equilibria._core.maps import Counter, Equation, Map
from equilibria.solution import SolveResult
from equilibria.solvers.base import Solver
from equilibria.solvers.rowwise import collect, rebuild
from equilibria.stop import Stop

Run = Callable[..., Sequence[Tensor]]
Backend = Callable[[fx.GraphModule, Sequence[Tensor]], Run]


class Program:
    """A compiled solve for one equation, solver, stop and set of shapes."""

    def __init__(self, backend: Backend, call: Call) -> None:
        self.solver, self.stop, self.precision, self.rows = call.solver, call.stop, call.options["precision"], call.rows
        self.extra = call.extra
        with torch.no_grad(), autodiff_modes.tracing(), no_autocast(call.z0.device):
            parts = Parts.of(call.equation, call.z0, call.f.args)
            graph = make_fx(lambda *given: self._loop(parts, *given), tracing_mode="fake")(*call.inputs())
            self.run = backend(graph, call.inputs())

    def __call__(self, call: Call) -> SolveResult | None:
        """Run the solve; None if squares of its start leave the dtype, which the plain loop allows."""
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

    def _padded(self, call: Call, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs padded to the rows of the program: copies of the first row fill the others."""
        place = torch.arange(self.rows, device=inputs[0].device)
        index = torch.where(place < len(inputs[0]), place, torch.zeros_like(place))
        rows = [True] * (1 + sum(self.extra)) + list(call.equation.rowwise)
        return [tensor.index_select(0, index) if has else tensor for tensor, has in zip(inputs, rows, strict=True)]

    def _loop(self, parts: Parts, z0: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the traced loop; returns the steps taken and the tensors that it carried."""
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
            """Return the step, the solver's state and the record from the tensors that the loop carries."""
            step, *rest = tensors[: len(moving)]
            record = SolveRecord(self.stop, rest[0], None if scale is None else tensors[-1], self.precision)
            record.load(rest[len(own) :])
            return step, rebuild(state, iter(rest[: len(own)]), iter(collect(state, int))), record

        def body(*tensors: Tensor) -> tuple[Tensor, ...]:
            """Take one step of the loop on the tensors it carries."""
            step, now, record = read(tensors)
            f = _Traced(parts, tensors[len(moving) :][: len(saved)])
            f.fell, f.precision = record.fell, self.precision
            now = self.solver.step(f, now)  # type: ignore[arg-type]
            record.record_rows(now, step + 1)
            out = (step + 1, *collect(now, Tensor), *record.tensors())
            # contiguous() keeps the strides of tensors with one row, but the loop requires the same ones in every step
            return tuple(new.clone(memory_format=torch.contiguous_format) for new in out)

        def running(*tensors: Tensor) -> Tensor:
            """Return True while rows run and steps are left."""
            step, _, record = read(tensors)
            assert record.open is not None
            return (step < self.stop.max_steps) & record.open.any()

        step, *after = while_loop_op(running, body, tuple(moving), tuple(fixed))  # type: ignore[arg-type]
        return (step, *after[len(own) :])

    def _begin(self, f: _Traced, z0: Tensor, scale: Tensor | None) -> tuple[Any, SolveRecord]:
        """Return state and tensors after the first step; it runs before the loop, because shapes still change in it."""
        f.precision, record = self.precision, SolveRecord(self.stop, z0, scale, self.precision)
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
        """Trace an equation at z and split it; of a linear one the product is traced."""
        function = equation.product if equation.linear else equation
        given = [z, *[arg.detach() for arg in args]]
        written = make_fx(lambda z, *args: function(z, *args), tracing_mode="fake")(*given)
        # in a trace of the trace: what torch takes apart below functionalize writes into memory of its own
        pure = torch.func.functionalize(written, remove="mutations")
        return split(_without_scaled_sums(make_fx(pure, tracing_mode="fake")(*given)))


def _without_scaled_sums(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a + alpha b, which torch's compiler computes without alpha if b is a product of matrices."""
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


def split(whole: fx.GraphModule) -> Parts:
    """Split a graph at its first placeholder, the state: all that does not depend on it is computed first."""
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
    """Return the nodes that depend on the state, and the other values that they need.

    Views of values are taken inside, because they cost nothing there.
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
    """Return True if a node returns a view, or an entry of a tuple that such a node returns."""
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


class _Traced:
    """The map that solvers get in a trace: it counts no evaluations and reads no values of tensors."""

    growth = float("inf")
    fell: Tensor | None = None
    precision = 0.0

    def __init__(self, parts: Parts, saved: Sequence[Tensor], known: tuple[Tensor, Tensor | None] | None = None) -> None:
        self.parts, self.saved, self.known = parts, saved, known

    def __call__(self, z: Tensor) -> Tensor:
        """Return the traced map at z, or the value that is known for this z."""
        if self.known is not None and z is self.known[0] and self.known[1] is not None:
            return self.known[1].clone()
        return self.product(z)

    def jacobian(self, z: Tensor) -> _Traced:
        """Return self: in a trace solvers take the derivative of linear maps only."""
        return self

    def product(self, z: Tensor) -> Tensor:
        """Return the traced map at z; for a linear equation the product M z."""
        return self.parts.apply(z, *self.saved)


@dataclass(frozen=True)
class Call:
    """A solve that is to be run by a program."""

    f: Map
    equation: Equation  # of `f`
    z0: Tensor
    solver: Solver[Any]
    stop: Stop
    options: dict[str, Any]

    @property
    def rows(self) -> int:
        """The batch size of the call."""
        return len(self.z0)

    @property
    def extra(self) -> list[bool]:
        """Two flags: whether the inputs contain a scale, and whether they contain the known value of f(z0)."""
        return [self.options["scale"] is not None, self.options["known"] is not None]

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that a program takes."""
        extra = (tensor for tensor in (self.options["scale"], self.options["known"]) if tensor is not None)
        return tuple(tensor.detach() for tensor in (self.z0, *extra, *self.f.args))

    def key(self) -> Hashable:
        """Return the key of the program for this call: everything that a program depends on."""
        return self._identity([tensor.shape for tensor in self._tensors()])

    def family(self) -> Hashable:
        """Return the key without the batch size, which programs of one family differ in."""
        rows = (True, *self.equation.rowwise)
        shapes = [tensor.shape for tensor in self._tensors()]
        return self._identity([shape[1:] if has else shape for shape, has in zip(shapes, rows, strict=True)])

    def _tensors(self) -> tuple[Tensor, ...]:
        """Return the start and the args, whose shapes identify a program."""
        return self.z0, *self.f.args

    def _identity(self, shapes: Sequence[torch.Size]) -> Hashable:
        """Return the key of a call with these shapes."""
        tensors = tuple((tensor.stride(), tensor.dtype, tensor.device) for tensor in self._tensors())
        given = tuple(name for name in ("scale", "known") if self.options[name] is not None)
        return type(self.equation), self.equation.fingerprint(), tuple(shapes), tensors, self.solver, self.stop, given
