"""Split a model at its equilibrium layer: the part before it runs at admission, the part after it when rows are answered.

The model is not traced. Both parts run its own forward pass. The first part stops when it reaches the DEQ. The second part
uses the equilibrium instead of a solve, and the outputs of the modules before the layer as recorded at admission.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from equilibria.deq import DEQ
from equilibria.serving.adapter import Layout, State, advance, describe, memory_of, prepared, solution, start
from equilibria.serving.row_solvers import unsupported
from equilibria.serving.tickets import UnservableModelError
from equilibria.solution import Solution, Stats, Status, record
from equilibria.stop import Stop


class _Reached(BaseException):
    """Raised when the forward pass reaches the equilibrium layer; a BaseException, so that models do not catch it."""

    def __init__(self, layer: DEQ, inputs: tuple[Any, ...], init: Any) -> None:
        super().__init__()
        self.layer, self.inputs, self.init = layer, inputs, init


class _Frozen(nn.Module):
    """A parametrization replaced by its value, computed once."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value: Tensor
        self.register_buffer("value", value, persistent=False)

    def forward(self) -> Tensor:
        return self.value


@dataclass(frozen=True)
class Arguments:
    """The arguments of a model for one sample or a batch: tensors, and other values, which all samples of a batch share."""

    tensors: tuple[Tensor, ...]
    spec: Any  # the structure, with the values of leaves that are not tensors

    @staticmethod
    def of(inputs: Any, device: torch.device) -> Arguments:
        """Return the arguments in `inputs`: a tuple of positional, a dict of keyword arguments, or a single argument."""
        if isinstance(inputs, Tensor):
            plain = inputs.device == device and not inputs.requires_grad
            return Arguments((inputs if plain else inputs.detach().to(device),), ONE_TENSOR)
        args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        leaves, structure = pytree.tree_flatten((args, inputs if isinstance(inputs, dict) else {}))
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        places = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        tensors = tuple(leaf.detach().to(device) for leaf in leaves if isinstance(leaf, Tensor))
        return Arguments(tensors, (structure, places, others))

    def call(self, model: Callable[..., Any]) -> Any:
        """Call the model with these arguments."""
        if self.spec is ONE_TENSOR:
            return model(*self.tensors)
        structure, places, others = self.spec
        tensors = iter(self.tensors)
        leaves = [next(tensors) if is_tensor else other for is_tensor, other in zip(places, others, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return model(*args, **kwargs)

    @property
    def key(self) -> tuple[Any, ...]:
        """The kind of the request, hashable: structure, other values, and shapes and dtypes of the tensors.

        A pool serves requests of one kind.
        """
        if self.spec is ONE_TENSOR:
            (tensor,) = self.tensors
            return None, ((tensor.shape, tensor.dtype),)
        kinds = tuple((t.shape, t.dtype) for t in self.tensors)
        structure, places, others = self.spec
        return (repr(structure), places, repr(others)), kinds


ONE_TENSOR: Any = "one tensor"  # the usual spec, which needs no pytree


@dataclass(frozen=True)
class Reached:
    """The values of a batch when it reaches the equilibrium layer."""

    given: tuple[Any, ...]  # arguments of the cell after `prepare`
    start: State
    outputs: tuple[Any, ...]  # outputs of the modules before the layer, in the order of their calls


class CellSplit:
    """The two parts of a model, and its cell. Only one thread may use it at a time.

    The model is copied, and the copy shares its tensors. Later changes of the weights therefore take effect, except for
    weights behind parametrizations, which are computed once.
    """

    def __init__(self, model: nn.Module, *, solver: Any = None, stop: Stop | None = None, output: Any = None) -> None:
        self.model = _copy(model).eval()
        self.output = output
        self.lock = threading.RLock()
        self.layers = {name: module for name, module in self.model.named_modules() if isinstance(module, DEQ)}
        if not self.layers:
            raise UnservableModelError(
                f"{type(model).__name__} has no equilibrium layer (eq.DEQ), so there is no solve for rows to enter or "
                "leave. Serve explicit networks with another server."
            )
        _freeze_weights(self.model)
        self.solver, self.stop = solver, stop
        self._answer: Callable[[DEQ, tuple[Any, ...], Any], Solution] | None = None
        for layer in self.layers.values():
            layer.solve = self._handler(layer)  # type: ignore[method-assign]
        self.before: list[nn.Module] = []  # modules whose outputs are kept from admission to the answer
        self._replay: dict[int, list[Any]] = {}
        self._seen: list[tuple[nn.Module, Any]] | None = None  # module calls before the layer, while they are recorded

    def _handler(self, layer: DEQ) -> Callable[..., Solution]:
        """Return the replacement of `layer.solve`: it raises _Reached, or returns the solution given for this run."""

        def solve(*inputs: Any, init: Any = None) -> Solution:
            if self._answer is None:
                raise _Reached(layer, inputs, init)
            return self._answer(layer, inputs, init)

        return solve

    # the layer on the path

    def find(self, arguments: Arguments) -> DEQ:
        """Run the model once without solving and return its only equilibrium layer.

        Raises UnservableModelError with the reason if the model cannot be served.
        """
        calls: list[DEQ] = []

        def answer(layer: DEQ, inputs: tuple[Any, ...], init: Any) -> Solution:
            calls.append(layer)
            self._check(layer)
            given = prepared(layer.cell, inputs)
            z0 = start(layer, inputs, given, init)
            layout = Layout.of(z0)
            z = layout.pack(z0)
            zeros = [0] * len(z)
            return solution(z, layout, lambda state: layer.cell(state, *given), z0, describe(zeros, zeros, zeros, z))

        self._run(arguments, answer)
        if len(calls) != 1:
            names = {id(layer): name for name, layer in self.layers.items()}
            met = ", ".join(names[id(layer)] or "the model itself" for layer in calls) or "none"
            raise UnservableModelError(
                f"A request must pass exactly one equilibrium layer, exactly once; this model ran {len(calls)} solves "
                f"({met}). Serve its parts separately."
            )
        return calls[0]

    def _check(self, layer: DEQ) -> None:
        """Raise UnservableModelError if the layer's solver, stop, init or gradient cannot be served row by row."""
        reason = unsupported(self.solver or layer.solver)
        stop = self.stop_of(layer)
        if not layer.batched:
            reason = "its layer has batched=False, so the batch is one problem and rows cannot be solved separately"
        elif memory_of(layer.init) is not None:
            reason = "its layer starts from remembered samples (init=eq.Remember()), but requests have no sample keys"
        elif stop.process_group is not None:
            reason = "its stop has a process_group: ranks that step together cannot admit rows one by one"
        try:
            advance(layer.gradient, int(layer.solves) if layer.solves is not None else 0)
        except TypeError as error:
            reason = f"{error}; set layer.gradient to eq.Implicit() for serving"
        if reason is not None:
            raise UnservableModelError(f"This model cannot be served: {reason}.")

    def stop_of(self, layer: DEQ) -> Stop:
        """Return the engine's stop if it was given one, else that of the layer in eval mode."""
        return self.stop or layer.eval_stop or layer.stop

    # the two parts

    def reach(self, arguments: Arguments, *, watch: list[nn.Module] | None = None) -> Reached:
        """Run the part before the layer and return its result. `watch` collects the outermost modules that ran."""
        seen: list[tuple[nn.Module, Any]] = []
        reached = self._run_to_layer(arguments, seen, watching=watch is not None)
        if watch is not None:
            watch.extend(module for module, _ in seen)
        elif [id(module) for module, _ in seen] != [id(module) for module in self.before]:
            raise UnservableModelError(
                "The modules before the equilibrium layer differ from request to request. Serve a model whose forward pass "
                "calls the same modules for every request."
            )
        with torch.no_grad():
            given = prepared(reached.layer.cell, reached.inputs)
            z0 = start(reached.layer, reached.inputs, given, reached.init)
        return Reached(given, z0, tuple(output for _, output in seen))

    def _run_to_layer(self, arguments: Arguments, seen: list[tuple[nn.Module, Any]], *, watching: bool) -> _Reached:
        """Run the forward pass until it calls the layer; `seen` collects module calls before it."""
        hooks = _watch(self.model, seen) if watching else []
        self._seen = None if watching else seen
        try:
            self._run(arguments, None)
        except _Reached as reached:
            return reached
        finally:
            self._seen = None
            for hook in hooks:
                hook.remove()
        raise UnservableModelError("The forward pass of this request reaches no equilibrium layer.")

    def finish(self, arguments: Arguments, reached: Reached, z: Tensor, layout: Layout, stats: Stats) -> Any:
        """Return the model's output for rows whose equilibrium is `z`."""

        def answer(layer: DEQ, inputs: tuple[Any, ...], init: Any) -> Solution:
            def f(state: State) -> State:
                return layer.cell(state, *reached.given)

            steps = advance(layer.gradient, int(layer.solves) if layer.solves is not None else 0)
            if steps is None:
                there = z
            else:
                # take the steps of a gradient from the equilibrium; rows that are not finite stay unchanged
                out = steps(lambda h: layout.pack_output(f(layout.unpack(h)), len(h)), z)
                there = torch.where((stats.status != Status.NONFINITE).unsqueeze(1), out, z)
            return solution(there, layout, f, None, stats)

        self._replay = {}
        for module, output in zip(self.before, reached.outputs, strict=True):
            self._replay.setdefault(id(module), []).append(output)
        try:
            out = self._run(arguments, answer)
        finally:
            self._replay = {}
        return out if self.output is None else self.output(out)

    def alone(self, arguments: Arguments, stop: Stop) -> tuple[Any, Solution]:
        """Return the model's output and Solution for a batch, solved by the library's own loop."""

        def answer(layer: DEQ, inputs: tuple[Any, ...], init: Any) -> Solution:
            before = layer.solver, layer.stop, layer.eval_stop
            layer.solver, layer.stop, layer.eval_stop = self.solver or layer.solver, stop, None
            try:
                return DEQ.solve(layer, *inputs, init=init)
            finally:
                layer.solver, layer.stop, layer.eval_stop = before

        with record(self.model) as solutions:
            out = self._run(arguments, answer)
        return out if self.output is None else self.output(out), solutions[0]

    def _run(self, arguments: Arguments, answer: Callable[[DEQ, tuple[Any, ...], Any], Solution] | None) -> Any:
        """Run the model with `answer` in place of its solves."""
        with self.lock, torch.no_grad():
            self._answer = answer
            try:
                return arguments.call(self.model)
            finally:
                self._answer = None

    def keep(self, modules: Sequence[nn.Module]) -> None:
        """Keep the outputs of these modules from admission to the answer instead of computing them again."""
        self.before = list(modules)
        for module in {id(m): m for m in modules}.values():
            module.forward = self._replayed(module, module.forward)

    def _replayed(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a module: return a recorded output if there is one, else run it and record the call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            kept = self._replay.get(id(module))
            if kept:
                return kept.pop(0)
            output = forward(*args, **kwargs)
            if self._seen is not None:
                self._seen.append((module, output))
            return output

        return run


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares all tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception as error:
        raise UnservableModelError(
            f"{type(model).__name__} cannot be copied, but the engine serves a copy ({type(error).__name__}: {error})."
        ) from error


def _freeze_weights(model: nn.Module) -> None:
    """Replace parametrized weights by their values, which do not change while the model is served."""
    for module in list(model.modules()):
        places = getattr(module, "parametrizations", None)
        for name, part in list(places.items()) if isinstance(places, nn.ModuleDict) else []:
            if isinstance(part, ParametrizationList):
                with torch.no_grad():
                    module.parametrizations[name] = _Frozen(part())  # type: ignore[operator, index, assignment]


def _watch(model: nn.Module, seen: list[tuple[nn.Module, Any]]) -> list[Any]:
    """Register hooks that collect the outermost calls of modules with weights; returns the hooks."""
    depth: list[int] = []

    def enter(module: nn.Module, args: Any) -> None:
        depth.append(len(seen))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        del seen[depth.pop() :]
        seen.append((module, output))

    parts = [m for m in model.modules() if not isinstance(m, DEQ) and any(True for _ in m.parameters())]
    hooks: list[Any] = [m.register_forward_pre_hook(enter) for m in parts]
    return hooks + [m.register_forward_hook(leave) for m in parts]
