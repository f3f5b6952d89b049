"""DEQ, a layer made of a cell, a solver, a stop and a gradient; `fixed_point` and `root` do the same for functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._core import autodiff_modes, opaque
from equilibria._core.autodiff_modes import Autocast, not_traced
from equilibria._core.compile import Compiler
from equilibria._core.equation import CellEquation
from equilibria._core.frozen_cell import FrozenCell
from equilibria._core.packing import Layout, State, zeros_like_first
from equilibria._core.problem import Problem
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.warmup import Warmup
from equilibria.remember import Keys
from equilibria.solution import Solution, note, recordings
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver, check_solver
from equilibria.solvers.robust import Robust
from equilibria.starts import Init, check_cell, check_init, first_steps, memory_of, note_first_call, prepared, start_of
from equilibria.stop import Stop


class DEQ(nn.Module):
    """The equilibrium z = cell(z, *inputs) as a layer.

    cell       nn.Module or callable, cell(z, *inputs) -> z of the same structure, batch first. If it has
               `prepare(*inputs)`, that is called once per solve and its result (a tensor or a tuple) replaces the inputs
    init       the start: None (zeros like the first input), Zeros(*shape), FirstStep(), Remember(), or a callable or
               module init(*inputs) -> z0
    solver     the solver, which computes the next iterate
    stop       tolerances and limits of the solve
    gradient   the method of differentiation
    eval_stop  replaces `stop` in eval mode; None uses `stop`
    compile    compile the forward and backward solves, each as one graph; they are used if they are faster
    batched    False if the state is one problem without a batch dimension, such as a graph
    """

    def __init__(
        self,
        cell: Callable[..., State],
        init: Init = None,
        solver: AnySolver = Anderson(),
        stop: Stop = Stop(),
        gradient: Gradient = Implicit(),
        eval_stop: Stop | None = None,
        compile: bool = False,
        *,
        batched: bool = True,
    ) -> None:
        super().__init__()
        _check_parts(cell, init, solver, stop, gradient, eval_stop)
        self.cell = cell
        self.init = init
        self.solver = solver
        self.stop = stop
        self.gradient = gradient
        self.eval_stop = eval_stop
        self.batched = batched
        self._compiler = Compiler() if compile else None
        self._number = opaque.register(self)
        self.solves: Tensor | None
        self.register_buffer("solves", torch.zeros((), dtype=torch.int64) if isinstance(gradient, Warmup) else None)

    def forward(self, *inputs: Any, init: Solution | State | None = None) -> State:
        """Solve for these inputs and return the equilibrium."""
        if torch.compiler.is_compiling() and opaque.applies(self, inputs, init):
            return opaque.call(self, inputs)
        return self.solve(*inputs, init=init).z

    @not_traced
    def solve(self, *inputs: Any, init: Solution | State | None = None) -> Solution:
        """Return the equilibrium with its statistics. `init` is a state or an earlier Solution to start from instead."""
        stop = self.stop if self.training or self.eval_stop is None else self.eval_stop
        start = self.init if init is None else constant(init)
        solves = 0 if self.solves is None else int(self.solves)  # training solves before this one
        if self.solves is not None and self.training and torch.is_grad_enabled() and not autodiff_modes.inside_transform():
            self.solves += 1  # the gradient depends on the count
        try:
            solution = _solve(
                self.cell, start, inputs, self.solver, stop, self.gradient, self.batched, self._compiler, solves
            )
        except (RuntimeError, TypeError) as error:
            if start is None:
                note_first_call(error, self.cell, inputs)
            raise
        if self.init is not None and (memory := memory_of(self.init)) is not None:
            memory.store(solution)
        if recordings.get():
            note(self, solution)
        return solution

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_compiler": None if self._compiler is None else Compiler()}
        del state["_number"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = opaque.register(self)

    def extra_repr(self) -> str:
        parts = {name: getattr(self, name) for name in ("solver", "stop", "gradient", "eval_stop")}
        lines = [f"({name}): {value!r}" for name, value in parts.items() if value is not None]
        return "\n".join(lines)


@contextmanager
def sample_keys(model: nn.Module, keys: Keys) -> Iterator[None]:
    """Set the keys of the samples, one per row, for every layer of `model` with `init=Remember()`, inside the block."""
    layers = [module for module in model.modules() if isinstance(module, DEQ)]
    memories = {id(memory): memory for layer in layers if (memory := memory_of(layer.init)) is not None}
    with ExitStack() as stack:
        for memory in memories.values():
            stack.enter_context(memory.keyed(keys))
        yield


@not_traced
def fixed_point(
    f: Callable[..., State],
    z0: Solution | State,
    *inputs: Any,
    solver: AnySolver = Anderson(),
    stop: Stop = Stop(),
    gradient: Gradient = Implicit(),
    batched: bool = True,
) -> Solution:
    """Solve z = f(z, *inputs) from z0, a state or an earlier Solution; differentiable in inputs and f's parameters.

    `f` may be a module or any callable. Tensors that a plain callable closes over get first-order gradients; for more,
    pass them as inputs.
    """
    _check_parts(f, None, solver, stop, gradient, None)
    follows = gradient.follows_start and not isinstance(z0, Solution)
    start = (lambda *inputs: z0) if follows else constant(z0)
    return _solve(f, start, inputs, solver, stop, gradient, batched)


def root(
    function: Callable[..., State],
    z0: Solution | State,
    *inputs: Any,
    solver: AnySolver = Robust(),
    stop: Stop = Stop(rtol=0.0, atol=1e-6, max_steps=100),
    gradient: Gradient = Implicit(stop=Stop(rtol=1e-6, max_steps=100)),
    batched: bool = True,
) -> Solution:
    """Solve function(z, *inputs) = 0 from z0, as the fixed point of z - function(z, *inputs); differentiable alike.

    The default `stop` bounds |function(z)| absolutely, because a tolerance relative to |z| is not meaningful for a root.
    """
    check_cell(function)
    cell: Callable[..., State] = lambda z, *inputs: pytree.tree_map(torch.sub, z, function(z, *inputs))  # noqa: E731
    cell = _ModuleMinus(function) if isinstance(function, nn.Module) else cell
    return fixed_point(cell, z0, *inputs, solver=solver, stop=stop, gradient=gradient, batched=batched)


class _ModuleMinus(nn.Module):
    """z - module(z, *inputs), with the parameters of the module as its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, z: State, *inputs: Any) -> State:
        return pytree.tree_map(torch.sub, z, self.module(z, *inputs))


