"""Language models built from settings: the network, its solver and its gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from equilibria._core.checks import require
from equilibria.models.language.adaptive_vocabulary import AdaptiveVocabulary, VocabularyConfig
from equilibria.models.language.deq_transformer import DEQTransformer, TransformerStart, TransformerXL
from equilibria.models.language.sequence import GRUModel, SequenceModel
from equilibria.models.language.transformer_configs import (
    TRANSFORMER_CONFIGS,
    TRANSFORMER_XL_CONFIGS,
    NormPlace,
    TransformerConfig,
)
from equilibria.models.language.trellis_cell import TRELLIS_CONFIGS, TrellisConfig
from equilibria.models.language.trellisnet import TrellisNet
from equilibria.models.solve_options import SolveOptions, relative_stop

ModelKind = Literal["transformer", "untied", "trellis", "gru"]
Checkpointing = Literal["sqrt", "recursive"]
LanguageSolverName = Literal["anderson", "broyden", "picard"]
LanguageGradientName = Literal["implicit", "upg", "npg", "jfb"]
Adjoint = Literal["gmres", "broyden"]

NEVER = 1e-30  # a tolerance that no solve reaches, so that it takes all its steps

_NAMES: dict[ModelKind, tuple[str, ...]] = {
    "transformer": tuple(TRANSFORMER_CONFIGS),
    "untied": tuple(TRANSFORMER_XL_CONFIGS),
    "trellis": tuple(TRELLIS_CONFIGS),
    "gru": ("60",),
}


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A sequence model; options that are None keep the value of the configuration.

    kind            "transformer" and "trellis" are equilibria, or with a depth explicit stacks of one layer; "untied" is
                    Transformer-XL, whose layers have their own weights
    size            a name in TRANSFORMER_CONFIGS, TRANSFORMER_XL_CONFIGS or TRELLIS_CONFIGS; for "gru" the number of units
    depth           number of layers of the explicit stack, or of "untied"
    checkpoint      checkpointing of explicit networks: what is kept for backward
    solver          solver of the equilibrium; None: Anderson's method, for TrellisNet Broyden's
    gradient        gradient of the equilibrium; `phantom_steps` and `damping` are those of "upg" and "npg"
    adjoint         solver of the linear systems of "implicit"; "broyden", as published, always takes all `backward_steps`
    directions      number of directions that "gmres" keeps; None: 4 to 20, as needed
    eval_steps      step limit of the solver in evaluation; None: as in training
    start           start of a transformer's solves; None: zero
    gain            factor on the initial matrices of a transformer, whose deviation is 0.01 as released; the DEQ paper says
                    0.05
    cutoffs         cutoffs of an adaptive softmax; `divisor` makes the vectors of transformers shorter from cluster to
                    cluster
    vectors         width of the word vectors, if it is not that of the transformer
    width, heads, inner, hidden, dropout, norm, ...  of the configuration; `hidden` and `embedding` are TrellisNet's
    """

    kind: ModelKind = "transformer"
    size: str = "nano"
    depth: int | None = None
    checkpoint: Checkpointing | None = None
    solver: LanguageSolverName | None = None
    gradient: LanguageGradientName = "implicit"
    phantom_steps: int = 5
    damping: float = 0.8
    adjoint: Adjoint = "gmres"
    directions: int | None = None
    tolerance: float | None = None
    forward_steps: int | None = None
    backward_steps: int | None = None
    eval_steps: int | None = None
    start: TransformerStart | None = None
    pretraining_depth: int | None = None
    memory: int | None = None
    eval_memory: int | None = None
    norm: NormPlace | None = None
    skip_from_norm: bool | None = None
    dropout: float | None = None
    width: int | None = None
    heads: int | None = None
    inner: int | None = None
    embedding: int | None = None
    hidden: int | None = None
    gain: float = 1.0
    cutoffs: tuple[int, ...] | None = None
    divisor: int | None = None
    vectors: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "gru":
            require(
                self.size.isdigit() and int(self.size) > 0,
                f"The size of a gru is its number of units, at least 1, got {self.size!r}.",
            )
        else:
            names = _NAMES[self.kind]
            require(self.size in names, f"size of {self.kind} must be one of {', '.join(names)}, got {self.size!r}.")
        require(
            self.checkpoint is None or self.kind == "untied" or self.depth is not None,
            "checkpoint is for explicit networks: pass a depth as well.",
        )

    def model(self, tokens: int) -> SequenceModel:
        """Return a new model for a vocabulary of `tokens` tokens."""
        match self.kind:
            case "gru":
                return GRUModel(tokens, int(self.size))
            case "untied":
                return self._widened(TransformerXL(self.transformer(tokens), layers=self.depth, checkpoint=self.checkpoint))
            case "trellis":
                return self._trellis(tokens)
        config = self.transformer(tokens)
        parts = self._parts(config)
        return self._widened(
            DEQTransformer(config, **parts, depth=self.depth, checkpoint=self.checkpoint, start=self.start or "zero")
        )

    def transformer(self, tokens: int) -> TransformerConfig:
        """Return the transformer configuration with the given options replaced."""
        config = (TRANSFORMER_XL_CONFIGS if self.kind == "untied" else TRANSFORMER_CONFIGS)[self.size]
        vocabulary = config.vocabulary
        chosen = VocabularyConfig(
            tokens=tokens,
            width=self.vectors or vocabulary.width,
            cutoffs=tuple(c for c in (vocabulary.cutoffs if self.cutoffs is None else self.cutoffs) if c < tokens),
            divisor=self.divisor or vocabulary.divisor,
            tied=vocabulary.tied,
            shared_projections=vocabulary.shared_projections,
        )
        changes = self._changes(
            "tolerance", "forward_steps", "backward_steps", "pretraining_depth", "memory", "eval_memory", "norm",
            "skip_from_norm", "dropout", "width", "heads", "inner",
        )  # fmt: skip
        changed: TransformerConfig = dataclasses.replace(config, vocabulary=chosen, **changes)
        if self.width is None and self.heads is None:
            return changed
        require(
            changed.width % changed.heads == 0,
            f"width must be divisible by heads, got width={changed.width} and heads={changed.heads}.",
        )
        return dataclasses.replace(changed, head_width=changed.width // changed.heads)

    def trellis(self, tokens: int) -> TrellisConfig:
        """Return the TrellisNet configuration with the given options replaced."""
        changes = self._changes(
            "tolerance", "forward_steps", "backward_steps", "pretraining_depth", "embedding", "hidden"
        )  # fmt: skip
        return dataclasses.replace(TRELLIS_CONFIGS[self.size], tokens=tokens, **changes)

    @property
    def forward_limit(self) -> int:
        """Steps of the solver in training."""
        config = self.trellis(1) if self.kind == "trellis" else self.transformer(1)
        return config.forward_steps

    def _trellis(self, tokens: int) -> TrellisNet:
        """Return a TrellisNet, with an adaptive softmax if there are cutoffs."""
        config = self.trellis(tokens)
        parts = self._parts(config)
        net = TrellisNet(config, **parts, depth=self.depth, checkpoint=self.checkpoint)
        if cutoffs := tuple(c for c in self.cutoffs or () if c < tokens):
            require(config.experts == 1, f"cutoffs need a single softmax, got a mixture of {config.experts}.")
            net.vocabulary = AdaptiveVocabulary(VocabularyConfig(tokens=tokens, cutoffs=cutoffs), config.embedding)
        return net

    def _widened(self, model: SequenceModel) -> SequenceModel:
        """Scale the initial matrices by `gain`; with weight norm, scale the row lengths."""
        if self.gain != 1:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    length = name.endswith("weight.original0")  # the row lengths g of weight norm
                    if length or (weight.dim() > 1 and "parametrizations" not in name):
                        weight.mul_(self.gain)
        return model

    def _changes(self, *names: str) -> dict[str, Any]:
        """Return the options among `names` that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _parts(self, config: TransformerConfig | TrellisConfig) -> dict[str, Any]:
        """Return solver, stops and gradient of a model; `eval_stop` is set because training may draw its limit at random."""
        training = relative_stop(config.tolerance, config.forward_steps)
        adjoint_tolerance = config.tolerance if self.adjoint == "gmres" else NEVER
        options = SolveOptions(
            stop=training,
            adjoint_stop=relative_stop(adjoint_tolerance, config.backward_steps),
            solver=self.solver or ("broyden" if self.kind == "trellis" else "anderson"),
            gradient=self.gradient,
            adjoint=self.adjoint,
            history=None if self.solver is None else max(config.forward_steps, 1),
            directions=self.directions,
            phantom_steps=self.phantom_steps,
            damping=self.damping,
        )
        evaluation = dataclasses.replace(training, max_steps=self.eval_steps or config.forward_steps)
        return options.parts() | {"eval_stop": evaluation}
