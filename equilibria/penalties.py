"""Penalties to add to a loss, which keep equilibria easy to find, and schedules of their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria._core import autodiff_modes
from equilibria._core.checks import require
from equilibria._core.packing import State
from equilibria._core.quarantine import quarantine
from equilibria.explicit import Trajectory
from equilibria.solution import Solution
from equilibria.stop import Stop

__all__ = [
    "ConstantWeights",
    "ExponentialWeights",
    "LinearWeights",
    "PenaltySchedule",
    "correction_penalty",
    "correction_states",
    "jacobian_penalty",
    "random_max_steps",
    "skip_penalty",
]


def jacobian_penalty(s: Solution, probes: int = 1, generator: torch.Generator | None = None) -> Tensor:
    """Return Hutchinson's estimate of |J|_F^2 / n, averaged over the batch (Bai, Koltun and Kolter 2021).

    J = df/dz at the equilibrium, and n is the size of a state. z is a constant here: the gradient reaches parameters and
    inputs through J, not through z. It costs an evaluation of the cell, a product per probe, and a second derivative of
    the cell in backward.

    probes     number of random vectors; the relative error of the estimate falls as (probes * batch)^(-1/2)
    generator  random generator of these vectors; None uses torch's default
    """
    require(probes >= 1, f"jacobian_penalty needs at least one of its probes, got {probes}.")
    if s.equation.cell.sharded and torch.is_grad_enabled():
        raise RuntimeError(
            "The gradient of the Jacobian penalty is a second derivative, which FSDP does not support for sharded weights: "
            'train with strategy="ddp", or leave the penalty out.'
        )
    good = s.finite
    z = s.layout.pack(s.z).detach()
    # a sample that is not finite would make the sum over the batch nan, even with weight zero
    z, args, _ = quarantine(s.equation, z, s.equation.args, z, good)
    pull = _pull(lambda t: s.equation(t, *args), z)
    total = z.new_zeros(())
    # E |J'e|^2 = |J|_F^2 for e with unit covariance; J' and not J, as reverse mode is the one that all cells have
    for _ in range(probes):
        probe = torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)
        total = total + torch.where(good.unsqueeze(1), pull(probe), 0).square().sum()
    return total / (probes * z.shape[1] * good.sum().clamp_min(1))


def skip_penalty(s: Solution) -> Tensor:
    """Return the mean |z - z0|, summed over the tensors of a nested state (Pal et al. 2022).

    With a learned `init` this trains a Skip DEQ V1, which predicts its equilibrium; with `init=FirstStep()` a Skip DEQ V2,
    whose first step approximates it. Gradients reach both z, by the layer's gradient, and z0.
    """
    good = s.finite
    distances = [_mean_distance(a, b, good, s.layout.batched) for a, b in zip(*map(_leaves, (s.z, s.z0)), strict=True)]
    return torch.stack(distances).sum()


@dataclass(frozen=True)
class ExponentialWeights:
    """base^(n - 1 - k) for the k-th of n states."""

    base: float = 0.8

    def __call__(self, n: int, k: int) -> float:
        return self.base ** (n - 1 - k)


@dataclass(frozen=True)
class LinearWeights:
    """1 - slope (n - 1 - k) / n + offset for the k-th of n states."""

    slope: float = 0.9
    offset: float = 0.0

    def __call__(self, n: int, k: int) -> float:
        return 1 - self.slope * (n - 1 - k) / n + self.offset


@dataclass(frozen=True)
class ConstantWeights:
    """The same weight for every state."""

    value: float = 1.0

    def __call__(self, n: int, k: int) -> float:
        return self.value


Weights = Callable[[int, int], float]


def correction_penalty(
    s: Solution | Trajectory | Sequence[State],
    loss: Callable[[Any], Tensor],
    weights: Weights = ExponentialWeights(),
    *,
    steps: int = 1,
    damping: float = 1.0,
    most: int | None = None,
) -> Tensor:
    """Return the loss on intermediate states, sum_k weights(n, k) loss(h_k), so that they approach the target as well.

    s        a Solution of `Stop(keep_every=...)`, for the states that `correction_states` gives with `steps`, `damping` and
             `most`. Or a `Trajectory`, whose start is left out, or a sequence of states with gradients
    loss     state -> scalar
    weights  weights(n, k) of the k-th of n states, k from 0: ExponentialWeights, LinearWeights, ConstantWeights or any
             function
    """
    states = _states(s, steps, damping, most)
    require(len(states) > 0, "correction_penalty needs at least one state.")
    terms = [weights(len(states), k) * loss(state) for k, state in enumerate(states)]
    return torch.stack(terms).sum()


def correction_states(s: Solution, *, steps: int = 1, damping: float = 1.0, most: int | None = None) -> list[State]:
    """Return states on the way to the equilibrium, with gradients of their own, and the equilibrium (Bai and others 2022).

    From iterates that `Stop(keep_every=...)` kept, `steps` damped steps are taken with a graph: a phantom gradient of each.

    most  iterates at most, evenly spaced among those that were kept, so that memory does not grow with the steps of the
          solver; None takes all
    """
    require(most is None or most >= 0, f"most must not be negative, got {most}.")
    kept = s.stats.iterates
    chosen = kept if most is None or len(kept) <= most else [kept[(i + 1) * len(kept) // (most + 1)] for i in range(most)]
    return [*(s.layout.unpack(_head(s, z, steps, damping)) for z in chosen), s.z]


@dataclass(frozen=True, kw_only=True)
class PenaltySchedule:
    """The weight of a penalty at a training step: 0 at steps without the penalty, otherwise it grows by `increment`.

        weight = schedule(step)
        if weight:
            loss = loss + weight * eq.jacobian_penalty(s)

    The random choice of steps depends on seed and step only, so it is the same on every rank and after resuming.

    weight         the initial weight
    frequency      the share of steps in which the penalty is applied
    increment      added every `every` steps after pre-training
    pretraining    number of first steps, which have the weight `pretraining_weight`
    until          the first step without a penalty; None keeps it to the end
    """

    weight: float = 1.0
    frequency: float = 1.0
    increment: float = 0.0
    every: int = 1
    pretraining: int = 0
    pretraining_weight: float = 0.0
    until: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.frequency <= 1, f"frequency is a share of the steps, in [0, 1], got {self.frequency}.")
        require(self.every >= 1, f"every must be at least 1 step, got {self.every}.")

    def __call__(self, step: int) -> float:
        if (self.until is not None and step >= self.until) or _uniform("penalty", self.seed, step) >= self.frequency:
            return 0.0
        if step < self.pretraining:
            return self.pretraining_weight
        return self.weight + self.increment * ((step - self.pretraining) // self.every)


def random_max_steps(stop: Stop, step: int, below: int = 2, above: int = 0, seed: int = 0) -> Stop:
    """Return `stop` with max_steps drawn from {max_steps - below, ..., max_steps + above} by seed and step.

    A varying number of steps keeps a model from relying on one number.
    """
    drawn = int(_uniform("jitter", seed, step) * (below + above + 1)) - below
    return dataclasses.replace(stop, max_steps=max(stop.max_steps + drawn, 1))


def _uniform(purpose: str, seed: int, step: int) -> float:
    """Return a pseudo-random number in [0, 1) for a step; different purposes get independent numbers."""
    return Random(f"{purpose} {seed} {step}").random()


def _pull(f: Callable[[Tensor], Tensor], z: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map t -> J't at z, differentiable in what f depends on."""
    if autodiff_modes.inside_transform():
        pull = autodiff_modes.vjp(f, z)
        return lambda t: pull(t)[0]
    autodiff_modes.check_derivatives("The Jacobian penalty", z)
    recording = torch.is_grad_enabled()
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        out = f(leaf)
    if not out.requires_grad:
        return torch.zeros_like

    def product(t: Tensor) -> Tensor:
        options = {"create_graph": recording, "retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(out, leaf, t, **options)[0]

    return product


def _leaves(state: State) -> list[Tensor]:
    return pytree.tree_leaves(state)


def _mean_distance(a: Tensor, b: Tensor, good: Tensor, batched: bool) -> Tensor:
    """Return the mean distance over the samples in `good`; the others do not count and get no gradient."""
    rows = good.view(-1, *[1] * (a.dim() - 1)) if batched else good.all()
    count = torch.where(rows, torch.ones_like(a, dtype=good.dtype), False).sum().clamp_min(1)
    a, b = (torch.where(rows, end, torch.zeros_like(end)) for end in (a, b))
    return (a - b).abs().sum() / count


def _states(s: Solution | Trajectory | Sequence[State], steps: int, damping: float, most: int | None) -> Sequence[State]:
    if isinstance(s, Trajectory):
        return s.states[1:]
    if not isinstance(s, Solution):
        return s
    return correction_states(s, steps=steps, damping=damping, most=most)


def _head(s: Solution, z: Tensor, steps: int, damping: float) -> Tensor:
    """Take `steps` damped steps from an iterate, (batch, n), with a graph; non-finite samples are left unchanged."""
    good = s.finite
    h, args, _ = quarantine(s.equation, z, s.equation.args, z, good)
    for _ in range(steps):
        h = torch.lerp(h, s.equation(h, *args), damping)
    return torch.where(good.unsqueeze(1), h, z)