def _solve(
    cell: Callable[..., State],
    init: Init,
    inputs: Sequence[Any],
    solver: AnySolver,
    stop: Stop,
    gradient: Gradient,
    batched: bool,
    compiler: Compiler | None = None,
    solves: int = 0,
) -> Solution:
    if not autodiff_modes.is_ordinary():
        autodiff_modes.check_recordable()
        if not gradient.exports_loop:
            autodiff_modes.check_not_exported()
    # from here to the end of backward, masks, computed weights and buffers stay the same
    fixed, prepares = FrozenCell(cell), hasattr(cell, "prepare")
    bad = _nonfinite_samples(inputs, batched) if prepares or init is not None else None
    # `prepare` and `init` are not part of the equation, whose backward quarantines samples. They get zeros for samples that
    # are not finite, because 0 * nan is nan in their backward too. The solve gets nan, so that it marks them NONFINITE.
    sound = clean = inputs if bad is None else _fill_rows(tuple(inputs), bad, 0.0)
    given = inputs
    if prepares:
        with fixed.in_place():
            sound = prepared(fixed.cell, clean)
        given = sound if bad is None else _fill_rows(sound, bad, float("nan"))

    def f(z: State) -> State:
        return fixed(z, *given)

    usual = init is None  # most layers start from zeros
    start = zeros_like_first(clean) if usual else start_of(init, cell, lambda z: fixed(z, *sound), clean, batched=batched)
    layout = Layout.of(start, batched=batched)
    z0 = layout.pack(start) if gradient.follows_start else layout.pack(start).detach()
    known = None
    if fixed.dropouts and fixed.undrawn():  # the evaluation that draws the masks is also the first one of the solve
        with torch.no_grad():
            known = layout.pack_output(f(start), layout.batch, cast=Autocast.current(layout.device).enabled)
    equation = CellEquation(fixed, layout, given)
    if equation.opaque and stop.process_group is None and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "The cell's weights are sharded, so every call of it is a collective and all ranks must take the same number of "
            'steps, or they deadlock: give the stop a process_group, Stop(process_group="world").'
        )
    # an autograd.Function cannot give gradients to tensors in a closure, so that another path is taken for them
    opaque = equation.opaque
    recorded = torch.is_grad_enabled() or autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level()
    if fixed.module is None and recorded:
        known, opaque = equation.captures(z0)
    # a default tolerance below the precision of the cell would never be met
    stop = stop if stop.rtol >= equation.precision else stop.reachable(equation.precision)
    problem = Problem(equation, solver, stop, known=known, opaque=opaque, solves=solves, compiler=compiler)
    z = gradient(problem, z0, equation.args)
    # evaluations outside of the loop count in the statistics too
    extra = int(known is not None) + int(bool(equation.moves_buffers) and equation.settle(z.detach()))
    extra += 0 if init is None else first_steps(init)
    if extra:
        problem.result.add_evaluations(extra, layout.batch)
    if fixed.cell is not fixed.original:  # the cell may have set attributes on itself, such as a counter
        fixed.hand_back()
    # the matrix has a larger range than float16: inf would otherwise leave the layer
    z = layout.saturate(z) if layout.narrow else z
    return Solution(z if layout.flat else layout.unpack(z), start, f, problem.result, layout, problem)


