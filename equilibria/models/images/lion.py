"""LION: equilibrium prompts around a frozen backbone (after Wang and others, AAAI 2024).

The paper publishes the idea and the results: two implicit layers, one before a frozen network and one behind its features,
are trained together with a classifier and pruned during training by the lottery ticket hypothesis. The equations of the
layers and the details of the pruning are this library's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from equilibria._core.checks import require
from equilibria.constraints import spectral_norm
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.fallback import AnySolver
from equilibria.stop import Stop

CONTRACTION = 0.9  # largest contraction factor of a prompt
SMALL = 0.01  # standard deviation of a prompt's output weights: its initial output is close to zero

M = TypeVar("M", nn.Conv2d, nn.Linear)


class ImagePrompt(nn.Module):
    """f(z, x) = W2 * relu(W1 * z + norm(U * x + b)) on images, with 3x3 convolutions *; a contraction.

    Only the input is normalised. A norm around W1 z would divide by a standard deviation that may be small; in trials
    solves failed within twenty training steps. The norms of W1 and W2 are bounded so that f contracts by CONTRACTION.

    channels  channels of images and state
    hidden    hidden channels
    groups    groups of the norm
    """

    def __init__(self, channels: int, hidden: int, groups: int) -> None:
        super().__init__()
        self.W1 = _bounded(nn.Conv2d(channels, hidden, 3, padding=1, bias=False))
        self.U = nn.Conv2d(channels, hidden, 3, padding=1)
        self.norm = nn.GroupNorm(groups, hidden)
        self.W2 = _bounded(_small(nn.Conv2d(hidden, channels, 3, padding=1, bias=False)))

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(self.U(x))

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return self.W2(torch.relu(self.W1(z) + injected))


class FeaturePrompt(nn.Module):
    """f(z, h) = W2 relu(W1 z + norm(U h + b)) on vectors, like ImagePrompt on images."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.W1 = _bounded(nn.Linear(features, hidden, bias=False))
        self.U = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.W2 = _bounded(_small(nn.Linear(hidden, features, bias=False)))

    def prepare(self, h: Tensor) -> Tensor:
        return self.norm(self.U(h))

    def forward(self, z: Tensor, injected: Tensor) -> Tensor:
        return self.W2(torch.relu(self.W1(z) + injected))


@dataclass(frozen=True, kw_only=True)
class LionConfig:
    """The sizes of the trained parts.

    features         features of the backbone per image, after the mean over positions
    image_channels   channels of the images
    image_hidden     hidden channels of the prompt before the backbone
    feature_hidden   hidden width of the prompt behind it
    groups           groups of the norm inside the prompt before the backbone
    """

    features: int
    classes: int = 10
    image_channels: int = 3
    image_hidden: int = 8
    feature_hidden: int = 32
    groups: int = 4

    def __post_init__(self) -> None:
        require(
            self.image_hidden % self.groups == 0,
            f"image_hidden={self.image_hidden} is not divisible by groups={self.groups}. Use a divisor.",
        )


class Lion(nn.Module):
    """head(h + z_h) with h = backbone(x + z_x), where z_x and z_h are equilibria for the image and for the features.

    backbone  any module from images to features (batch, features), (batch, features, height, width), or tokens
              (batch, tokens, features); the latter two are averaged over positions. A frozen copy in eval mode is kept
    solver, stop, gradient  of both equilibria
    """

    def __init__(
        self,
        backbone: nn.Module,
        config: LionConfig,
        *,
        solver: AnySolver = Anderson(),
        stop: Stop = Stop(),
        gradient: Gradient = Implicit(),
    ) -> None:
        super().__init__()
        self.config = config
        image = ImagePrompt(config.image_channels, config.image_hidden, config.groups)
        self.before = DEQ(image, None, solver, stop, gradient)
        self.backbone = copy.deepcopy(backbone).requires_grad_(False)
        self.behind = DEQ(FeaturePrompt(config.features, config.feature_hidden), None, solver, stop, gradient)
        self.head = nn.Linear(config.features, config.classes)
        self.train(self.training)  # puts the backbone in eval mode from the start

    def forward(self, images: Tensor) -> Tensor:
        h = self._features(images + self.before(images))
        return self.head(h + self.behind(h))

    def train(self, mode: bool = True) -> Lion:
        super().train(mode)
        self.backbone.eval()  # otherwise its running statistics would change
        return self

    def prunable(self) -> dict[str, nn.Parameter]:
        """Return the matrices and kernels of both prompts by name, without norms, biases and the classifier."""
        found = self.named_parameters()
        return {name: p for name, p in found if name.startswith(("before.", "behind.")) and p.dim() > 1}

    def trained_share(self) -> float:
        """Return the share of parameters that are trained."""
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return trained / sum(p.numel() for p in self.parameters())

    def _features(self, images: Tensor) -> Tensor:
        """Return the features of the backbone averaged over positions, (batch, features).

        Raises ValueError if their number is not that of the configuration.
        """
        h: Tensor = self.backbone(images)
        pooled = h.mean(dim=1) if h.dim() == 3 else h.flatten(2).mean(dim=2) if h.dim() > 3 else h
        if pooled.dim() != 2 or pooled.shape[1] != self.config.features:
            raise ValueError(
                f"The backbone returned shape {tuple(h.shape)}, but {self.config.features} features per image are expected. "
                "Set LionConfig(features=...), or remove the backbone's classifier."
            )
        return pooled


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """Settings of the selection of critical weights.

    keep   share of the weights that are critical
    decay  share by which the others shrink in every step
    """

    keep: float = 0.6
    decay: float = 0.1

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, f"keep must lie in (0, 1], got {self.keep}.")
        require(0 <= self.decay <= 1, f"decay must lie in [0, 1], got {self.decay}.")


