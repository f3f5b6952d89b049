"""Losses of reasoners: cross entropy with softmax or stablemax, and the loss of the halting head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Likelihood = Literal["softmax", "stablemax"]
HALT_WEIGHT = 0.5  # weight of the halting loss; that of the answers has the weight 1


def log_stablemax(logits: Tensor) -> Tensor:
    """Return log(s(x) / sum s(x)) over the last dimension, with s(x) = x + 1 for x >= 0 and 1 / (1 - x) for x < 0.

    Where exp grows exponentially, s grows linearly.
    """
    logs = torch.where(logits >= 0, torch.log1p(logits.clamp_min(0)), -torch.log1p(-logits.clamp_max(0)))
    return logs - logs.logsumexp(dim=-1, keepdim=True)


def answer_loss(logits: Tensor, targets: Tensor, likelihood: Likelihood = "softmax") -> Tensor:
    """Return the mean cross entropy over all positions."""
    logs = logits.log_softmax(dim=-1) if likelihood == "softmax" else log_stablemax(logits)
    return F.nll_loss(logs.flatten(0, -2), targets.flatten())


def halting_loss(halt: Tensor, right: Tensor) -> Tensor:
    """Return the binary cross entropy of the halting head; its target is whether all positions are right."""
    return F.binary_cross_entropy_with_logits(halt, right.to(halt.dtype))
