"""A summary of a model: its parts, and how its equilibria are solved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.analysis.measuring import muted, untouched
from equilibria.analysis.summary_table import Settings, Shapes, Solves, Summary, SummaryRow
from equilibria.deq import DEQ
from equilibria.solution import Solution, record


def summary(model: nn.Module, *inputs: Any, depth: int = 2) -> Summary:
    """Return the parts of a model with their sizes and, if inputs are given, the statistics of its solves in model(*inputs).

        print(eq.models.summary(model, images))

    The model runs in eval mode without gradients; failed solves are counted without a warning; the model is left unchanged.
    Without inputs nothing runs, so the model may be on the meta device.

    depth  levels of parts shown: 1 for the direct parts of the model, 2 for their parts too. Equilibrium layers are shown at
           any depth, the inside of a cell is not: use summary(deq.cell, z, x) for that
    """
    _check(model, inputs, depth)
    seen = _run(model, inputs) if inputs else _Seen({}, {})
    rows = tuple(_row(part, seen) for part in _parts(model, depth))
    tensors = [*model.parameters(), *model.buffers()]
    return Summary(rows, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


class _Part(NamedTuple):
    """A module that is shown."""

    name: str
    label: str
    module: nn.Module
    level: int


class _Seen(NamedTuple):
    """Outputs and solutions recorded in a run, by module name."""

    outputs: dict[str, Shapes]
    solutions: dict[str, list[Solution]]


def _check(model: nn.Module, inputs: Sequence[Any], depth: int) -> None:
    """Raise TypeError or ValueError for arguments that `summary` cannot use."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"summary takes an nn.Module, got {type(model).__name__}.")
    if depth < 0:
        raise ValueError(f"depth must be 0 or more, got {depth}.")
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(nn.parameter.is_lazy, tensors)):
        raise ValueError("The model has lazy parameters without a shape: run it once before the summary.")
    if inputs and _layers(model) and any(tensor.is_meta for tensor in tensors):
        raise ValueError("A model on the meta device cannot be solved: leave the inputs out, or use a real device.")


def _layers(model: nn.Module) -> dict[str, DEQ]:
    """Return the equilibrium layers of the model by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, DEQ)}


def _parts(model: nn.Module, depth: int) -> Iterator[_Part]:
    """Yield the modules that are shown, each once, parents first."""
    met: set[int] = set()  # ids of modules already visited: a module that two parents share is shown under the first

    def walk(name: str, module: nn.Module, above: _Part | None, down: int) -> Iterator[_Part]:
        met.add(id(module))
        if above is None:
            above = _Part(name, "(model)", module, 0)
            yield above
        elif down <= depth or isinstance(module, DEQ):
            above = _Part(name, name[len(above.name) :].lstrip("."), module, above.level + 1)
            yield above
        for own, child in module.named_children():
            if id(child) in met or own == "parametrizations":
                continue
            if isinstance(module, DEQ) and own == "cell":
                met.update(map(id, child.modules()))  # the inside of a cell is not shown, see `summary`
                if down < depth:
                    yield _Part(_join(name, own), own, child, above.level + 1)
            else:
                yield from walk(_join(name, own), child, above, down + 1)

    return walk("", model, None, 0)


def _row(part: _Part, seen: _Seen) -> SummaryRow:
    """Return the row of a part: counts, output shapes, and the settings of a DEQ."""
    module, settings = part.module, None
    if isinstance(module, DEQ):
        solutions = seen.solutions.get(part.name)
        found = _solves(solutions) if solutions else None
        settings = Settings(module.solver, module.stop, module.eval_stop, module.gradient, found)
    return SummaryRow(
        part.name,
        part.label,
        type(module).__name__,
        part.level,
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        frozen=sum(p.numel() for p in module.parameters() if not p.requires_grad),
        buffers=sum(buffer.numel() for buffer in module.buffers()),
        output=seen.outputs.get(part.name),
        equilibrium=settings,
    )


def _solves(solutions: Sequence[Solution]) -> Solves:
    """Return the statistics of all solves of a layer."""
    every = [solution.stats for solution in solutions]
    depth = torch.cat([stats.depth for stats in every]).double()
    residual = torch.cat([stats.residual.double() for stats in every])
    return Solves(
        state=tuple(tuple(leaf.shape) for leaf in solutions[0].layout.leaves),
        count=len(solutions),
        samples=len(depth),
        evaluations=sum(stats.evaluations for stats in every),
        mean_depth=float(depth.mean()) if len(depth) else 0.0,
        max_depth=int(depth.max()) if len(depth) else 0,
        residual=float(residual.max()) if len(depth) else 0.0,
        failed=sum(int(stats.failed.sum()) for stats in every),
    )


def _run(model: nn.Module, inputs: Sequence[Any]) -> _Seen:
    """Run model(*inputs) and record outputs and solutions."""
    layers = _layers(model)
    cells = [layer.cell for layer in layers.values() if isinstance(layer.cell, nn.Module)]
    inside = {id(part) for cell in cells for part in cell.modules()}
    watched = {name: part for name, part in model.named_modules() if name not in layers and id(part) not in inside}
    outputs: dict[str, Shapes] = {}
    with ExitStack() as stack:
        stack.enter_context(untouched(model, inputs))
        stack.enter_context(_evaluating(model))
        stack.enter_context(muted(list(layers.values())))
        stack.enter_context(torch.no_grad())
        for name, part in watched.items():
            stack.enter_context(_noting(name, part, outputs))
        recorded = {name: stack.enter_context(record(layer)) for name, layer in layers.items()}
        model(*inputs)
    solutions = {name: _own(layers[name], recorded, layers) for name in layers}
    for name, found in solutions.items():
        if found:
            outputs[name] = outputs[_join(name, "cell")] = _shapes(found[0].z)
    return _Seen(outputs, solutions)


def _own(layer: DEQ, recorded: Mapping[str, list[Solution]], layers: Mapping[str, DEQ]) -> list[Solution]:
    """Return the solves of a layer without those of layers inside it, which `record` lists too."""
    inner = {id(part) for part in layer.modules()} - {id(layer)}
    others = {id(s) for name, found in recorded.items() if id(layers[name]) in inner for s in found}
    return [s for name, found in recorded.items() if layers[name] is layer for s in found if id(s) not in others]


@contextmanager
def _noting(name: str, part: nn.Module, outputs: dict[str, Shapes]) -> Iterator[None]:
    """Record the output shapes of the first call of a module."""

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.setdefault(name, _shapes(output))

    handle = part.register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block, and restore the mode of every part after it."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:  # parents first: `train` of a parent may set more than a flag
            if part is model or part.training != mode:
                part.train(mode)


def _shapes(tree: Any) -> Shapes:
    """Return the shapes of the tensors in a nested structure."""
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
