"""Language modelling as a task: memory carried from segment to segment, perplexity over whole splits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria._core.frozen_cell import is_sharded
from equilibria.deq import DEQ
from equilibria.lab.experiments.deq_language.data import Segments, SplitName, TextData, TextSegment
from equilibria.lab.experiments.deq_language.measurements import (
    changes,
    inner_parameters,
    peak_bytes,
    peak_over_depths,
    stopped,
    with_memory,
)
from equilibria.lab.experiments.deq_language.models import LanguageModel
from equilibria.lab.experiments.image_task import now
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.language.sequence import Memory, SequenceModel, unrolled_pretraining
from equilibria.models.language.trellisnet import TrellisNet, activation_penalty
from equilibria.penalties import PenaltySchedule, jacobian_penalty, random_max_steps
from equilibria.solution import record

Metrics = dict[str, Tensor | float]
NLL = "nll"  # prefix of metrics that are -log p of a token; `summarise` turns their means into perplexities
SEPARATOR = "\n"  # between units of the vocabulary in a run's state; no unit contains it, since texts are read by lines


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """Settings of a language model, its text and its loss.

    jacobian_weight     weight of the Jacobian penalty, applied in a share `jacobian_frequency` of the steps after
                        pre-training; `jacobian_increment` is added to the weight every `jacobian_every` steps
    jitter              every training step draws the solver's limit from `limit - jitter` to `limit`
    activation          (alpha, beta) of the activation penalty of TrellisNet
    at                  numbers of steps: perplexity is also measured with the solver stopped after each of them
    memories            lengths: perplexity of a transformer is also measured with each of these lengths of memory
    depths              depths at which the change of the state under plain iteration of the cell is measured
    memory_depths       numbers of layers or solver steps for which the peak memory of a training step is measured
    """

    data: TextData = field(default_factory=TextData)
    model: LanguageModel = field(default_factory=LanguageModel)
    jacobian_weight: float = 0.0
    jacobian_frequency: float = 1.0
    jacobian_increment: float = 0.0
    jacobian_every: int = 1
    jitter: int = 0
    activation: tuple[float, float] = (0.0, 0.0)
    at: tuple[int, ...] = ()
    memories: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    memory_depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.jitter >= 0, f"jitter must not be negative, got {self.jitter}.")
        for name, least in (("at", 1), ("memories", 0), ("depths", 1), ("memory_depths", 1)):
            values = getattr(self, name)
            require(all(value >= least for value in values), f"{name} must be at least {least} each, got {values}.")


def network(model: nn.Module) -> SequenceModel:
    """Return the sequence model inside the wrapper of distributed training."""
    return next(module for module in model.modules() if isinstance(module, SequenceModel))


def may_be_copied(model: nn.Module) -> bool:
    """Return False for weights sharded by FSDP, of which measurements cannot make copies."""
    return not is_sharded(list(model.modules()))


class Language(Task[TextSegment]):
    """Trains a sequence model on a text, segment by segment from beginning to end.

    Every split has its own memory, which is empty at its first segment. The memory of training is part of the run's state.
    So is the vocabulary, so that text can be generated from the run's folder without the training text.
    """

    better = ("perplexity", "min")

    def __init__(self, settings: LanguageSettings) -> None:
        self.settings = settings
        self.unrolled = False  # True during pre-training, which has no penalties
        self.units: tuple[str, ...] = ()  # the vocabulary, once the text is loaded
        self._memories: dict[str, Memory] = {}
        self._jacobian = self._schedule(0)

    def prepare(self, root: Path | None, training: Training) -> None:
        self._jacobian = self._schedule(training.pretrain_steps)

    def model(self) -> nn.Module:
        return self.settings.model.model(self.settings.data.vocabulary)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[TextSegment]:
        data = self.settings.data
        whole = data.load(root)
        found, self.units = data.cut(whole), tuple(whole.classes)

        def segments(split: SplitName) -> Segments | None:
            if split not in found:
                return None
            rows = training.batch_size if split == "train" else training.eval_batch_size
            length = data.length if split == "train" else data.eval_length or data.length
            return Segments(split, found[split], rows, length, rank=rank, world_size=world_size)

        train = segments("train")
        assert train is not None
        return Loaders(train, segments("valid"), segments("test"))

    def loss(self, model: nn.Module, batch: TextSegment, step: int) -> Outcome:
        memory = self._recall(batch.split, batch)
        self._vary_steps(model, step)
        weight = 0.0 if self.unrolled else self._jacobian(step)
        loss, metrics, after = self._judged(model, batch, memory, weight)
        self._keep(batch.split, after)
        if batch.look and not self.unrolled and may_be_copied(network(model)):
            metrics |= self._memory_metrics(network(model), batch, memory)
        return Outcome(loss, metrics, batch.y.numel())

    def evaluate(self, model: nn.Module, batch: TextSegment) -> Outcome:
        memory = self._recall(batch.split, batch)
        with torch.no_grad():
            before = now(batch.x)
            loss, after = model(batch.x, memory, batch.y)
            metrics: Metrics = {NLL: loss, "predict_seconds": now(batch.x) - before}
            self._keep(batch.split, after)
            copyable = may_be_copied(network(model))
            metrics |= self._variants(network(model), batch) if copyable else {}
            if batch.look and self.settings.depths and copyable:
                found = changes(network(model), batch, memory, self.settings.depths)
                metrics |= {f"change_{depth}": value for depth, value in found.items()}
        return Outcome(loss, metrics, batch.y.numel())

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """Add perplexities, the exponentials of the mean over all tokens, and bits per token."""
        found = dict(means)
        for name, value in means.items():
            if name == NLL or name.startswith(f"{NLL}_"):
                # math.exp raises OverflowError above 709
                found[f"perplexity{name.removeprefix(NLL)}"] = math.exp(value) if value < 700 else math.inf
        if NLL in means:
            found["bits"] = means[NLL] / math.log(2)
        return found

    def pretrain(self, model: nn.Module, on: bool) -> None:
        unrolled_pretraining(model, on)
        self.unrolled = on

    def state(self) -> Any:
        return {"memory": list(self._memories.get("train", ())), "vocabulary": SEPARATOR.join(self.units)}

    def resume(self, state: Any) -> None:
        self._memories = {"train": tuple(state["memory"])}

    def _recall(self, name: str, batch: TextSegment) -> Memory:
        """Return the memory for a segment; it is empty at the first segment of a split."""
        if batch.position == 0:
            self._memories[name] = ()
        return tuple(part.to(batch.x.device) for part in self._memories.get(name, ()))

    def _keep(self, name: str, memory: Memory) -> None:
        """Store the memory for the next segment; drop it if it is not finite, or all later segments would fail too."""
        sound = all(bool(torch.isfinite(part).all()) for part in memory if part.is_floating_point())
        self._memories[name] = memory if sound else ()

    def _judged(self, model: nn.Module, batch: TextSegment, memory: Memory, weight: float) -> tuple[Tensor, Metrics, Memory]:
        """Return loss, metrics and memory of a training step; `weight` is the weight of the Jacobian penalty."""
        with record(model) as solutions:
            loss, nll, after = self._read(model, batch, memory)
        metrics: Metrics = {NLL: nll.detach()}
        if weight and solutions:
            penalty = jacobian_penalty(solutions[0])
            metrics["jacobian"] = penalty.detach()
            loss = loss + weight * penalty
        return loss, metrics, after

    def _read(self, model: nn.Module, batch: TextSegment, memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """Return the loss including the terms of TrellisNet's recipe, -log p alone, and the new memory."""
        net, (alpha, beta) = network(model), self.settings.activation
        if not isinstance(net, TrellisNet) or (net.config.auxiliary_every is None and not alpha and not beta):
            nll, after = model(batch.x, memory, batch.y)
            return nll, nll, after
        parts, after = model(batch.x, memory, batch.y, with_parts=True)
        loss = parts.loss + net.config.auxiliary_weight * parts.auxiliary + activation_penalty(parts, alpha, beta)
        return loss, parts.loss, after

    def _schedule(self, pretraining: int) -> PenaltySchedule:
        """Return the schedule of the Jacobian penalty, which begins after the steps of pre-training."""
        s = self.settings
        return PenaltySchedule(
            weight=s.jacobian_weight,
            frequency=s.jacobian_frequency if s.jacobian_weight else 0.0,
            increment=s.jacobian_increment,
            every=s.jacobian_every,
            pretraining=pretraining,
        )

    def _vary_steps(self, model: nn.Module, step: int) -> None:
        """Draw the solver's step limit for a training step, if there is jitter."""
        layer = getattr(network(model), "layer", None)
        if self.settings.jitter and isinstance(layer, DEQ):
            stop = dataclasses.replace(layer.stop, max_steps=self.settings.model.forward_limit)
            layer.stop = random_max_steps(stop, step, self.settings.jitter)

    def _variants(self, model: SequenceModel, batch: TextSegment) -> Metrics:
        """Return the losses of the same weights with other step limits and memory lengths, each with its own memory."""
        s = self.settings
        twins = {f"at_{k}": stopped(model, k) for k in s.at} | {f"memory_{m}": with_memory(model, m) for m in s.memories}
        found: Metrics = {}
        for name, twin in twins.items():
            if twin is None:
                continue
            place = f"{batch.split} {name}"
            found[f"{NLL}_{name}"], after = twin(batch.x, self._recall(place, batch), batch.y)
            self._keep(place, after)
        return found

    def _memory_metrics(self, model: SequenceModel, batch: TextSegment, memory: Memory) -> Metrics:
        """Return the peak memory of training steps, measured on copies of the model."""
        weight = self.settings.jacobian_weight  # steps with the penalty determine the peak

        def loss(twin: SequenceModel) -> Tensor:
            return self._judged(twin, batch, memory, weight)[0]

        found: Metrics = {"inner_parameters": float(inner_parameters(model))}
        found["peak_bytes_step"] = peak_bytes(model, batch, loss)
        found["peak_bytes_layer"] = peak_bytes(model, batch, loss, headless=True)
        over = peak_over_depths(model, batch, loss, self.settings.memory_depths)
        return found | {f"peak_bytes_{depth}": value for depth, value in over.items()}
