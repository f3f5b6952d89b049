"""Export of trained models by `torch.export` and to ONNX; every solve is a loop in which each sample stops by itself."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from equilibria._core.autodiff_modes import Autocast
from equilibria._core.checks import require
from equilibria._core.files import optional, replace_file
from equilibria.exportable import exportable
from equilibria.solution import record

MOST_ROWS = 2**31 - 1  # the bound of the batch size that torch.export is told
ONNX_TORCH = (2, 11)  # the oldest whose exporter knows while_loop
ONNX_LIMIT = 2**31  # bytes of a protobuf message


def export(
    model: nn.Module, example_inputs: Any, *, dynamic_batch: bool = True, with_steps: bool = False
) -> ExportedProgram:
    """Export the model as a graph in which every DEQ is one loop, which runs until the last sample has stopped.

        program = eq.export(model.eval(), x)
        y = program.module()(other)

    A sample takes the same steps and gets the same result as in the model, whatever the other samples and the example inputs
    are. Solvers that can be exported are Picard and Anderson. The graph neither warns nor raises (`Stop.on_failure`);
    `with_steps` returns which samples converged. The graph does not rescale states so small or large that the squares of
    their entries leave the dtype (below 1e-12 or above 1e18 in float32), as the model does. Such samples are not marked
    converged, unless they are within `Stop.atol`.

    model           the model in eval mode; its weights are copied
    example_inputs  the arguments of the model: a tuple, or one input
    dynamic_batch   allow batches of any size; the example then needs at least two samples, and every tensor with as many
                    rows as the first one is taken to have a row per sample
    with_steps      return (output, steps, converged), with steps (batch,) and converged (batch,) of every solve
    """
    inputs = _as_tuple(example_inputs)
    for leaf in pytree.tree_leaves(inputs):
        require(
            not (isinstance(leaf, Tensor) and Autocast.current(leaf.device).enabled),
            "A graph has the dtypes of the model that it is made of, and autocast is on: export outside of it.",
        )
    whole = _Whole(exportable(model, dynamic_batch=dynamic_batch), with_steps).eval()
    # the upper bound is for torch 2.6, which guards against the largest integer
    shapes = _dynamic_shapes(inputs, torch.export.Dim("batch", max=MOST_ROWS)) if dynamic_batch else None
    with torch.no_grad():
        return torch.export.export(whole, inputs, dynamic_shapes=shapes, strict=False)


def to_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | Path,
    *,
    dynamic_batch: bool = True,
    with_steps: bool = False,
) -> None:
    """Write the graph of `export` as an ONNX file; needs `pip install 'equilibria[export]'`.

        eq.to_onnx(model.eval(), x, "model.onnx")
        onnxruntime.InferenceSession("model.onnx").run(None, {"x": x.numpy()})

    Inputs have the names of the arguments of `model.forward`; the outputs are `output` (of several: `output_0`, ...) and
    `with_steps`, of every solve, `steps_0`, `converged_0`, ... The file is there whole or not at all. Older versions of
    torch than 2.11 cannot write loops.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < ONNX_TORCH:
        raise RuntimeError(
            f"Loops go into ONNX from torch {'.'.join(map(str, ONNX_TORCH))} on, and this is torch {torch.__version__}."
            " Install a newer one, or use eq.export(...), which needs no more than the package itself."
        )
    for package in ("onnx", "onnxscript"):
        optional(package, "export")
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    require(
        size < ONNX_LIMIT,
        f"An ONNX file holds less than 2 GiB, and the model has {size / 2**30:.1f} GiB of weights: convert it to half "
        "precision, or write eq.export(...) with torch.onnx.export(program, ..., external_data=True).",
    )
    inputs = _as_tuple(example_inputs)
    program = export(model, inputs, dynamic_batch=dynamic_batch, with_steps=with_steps)
    shapes = _dynamic_shapes(inputs, "batch") if dynamic_batch else None  # the name it has in the file
    names = None  # where some arguments are numbers, which are no graph inputs
    if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs)):
        arguments = inspect.signature(model.forward).bind(*inputs).arguments
        names = [name for argument, value in arguments.items() for name in _numbered(argument, value)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own parts
        written = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=shapes,
            input_names=names,
            output_names=_output_names(program, with_steps),
        )
    assert written is not None
    replace_file(Path(path), written.model_proto.SerializeToString())


class _Whole(nn.Module):
    """The traced module: the model, and the steps and status of its solves if asked for."""

    def __init__(self, model: nn.Module, with_steps: bool) -> None:
        super().__init__()
        self.model, self.with_steps = model, with_steps

    def forward(self, *inputs: Any) -> Any:
        with record(self.model) as solutions:
            output = self.model(*inputs)
        if not self.with_steps:
            return output
        stats = [solution.stats for solution in solutions]
        return output, tuple(each.steps for each in stats), tuple(each.converged for each in stats)


def _as_tuple(example_inputs: Any) -> tuple[Any, ...]:
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)


def _dynamic_shapes(inputs: tuple[Any, ...], any_size: Any) -> tuple[Any]:
    """The dynamic dimensions of the arguments of `_Whole`: the first of every tensor with a row per sample."""
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if _has_rows(leaf)]
    require(len(sizes) > 0, "There is no tensor with a batch dimension among example_inputs: set dynamic_batch=False.")
    require(
        sizes[0] >= 2,
        f"example_inputs holds {sizes[0]} samples, and torch.export takes sizes 0 and 1 for constants: give two samples or "
        "more, or set dynamic_batch=False for batches of just that size.",
    )

    def rows(leaf: Any) -> dict[int, Any] | None:
        return {0: any_size} if _has_rows(leaf) and leaf.shape[0] == sizes[0] else None

    return (pytree.tree_map(rows, inputs),)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _output_names(program: ExportedProgram, with_steps: bool) -> list[str]:
    spec = program.call_spec.out_spec
    assert spec is not None
    tree = pytree.tree_unflatten(range(spec.num_leaves), spec)
    if not with_steps:
        return _numbered("output", tree)
    output, steps, _ = tree
    return _numbered("output", output) + [f"{name}_{i}" for name in ("steps", "converged") for i in range(len(steps))]


def _numbered(name: str, tree: Any) -> list[str]:
    """A name for every tensor."""
    count = len(pytree.tree_leaves(tree))
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
