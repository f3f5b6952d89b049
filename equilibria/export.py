"""Export of trained models by `torch.export` and to ONNX; every solve is a loop in which samples stop independently."""

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

MOST_ROWS = 2**31 - 1  # largest batch size of an exported graph; torch 2.6 fails without a bound
ONNX_TORCH = (2, 11)  # oldest version of torch whose ONNX exporter supports while_loop
ONNX_LIMIT = 2**31  # largest number of bytes of a protobuf message


def export(
    model: nn.Module, example_inputs: Any, *, dynamic_batch: bool = True, with_steps: bool = False
) -> ExportedProgram:
    """Export the model as a graph in which every DEQ is one loop, which runs until the last sample has stopped.

        program = eq.export(model.eval(), x)
        y = program.module()(other)

    A sample takes the same steps and gets the same result as in the model. It depends neither on the other samples nor on
    the example inputs. The solvers Picard and Anderson can be exported. The graph neither warns nor raises if a solve fails
    (`Stop.on_failure`); `with_steps` returns which samples converged. The model rescales states whose entries have squares
    outside of the dtype's range (below 1e-12 or above 1e18 in float32); the graph does not. It marks such samples as not
    converged, unless they are within `Stop.atol`.

    model           the model in eval mode; its weights are copied
    example_inputs  the arguments of the model: a tuple, or one input
    dynamic_batch   allow batches of any size. The example then needs at least two samples. Every tensor whose first
                    dimension has the size of the first tensor's is assumed to have one row per sample
    with_steps      return (output, steps, converged), where steps and converged hold a tensor (batch,) for every solve
    """
    inputs = _as_tuple(example_inputs)
    for leaf in pytree.tree_leaves(inputs):
        require(
            not (isinstance(leaf, Tensor) and Autocast.current(leaf.device).enabled),
            "Autocast is on, but an exported graph has the dtypes of the model. Call export outside of the autocast "
            "context.",
        )
    module = _ExportedModule(exportable(model, dynamic_batch=dynamic_batch), with_steps).eval()
    # without an upper bound torch 2.6 adds a guard against the largest integer and fails
    shapes = _dynamic_shapes(inputs, torch.export.Dim("batch", max=MOST_ROWS)) if dynamic_batch else None
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


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

    Inputs have the names of the arguments of `model.forward`. The output is called `output`; several outputs are called
    `output_0`, `output_1`, ... With `with_steps` every solve adds outputs `steps_0`, `converged_0`, ... The file is written
    atomically. Versions of torch before 2.11 cannot write loops.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < ONNX_TORCH:
        raise RuntimeError(
            f"This is torch {torch.__version__}, but loops in ONNX need torch {'.'.join(map(str, ONNX_TORCH))} or newer. "
            "Install a newer version, or use eq.export(...), which needs no further package."
        )
    for package in ("onnx", "onnxscript"):
        optional(package, "export")
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    require(
        size < ONNX_LIMIT,
        f"The model has {size / 2**30:.1f} GiB of weights, but an ONNX file holds less than 2 GiB. Convert the model to "
        "half precision, or write eq.export(...) with torch.onnx.export(program, ..., external_data=True).",
    )
    inputs = _as_tuple(example_inputs)
    program = export(model, inputs, dynamic_batch=dynamic_batch, with_steps=with_steps)
    shapes = _dynamic_shapes(inputs, "batch") if dynamic_batch else None  # the name of the dimension in the file
    names = None  # the exporter's own names, if an argument is a number: numbers are constants of the graph, not inputs
    if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs)):
        arguments = inspect.signature(model.forward).bind(*inputs).arguments
        names = [name for argument, value in arguments.items() for name in _numbered(argument, value)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own deprecated functions
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


class _ExportedModule(nn.Module):
    """The module that is traced: it returns the model's output, and with `with_steps` the steps and status of its solves."""

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
    """Return the dynamic dimensions of the arguments: the first dimension of every tensor with a row per sample."""
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if _has_rows(leaf)]
    require(len(sizes) > 0, "example_inputs has no tensor with a batch dimension. Set dynamic_batch=False.")
    require(
        sizes[0] >= 2,
        f"example_inputs holds {sizes[0]} samples, but torch.export treats sizes 0 and 1 as constants. Pass two samples or "
        "more, or set dynamic_batch=False for batches of exactly that size.",
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
    """Return a name for every tensor in `tree`."""
    count = len(pytree.tree_leaves(tree))
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
