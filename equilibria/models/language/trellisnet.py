"""TrellisNet, a temporal convolution network whose layers share their weights, and its equilibrium (Bai and others 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._core.checkpointing import Checkpoint
from equilibria._core.checks import require
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary, VocabularyConfig
from equilibria.models.language.sequence import EquilibriumModel, Memory, checked, last_columns
from equilibria.models.language.sequence_layers import linear
from equilibria.models.language.trellis_cell import TrellisCell, TrellisConfig, TrellisStack, TrellisStates
from equilibria.models.solve_options import relative_stop
from equilibria.nn import VariationalDropout
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop


@dataclass(frozen=True)
class TrellisParts:
    """The parts of a model's output that losses use.

    loss       mean of -log p(target)
    auxiliary  sum of the same losses on earlier layers, to be weighted by `config.auxiliary_weight`; 0 if there are none
    output     (batch, time, embedding), the states that the softmax reads, before dropout
    dropped    the same after dropout
    """

    loss: Tensor
    auxiliary: Tensor
    output: Tensor
    dropped: Tensor


def activation_penalty(parts: TrellisParts, alpha: float, beta: float) -> Tensor:
    """Return alpha mean(dropped^2) + beta mean((output_{t+1} - output_t)^2) (Merity, McCann and Socher 2017)."""
    penalty = alpha * parts.dropped.square().mean()
    if parts.output.shape[1] < 2:
        return penalty  # a single position has no change, and the mean over none would be nan
    return penalty + beta * parts.output.diff(dim=1).square().mean()


class Mixture(nn.Module):
    """A mixture of softmaxes over one vocabulary (Yang and others 2018): p = sum_k pi_k(h) softmax(E tanh(W_k h + b_k))."""

    def __init__(self, vocabulary: AdaptiveVocabulary, experts: int) -> None:
        super().__init__()
        self.vocabulary, self.experts = vocabulary, experts
        width = vocabulary.width
        self.priors = linear(width, experts, bias=False)
        self.latents = linear(width, experts * width)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.vocabulary.embed(tokens)

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return log-probabilities (..., tokens); with targets, their mean loss."""
        latents = torch.tanh(self.latents(h)).unflatten(-1, (self.experts, -1))
        priors = torch.log_softmax(self.priors(h), dim=-1)
        if targets is None:
            each = torch.log_softmax(self.vocabulary(latents), dim=-1)
            return torch.logsumexp(priors.unsqueeze(-1) + each, dim=-2)
        repeated = targets.unsqueeze(-1).expand(*targets.shape, self.experts)
        return -torch.logsumexp(priors - self.vocabulary.losses(latents, repeated), dim=-1).mean()


