"""Solves of a layer from other starts: several equilibria, path dependence, drift, lazy cells, residual and correctness."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core.packing import State
from equilibria.deq import DEQ
from equilibria.explicit import WeightTied
from equilibria.solution import Solution

SAME = 0.05  # states closer than this, relative to their norm, count as one equilibrium
DRIFT_STEPS = 100  # plain steps taken from the equilibrium
RTOL = 1e-3  # tolerance of restarts if the layer has none
STEPS = 200  # smallest max_steps of restarts


@dataclass(frozen=True)
class Attractors:
    """Results of restarts per sample; nan where a sample did not converge."""

    restarts: int
    converged: list[int]  # number of restarts that converged
    equilibria: list[int]  # number of different equilibria among those and the layer's own answer
    path: list[float]  # relative distance between the answer and the one reached from another sample's equilibrium
    drift: list[float]  # relative distance from the equilibrium after `DRIFT_STEPS` plain steps
    first_step: list[float]  # relative distance from the equilibrium after one step from a random start
    auc: float | None = None  # probability that a wrong answer has a larger residual than a right one
    wrong: int | None = None  # number of wrong answers; None without labels


def measure_attractors(deq: DEQ, inputs: tuple[Any, ...], restarts: int, wrong: Tensor | None = None) -> Attractors:
    """Solve the layer from `restarts` random starts and from the equilibria of other samples, and compare the answers.

    wrong  (batch,) bool, samples that the model answers wrongly; None: the residual is not compared with correctness
    """
    stop = deq.stop if deq.training or deq.eval_stop is None else deq.eval_stop
    # a layer that always takes all its steps has no tolerance, but its restarts must be judged by one
    rtol = stop.rtol if stop.rtol > 0 or stop.atol > 0 else RTOL
    # a restart from far away may need more steps than the layer is given
    stop = dataclasses.replace(stop, rtol=rtol, max_steps=max(stop.max_steps, STEPS), on_failure="ignore")
    layer = DEQ(deq.cell, deq.init, deq.solver, stop, batched=deq.batched)
    with torch.no_grad():
        own = layer.solve(*inputs)
        z, good = _packed(own, own.z), own.stats.converged
        random = [_random_like(own) for _ in range(restarts)]
        solved = [layer.solve(*inputs, init=start) for start in random]
        # the largest distance over the restarts, (batch,): a sample is near only if every start leads there
        first = torch.stack([_distance(_packed(own, own.f(start)), z) for start in random]).amax(dim=0)
        swapped = (
            layer.solve(*inputs, init=pytree.tree_map(lambda leaf: leaf.roll(1, dims=0), own.z))
            if own.layout.batched and own.layout.batch > 1
            else None
        )
        deeper = WeightTied(deq.cell, DRIFT_STEPS, batched=deq.batched)(*inputs, init=own.z)
    others = torch.stack([_packed(s, s.z) for s in solved])
    arrived = torch.stack([s.stats.converged for s in solved])
    auc = None if wrong is None else area_under_curve(own.stats.residual, wrong.to(own.stats.residual.device))
    return Attractors(
        restarts=restarts,
        converged=arrived.sum(dim=0).tolist(),
        equilibria=[_clusters(z[i], others[:, i][arrived[:, i]], bool(good[i])) for i in range(len(z))],
        path=[] if swapped is None else _where(_distance(_packed(own, swapped.z), z), good & swapped.stats.converged),
        drift=_where(_distance(_packed(own, deeper), z), good),
        first_step=_where(first, good),
        auc=auc if auc is None or math.isfinite(auc) else None,
        wrong=None if wrong is None else int(wrong.sum()),
    )


def area_under_curve(score: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive sample scores higher than a negative one, ties counting half (Mann-Whitney)."""
    high, low = score[positive].double(), score[~positive].double()
    if len(high) == 0 or len(low) == 0:
        return float("nan")
    order = low.sort().values  # comparing all pairs would take memory quadratic in the number of samples
    below, not_above = torch.searchsorted(order, high), torch.searchsorted(order, high, right=True)
    return float((below + not_above).double().mean() / (2 * len(low)))


def wrong_answers(output: Any, labels: Tensor) -> Tensor:
    """Return (batch,) bool from logits (batch, ..., classes) and labels (batch, ...): True if any position is wrong."""
    if not isinstance(output, Tensor) or output.shape[:-1] != labels.shape:
        seen = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} need a model that returns logits of shape "
            f"{(*labels.shape, 'classes')}, got {seen}."
        )
    wrong: Tensor = output.argmax(dim=-1) != labels
    return wrong.flatten(1).any(dim=1) if wrong.dim() > 1 else wrong


def _packed(s: Solution, state: State) -> Tensor:
    """Return a nested state as a matrix (batch, n)."""
    return s.layout.pack(state).detach()


def _random_like(s: Solution) -> State:
    """Draw a normally distributed start; per sample, every tensor has the root mean square of that of the equilibrium."""

    def draw(leaf: Tensor) -> Tensor:
        # noise of the equilibrium's own magnitude; a fixed magnitude could lie far outside the states that occur
        if not s.layout.batched:
            return leaf.square().mean().sqrt() * torch.randn_like(leaf)
        size = leaf.flatten(1).square().mean(dim=1).sqrt().nan_to_num(1.0)
        return size.view(-1, *[1] * (leaf.dim() - 1)) * torch.randn_like(leaf)

    return pytree.tree_map(draw, s.z)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| / |b|, (batch,)."""
    return (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(torch.finfo(b.dtype).tiny)


def _clusters(own: Tensor, others: Tensor, counts: bool) -> int:
    """Count the different states among `others`, (restarts, n), and `own`, (n,), which takes part if `counts`.

    A state is new if it is farther than SAME from every state counted so far.
    """
    seen: list[Tensor] = [own] if counts else []
    for state in others:
        if all(float((state - one).norm() / one.norm().clamp_min(1e-30)) > SAME for one in seen):
            seen.append(state)
    return len(seen)


def _where(values: Tensor, good: Tensor) -> list[float]:
    """Return `values` as a list, with nan for samples that are not `good`; both (batch,)."""
    return torch.where(good, values.double(), torch.nan).tolist()
