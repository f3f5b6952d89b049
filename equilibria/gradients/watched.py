"""Quarantine for gradients that autograd computes from a graph of steps: JFB, UnrolledPhantom, Unrolled.

The gradient of a weight is a sum over the batch, so that one sample with a non-finite share makes it non-finite. The
gradients of all arguments pass through one autograd node. If one of them is not finite, that node finds the samples
responsible and computes the gradients again without them, as the implicit gradients do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from equilibria._core import autodiff_modes
from equilibria._core.failures import report_failures
from equilibria._core.problem import Problem
from equilibria._core.quarantine import quarantine
from equilibria._core.search import all_finite, sum_finite_shares
from equilibria.solution import SolveResult, Status, empty_stats

Steps = Callable[[Problem, Tensor, Sequence[Tensor]], Tensor]  # (problem, start, args) -> z, with a graph


CHANGED = (
    "A tensor of the cell was changed in place between forward and backward, and the backward pass runs the cell again. "
    "Call backward() before the optimizer's step, or change a copy."
)


def watched(steps: Steps, problem: Problem, start: Tensor, args: Sequence[Tensor], *, replays: bool = False) -> Tensor:
    """Run `steps(problem, start, args)`; samples with non-finite gradients are left out of first-order gradients.

    replays  True if backward runs the cell again; it then raises if a tensor was changed in place since the forward

    There is no check under `torch.func`, where values cannot be read, and with several ranks, where another run of the
    cell would be a collective operation.
    """
    tensors = (start, *args)
    followed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    transformed = autodiff_modes.inside_transform() or autodiff_modes.inside_dual_level()
    if (
        not followed
        or not torch.is_grad_enabled()
        or transformed
        or problem.opaque
        or problem.stop.process_group is not None
    ):
        return steps(problem, start, args)
    watch = _Watch(steps, problem, [tensor.detach() for tensor in tensors], followed, replays)
    # only tensors that need gradients pass through a Function: others would keep a graph for nothing
    passed = list(tensors)
    for i, tensor in zip(followed, _Arguments.apply(watch, *[tensors[i] for i in followed]), strict=True):
        passed[i] = tensor
    return _Answer.apply(watch, steps(problem, passed[0], passed[1:]))


def guarded(problem: Problem, fz: Tensor) -> Tensor:
    """Return an evaluation of a closure, (batch, n), whose non-finite cotangents are set to zero, sample by sample.

    The gradients of tensors that a closure captured do not pass through one node, but all of them come from such cotangents.
    """
    if problem.opaque and fz.requires_grad and torch.is_grad_enabled() and problem.stop.process_group is None:
        fz.register_hook(lambda v: _without_lost(problem, v))
    return fz


def _without_lost(problem: Problem, v: Tensor) -> Tensor:
    """Return the cotangent v with zeros for samples where it is not finite, which are reported."""
    if torch._C._functorch.is_legacy_batchedtensor(v):  # several cotangents at once, whose values cannot be read
        return v
    lost = ~torch.isfinite(v).all(dim=1)
    if not bool(lost.any()):
        return v
    before = problem.result.adjoint
    known = torch.zeros_like(lost) if before is None else before.status == Status.NONFINITE
    if bool((lost & ~known).any()):
        file_lost_steps(problem, lost | known)
    return torch.where(lost.unsqueeze(1), torch.zeros_like(v), v)


class _Answer(Function):
    """The identity; its backward stores the cotangent for the check of the gradients."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, z: Tensor) -> Tensor:
        """Store the watch and return a view of z."""
        ctx.watch = watch
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, Tensor]:
        """Pass the cotangent to the watch before it is pulled through the steps."""
        ctx.watch.begin(cotangents[0])
        return None, cotangents[0]