class TrellisNet(EquilibriumModel):
    """Embedding -> `TrellisCell` on all positions of a segment, at its equilibrium or applied `depth` times -> softmax.

        net = TrellisNet(TRELLIS_CONFIGS["nano"], tokens=50)                    # the equilibrium, DEQ-TrellisNet
        net = TrellisNet(TRELLIS_CONFIGS["nano"], tokens=50, depth=20)          # TrellisNet

    One application moves information one position ahead, so an equilibrium takes about as many steps as there are positions
    that matter.

    config      one of `TRELLIS_CONFIGS` or your own
    tokens      number of tokens in the vocabulary; None: as in the configuration
    solver      solver of the equilibrium; None: Broyden, as in the paper
    stop        None: tolerance and step limit of the configuration, without warnings about solves that use all steps
    gradient    None: implicit, with tolerance and step limit of the configuration
    eval_stop   `stop` in eval mode; None: the same
    depth       build the explicit network instead, with this many layers and the same names in the state dict
    checkpoint  checkpointing of the explicit network, see `WeightTied`
    """

    def __init__(
        self,
        config: TrellisConfig,
        tokens: int | None = None,
        *,
        solver: AnySolver | None = None,
        stop: Stop | None = None,
        gradient: Gradient | None = None,
        eval_stop: Stop | None = None,
        depth: int | None = None,
        checkpoint: Checkpoint = None,
    ) -> None:
        super().__init__()
        require(depth is not None or checkpoint is None, "checkpoint is for explicit networks: pass a depth as well.")
        require(
            depth is not None or config.dilations == (1,),
            f"An equilibrium has one layer, of dilation 1, got dilations={config.dilations}. Pass a depth, or use "
            "dilations=(1,).",
        )
        config = config if tokens is None else replace(config, tokens=tokens)
        self.config, self.pretraining_depth = config, config.pretraining_depth
        self.gradient = gradient or Implicit(stop=relative_stop(config.tolerance, config.backward_steps))
        vocabulary = AdaptiveVocabulary(VocabularyConfig(tokens=config.tokens), config.embedding)
        self.vocabulary = vocabulary if config.experts == 1 else Mixture(vocabulary, config.experts)
        self.input_dropout = VariationalDropout(config.input_dropout, shared=(1,))
        self.output_dropout = VariationalDropout(config.output_dropout, shared=(1,))
        cell = TrellisCell(config)
        self.layer: DEQ | TrellisStack
        if depth is None:
            stop = stop or relative_stop(config.tolerance, config.forward_steps)
            self.layer = DEQ(cell, None, solver or Broyden(), stop, self.gradient, eval_stop)
        else:
            self.layer = TrellisStack(cell, depth, checkpoint)

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        targets: Tensor | None = None,
        *,
        with_parts: bool = False,
    ) -> tuple[Any, Memory]:
        """Return (scores (batch, time, tokens), memory) or, with targets, (mean loss, memory).

        with_parts  return `TrellisParts` in place of the loss
        """
        require(targets is not None or not with_parts, "with_parts returns parts of a loss and needs targets: pass them.")
        rereading = self.config.carry == "tokens"
        memory = checked(tokens, memory, 1 if rereading else 3)
        known = memory[0].shape[1] if rereading and memory else 0  # positions that are read again and not scored
        read = torch.cat([memory[0], tokens], dim=1) if known else tokens
        x = self._embedded(read)
        history = () if rereading else memory
        found = self._states(x, history, with_parts)
        kept = (last_columns(None, read, self.config.horizon),) if rereading else self._history(history, x, found[-1])
        outputs = [h[:, known:, -self.config.embedding :] for h, _ in found]
        return self._outcome(outputs, targets, with_parts), kept

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens after word dropout and input dropout, (batch, time, embedding)."""
        x: Tensor = self.vocabulary.embed(tokens)
        share = self.config.word_dropout
        if self.training and share:
            # drops tokens of the vocabulary, so that a token is dropped at all its positions
            kept = (torch.rand(self.config.tokens, device=x.device) >= share).to(x.dtype) / (1 - share)
            x = x * kept[tokens].unsqueeze(-1)
        return self.input_dropout(x)

    def _states(self, x: Tensor, history: Memory, tapped: bool) -> list[TrellisStates]:
        """Return the states (h, c) after all layers that have their own loss, and last those after the last layer.

        Without `tapped`, and for an equilibrium, only the last are returned.
        """
        zeros = x.new_zeros(*x.shape[:2], self.config.size)
        every = self.config.auxiliary_every
        if isinstance(self.layer, TrellisStack) and every is not None and tapped:
            return self.layer.tapped(x, history, init=(zeros, zeros), every=every)
        return [self.layer(x, history, init=(zeros, zeros))]

    def _history(self, history: Memory, x: Tensor, z: TrellisStates) -> Memory:
        """Return the memory after a segment: h and c at its last position, and the last embedded tokens."""
        h, c = z
        # a layer of dilation s needs the s vectors before a segment
        vectors = last_columns(history[2] if history else None, x, max(self.config.dilations))
        return last_columns(None, h, 1), last_columns(None, c, 1), vectors

    def _outcome(self, outputs: list[Tensor], targets: Tensor | None, with_parts: bool) -> Tensor | TrellisParts:
        """Return scores or the mean loss; with `with_parts`, the TrellisParts."""
        dropped = self.output_dropout(outputs[-1])
        result: Tensor = self.vocabulary(dropped, targets)
        if not with_parts:
            return result
        below = [self.vocabulary(self.output_dropout(output), targets) for output in outputs[:-1]]
        auxiliary = torch.stack(below).sum() if below else torch.zeros_like(result)
        return TrellisParts(result, auxiliary, outputs[-1], dropped)
