"""The layer of a TrellisNet as a cell (Bai, Kolter and Koltun 2019), its configurations, and the explicit stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from equilibria._core.checkpointing import Buffers, Checkpoint, Tensors, check_checkpoint, repeat
from equilibria._core.checks import require
from equilibria._core.frozen_cell import FrozenCell
from equilibria.models.language.sequence_layers import WeightDrop, linear
from equilibria.nn import VariationalDropout

TrellisStates = tuple[Tensor, Tensor]  # h and c, (batch, time, size) each
CarryKind = Literal["state", "tokens"]


@dataclass(frozen=True, kw_only=True)
class TrellisConfig:
    """Sizes of the layer, how often it is applied, and dropout.

    tokens           number of tokens in the vocabulary; embedding and softmax share their vectors
    embedding        width of the vectors; the softmax reads this many last channels of h
    hidden           number of the other channels of h
    layers           number of layers of the explicit network
    dilations        layer i has the dilation at i modulo their number; an equilibrium has one dilation, 1
    weight_norm      weight norm on W1 and W2
    input_bias       W1 has a bias, as in the code of the equilibrium
    carry            what is carried from segment to segment: "state", h and c at the last position, which stand for all
                     earlier ones; "tokens", the last `horizon` tokens, which are read again before the segment, unscored
    horizon          number of tokens to read again with carry="tokens"
    input_history    with carry="state", the last vectors are carried too. False, as in the released models: W1 sees zeros
                     before the segment, which matters little in a long segment and much in a segment of one token
    output_dropout, input_dropout, hidden_dropout  shares, with one mask for all positions
    word_dropout     share of the vocabulary whose vectors are set to zero in a forward pass
    weight_drop      share of the entries of W2 that are dropped, in the half that multiplies h_{t-s}
    experts          number of softmaxes in the mixture; 1: a plain softmax
    auxiliary_every  number of layers of the explicit network from one loss to the next; None: only the last layer has a loss
    auxiliary_weight weight of these losses in the recipe
    tolerance, forward_steps, backward_steps  of the solves, unless a stop and a gradient are given
    pretraining_depth   applications of the cell in unrolled pre-training
    """

    summary: str
    tokens: int
    embedding: int
    hidden: int
    layers: int
    dilations: tuple[int, ...] = (1,)
    weight_norm: bool = True
    input_bias: bool = False
    carry: CarryKind = "state"
    horizon: int = 0
    input_history: bool = True
    output_dropout: float = 0.0
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    word_dropout: float = 0.0
    weight_drop: float = 0.0
    experts: int = 1
    auxiliary_every: int | None = None
    auxiliary_weight: float = 0.0
    tolerance: float = 1e-3
    forward_steps: int = 45
    backward_steps: int = 45
    pretraining_depth: int = 40

    def __post_init__(self) -> None:
        for name in ("tokens", "embedding", "hidden", "layers", "experts"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        require(
            len(self.dilations) > 0 and min(self.dilations) >= 1,
            f"dilations, the distances that layers look back, must be at least 1 each, got {self.dilations}.",
        )
        require(self.carry in ("state", "tokens"), f'carry must be "state" or "tokens", got {self.carry!r}.')
        require(
            self.carry == "state" or self.horizon >= 1,
            f'With carry="tokens" horizon, the number of tokens to read again, must be at least 1, got {self.horizon}.',
        )
        require(0 <= self.word_dropout < 1, f"word_dropout is a share and must lie in [0, 1), got {self.word_dropout}.")
        require(
            self.auxiliary_every is None or self.auxiliary_every >= 1,
            f"auxiliary_every must be at least 1 layer, or None, got {self.auxiliary_every}.",
        )

    @property
    def size(self) -> int:
        """Channels of h, and of c."""
        return self.hidden + self.embedding


class TrellisCell(nn.Module):
    """One layer on all positions, (h, c) -> (h', c'), with the same weights at every depth.

    i, o, g, f = W1 [x_{t-s}, x_t] + W2 [h_{t-s}, h_t] + b
    c' = sigmoid(f) c_{t-s} + sigmoid(i) tanh(g),    h' = sigmoid(o) tanh(c')

    s is the dilation. The history before the segment is h and c of one position, which stand for all earlier positions.
    """

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.config, size = config, config.size
        self.W1 = linear(2 * config.embedding, 4 * size, bias=config.input_bias, norm=config.weight_norm)
        self.W2 = linear(2 * size, 4 * size, norm=config.weight_norm)
        if config.weight_drop:
            parametrize.register_parametrization(self.W2, "weight", WeightDrop(config.weight_drop, size))
        self.dropout = VariationalDropout(config.hidden_dropout, shared=(1,))

    def prepare(self, x: Tensor, history: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of a solve: injection, h and c before the segment.

        x        embedded tokens, (batch, time, embedding)
        history  () or (h, c, last vectors)
        """
        return (self.injected(x, history, 1), *self.before(x, history))

    def injected(self, x: Tensor, history: tuple[Tensor, ...], dilation: int) -> Tensor:
        """Return W1 [x_{t-s}, x_t], (batch, time, 4 size): the part of the layer that is the same at every depth."""
        vectors = history[2] if history and self.config.input_history else x[:, :0]
        padded = F.pad(vectors, (0, 0, max(dilation - vectors.shape[1], 0), 0))[:, -dilation:]
        return self.W1(torch.cat([_delayed(x, padded), x], dim=-1))

    def before(self, x: Tensor, history: tuple[Tensor, ...]) -> TrellisStates:
        """Return h and c before the segment, (batch, 1, size) each; zeros without a history."""
        if history:
            return history[0], history[1]
        zeros = x.new_zeros(x.shape[0], 1, self.config.size)
        return zeros, zeros

    def forward(self, z: TrellisStates, injected: Tensor, h0: Tensor, c0: Tensor, dilation: int = 1) -> TrellisStates:
        h, c = z
        # dropped before it is cut into taps, so that h_{t-s} and h_t lose the same channels
        h = self.dropout(torch.cat([h0.expand(-1, dilation, -1), h], dim=1))
        taps = torch.cat([h[:, :-dilation], h[:, dilation:]], dim=-1)  # [h_{t-s}, h_t]
        i, o, g, f = (injected + self.W2(taps)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * _delayed(c, c0.expand(-1, dilation, -1)) + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class TrellisStack(nn.Module):
    """The cell applied `depth` times from (0, 0), with the dilations in turn; weights and masks are the same at all depths.

    checkpoint  what to keep for backward, see `WeightTied`
    """

    def __init__(self, cell: TrellisCell, depth: int, checkpoint: Checkpoint = None) -> None:
        super().__init__()
        require(depth >= 1, f"depth, the number of applications of the cell, must be at least 1, got {depth}.")
        check_checkpoint(checkpoint)
        self.cell, self.depth, self.checkpoint = cell, depth, checkpoint

    def forward(self, x: Tensor, history: tuple[Tensor, ...], *, init: TrellisStates) -> TrellisStates:
        return self.tapped(x, history, init=init, every=None)[-1]

    def tapped(
        self, x: Tensor, history: tuple[Tensor, ...], *, init: TrellisStates, every: int | None
    ) -> list[TrellisStates]:
        """Return the states after every `every` layers, and after the last."""
        fixed = FrozenCell(self.cell)  # weights are computed and masks drawn once for all layers, as in a solve
        dilations = self.cell.config.dilations
        with fixed.in_place():
            cell: TrellisCell = fixed.cell  # type: ignore[assignment]
            injected = {s: cell.injected(x, history, s) for s in set(dilations)}
            step = _LayerStep(cell, fixed, injected, cell.before(x, history), dilations)
        z: Tensors = (torch.tensor(0), *init)
        found: list[TrellisStates] = []
        for start in range(0, self.depth, every or self.depth):
            z = repeat(step, z, min(every or self.depth, self.depth - start), self.checkpoint)
            found.append((z[1], z[2]))
        return found

    def extra_repr(self) -> str:
        return f"depth={self.depth}" + (f", checkpoint={self.checkpoint!r}" if self.checkpoint else "")


class _LayerStep:
    """One step of the stack: maps (number i, h, c) to (i + 1, layer i of h and c), in the form that `repeat` takes."""

    def __init__(
        self,
        cell: TrellisCell,
        fixed: FrozenCell,
        injected: dict[int, Tensor],
        before: TrellisStates,
        dilations: Sequence[int],
    ) -> None:
        self.cell, self.fixed, self.injected, self.before, self.dilations = cell, fixed, injected, before, dilations

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def __call__(self, z: Tensors, buffers: Buffers) -> Tensors:
        number, h, c = z
        # the number is part of the state, so that a checkpointed segment replays its own layers
        dilation = self.dilations[int(number) % len(self.dilations)]
        with self.fixed.in_place():
            return number + 1, *self.cell((h, c), self.injected[dilation], *self.before, dilation)


def _delayed(x: Tensor, before: Tensor) -> Tensor:
    """Return x_{t-s} for all t, (batch, time, ...); `before` holds the s positions before the first."""
    return torch.cat([before, x], dim=1)[:, : x.shape[1]]


_WORD_PTB = TrellisConfig(
    summary="Penn Treebank, words",
    tokens=10_000,
    embedding=400,
    hidden=1000,
    layers=58,
    weight_norm=False,
    carry="tokens",
    horizon=58,
    input_history=False,
    output_dropout=0.45,
    input_dropout=0.45,
    hidden_dropout=0.28,
    word_dropout=0.1,
    weight_drop=0.5,
    auxiliary_every=12,
    auxiliary_weight=0.05,
    forward_steps=55,
    backward_steps=55,
)
_WIKITEXT = TrellisConfig(
    summary="WikiText-103",
    tokens=267_735,
    embedding=512,
    hidden=1600,
    layers=75,
    input_history=False,
    output_dropout=0.1,
    input_dropout=0.1,
    hidden_dropout=0.1,
    auxiliary_every=25,
    auxiliary_weight=0.1,
)
# changes that the code of the equilibrium makes to the explicit network
_EQUILIBRIUM = {"carry": "state", "weight_norm": True, "input_bias": True, "auxiliary_every": None, "auxiliary_weight": 0.0}

TRELLIS_CONFIGS = {
    "word-ptb": _WORD_PTB,
    "wikitext-103": _WIKITEXT,
    "deq-word-ptb": replace(_WORD_PTB, **_EQUILIBRIUM),  # type: ignore[arg-type]
    "deq-wikitext-103": replace(_WIKITEXT, **_EQUILIBRIUM),  # type: ignore[arg-type]
    "deq-wikitext-103-script": replace(
        _WIKITEXT,
        summary="WikiText-103, sizes of the released script",
        embedding=500,
        hidden=1500,
        input_bias=True,
        auxiliary_every=None,
        auxiliary_weight=0.0,
    ),
    "nano": TrellisConfig(summary="for CPUs", tokens=10_000, embedding=64, hidden=128, layers=20, pretraining_depth=10),
}