PRUNING = PruningConfig()


class Pruning:
    """Trains only the critical weights; the others decay and are removed at the end.

    The score of a weight is |w dL/dw|, summed over the steps of an epoch. It estimates, to first order, how much the loss
    changes without the weight. `select` makes the weights with the largest scores critical.

        pruning = Pruning(model.prunable())
        for epoch in range(epochs):
            for images, labels in batches:
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                pruning.step(optimizer)                 # instead of optimizer.step()
            pruning.select()
        pruning.remove_()

    All weights are critical until the first `select`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: PruningConfig = PRUNING) -> None:
        require(len(parameters) > 0, "There are no parameters to prune: pass model.prunable().")
        self.parameters, self.config = dict(parameters), config
        self.removed = False
        self.critical = {name: torch.ones_like(p, dtype=torch.bool) for name, p in self.parameters.items()}
        self.scores = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the scores, and take the optimizer's step for the critical weights only.

        The others are restored and shrunk, since momentum and weight decay of the optimizer would move them.
        """
        for name, p in self.parameters.items():
            if p.grad is not None:
                self.scores[name] += (p * p.grad).abs()
        before = {name: p.clone() for name, p in self.parameters.items()}
        optimizer.step()
        decay = 1.0 if self.removed else self.config.decay  # removed weights stay at zero
        for name, p in self.parameters.items():
            p.copy_(torch.where(self.critical[name], p, (1 - decay) * before[name]))

    @torch.no_grad()
    def select(self) -> None:
        """Make the weights with the largest scores, over all parameters together, critical, and reset the scores."""
        if self.removed:
            raise RuntimeError(
                "select cannot be called after remove_: removed weights have no score. Make a new Pruning to prune further."
            )
        # one ranking over all tensors, so that a tensor that matters little may lose most of its weights
        scores = torch.cat([score.flatten() for score in self.scores.values()])
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen[scores.topk(round(self.config.keep * len(scores))).indices] = True
        sizes = [p.numel() for p in self.parameters.values()]
        for (name, p), part in zip(self.parameters.items(), chosen.split(sizes), strict=True):
            self.critical[name] = part.view_as(p)
            self.scores[name].zero_()

    @torch.no_grad()
    def remove_(self) -> int:
        """Set all weights but the critical ones to zero, and return how many were set."""
        self.removed = True
        for name, p in self.parameters.items():
            p.copy_(torch.where(self.critical[name], p, 0.0))
        return sum(int((~critical).sum()) for critical in self.critical.values())

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        return {"critical": dict(self.critical), "scores": dict(self.scores), "removed": self.removed}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        critical, scores = state["critical"], state["scores"]
        assert isinstance(critical, dict) and isinstance(scores, dict)
        if set(critical) != set(self.parameters):
            raise ValueError(
                f"The state belongs to the parameters {sorted(critical)}, but the model has {sorted(self.parameters)}. Load "
                "the state that was saved with this model."
            )
        self.critical = {name: critical[name].clone() for name in self.parameters}
        self.scores = {name: scores[name].clone() for name in self.parameters}
        self.removed = bool(state["removed"])


def _small(layer: M) -> M:
    """Initialise the weight with the small standard deviation SMALL, and return the layer."""
    nn.init.normal_(layer.weight, std=SMALL)
    return layer


def _bounded(layer: M) -> M:
    """Constrain the operator norm of the layer to at most the square root of CONTRACTION.

    The norm of a convolution is at most that of its kernel as a matrix, times the square root of the number of taps.
    """
    taps = layer.weight[0, 0].numel()
    return spectral_norm(layer, bound=math.sqrt(CONTRACTION / taps), clip=True, exact=True)
