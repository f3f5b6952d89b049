"""Configurations of DEQ transformers and of the explicit ones they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from equilibria._core.checks import require
from equilibria.models.language.adaptive_vocabulary import VocabularyConfig

NormPlace = Literal["post", "pre"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a transformer block, the number of blocks, and the vocabulary.

    width               width of the state, d
    heads, head_width   H heads of e numbers each; H e is d in all published models
    inner               width inside the feed-forward layer, D
    blocks              number of blocks in series inside f; all get the same injection
    layers              number of blocks of the untied stack, `TransformerXL`
    norm                "post": layer norms after the sums; "pre": before attention and feed-forward layer
    skip_from_norm      with "pre": the feed-forward layer is added to its normalised input, as in the code of the papers.
                        Without it f(z) = z + g(z), where g does not depend on the scale of z: for large z the residual
                        f(z) - z does not shrink, and solves rarely converge. It suits explicit networks, and gradients
                        that consist of a few damped steps
    attention_norm      one more layer norm, before the attention's output matrix
    affine              layer norms have weights
    weight_norm         weight norm on all matrices of a block
    output_bias         the attention's output matrix has a bias
    dropout             dropout of embedding, positions, both sublayers and output, with one mask for all positions
    attention_dropout   dropout of the attention weights
    reach               number of positions that a position attends to, itself included; None: all
    memory              positions that are kept from segment to segment
    eval_memory         the same in eval mode; None: as in training
    tolerance, forward_steps, backward_steps  of the solves, unless a stop and a gradient are given
    tracked_steps       steps with damping 0.8 after those of the solver; gradients flow through them, checkpointed. 0:
                        implicit gradients
    pretraining_depth   applications of f in unrolled pre-training
    fused               see `RelativeAttention`
    """

    summary: str
    width: int
    heads: int
    head_width: int
    inner: int
    vocabulary: VocabularyConfig
    blocks: int = 1
    layers: int = 1
    norm: NormPlace = "post"
    skip_from_norm: bool = False
    attention_norm: bool = False
    affine: bool = False
    weight_norm: bool = True
    output_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    reach: int | None = 1000
    memory: int = 150
    eval_memory: int | None = None
    tolerance: float = 1e-3
    forward_steps: int = 30
    backward_steps: int = 35
    tracked_steps: int = 0
    pretraining_depth: int = 2
    fused: bool = True

    def __post_init__(self) -> None:
        for name in ("width", "heads", "head_width", "inner", "blocks", "layers"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        require(self.norm in ("post", "pre"), f'norm must be "post" or "pre", got {self.norm!r}.')
        require(
            self.norm == "pre" or not self.skip_from_norm,
            'skip_from_norm needs norm="pre"; with norm="post" the input of the feed-forward layer is normalised anyway.',
        )
        require(self.reach is None or self.reach >= 1, f"reach must be at least 1, or None for all, got {self.reach}.")
        require(
            self.memory >= 0 and (self.eval_memory is None or self.eval_memory >= 0),
            f"memory counts positions and must not be negative, got {self.memory} and {self.eval_memory}.",
        )

    def memory_length(self, training: bool) -> int:
        """Return the number of positions to remember in this mode."""
        return self.memory if training or self.eval_memory is None else self.eval_memory


WORDS = 267_735  # words of WikiText-103
CUTOFFS = (20_000, 40_000, 200_000)  # first words of the clusters, by rank of frequency
_PLAIN = VocabularyConfig(tokens=WORDS)
_ADAPTIVE = VocabularyConfig(tokens=WORDS, cutoffs=CUTOFFS, divisor=4)

_MEDIUM = TransformerConfig(
    summary="WikiText-103, adaptive",
    width=700,
    heads=10,
    head_width=70,
    inner=48_000,
    vocabulary=_ADAPTIVE,
    dropout=0.05,
    eval_memory=300,
)
_REGULARIZED = replace(
    _MEDIUM, dropout=0.06, attention_dropout=0.01, memory=300, eval_memory=None, forward_steps=12, backward_steps=13
)

TRANSFORMER_CONFIGS = {
    "medium": _MEDIUM,
    "medium-regularized": replace(_REGULARIZED, summary="WikiText-103, adaptive, for Jacobian regularization"),
    "medium-regularized-pre": replace(
        _REGULARIZED,
        summary="the same, norms in front",
        norm="pre",
        skip_from_norm=True,
        forward_steps=14,
        backward_steps=14,
    ),
    "medium-v1": replace(_MEDIUM, summary="WikiText-103, adaptive, first release", inner=45_000, backward_steps=40),
    "medium-plain": replace(
        _MEDIUM, summary="WikiText-103, plain softmax", width=480, head_width=48, inner=43_000, vocabulary=_PLAIN
    ),
    "small": replace(
        _MEDIUM, summary="WikiText-103, small, plain softmax", width=500, head_width=50, inner=2500, vocabulary=_PLAIN
    ),
    "three-blocks": replace(
        _MEDIUM,
        summary="WikiText-103, adaptive, three blocks in the cell",
        inner=14_800,
        blocks=3,
        norm="pre",
        attention_norm=True,
        forward_steps=0,
        tracked_steps=12,
    ),
    "nano": TransformerConfig(
        summary="for CPUs",
        width=64,
        heads=4,
        head_width=16,
        inner=256,
        vocabulary=VocabularyConfig(tokens=10_000),
        memory=64,
        forward_steps=15,
        backward_steps=15,
    ),
    "copy": TransformerConfig(
        summary="copy memory",
        width=28,
        heads=2,
        head_width=14,
        inner=112,
        vocabulary=VocabularyConfig(tokens=10, tied=False),
        reach=None,
        memory=0,
    ),
}

TRANSFORMER_XL_CONFIGS = {
    "base": TransformerConfig(
        summary="WikiText-103",
        width=410,
        heads=10,
        head_width=41,
        inner=2100,
        vocabulary=VocabularyConfig(tokens=WORDS, cutoffs=CUTOFFS),
        layers=16,
        affine=True,
        weight_norm=False,
        output_bias=False,
        dropout=0.1,
        reach=None,
        eval_memory=640,
    ),
    "small": TransformerConfig(
        summary="WikiText-103, small",
        width=300,
        heads=10,
        head_width=30,
        inner=1300,
        vocabulary=VocabularyConfig(tokens=WORDS, width=500),
        layers=4,
        weight_norm=False,
        reach=None,
    ),
    "nano": TransformerConfig(
        summary="for CPUs, as large as the DEQ",
        width=48,
        heads=4,
        head_width=12,
        inner=48,
        vocabulary=VocabularyConfig(tokens=10_000, width=64),
        layers=4,
        weight_norm=False,
        memory=64,
    ),
}
