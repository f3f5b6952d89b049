"""Gradients that autograd computes from a graph of steps (JFB, UnrolledPhantom, Unrolled), checked before they leave it.

The gradient of a weight is a sum over the batch, so one sample whose share is not finite takes it from all of them. The
gradients of all arguments pass through one node. Where one of them is not finite, that node finds the samples responsible
and computes the gradients again without them, as the implicit gradients do.
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
from equilibria._core.search import all_finite, sum_finite_shares
from equilibria.gradients.base import Problem, quarantine
from equilibria.solution import Report, Status, empty_stats

Steps = Callable[[Problem, Tensor, Sequence[Tensor]], Tensor]  # (problem, start, args) -> z, with a graph


CHANGED = (
    "A tensor of the cell was changed in place between forward and backward, and the backward pass runs the cell again. "
    "Call backward() before the optimizer's step, or change a copy."
)


def watched(steps: Steps, problem: Problem, start: Tensor, args: Sequence[Tensor], *, replays: bool = False) -> Tensor:
    """`steps(problem, start, args)`, whose first-order gradients quarantine samples.

    replays  the backward pass runs the cell again, so its tensors must still be as they were

    Not where values cannot be read (`torch.func`), nor where another run of the cell is a collective of many ranks.
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
    passed = list(tensors)
    for i, tensor in zip(followed, _Arguments.apply(watch, *[tensors[i] for i in followed]), strict=True):
        passed[i] = tensor
    return _Answer.apply(watch, steps(problem, passed[0], passed[1:]))


class _Answer(Function):
    """The identity; its backward keeps the cotangent until the gradients of the arguments arrive."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, z: Tensor) -> Tensor:
        ctx.watch = watch
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, Tensor]:
        ctx.watch.begin(cotangents[0])
        return None, cotangents[0]


class _Arguments(Function):
    """The identity on all arguments that need gradients; its backward runs once their gradients are complete."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        return tuple(arg.detach() for arg in args)  # detached: a view of many may not be written into

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.watch.checked(grads)


class _Watch:
    def __init__(self, steps: Steps, problem: Problem, tensors: list[Tensor], followed: list[int], replays: bool) -> None:
        self.steps, self.problem, self.tensors, self.followed = steps, problem, tensors, followed
        self.versions, self.replays = list(map(_version, tensors)), replays
        self.cotangent: Tensor | None = None

    def begin(self, cotangent: Tensor) -> None:
        self.cotangent = cotangent
        if self.replays:
            self._refuse_changes()

    def _refuse_changes(self) -> None:
        if list(map(_version, self.tensors)) != self.versions:
            raise RuntimeError(CHANGED)

    def checked(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """These gradients, or those of the samples whose share is finite."""
        v, self.cotangent = self.cotangent, None
        if v is None or torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(v) or all_finite(grads):
            return grads
        self._refuse_changes()
        stats = self.problem.report.stats
        assert stats is not None
        at_first = stats.status != Status.NONFINITE
        good = at_first & torch.isfinite(v).all(dim=1)
        if self.problem.equation.coupled:  # there are no shares
            grads, lost = self._again(v, good), torch.zeros_like(good)
        else:
            zero = [torch.zeros_like(self.tensors[i]) for i in self.followed]
            grads, lost = sum_finite_shares(good, lambda rows: self._again(v, rows), zero)
        # a sum of finite gradients may be too large for its dtype: it belongs to every sample
        self._file(at_first & ~(good & ~lost) if all_finite(grads) else at_first)
        return grads

    def _again(self, v: Tensor, good: Tensor) -> list[Tensor | None]:
        """The gradients with good samples in place of all others, which get a cotangent of zero."""
        leaves = [tensor.detach() for tensor in self.tensors]
        needed = [leaves[i].requires_grad_() for i in self.followed]
        if not bool(good.any()):
            return [torch.zeros_like(leaf, requires_grad=False) for leaf in needed]
        silent = dataclasses.replace(self.problem, report=Report(), on_failure="ignore")
        with torch.enable_grad():
            start, args, v = quarantine(self.problem.equation, leaves[0], leaves[1:], v, good)
            z = self.steps(silent, start, args)
        return list(torch.autograd.grad(z, needed, v, allow_unused=True))

    def _file(self, lost: Tensor) -> None:
        """Samples set aside are NONFINITE; nothing was solved for the others, so no residual is known of them."""
        if not bool(lost.any()):
            return
        problem, stats = self.problem, empty_stats(len(lost), lost.device)
        told = dataclasses.replace(
            stats,
            status=stats.status.masked_fill(lost, Status.NONFINITE),
            residual=stats.residual.masked_fill(lost, float("inf")),
        )
        unknown = stats.residual.masked_fill(~lost, float("nan")).masked_fill(lost, float("inf"))
        status = torch.where(lost, Status.NONFINITE, Status.MAX_STEPS).to(torch.int8)
        problem.report.adjoint = dataclasses.replace(stats, status=status, residual=unknown)
        report_failures(told, problem.stop, problem.solver, what="adjoint", owner=problem.equation.owner)


def _version(tensor: Tensor) -> int:
    """How often it was written into; inference tensors do not count, and cannot be written into outside of that mode."""
    return 0 if tensor.is_inference() else tensor._version
