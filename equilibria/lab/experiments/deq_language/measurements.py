"""Measurements that do not change a sequence model: memory of a training step, other limits, plain iteration."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equilibria.analysis.measuring import untouched
from equilibria.analysis.memory import peak_memory
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.unrolled import Unrolled
from equilibria.lab.experiments.deq_language.data import TextSegment
from equilibria.lab.experiments.deq_language.models import NEVER
from equilibria.models.language.deq_transformer import DEQTransformer, TransformerXL
from equilibria.models.language.sequence import Memory, SequenceModel
from equilibria.models.language.trellis_cell import TrellisStack

Loss = Callable[[SequenceModel], Tensor]
M = TypeVar("M", bound=nn.Module)


class _Headless(nn.Module):
    """Replaces a vocabulary: constant embeddings and a loss of negligible cost."""

    def __init__(self, vocabulary: Any) -> None:
        super().__init__()
        self._vocabulary = [vocabulary]  # in a list, so that it is no submodule and its weights get no gradients

    def embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self._vocabulary[0].embed(tokens)
        return found.requires_grad_()

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        # channels have different weights: after a layer norm their plain mean is always 0, and so is its gradient
        return (h @ torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype, device=h.device)).mean()


def inner_parameters(model: SequenceModel) -> int:
    """Return the number of parameters without those of the vocabulary, as papers count them."""
    vocabulary: Any = getattr(model, "vocabulary", None)
    outer = sum(weight.numel() for weight in vocabulary.parameters()) if isinstance(vocabulary, nn.Module) else 0
    return sum(weight.numel() for weight in model.parameters()) - outer


def peak_bytes(model: SequenceModel, batch: TextSegment, loss: Loss, *, headless: bool = False) -> float:
    """Return the peak memory of loss and gradients of a training step in bytes, without the weights.

    It is measured on a copy of the model, so that neither its weights nor records of its solves are affected.

    headless  leave out embedding and softmax, whose memory is the same for every network between them
    """
    twin = copy.deepcopy(model)
    if headless and hasattr(twin, "vocabulary"):
        twin.vocabulary = _Headless(twin.vocabulary)
    weights = [weight for weight in twin.parameters() if weight.requires_grad]

    def step() -> None:
        torch.autograd.grad(loss(twin), weights, allow_unused=True)

    with untouched(twin, batch), torch.enable_grad():
        step()  # a first step allocates what is kept permanently
        return float(peak_memory(step, batch.x.device))


def peak_over_depths(model: SequenceModel, batch: TextSegment, loss: Loss, depths: Sequence[int]) -> dict[int, float]:
    """Return `peak_bytes` by depth: the number of layers of an explicit stack, or of steps of both solves.

    The tolerance of the solves is set so low that they take all steps.
    """
    return {depth: peak_bytes(deepened(model, depth), batch, loss, headless=True) for depth in depths}


def deepened(model: SequenceModel, depth: int) -> SequenceModel:
    """Return a model with the same weights and another depth: layers of a stack, or steps of both solves of a DEQ."""
    twin = _twin(model)
    layer: Any = getattr(model, "layer", None)
    if isinstance(layer, DEQ):
        stop = dataclasses.replace(layer.stop, rtol=NEVER, atol=0.0, max_steps=depth)  # exactly `depth` steps
        gradient = layer.gradient
        if isinstance(gradient, Implicit):
            gradient = Implicit(solver=gradient.solver, stop=stop)
        elif isinstance(gradient, Unrolled):
            gradient = dataclasses.replace(gradient, depth=depth)
        twin.layer = DEQ(layer.cell, layer.init, layer.solver, stop, gradient)
    elif isinstance(layer, (WeightTied, TrellisStack)):
        twin.layer = _twin(layer)
        twin.layer.depth = depth
    else:
        raise ValueError(f"{type(model).__name__} has no layer whose depth can be changed. Leave memory_depths empty.")
    return twin.train(model.training)


def stopped(model: SequenceModel, steps: int) -> SequenceModel | None:
    """Return a model with the same weights whose solver stops after `steps` in evaluation; None for an explicit network."""
    layer: Any = getattr(model, "layer", None)
    if not isinstance(layer, DEQ):
        return None
    stop = dataclasses.replace(layer.eval_stop or layer.stop, max_steps=steps)
    twin = _twin(model)
    twin.layer = DEQ(layer.cell, layer.init, layer.solver, stop, layer.gradient).train(layer.training)
    return twin


def with_memory(model: SequenceModel, length: int) -> SequenceModel | None:
    """Return a model with the same weights and a memory of `length` positions in evaluation; None for other models."""
    if not isinstance(model, (DEQTransformer, TransformerXL)):
        return None
    twin = _twin(model)
    twin.config = dataclasses.replace(model.config, eval_memory=length)
    if isinstance(layer := getattr(model, "layer", None), DEQ):  # a new layer, so that records of the model do not see it
        stop = layer.eval_stop or layer.stop
        twin.layer = DEQ(layer.cell, layer.init, layer.solver, stop, layer.gradient).train(layer.training)
    return twin


@torch.no_grad()
def changes(model: SequenceModel, batch: TextSegment, memory: Memory, depths: Sequence[int]) -> dict[int, float]:
    """Return |z_d - z_{d-1}| / |z_d| by depth d for plain iteration of the cell from zero, as a mean over samples."""
    layer: Any = getattr(model, "layer", None)
    if layer is None:
        return {}
    given: list[tuple[Any, Any]] = []
    twin = _twin(model)
    twin.layer = _Noting(given)
    try:
        twin(batch.x, memory, batch.y)
    except _Noted:
        pass
    inputs, start = given[0]
    stack = WeightTied(layer.cell, max(depths)).train(layer.training)
    residuals = stack.trajectory(*inputs, init=start).residuals.mean(dim=1)
    return {depth: float(residuals[depth - 1]) for depth in depths}


class _Noted(Exception):  # noqa: N818
    """Raised to stop the forward pass at the layer."""


class _Noting(nn.Module):
    """Records the inputs of a layer and stops the forward pass."""

    def __init__(self, given: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.given = given
        self.cell = None

    def forward(self, *inputs: Any, init: Any) -> Any:
        self.given.append((inputs, init))
        raise _Noted


def _twin(module: M) -> M:
    """Return a shallow copy whose submodules can be replaced without changing the original."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin
