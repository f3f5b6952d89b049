"""DEQ transformers for language (Bai, Kolter and Koltun 2019) and the explicit transformers they are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equilibria._core.checkpointing import Buffers, Checkpoint, Tensors, check_checkpoint, repeat
from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.phantom import UnrolledPhantom
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary
from equilibria.models.language.relative_attention import Around
from equilibria.models.language.sequence import EquilibriumModel, Memory, SequenceModel, checked, last_columns
from equilibria.models.language.sequence_layers import linear
from equilibria.models.language.transformer_cell import Positions, TransformerBlock, TransformerCell
from equilibria.models.language.transformer_configs import TransformerConfig
from equilibria.models.solve_options import relative_stop
from equilibria.nn import VariationalDropout
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

TransformerStart = Literal["zero", "embedding", "memory"]


class DEQTransformer(EquilibriumModel):
    """Embedding -> equilibrium of a `TransformerCell` over all positions of a segment -> softmax.

        model = DEQTransformer(TRANSFORMER_CONFIGS["nano"], tokens=len(corpus.classes))
        loss, memory = model(tokens, memory, targets)

    The memory holds the injection and the states of the last positions, detached from the graph. No state depends on a
    later position, so segments read with enough memory have the same equilibrium as one long segment. This is not true of
    an explicit twin and of unrolled pre-training: every application attends to the states that the last application left.

    config      one of `TRANSFORMER_CONFIGS` or your own
    tokens      number of tokens in the vocabulary; None: as in the configuration
    solver      solver of the equilibrium
    stop        None: tolerance and step limit of the configuration, without warnings about solves that use all steps
    gradient    None: implicit, with tolerance and step limit of the configuration; with `tracked_steps`, a phantom gradient
    eval_stop   `stop` in eval mode; None: the same
    depth       build the explicit twin instead: the cell applied that many times, with the same names in the state dict
    checkpoint  checkpointing of the explicit twin, see `WeightTied`
    start       start of the solve: "zero"; "embedding", the embedded tokens; "memory", the mean of the states in memory, or
                zero without memory. The last saves evaluations in a trained model
    """

    def __init__(
        self,
        config: TransformerConfig,
        tokens: int | None = None,
        *,
        solver: AnySolver = Anderson(),
        stop: Stop | None = None,
        gradient: Gradient | None = None,
        eval_stop: Stop | None = None,
        depth: int | None = None,
        checkpoint: Checkpoint = None,
        start: TransformerStart = "zero",
    ) -> None:
        super().__init__()
        require(
            start in get_args(TransformerStart),
            f"start must be one of {', '.join(get_args(TransformerStart))}, got {start!r}.",
        )
        require(depth is not None or checkpoint is None, "checkpoint is for explicit networks: pass a depth as well.")
        self.config, self.start, self.pretraining_depth = config, start, config.pretraining_depth
        self.gradient = gradient or _gradient(config)
        self.vocabulary = vocabulary(config, tokens)
        self.injection = linear(config.width, 3 * config.heads * config.head_width)
        self.input_dropout = VariationalDropout(config.dropout, shared=(1,))
        self.output_dropout = VariationalDropout(config.dropout, shared=(1,))
        cell = TransformerCell(config)
        self.layer: DEQ | WeightTied
        if depth is None:
            stop = stop or relative_stop(config.tolerance, config.forward_steps)
            self.layer = DEQ(cell, None, solver, stop, self.gradient, eval_stop)
        else:
            self.layer = WeightTied(cell, depth, checkpoint=checkpoint)

    def forward(self, tokens: Tensor, memory: Memory | None = None, targets: Tensor | None = None) -> tuple[Tensor, Memory]:
        """Return (scores (batch, time, tokens), memory) or, with targets, (mean loss, memory)."""
        memory = checked(tokens, memory, 1 + self.config.blocks)
        x = self.input_dropout(self.vocabulary.embed(tokens))
        u = self.injection(x).to(x.dtype)  # autocast would narrow it, and the memory may be used without autocast later
        z, seen = self._states(u, memory, self._start(x, memory))
        length = self.config.memory_length(self.training)
        return self.vocabulary(self.output_dropout(z), targets), remembered(memory, (u, *seen), length)

    def _start(self, x: Tensor, memory: Memory) -> Tensor:
        """Return the start of the solve, (batch, time, width)."""
        if self.start == "embedding":
            return x
        if self.start == "memory" and memory and memory[1].shape[1]:
            return memory[1].mean(dim=1, keepdim=True).to(x.dtype).expand_as(x)
        return torch.zeros_like(x, requires_grad=False)

    def _states(self, u: Tensor, memory: Memory, z0: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the state, and the state that every block of the cell got as its input; both (batch, time, width)."""
        cell = self.layer.cell
        if not isinstance(cell, TransformerCell) or len(cell.blocks) == 1:
            z = self.layer(u, memory, init=z0)
            return z, (z,)
        if isinstance(self.layer, DEQ):
            # one more run at the equilibrium shows the inputs of the blocks between the first and the last
            s = self.layer.solve(u, memory, init=z0)
            with torch.no_grad(), cell.watched() as seen:
                s.f(s.z.detach())
            return s.z, tuple(seen.values())
        with cell.watched() as seen:
            z = self.layer(u, memory, init=z0)
        return z, (z, *[seen[i] for i in range(1, len(seen))])


class TransformerXL(SequenceModel):
    """Embedding -> a stack of blocks, each with its own weights -> softmax (Dai and others 2019).

    There is no injection: the embedding is the input of the first block. Each block has its own memory, which holds the
    states that the block got in earlier segments.

    config      one of `TRANSFORMER_XL_CONFIGS` or your own
    tokens      number of tokens in the vocabulary; None: as in the configuration
    layers      number of blocks; None: as in the configuration
    checkpoint  what to keep for backward, see `WeightTied`; the gradients are equal bit by bit
    """

    def __init__(
        self,
        config: TransformerConfig,
        tokens: int | None = None,
        *,
        layers: int | None = None,
        checkpoint: Checkpoint = None,
    ) -> None:
        super().__init__()
        layers = config.layers if layers is None else layers
        require(layers >= 1, f"layers must be at least 1, got {layers}.")
        check_checkpoint(checkpoint)
        self.config, self.checkpoint = config, checkpoint
        self.vocabulary = vocabulary(config, tokens)
        self.positions = Positions(config)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(layers))
        self.input_dropout = VariationalDropout(config.dropout, shared=(1,))
        self.output_dropout = VariationalDropout(config.dropout, shared=(1,))

    def forward(self, tokens: Tensor, memory: Memory | None = None, targets: Tensor | None = None) -> tuple[Tensor, Memory]:
        """Return (scores (batch, time, tokens), memory) or, with targets, (mean loss, memory)."""
        memory = checked(tokens, memory, len(self.blocks))
        x = self.input_dropout(self.vocabulary.embed(tokens))
        positions, hidden = self.positions(x.shape[1], memory[0].shape[1] if memory else 0, x)
        states = memory or [None] * len(self.blocks)
        blocks: Sequence[Any] = list(self.blocks)
        around = [block.around(positions, hidden, state, None) for block, state in zip(blocks, states, strict=True)]
        # the number of the block is part of the state, so that a checkpointed segment replays its own blocks
        step = _BlockStep(blocks, around)
        _, z = repeat(step, (torch.tensor(0), x), len(blocks), self.checkpoint)
        seen = tuple(step.seen[i] for i in range(len(blocks)))
        length = self.config.memory_length(self.training)
        return self.vocabulary(self.output_dropout(z), targets), remembered(memory, seen, length)


class _BlockStep:
    """One step of a stack: maps (number i, state) to (i + 1, block i of the state), in the form that `repeat` takes."""

    def __init__(self, blocks: Sequence[Any], around: Sequence[Around]) -> None:
        self.blocks, self.around = blocks, around
        self.seen: dict[int, Tensor] = {}

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors:
        number, state = int(z[0]), z[1]
        self.seen[number] = state.detach()  # by number: a checkpoint that recomputes a step replaces its entry
        return z[0] + 1, self.blocks[number](state, None, self.around[number])


def vocabulary(config: TransformerConfig, tokens: int | None) -> AdaptiveVocabulary:
    """Return the vocabulary of a configuration, with `tokens` tokens if given; cutoffs beyond them are left out."""
    chosen = config.vocabulary
    if tokens is not None:
        cutoffs = tuple(cutoff for cutoff in chosen.cutoffs if cutoff < tokens)
        chosen = replace(chosen, tokens=tokens, cutoffs=cutoffs)
    return AdaptiveVocabulary(chosen, config.width, scale=math.sqrt(config.width))


def remembered(memory: Memory, now: Sequence[Tensor], length: int) -> Memory:
    """Return the memory after a segment: the last `length` positions of memory and segment; () for a length of 0."""
    if length == 0:
        return ()
    before = memory or [None] * len(now)
    return tuple(last_columns(a, b, length) for a, b in zip(before, now, strict=True))


def _gradient(config: TransformerConfig) -> Gradient:
    """Return the gradient of a configuration: phantom if it has `tracked_steps`, else implicit."""
    if config.tracked_steps:
        return UnrolledPhantom(steps=config.tracked_steps, damping=0.8, checkpoint=True)
    return Implicit(stop=relative_stop(config.tolerance, config.backward_steps))
