"""The common parts of language models: memory, loss, unrolled pre-training and generation of text."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.unrolled import Unrolled
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary, VocabularyConfig

Memory = tuple[Tensor, ...]  # tensors with the batch first; (): there is no memory


class SequenceModel(nn.Module):
    """A model of tokens, (batch, time), that reads a text segment by segment.

        memory = None
        for tokens, targets in batches:
            loss, memory = model(tokens, memory, targets)

    The memory is a tuple of detached tensors, batch first. Checkpoints store it unchanged.
    """

    @abstractmethod
    def forward(self, tokens: Tensor, memory: Memory | None = None, targets: Tensor | None = None) -> Any:
        """Return (scores (batch, time, tokens), memory) or, with targets, (mean loss, memory)."""


class EquilibriumModel(SequenceModel):
    """A sequence model around one layer, which is a DEQ or an explicit network.

    gradient           gradient of the DEQ outside of pre-training
    pretraining_depth  applications of the cell in pre-training
    """

    layer: nn.Module
    gradient: Gradient
    pretraining_depth: int


def unrolled_pretraining(model: nn.Module, on: bool = True, depth: int | None = None) -> None:
    """Switch every equilibrium sequence model inside `model` to a shallow unrolled network, or back to the equilibrium.

    The published recipes train this way for the first steps. Parameters and optimizer state are unaffected. The switch is
    not part of the state dict. `gradient=Warmup(...)` does the same by the number of steps.

    depth  applications of the cell; None: as in the configuration
    """
    found = [module for module in model.modules() if isinstance(module, EquilibriumModel)]
    require(
        len(found) > 0,
        f"unrolled_pretraining applies to DEQTransformer and TrellisNet, but this {type(model).__name__} contains none.",
    )
    for module in found:
        if not isinstance(module.layer, DEQ):
            raise ValueError(
                f"unrolled_pretraining needs an equilibrium, but this {type(module).__name__} is an explicit network: build "
                "it with depth=None."
            )
        unrolled = Unrolled(depth=module.pretraining_depth if depth is None else depth)
        module.layer.gradient = unrolled if on else module.gradient


class GRUModel(SequenceModel):
    """Embedding -> gated recurrent units -> softmax, the baseline of the copy memory task.

    tokens     number of tokens in the vocabulary
    hidden     number of units
    embedding  width of the embedding; None: the number of tokens, at most `hidden`
    layers     number of recurrent layers
    """

    def __init__(self, tokens: int = 10, hidden: int = 60, *, embedding: int | None = None, layers: int = 1) -> None:
        super().__init__()
        width = min(tokens, hidden) if embedding is None else embedding
        self.embedding = nn.Embedding(tokens, width)
        self.gru = nn.GRU(width, hidden, layers, batch_first=True)
        self.vocabulary = AdaptiveVocabulary(VocabularyConfig(tokens=tokens), hidden)

    def forward(self, tokens: Tensor, memory: Memory | None = None, targets: Tensor | None = None) -> tuple[Tensor, Memory]:
        """Return (scores or mean loss, memory); the memory holds the last states, (batch, layers, hidden)."""
        memory = checked(tokens, memory, 1)
        before = memory[0].transpose(0, 1).contiguous() if memory else None
        h, last = self.gru(self.embedding(tokens), before)
        return self.vocabulary(h, targets), (last.detach().transpose(0, 1),)


def checked(tokens: Tensor, memory: Memory | None, parts: int) -> Memory:
    """Return the memory, () for None; raises ValueError unless it has `parts` tensors that fit the tokens."""
    require(
        tokens.dim() == 2 and tokens.numel() > 0,
        f"Tokens must have the shape (batch, time), with at least one of each, got {tuple(tokens.shape)}.",
    )
    memory = () if memory is None else tuple(memory)
    require(
        len(memory) in (0, parts),
        f"The memory of this model has {parts} tensors, got {len(memory)}. Pass the memory that its last call returned, or "
        "None.",
    )
    for part in memory:
        require(
            part.shape[0] == tokens.shape[0],
            f"The memory has {part.shape[0]} rows and the tokens have {tokens.shape[0]}: row i of a segment continues row i "
            "of the segment before. Begin with memory=None.",
        )
    return memory


def last_columns(before: Tensor | None, now: Tensor, count: int) -> Tensor:
    """Return the last `count` positions of both, (batch, time, ...), detached and copied."""
    now = now.detach()
    whole = now if before is None else torch.cat([before.detach(), now], dim=1)
    return whole[:, max(whole.shape[1] - count, 0) :].clone()


@torch.no_grad()
def generate(
    model: SequenceModel,
    tokens: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append `count` tokens, drawn one by one from the model in eval mode: (batch, time) -> (batch, time + count).

    temperature  divides the scores; 0: always take the most probable token
    top_k        draw from this many most probable tokens; None: from all
    generator    generator of the draws; None: torch's own
    """
    require(count >= 0, f"count is how many tokens to draw and must not be negative, got {count}.")
    require(temperature >= 0, f"temperature must not be negative, got {temperature}.")
    require(top_k is None or top_k >= 1, f"top_k must be at least 1, or None for all, got {top_k}.")
    modes = [(module, module.training) for module in model.modules()]  # parts may be in different modes
    model.eval()
    try:
        found, segment, memory = [tokens], tokens, None
        for _ in range(count):
            # after the first segment only the new token is read; the memory holds the others
            scores, memory = model(segment, memory)
            segment = _draw(scores[:, -1], temperature, top_k, generator).to(tokens.dtype)
            found.append(segment)
        return torch.cat(found, dim=1)
    finally:
        for module, training in modes:
            module.training = training


def _draw(scores: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row, (batch, tokens) -> (batch, 1)."""
    if temperature == 0:
        return scores.argmax(dim=-1, keepdim=True)
    top, index = scores.topk(min(top_k or scores.shape[-1], scores.shape[-1]), dim=-1)
    below = top - top[:, :1]  # at most 0, so that a tiny temperature cannot make the softmax overflow
    scaled = below / max(temperature, torch.finfo(top.dtype).tiny)
    chosen = torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=generator)
    return index.gather(1, chosen)
