"""Adaptive embedding and softmax, with shorter vectors for rarer words (Baevski and Auli 2019; Grave and others 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria._core.checks import require
from equilibria.models.language.sequence_layers import SPREAD


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """The tokens and their embedding.

    tokens              number of tokens, which are numbered from the most frequent to the rarest
    width               width of the vectors of the most frequent tokens; None: that of the model
    cutoffs             first token of every cluster but the first; (): one cluster, a plain softmax
    divisor             factor by which vectors get shorter from cluster to cluster
    tied                the softmax uses the vectors of the embedding
    shared_projections  with a divisor: the softmax of every cluster but the first uses the projection of the embedding.
                        False, as in the released models: it has its own matrix, which begins as a copy
    """

    tokens: int
    width: int | None = None
    cutoffs: tuple[int, ...] = ()
    divisor: int = 1
    tied: bool = True
    shared_projections: bool = False

    def __post_init__(self) -> None:
        require(self.tokens >= 1, f"A vocabulary has at least one token, got {self.tokens}.")
        require(self.divisor >= 1, f"divisor must be at least 1, got {self.divisor}.")
        ends = self.ends
        require(
            all(a < b for a, b in pairwise((0, *ends))),
            f"cutoffs must grow and lie between 0 and the number of tokens, {self.tokens}, got {self.cutoffs}. "
            "Leave out those beyond the vocabulary.",
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after the last token of every cluster."""
        return (*self.cutoffs, self.tokens)

    def widths(self, model: int) -> tuple[int, ...]:
        """Return the width of the vectors of every cluster, for a model of width `model`."""
        first = model if self.width is None else self.width
        widths = tuple(first // self.divisor**i for i in range(len(self.ends)))
        require(
            min(widths) >= 1,
            f"With divisor={self.divisor} the vectors of the clusters get the widths {widths}: use fewer cutoffs.",
        )
        return widths


class AdaptiveVocabulary(nn.Module):
    """Embedding and softmax over one vocabulary that is divided into clusters.

    A token of cluster i has a vector of width // divisor^i numbers, which is projected to the width of the model. Its
    probability is log p(token) = log p(cluster) + log p(token in cluster). The softmax of the first cluster has one more
    entry per later cluster, in reverse order: the last entry belongs to cluster 1. With one cluster this is the plain
    softmax. With a divisor every cluster has its own projection. Without one, all clusters share a projection, or have none
    if vectors have the width of the model.

        vocabulary = AdaptiveVocabulary(VocabularyConfig(tokens=267_735, cutoffs=(20_000, 40_000, 200_000), divisor=4), 700)
        x = vocabulary.embed(tokens)             # (batch, time, 700)
        loss = vocabulary(h, targets)            # the mean of -log p(target), a scalar
        scores = vocabulary(h)                   # (batch, time, tokens)

    width  width of the model
    scale  factor on the embedded vectors
    """

    def __init__(self, config: VocabularyConfig, width: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.config, self.width, self.scale = config, width, scale
        widths = config.widths(width)
        self.starts = (0, *config.cutoffs)
        shapes = [(end - start, w) for start, end, w in zip(self.starts, config.ends, widths, strict=True)]
        self.tables = _parameters(shapes)
        self.out_tables = _parameters([] if config.tied else shapes)
        self.biases = nn.ParameterList(torch.zeros(size) for size, _ in shapes)
        each = config.divisor > 1 and len(widths) > 1  # a projection per cluster
        one = not each and widths[0] != width  # one projection for all clusters
        self.projections = _parameters([(width, w) for w in widths] if each else [(width, widths[0])] if one else [])
        own = widths[:1] if config.shared_projections else widths
        self.out_projections = _parameters([(width, w) for w in own] if each else [])
        with torch.no_grad():  # the first cluster's two matrices start independently
            for i in range(1, len(self.out_projections)):
                self.out_projections[i].copy_(self.projections[i])
        self.cluster_weight = nn.Parameter(SPREAD * torch.randn(len(widths) - 1, widths[0])) if config.cutoffs else None
        self.cluster_bias = nn.Parameter(torch.zeros(len(widths) - 1)) if config.cutoffs else None

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens, (batch, time) -> (batch, time, width)."""
        self._check(tokens)
        if len(self.tables) == 1:
            return self.scale * self._lifted(F.embedding(tokens, self.tables[0]), 0)
        flat = tokens.flatten()
        out = torch.zeros(len(flat), self.width, dtype=self.tables[0].dtype, device=tokens.device)
        for i, (start, end) in enumerate(zip(self.starts, self.config.ends, strict=True)):
            places = ((flat >= start) & (flat < end)).nonzero().squeeze(1)
            rows = self._lifted(F.embedding(flat[places] - start, self.tables[i]), i)
            out = out.index_copy(0, places, rows)
        return self.scale * out.view(*tokens.shape, self.width)

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the scores of all tokens, (..., tokens), whose softmax are the probabilities; with targets, the mean loss.

        With several clusters the scores are log-probabilities.
        """
        return self.scores(h) if targets is None else self.losses(h, targets).mean()

    def scores(self, h: Tensor) -> Tensor:
        """Return the scores of all tokens, (..., width) -> (..., tokens)."""
        head = self._logits(h, 0)
        if self.cluster_weight is None:
            return head
        head = F.log_softmax(head, dim=-1)
        # the entries of the clusters are at the end of the head in reverse order: -1 is cluster 1
        tails = [F.log_softmax(self._logits(h, i), dim=-1) + head[..., -i, None] for i in range(1, len(self.tables))]
        return torch.cat([head[..., : self.config.cutoffs[0]], *tails], dim=-1)

    def losses(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target) in the shape of the targets; clusters without a target are not computed."""
        require(
            h.shape[:-1] == targets.shape,
            f"Every position has one target: got targets of shape {tuple(targets.shape)} for states of {tuple(h.shape)}.",
        )
        self._check(targets)
        flat, goal = h.flatten(0, -2), targets.flatten().long()
        if self.cluster_weight is None:
            return F.cross_entropy(self._logits(flat, 0), goal, reduction="none").view_as(targets)
        head = F.log_softmax(self._logits(flat, 0), dim=-1)
        cluster = torch.bucketize(goal, torch.tensor(self.config.cutoffs, device=goal.device), right=True)
        column = torch.where(cluster == 0, goal, head.shape[1] - cluster)  # the token's own entry, or that of its cluster
        found = head.gather(1, column.unsqueeze(1)).squeeze(1)
        for i in range(1, len(self.tables)):
            places = (cluster == i).nonzero().squeeze(1)
            if len(places):
                tail = F.log_softmax(self._logits(flat[places], i), dim=-1)
                inside = tail.gather(1, (goal[places] - self.starts[i]).unsqueeze(1)).squeeze(1)
                found = found.index_add(0, places, inside)
        return -found.view_as(targets)

    def _logits(self, h: Tensor, cluster: int) -> Tensor:
        """Return the logits of a cluster's tokens; the first cluster is followed by one logit per other cluster."""
        table, bias = (self.tables if self.config.tied else self.out_tables)[cluster], self.biases[cluster]
        if cluster == 0 and self.cluster_weight is not None and self.cluster_bias is not None:
            table, bias = torch.cat([table, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        logits = F.linear(self._lowered(h, cluster), table, bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # a loss in bfloat16 would have two digits

    def _lifted(self, rows: Tensor, cluster: int) -> Tensor:
        """Project vectors of a cluster to the width of the model."""
        if not len(self.projections):
            return rows
        lifted = F.linear(rows, self.projections[min(cluster, len(self.projections) - 1)])
        return lifted.to(rows.dtype)  # states and residuals that follow keep their precision under autocast

    def _lowered(self, h: Tensor, cluster: int) -> Tensor:
        """Project states to the width of a cluster's vectors."""
        if not len(self.projections):
            return h
        own = cluster < len(self.out_projections)
        matrix = self.out_projections[cluster] if own else self.projections[min(cluster, len(self.projections) - 1)]
        return F.linear(h, matrix.mT)

    def _check(self, tokens: Tensor) -> None:
        """Raise for tokens that are not integers (TypeError) or out of range (ValueError, on the CPU only)."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Tokens must be int64 or int32, got {tokens.dtype}. Convert them with .long().")
        # on other devices reading them would be a sync, and in a trace they have no values
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = int(tokens.min()), int(tokens.max())
            require(
                0 <= low and high < self.config.tokens,
                f"Tokens go from 0 to {self.config.tokens - 1} in this vocabulary, got {low} to {high}. "
                "Make the model with the right number of tokens.",
            )

    def extra_repr(self) -> str:
        return f"tokens={self.config.tokens}, cutoffs={self.config.cutoffs}, width={self.width}, scale={self.scale:.4g}"


def _parameters(shapes: list[tuple[int, int]]) -> nn.ParameterList:
    """Return normally distributed matrices of these shapes with the standard deviation SPREAD."""
    return nn.ParameterList(SPREAD * torch.randn(*shape) for shape in shapes)