class _Arguments(Function):
    """The identity on all arguments that require gradients; its backward runs when their gradients are complete."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, *args: Tensor) -> tuple[Tensor, ...]:
        """Store the watch and return the args detached."""
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        return tuple(arg.detach() for arg in args)  # autograd forbids in-place writes to views from a multi-view function

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pass on the gradients of the args, without samples whose gradients are not finite."""
        return None, *ctx.watch.checked(grads)


class _Watch:
    """The steps and tensors of one forward pass, and the cotangent while its backward runs."""

    def __init__(self, steps: Steps, problem: Problem, tensors: list[Tensor], followed: list[int], replays: bool) -> None:
        self.steps, self.problem, self.tensors, self.followed = steps, problem, tensors, followed
        self.versions, self.replays = list(map(_version, tensors)), replays
        self.cotangent: Tensor | None = None

    def begin(self, cotangent: Tensor) -> None:
        """Store the cotangent, (batch, n), at the start of the backward pass."""
        self.cotangent = cotangent
        if self.replays:
            self._refuse_changes()

    def _refuse_changes(self) -> None:
        """Raise if an arg was written to in place since forward."""
        if list(map(_version, self.tensors)) != self.versions:
            raise RuntimeError(CHANGED)

    def checked(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return `grads` if they are finite, else the sum over the samples whose gradients are."""
        v, self.cotangent = self.cotangent, None
        if v is None or torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(v) or all_finite(grads):
            return grads
        self._refuse_changes()
        at_first = self.problem.result.stats.status != Status.NONFINITE
        good = at_first & torch.isfinite(v).all(dim=1)
        if self.problem.equation.identity.coupled:  # gradients are no sums over independent samples
            grads, lost = self._again(v, good), torch.zeros_like(good)
        else:
            zero = [torch.zeros_like(self.tensors[i]) for i in self.followed]
            grads, lost = sum_finite_shares(good, lambda rows: self._again(v, rows), zero)
        # if a sum of finite gradients overflows, no single sample is the cause, and all are marked
        file_lost_steps(self.problem, at_first & ~(good & ~lost) if all_finite(grads) else at_first)
        return grads

    def _again(self, v: Tensor, good: Tensor) -> list[Tensor | None]:
        """Compute the gradients of the `good` samples again; the others are replaced and get a zero cotangent."""
        # new leaves, so that this second run has a graph of its own: backward has freed that of the first
        leaves = [tensor.detach() for tensor in self.tensors]
        needed = [leaves[i].requires_grad_() for i in self.followed]
        if not bool(good.any()):
            return [torch.zeros_like(leaf, requires_grad=False) for leaf in needed]
        silent = self.problem.changed(result=SolveResult(), on_failure="ignore")
        with torch.enable_grad():
            start, args, v = quarantine(self.problem.equation, leaves[0], leaves[1:], v, good)
            z = self.steps(silent, start, args)
        return list(torch.autograd.grad(z, needed, v, allow_unused=True))


def file_lost_steps(problem: Problem, lost: Tensor) -> None:
    """Store adjoint statistics: NONFINITE for samples left out; nan residuals for the others, which had no solve."""
    if not bool(lost.any()):
        return
    stats = empty_stats(len(lost), lost.device)
    told = dataclasses.replace(
        stats,
        status=stats.status.masked_fill(lost, Status.NONFINITE),
        residual=stats.residual.masked_fill(lost, float("inf")),
    )
    unknown = stats.residual.masked_fill(~lost, float("nan")).masked_fill(lost, float("inf"))
    status = torch.where(lost, Status.NONFINITE, Status.MAX_STEPS).to(torch.int8)
    problem.result.adjoint = dataclasses.replace(stats, status=status, residual=unknown)
    report_failures(told, problem.stop, problem.solver, what="adjoint", owner=problem.equation.identity.owner)


def _version(tensor: Tensor) -> int:
    """Return the version counter; 0 for inference tensors, which have none and are read-only outside of inference mode."""
    return 0 if tensor.is_inference() else tensor._version
