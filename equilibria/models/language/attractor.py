"""Attractor language models: an equilibrium block that refines the output of a backbone of ordinary layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary, VocabularyConfig
from equilibria.models.language.sequence import Memory, SequenceModel, checked
from equilibria.models.reasoning.blocks import ReasonerLayer, RotaryAttention, initialize, rms_norm
from equilibria.solution import Solution
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

MULTIPLE = 16  # hidden widths are rounded up to a multiple of this
# The published limits: at most 8 steps, at least 4. Convergence is checked at the first and at every fourth step.
ATTRACTOR_STOP = Stop(rtol=1e-3, atol=0.0, max_steps=8, check_every=4, on_failure="ignore")


class AttractorCell(nn.Module):
    """f(z, h) = layers(z + h): causal attention with rotary positions and a SwiGLU, with an RMS norm after each sum."""

    def __init__(self, width: int, heads: int, layers: int = 1, expansion: float = 4.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[causal_layer(width, heads, expansion) for _ in range(layers)])
        initialize(self)

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        out: Tensor = self.layers(z + h)
        return out


def causal_layer(width: int, heads: int, expansion: float = 4.0) -> ReasonerLayer:
    """Return a layer of the kind that `AttractorCell` consists of."""
    return ReasonerLayer(RotaryAttention(width, heads, causal=True), width, expansion, MULTIPLE)


class AttractorHead(nn.Module):
    """The equilibrium z = f(z, h) of an `AttractorCell`, started at the backbone's output h, (batch, time, width).

    gradient  `Implicit()` is exact, `JFB()` the one-step gradient
    """

    def __init__(
        self,
        width: int,
        heads: int = 4,
        layers: int = 1,
        *,
        solver: AnySolver = Anderson(),
        stop: Stop = ATTRACTOR_STOP,
        gradient: Gradient = Implicit(),
    ) -> None:
        super().__init__()
        self.layer = DEQ(AttractorCell(width, heads, layers), _start_at_input, solver, stop, gradient)

    def forward(self, h: Tensor) -> Tensor:
        z: Tensor = self.layer(rms_norm(h))
        return z


def _start_at_input(h: Tensor) -> Tensor:
    # a named function, because a lambda cannot be pickled
    return h


class CausalBackbone(nn.Module):
    """Tokens -> embedding -> ordinary causal layers, (batch, time, width)."""

    def __init__(self, tokens: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*[causal_layer(width, heads) for _ in range(layers)])
        initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.layers(self.embedding(tokens))
        return h


class AttractorModel(SequenceModel):
    """backbone -> head -> softmax over the vocabulary, without a memory of earlier segments.

        backbone = transformers.AutoModel.from_config(config)  # or models.CausalBackbone(...)
        model = models.AttractorModel(backbone, models.AttractorHead(width), tokens=vocabulary, width=width)

    backbone  maps tokens to (batch, time, width), or to an object with such a `last_hidden_state` like Hugging Face's models
    head      an `AttractorHead`; None: the backbone alone
    """

    def __init__(self, backbone: nn.Module, head: AttractorHead | None, *, tokens: int, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.vocabulary = AdaptiveVocabulary(VocabularyConfig(tokens=tokens), width)

    def forward(self, tokens: Tensor, memory: Memory | None = None, targets: Tensor | None = None) -> tuple[Tensor, Memory]:
        """Return (scores (batch, time, tokens), ()) or, with targets, (mean loss, ())."""
        checked(tokens, memory, 0)
        h = last_hidden(self.backbone(tokens))
        return self.vocabulary(h if self.head is None else self.head(h), targets), ()


def last_hidden(output: Any) -> Tensor:
    """Return the hidden states, (batch, time, width), in the output of a backbone; raises TypeError if there are none."""
    found = getattr(output, "last_hidden_state", output)
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise TypeError(
            "The backbone must return hidden states (batch, time, width), or an object with them as last_hidden_state; got "
            f"{type(output).__name__}."
        )
    return found


@torch.no_grad()
def token_residuals(s: Solution) -> Tensor:
    """Return |f(z) - z| / |f(z)| of every token, (batch, time), for a state (batch, time, width); runs the cell once."""
    z = s.z.detach()
    fz = s.f(z)
    length: Tensor = (fz - z).norm(dim=-1) / fz.norm(dim=-1).clamp_min(torch.finfo(fz.dtype).tiny)
    return length
