"""Breadth: solve every sample from several random starts, and keep the best converged or the most frequent answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.checks import require
from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.solution import Solution
from equilibria.stop import Stop

Keep = Literal["residual", "vote"]
AnswerFunction = Callable[[State], Tensor]


def breadth(
    deq: DEQ,
    *,
    starts: int,
    keep: Keep = "residual",
    answer: AnswerFunction | None = None,
    first: int | None = None,
    stop: Stop | None = None,
) -> Breadth:
    """Solve every sample from several random starts, all in one batch, and keep one of the equilibria.

        wide = eq.looped.breadth(deq, starts=16, first=2, stop=eq.Stop(rtol=1e-2, max_steps=200))
        found = wide(x)  # found.z, found.winner, found.residual, found.spread

    deq     a layer whose `init` draws a different start for every row, such as `eq.looped.RandomStart`
    starts  largest number of starts per sample
    keep    "residual": keep the equilibrium with the smallest residual. "vote": keep the answer that most starts agree on,
            and of these starts the one with the smallest residual; needs `answer`
    answer  function from a state to discrete answers (batch, ...), such as the argmax of logits
    first   number of starts in a first solve; samples of which no start converged get the remaining starts in a second
            solve. None: one solve with all starts
    stop    stop of these solves; None: that of the layer
    """
    require(isinstance(deq, DEQ), f"breadth needs an eq.DEQ, got {type(deq).__name__}. Pass the layer inside the model.")
    require(
        deq.batched, "breadth needs a batch of samples, but this layer has batched=False. Make the layer with batched=True."
    )
    require(starts >= 1, f"starts must be at least 1, got {starts}.")
    require(first is None or 1 <= first <= starts, f"first must lie in 1 ... {starts}, got {first}.")
    require(keep in ("residual", "vote"), f'keep must be "residual" or "vote", got {keep!r}.')
    require(keep == "residual" or answer is not None, 'keep="vote" compares answers: pass answer=, a function of the state.')
    return Breadth(deq, starts, keep, answer, first, stop)


@dataclass(frozen=True)
class BreadthSolution:
    """The state that was kept for every sample, with statistics of all starts."""

    z: State
    winner: Tensor  # (batch,) index of the start whose state was kept
    residual: Tensor  # (batch, starts) relative residuals; inf for starts that were not run or are not finite
    converged: Tensor  # (batch,) bool, True if the kept start converged
    starts: Tensor  # (batch,) number of starts that were run
    spread: Tensor  # (batch,) share of the starts with another answer; without `answer`, their mean relative distance from z
    sample_evaluations: int = 0  # number of rows on which the cell was run, in all solves


@dataclass(frozen=True)
class Breadth:
    """Solves every sample from several starts; made by `eq.looped.breadth` and called with the inputs of the layer."""

    deq: DEQ = field(repr=False)
    starts: int
    keep: Keep
    answer: AnswerFunction | None
    first: int | None
    stop: Stop | None

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> BreadthSolution:
        """Solve all starts and return the kept equilibria, without a graph."""
        layer, batch = self._layer(), len(pytree.tree_leaves(inputs)[0])
        rows = torch.arange(batch, device=pytree.tree_leaves(inputs)[0].device)
        parts: list[_Round] = []
        before, evaluated = 0, 0
        for count in self._rounds():
            s = layer.solve(*_repeated(inputs, rows, batch, count))
            evaluated += s.stats.sample_evaluations
            _check_starts(s, count)
            parts.append(_Round(rows, before, count, s))
            done = parts[-1].converged.any(dim=0)
            rows, before = rows[~done], before + count
            if len(rows) == 0:
                break
        return self._best(parts, batch, evaluated)

    def _layer(self) -> DEQ:
        """Return the layer with the stop of these solves."""
        # a new layer, so that the settings of the given one are not changed
        deq = self.deq
        stop = self.stop or (deq.stop if deq.training or deq.eval_stop is None else deq.eval_stop)
        return DEQ(deq.cell, deq.init, deq.solver, stop, deq.gradient)

    def _rounds(self) -> Iterator[int]:
        """Yield the number of starts of each round."""
        first = self.starts if self.first is None else self.first
        yield first
        if first < self.starts:
            yield self.starts - first

    def _best(self, parts: list[_Round], batch: int, evaluated: int) -> BreadthSolution:
        """Join the rounds, and select for each sample the start that `keep` prefers."""
        leaves, structure = pytree.tree_flatten(parts[0].solution.z)
        wide = [_table(parts, batch, self.starts, i) for i in range(len(leaves))]  # (starts, batch, ...) each
        residual = _filled(parts, batch, self.starts, lambda part: part.residual, torch.inf)
        converged = _filled(parts, batch, self.starts, lambda part: part.converged, False)
        ran = _filled(parts, batch, self.starts, lambda part: torch.ones_like(part.converged), False)
        answers = None if self.answer is None else self._answers(wide, structure)
        if self.keep == "residual" or answers is None:
            score = residual
        else:
            # the most votes decide, and among equal votes the smallest residual
            agree = (answers.unsqueeze(0) == answers.unsqueeze(1)).all(dim=-1) & ran.unsqueeze(0) & ran.unsqueeze(1)
            votes = agree.sum(dim=0)
            least = torch.where(votes == votes.amax(dim=0), residual, torch.inf)
            # inf would make a majority whose residual is not finite equal to starts that were not run
            score = torch.where(torch.isinf(least) & (votes == votes.amax(dim=0)), torch.finfo(residual.dtype).max, least)
        winner, places = score.argmin(dim=0), torch.arange(batch, device=residual.device)
        z = [leaf[winner, places] for leaf in wide]
        if answers is None:
            spread = _distance(wide, z, ran)
        else:
            kept = answers[winner, places]
            other = (answers != kept).any(dim=-1) & ran
            spread = other.sum(dim=0) / ran.sum(dim=0)
        return BreadthSolution(
            z=pytree.tree_unflatten(z, structure),
            winner=winner,
            residual=residual.T,
            converged=converged[winner, places],
            starts=ran.sum(dim=0),
            spread=spread,
            sample_evaluations=evaluated,
        )

    def _answers(self, wide: list[Tensor], structure: Any) -> Tensor:
        """Return the answers of all starts, (starts, batch, n); those of starts that were not run have no meaning."""
        assert self.answer is not None
        starts, batch = wide[0].shape[:2]
        found = self.answer(pytree.tree_unflatten([leaf.flatten(0, 1) for leaf in wide], structure))
        return found.reshape(starts, batch, -1)


@dataclass(frozen=True)
class _Round:
    """One solve of the samples `rows` from `count` starts, numbered from `before`; all rows of a start are adjacent."""

    rows: Tensor
    before: int
    count: int
    solution: Solution

    @property
    def residual(self) -> Tensor:
        """The relative residuals, (count, rows); inf if not finite."""
        found = self.solution.stats.residual.view(self.count, -1)
        return torch.where(torch.isfinite(found), found, torch.inf)

    @property
    def converged(self) -> Tensor:
        return self.solution.stats.converged.view(self.count, -1)


def _repeated(inputs: Any, rows: Tensor, batch: int, count: int) -> Any:
    """Repeat the inputs of these rows `count` times, one copy of the batch after the other."""

    def repeat(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != batch:
            return leaf  # not a tensor with one row per sample, so all samples share it
        return leaf.index_select(0, rows).repeat(count, *[1] * (leaf.dim() - 1))

    return pytree.tree_map(repeat, tuple(inputs))


def _check_starts(s: Solution, count: int) -> None:
    """Raise ValueError if the first two starts of every sample are the same."""
    if count < 2:
        return
    packed = s.layout.pack(s.z0).detach()
    packed = packed.view(count, -1, packed.shape[-1])
    if packed.shape[1] and bool((packed[0] == packed[1]).all()):
        raise ValueError(
            "All starts of a sample are equal, but breadth needs different ones. Give the layer an init that draws at "
            "random, such as eq.looped.RandomStart()."
        )


def _table(parts: list[_Round], batch: int, starts: int, leaf: int) -> Tensor:
    """Return a tensor of the state for all starts, (starts, batch, ...); zeros where a start was not run."""
    found = [pytree.tree_leaves(part.solution.z)[leaf] for part in parts]
    wide = found[0].new_zeros(starts, batch, *found[0].shape[1:])
    for part, z in zip(parts, found, strict=True):
        wide[part.before : part.before + part.count, part.rows] = z.view(part.count, len(part.rows), *z.shape[1:])
    return wide


def _filled(parts: list[_Round], batch: int, starts: int, what: Callable[[_Round], Tensor], missing: Any) -> Tensor:
    """Return what(round) for all starts, (starts, batch); `missing` where a start was not run."""
    like = what(parts[0])
    wide = torch.full((starts, batch), missing, dtype=like.dtype, device=like.device)
    for part in parts:
        wide[part.before : part.before + part.count, part.rows] = what(part)
    return wide


def _distance(wide: list[Tensor], z: list[Tensor], ran: Tensor) -> Tensor:
    """Return the mean distance from z of the other starts that were run, relative to |z|."""
    states = torch.cat([leaf.flatten(2) for leaf in wide], dim=2)
    kept = torch.cat([leaf.flatten(1) for leaf in z], dim=1)
    length = (states - kept).norm(dim=2) / kept.norm(dim=1).clamp_min(torch.finfo(kept.dtype).tiny)
    total = torch.where(ran, length, 0).sum(dim=0)
    return total / (ran.sum(dim=0) - 1).clamp_min(1)