def _nonfinite_samples(inputs: Sequence[Any], batched: bool) -> Tensor | None:
    """Return (batch,), True for samples with inputs that are not finite; None if there are none or no graph is recorded."""
    if not batched or not torch.is_grad_enabled() or autodiff_modes.inside_transform():
        return None
    leaves = [leaf for leaf in pytree.tree_leaves(tuple(inputs)) if _has_rows(leaf)]
    batch = leaves[0].shape[0] if leaves else 0
    if batch == 0:
        return None
    bad = torch.zeros(batch, dtype=torch.bool, device=leaves[0].device)
    for leaf in leaves:
        if leaf.shape[0] == batch:
            values = leaf.detach()
            # -inf in a real tensor is allowed: attention masks contain it
            broken = ~torch.isfinite(values) if values.is_complex() else torch.isnan(values) | torch.isposinf(values)
            bad = bad | broken.reshape(batch, -1).any(dim=1)
    return bad if bool(bad.any()) else None


def _has_rows(leaf: Any) -> bool:
    plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided
    return plain and leaf.dim() > 0 and (leaf.is_floating_point() or leaf.is_complex())


def _fill_rows(tree: Any, rows: Tensor, value: float) -> Any:
    """Return the tree with `value` in these rows of its tensors."""

    def fill(leaf: Any) -> Any:
        if not _has_rows(leaf) or leaf.shape[0] != len(rows):
            return leaf
        return torch.where(rows.view(-1, *[1] * (leaf.dim() - 1)), torch.full_like(leaf, value), leaf)

    return pytree.tree_map(fill, tree)


def constant(start: Solution | State) -> Callable[..., State]:
    """Return an `init` that is a fixed state, detached from its graph."""
    state = start.z if isinstance(start, Solution) else start
    state = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, state)
    return lambda *inputs: state


def _check_parts(cell: Any, init: Any, solver: Any, stop: Any, gradient: Any, eval_stop: Any) -> None:
    check_cell(cell)
    check_init(init)
    check_solver(solver)
    for name, part, kind in (("stop", stop, Stop), ("eval_stop", eval_stop, Stop), ("gradient", gradient, Gradient)):
        if not isinstance(part, kind) and not (name == "eval_stop" and part is None):
            raise TypeError(f"{name} must be an object such as eq.{'Stop' if kind is Stop else 'Implicit'}(), got {part!r}.")
