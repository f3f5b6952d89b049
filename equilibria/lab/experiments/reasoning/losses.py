"""Losses of reasoners: cross entropy of softmax or stablemax, and that of the halting head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Likelihood = Literal["softmax", "stablemax"]
HALT_WEIGHT = 0.5  # of the halting loss beside that of the answers


def log_stablemax(logits: Tensor) -> Tensor:
    """log of s(x) / sum s(x) with s(x) = x + 1 for x >= 0 and 1 / (1 - x) below, over the last dimension.

    It grows linearly where exp explodes, so that logits need not run away to make an answer certain.
    """
    logs = torch.where(logits >= 0, torch.log1p(logits.clamp_min(0)), -torch.log1p(-logits.clamp_max(0)))
    return logs - logs.logsumexp(dim=-1, keepdim=True)


def answer_loss(logits: Tensor, targets: Tensor, likelihood: Likelihood = "softmax") -> Tensor:
    """Mean cross entropy over all positions."""
    logs = logits.log_softmax(dim=-1) if likelihood == "softmax" else log_stablemax(logits)
    return F.nll_loss(logs.flatten(0, -2), targets.flatten())


def halting_loss(halt: Tensor, right: Tensor) -> Tensor:
    """Binary cross entropy of the halting head against "all positions right"."""
    return F.binary_cross_entropy_with_logits(halt, right.to(halt.dtype))
