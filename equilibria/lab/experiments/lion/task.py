"""Tuning of a pre-trained backbone to new classes as a task: a linear probe, LION's prompts, or all weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equilibria.lab.data.batches import Batches
from equilibria.lab.data.sets import Dataset, Split, generator
from equilibria.lab.experiments.image_task import SHAPES, Batch, ImageData, ImageSet, inside, judged
from equilibria.lab.experiments.lion.backbones import FEATURES, Backbone, Tuned, TuningKind, pretrained, timm_backbone
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.images.lion import Lion, LionConfig, Pruning, PruningConfig

CNN = "cnn"
NEW = 5  # number of new classes, half of those of every set


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Settings: a backbone is pre-trained on the first half of the classes and tuned to the second half.

    data            dataset; the labels of the second half are renumbered from 0
    tuning          what is trained: a linear classifier ("probe"), LION's prompts and a classifier ("lion"), or everything
                    ("finetune")
    backbone        "cnn": a small CNN that is pre-trained here; any other name: a model of timm with published weights
    pretrain_steps  steps of pre-training of the small CNN, with Adam
    keep            share of the weights to which LION's prompts are pruned; None: no pruning
    train, test     number of images of the second half, drawn at random under `seed`; None: all
    size            side to which images are scaled; None: unchanged
    image_hidden    channels inside LION's prompt before the backbone
    feature_hidden  width inside LION's prompt after the backbone
    seed            seed of the choice of images and of pre-training, so that all runs have the same backbone
    """

    data: ImageSet = "mnist"
    tuning: TuningKind = "lion"
    backbone: str = CNN
    pretrain_steps: int = 400
    keep: float | None = None
    train: int | None = None
    test: int | None = None
    size: int | None = None
    image_hidden: int = 8
    feature_hidden: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.keep is not None and self.tuning != "lion":
            raise ValueError(f'keep needs tuning="lion", got keep={self.keep} and tuning={self.tuning!r}. Leave keep out.')
        if self.pretrain_steps < 1:
            raise ValueError(f"pretrain_steps must be at least 1, got {self.pretrain_steps}.")

    def load(self, root: Path | None) -> tuple[Dataset[Split], Dataset[Split]]:
        """Load both halves of the classes; of the second one `train` and `test` images are drawn."""
        whole = ImageData(name=self.data, size=self.size).load(root)
        known = _part(whole, range(NEW), None, None, self.seed)
        return known, _part(whole, range(NEW, 2 * NEW), self.train, self.test, self.seed)


class Prompt(Task[Batch]):
    """Trains a `Tuned` on the new classes.

    Pre-training runs before the first step; a model whose weights are loaded needs none. Prompts are pruned during training:
    critical weights are selected after every epoch, and the others are removed before the last epoch, or after it if there
    is only one.
    """

    better = ("accuracy", "max")

    def __init__(self, settings: PromptSettings) -> None:
        self.settings = settings
        self._pretrained: nn.Module | None = None
        self._pruning: Pruning | None = None
        self._resumed: Mapping[str, object] | None = None  # state of a resumed run, for `_pruning` once it exists
        self._step, self._chosen = 0, 0  # the current step, and the number of selections so far
        self._steps, self._epochs = 0, 0  # steps per epoch, and number of epochs

    def prepare(self, root: Path | None, training: Training) -> None:
        s = self.settings
        if s.backbone == CNN:
            self._pretrained = pretrained(s.load(root)[0], s.pretrain_steps, s.seed)
        else:
            self._pretrained = timm_backbone(s.backbone, SHAPES[s.data][0], weights=True)

    def model(self) -> nn.Module:
        s, channels = self.settings, SHAPES[self.settings.data][0]
        backbone: Any = self._pretrained
        if backbone is None:
            backbone = Backbone(channels) if s.backbone == CNN else timm_backbone(s.backbone, channels, weights=False)
        config = LionConfig(
            features=FEATURES if isinstance(backbone, Backbone) else int(backbone.num_features),
            classes=NEW,
            image_channels=channels,
            image_hidden=s.image_hidden,
            feature_hidden=s.feature_hidden,
        )
        return Tuned(backbone, s.tuning, config)

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        _, found = self.settings.load(root)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": found.normalize}
        train = Batches(found.train, training.batch_size, seed=training.seed, drop_last=True, **place)
        self._steps, self._epochs = len(train), training.epochs
        return Loaders(train, None, Batches(found.test, training.eval_batch_size, shuffle=False, **place))

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        self._step = step
        x, y = batch
        loss, metrics = judged(model(x), y)
        return Outcome(loss, metrics, len(y))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        x, y = batch
        with torch.no_grad():
            loss, metrics = judged(model(x), y)
        tuned = inside(model, Tuned)
        metrics |= {"trained": float(tuned.trained()), "trained_share": tuned.trained_share(), "moved": tuned.moved()}
        return Outcome(loss, metrics, len(y))

    def improve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.keep is None:
            optimizer.step()
            return
        # created here and not earlier: only now the weights are on their device
        lion = inside(model, Lion)
        if self._pruning is None:
            assert self.settings.keep is not None
            self._pruning = Pruning(lion.prunable(), PruningConfig(keep=self.settings.keep))
            if self._resumed is not None:
                self._pruning.load_state_dict(self._resumed)
        pruning = self._pruning
        pruning.step(optimizer)
        epochs = (self._step + 1) // self._steps  # number of finished epochs
        if epochs > self._chosen and not pruning.removed:
            pruning.select()
            self._chosen = epochs
            if epochs >= self._epochs - 1:
                pruning.remove_()  # before the last epoch, which trains the remaining weights

    def state(self) -> Any:
        pruning = self._resumed if self._pruning is None else self._pruning.state_dict()
        return {"pruning": pruning, "chosen": self._chosen}

    def resume(self, state: Any) -> None:
        self._pruning, self._resumed, self._chosen = None, state["pruning"], state["chosen"]


def _part(whole: Dataset[Split], labels: range, train: int | None, test: int | None, seed: int) -> Dataset[Split]:
    """Return the images with these labels, renumbered from 0; `train` and `test` are numbers of images, None: all."""
    return dataclasses.replace(
        whole,
        train=_drawn(whole.train, labels, train, seed, f"train={train}"),
        test=_drawn(whole.test, labels, test, seed, f"test={test}"),
        classes=whole.classes[labels.start : labels.stop],
    )


def _drawn(split: Split, labels: range, count: int | None, seed: int, asked: str) -> Split:
    """Return `count` random images with these labels, renumbered from 0; `asked` names the setting in an error."""
    found = split[(split.y >= labels.start) & (split.y < labels.stop)]
    if count is not None and not 0 < count <= len(found):
        raise ValueError(f"There are {len(found)} images of these classes, got {asked}. Use 1 to {len(found)}, or None.")
    order = torch.randperm(len(found), generator=generator(seed, len(found)))[:count]
    return Split(found.x[order], found.y[order] - labels.start)
