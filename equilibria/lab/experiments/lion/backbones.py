"""Pre-trained backbones, and the modules that are trained around them for new classes."""

from __future__ import annotations

import copy
import importlib
import re
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.lab.data.batches import Batches
from equilibria.lab.data.sets import Dataset, Split
from equilibria.models.images.lion import Lion, LionConfig
from equilibria.stop import Stop

FEATURES = 64  # features of the small CNN
BATCH = 64  # batch size of its pre-training

TuningKind = Literal["probe", "lion", "finetune"]


class Backbone(nn.Module):
    """Maps images (batch, channels, height, width) to features (batch, 64) by three 3x3 convolutions with batch norms.

    The image is halved after the first two; at the end the mean over pixels is taken.
    """

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *_block(channels, 16), nn.MaxPool2d(2), *_block(16, 32), nn.MaxPool2d(2), *_block(32, FEATURES)
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(x).mean(dim=(2, 3))
        return features


class Tuned(nn.Module):
    """A classifier head(backbone(x)), or a `Lion` around the backbone, which also stores the backbone's initial weights.

    They are a buffer and hence in checkpoints, so that `moved` is right for loaded weights too.
    """

    def __init__(self, backbone: nn.Module, tuning: TuningKind, config: LionConfig) -> None:
        super().__init__()
        self.net: nn.Module
        if tuning == "lion":
            self.net = Lion(backbone, config, stop=Stop(on_failure="ignore"))
        else:
            self.net = Transfer(backbone, config, frozen=tuning == "probe")
        self.register_buffer("start", _flat(self._backbone()))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores

    @torch.no_grad()
    def moved(self) -> Tensor:
        """Return the largest change of the backbone's weights and running statistics, a scalar."""
        start = self.start
        assert isinstance(start, Tensor)
        return (_flat(self._backbone()) - start).abs().max()

    def trained(self) -> int:
        """Return the number of trained parameters without those that were pruned."""
        pruned = sum(int((p == 0).sum()) for p in self.net.prunable().values()) if isinstance(self.net, Lion) else 0
        return sum(p.numel() for p in self.parameters() if p.requires_grad) - pruned

    def trained_share(self) -> float:
        """Return the share of all parameters that is trained."""
        return self.trained() / sum(p.numel() for p in self.parameters())

    def _backbone(self) -> nn.Module:
        return self.net.get_submodule("backbone")


class Transfer(nn.Module):
    """A linear classifier on the features of a copy of a backbone; `frozen` excludes the copy from training."""

    def __init__(self, backbone: nn.Module, config: LionConfig, *, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.backbone = copy.deepcopy(backbone).requires_grad_(not frozen)
        self.head = nn.Linear(config.features, config.classes)
        self.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(x))
        return scores

    def train(self, mode: bool = True) -> Transfer:
        super().train(mode)
        if self.frozen:
            self.backbone.eval()  # otherwise its running statistics would change
        return self


def pretrained(known: Dataset[Split], steps: int, seed: int) -> Backbone:
    """Return a backbone trained to classify `known`; the result depends only on the arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = Backbone(known.train.x.shape[1])
        head = nn.Linear(FEATURES, len(known.classes))
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = Batches(known.train, BATCH, seed=seed, transform=known.normalize, drop_last=True)
    for step in range(steps):
        x, y = batches.batch(*divmod(step, len(batches)))
        optimizer.zero_grad()
        F.cross_entropy(head(backbone(x)), y).backward()
        optimizer.step()
        schedule.step()
    return backbone.eval()


def timm_backbone(name: str, channels: int, *, weights: bool) -> nn.Module:
    """Return a model of timm without its classifier, with or without its published weights."""
    # the name may come from a run folder: with a prefix such as "hf-hub:" timm would read files, and pickles, from there
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError(f"backbone must be 'cnn' or the name of a model of timm, such as 'resnet18'; got {name!r}.")
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise ImportError(
            f"backbone={name!r} needs timm, which is not installed ({error}). Install it with: pip install timm. Or use "
            'backbone="cnn", which needs no package.'
        ) from error
    model: nn.Module = timm.create_model(name, pretrained=weights, num_classes=0, in_chans=channels)
    return model.eval()


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _flat(module: nn.Module) -> Tensor:
    """Return all floating-point numbers of a module's state in one vector, (n,)."""
    return torch.cat([value.detach().flatten() for value in module.state_dict().values() if value.is_floating_point()])
