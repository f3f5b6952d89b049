"""LION: equilibrium prompts around a frozen backbone (after Wang and others, AAAI 2024).

Published are the idea and the results: two implicit layers, one before a frozen network and one behind its features, are
trained together with a classifier, and pruned on the way by the lottery ticket hypothesis. The equations of the layers and
the details of the pruning are this library's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from equilibria._core.loop import Stop
from equilibria.constraints import spectral_norm
from equilibria.deq import DEQ
from equilibria.gradients.base import Gradient
from equilibria.gradients.implicit import Implicit
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import require
from equilibria.solvers.fallback import AnySolver

CONTRACTION = 0.9  # at most, of a prompt
SMALL = 0.01  # standard deviation of the weights that lead out of a prompt: it begins as next to nothing

M = TypeVar("M", nn.Conv2d, nn.Linear)


class ImagePrompt(nn.Module):
    """f(z, x) = W2 * relu(W1 * z + norm(U * x + b)) on images, * being 3x3 convolutions; a contraction.

    The norm is on the input alone. Around W1 z as well it would divide by a spread that may be small: solves then ran
    into their limit within twenty steps of training. The norms of W1 and W2 are held below what CONTRACTION allows.

    channels  of images and state
    hidden    channels inside
    groups    of the norm
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
    """f(z, h) = W2 relu(W1 z + norm(U h + b)) on vectors, as ImagePrompt on images."""

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
    """The sizes of what is trained.

    features         that the backbone gives for an image, after the mean over places
    image_channels   of the images
    image_hidden     channels inside the prompt before the backbone
    feature_hidden   width inside the prompt behind it
    groups           of the norm inside the prompt before the backbone
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
            f"The {self.image_hidden} channels inside the image prompt do not fall into {self.groups} groups. "
            "Take a divisor.",
        )


class Lion(nn.Module):
    """head(h + z_h), h = backbone(x + z_x): z_x and z_h are equilibria, of the image and of the features.

    backbone  any module from images to features (batch, features), (batch, features, height, width), or tokens
              (batch, tokens, features); of the latter two the mean over places is taken. A copy of it is kept, which does
              not train and stays in eval mode
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
        self.train(self.training)

    def forward(self, images: Tensor) -> Tensor:
        h = self._features(images + self.before(images))
        return self.head(h + self.behind(h))

    def train(self, mode: bool = True) -> Lion:
        super().train(mode)
        self.backbone.eval()  # or its running statistics would move
        return self

    def prunable(self) -> dict[str, nn.Parameter]:
        """Matrices and kernels of the two prompts, by name; norms, biases and the classifier are left alone."""
        found = self.named_parameters()
        return {name: p for name, p in found if name.startswith(("before.", "behind.")) and p.dim() > 1}

    def trained_share(self) -> float:
        """Trained parameters over all of them."""
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return trained / sum(p.numel() for p in self.parameters())

    def _features(self, images: Tensor) -> Tensor:
        h: Tensor = self.backbone(images)
        pooled = h.mean(dim=1) if h.dim() == 3 else h.flatten(2).mean(dim=2) if h.dim() > 3 else h
        if pooled.dim() != 2 or pooled.shape[1] != self.config.features:
            raise ValueError(
                f"The backbone gave {tuple(h.shape)}, and {self.config.features} features were expected for every image. "
                "Say how many there are with LionConfig(features=...), or cut off the backbone's classifier."
            )
        return pooled


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """How critical weights are selected.

    keep   the share of the weights that is critical
    decay  by which the others shrink in every step
    """

    keep: float = 0.6
    decay: float = 0.1

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, f"keep is a share of the weights and must lie in (0, 1], got {self.keep}.")
        require(0 <= self.decay <= 1, f"decay must lie in [0, 1], got {self.decay}.")


PRUNING = PruningConfig()


class Pruning:
    """Weights that matter are trained, the others fade away and are at last removed.

    A weight's score is |w dL/dw|, added up over the steps of an epoch: what the loss would change without it, to first
    order. `select` makes the weights of the largest scores the critical ones.

        pruning = Pruning(model.prunable())
        for epoch in range(epochs):
            for images, labels in batches:
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                pruning.step(optimizer)                 # in place of optimizer.step()
            pruning.select()
        pruning.remove_()

    Until the first `select` all weights are critical.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: PruningConfig = PRUNING) -> None:
        require(len(parameters) > 0, "There are no parameters to prune: give model.prunable().")
        self.parameters, self.config = dict(parameters), config
        self.removed = False
        self.critical = {name: torch.ones_like(p, dtype=torch.bool) for name, p in self.parameters.items()}
        self.scores = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Add to the scores, and take the optimizer's step for the critical weights alone.

        The others are put back and shrunk: momentum and weight decay of the optimizer would move them without a gradient.
        """
        for name, p in self.parameters.items():
            if p.grad is not None:
                self.scores[name] += (p * p.grad).abs()
        before = {name: p.clone() for name, p in self.parameters.items()}
        optimizer.step()
        decay = 1.0 if self.removed else self.config.decay
        for name, p in self.parameters.items():
            p.copy_(torch.where(self.critical[name], p, (1 - decay) * before[name]))

    @torch.no_grad()
    def select(self) -> None:
        """Make the weights of the largest scores critical, over all parameters together, and begin new scores."""
        self._check_open("select")
        scores = torch.cat([score.flatten() for score in self.scores.values()])
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen[scores.topk(round(self.config.keep * len(scores))).indices] = True
        sizes = [p.numel() for p in self.parameters.values()]
        for (name, p), part in zip(self.parameters.items(), chosen.split(sizes), strict=True):
            self.critical[name] = part.view_as(p)
            self.scores[name].zero_()

    @torch.no_grad()
    def remove_(self) -> int:
        """Set all but the critical weights to zero, for good, and return how many these are."""
        self.removed = True
        for name, p in self.parameters.items():
            p.copy_(torch.where(self.critical[name], p, 0.0))
        return sum(int((~critical).sum()) for critical in self.critical.values())

    def state_dict(self) -> dict[str, object]:
        """The state to store in a checkpoint."""
        return {"critical": dict(self.critical), "scores": dict(self.scores), "removed": self.removed}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        critical, scores = state["critical"], state["scores"]
        assert isinstance(critical, dict) and isinstance(scores, dict)
        if set(critical) != set(self.parameters):
            raise ValueError(
                f"The state is of the parameters {sorted(critical)}, and these are {sorted(self.parameters)}. Load the one "
                "that was saved with this model."
            )
        self.critical = {name: critical[name].clone() for name in self.parameters}
        self.scores = {name: scores[name].clone() for name in self.parameters}
        self.removed = bool(state["removed"])

    def _check_open(self, what: str) -> None:
        if self.removed:
            raise RuntimeError(f"{what} after remove_: what is gone has no score. Make a new Pruning to prune further.")


def _small(layer: M) -> M:
    nn.init.normal_(layer.weight, std=SMALL)
    return layer


def _bounded(layer: M) -> M:
    """The layer with an operator norm of at most the root of CONTRACTION.

    The norm of a convolution is at most that of its kernel as a matrix, times the root of the number of taps.
    """
    taps = layer.weight[0, 0].numel()
    return spectral_norm(layer, bound=math.sqrt(CONTRACTION / taps), clip=True, exact=True)
