"""Segmentation of images with a multiscale DEQ as a task: a label for every pixel, and mean IoU over a whole split."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.lab.data.augment import Augmentation, Crop, Flip
from equilibria.lab.data.batches import Batches
from equilibria.lab.data.camvid import CLASSES
from equilibria.lab.data.catalogue import load
from equilibria.lab.data.sets import IGNORE, Dataset, Split
from equilibria.lab.data.synthetic import SHAPES
from equilibria.lab.experiments.image_task import Batch, now
from equilibria.lab.experiments.mdeq.label_pictures import bars, compared
from equilibria.lab.experiments.mdeq.task import MDEQOptions
from equilibria.lab.training.settings import Training
from equilibria.lab.training.task import Loaders, Outcome, Task
from equilibria.models.images.mdeq import pretraining

NAMES: dict[str, tuple[str, ...]] = {"camvid": CLASSES, "shapes": SHAPES}
SHOWN = 6  # images in the gallery


@dataclass(frozen=True, kw_only=True)
class SegmentSettings:
    """Settings of image segmentation.

    data     dataset; "shapes" needs no files
    train    number of training images, taken from the beginning; None: all. `valid` and `test` likewise
    size     height and width of the images of "shapes"
    balance  c: a class with a share p of the labelled training pixels has the weight 1 / ln(c + p) in the training loss; a
             value just above 1 favours rare classes most. None: equal weights
    crop     pixels by which training images are padded before a random cut
    flip     mirror half of the training images
    """

    data: Literal["camvid", "shapes"] = "camvid"
    model: MDEQOptions = field(default_factory=lambda: MDEQOptions(size="nano-segmentation"))
    train: int | None = None
    valid: int | None = None
    test: int | None = None
    size: int = 32
    balance: float | None = None
    crop: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.balance is not None and self.balance <= 1:
            raise ValueError(f"balance must be above 1, where the logarithm is positive, got {self.balance}. Try 1.02.")
        for name in ("train", "valid", "test"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1 image, or None for all of them, got {count}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return NAMES[self.data]

    def load(self, root: Path | None) -> Dataset[Split]:
        """Load the requested number of images of every split."""
        options: dict[str, Any] = {"size": self.size} if self.data == "shapes" else {}
        whole: Dataset[Split] = load(self.data, root, **options)
        assert whole.valid is not None
        train, valid, test = whole.train[: self.train], whole.valid[: self.valid], whole.test[: self.test]
        return Dataset(whole.name, train, test, valid, whole.classes, whole.mean, whole.std)


class Segmentation(Task[Batch]):
    """Cross entropy over the labelled pixels; accuracy and mean IoU over a whole split.

    The scores of the model are interpolated to the size of the images. Classes are weighted only in training, so that
    losses on other splits are comparable between settings.
    """

    better = ("mean_iou", "max")

    def __init__(self, settings: SegmentSettings) -> None:
        self.settings = settings
        self._weights: Tensor | None = None  # weights of the classes, (classes,)

    def model(self) -> nn.Module:
        return self.settings.model.model(3, len(self.settings.names))

    def batches(self, root: Path | None, training: Training, rank: int, world_size: int) -> Loaders[Batch]:
        found, s = self.settings.load(root), self.settings
        assert found.valid is not None
        if s.balance is not None:
            self._weights = class_weights(found.train.y, len(s.names), s.balance)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "transform": found.normalize}
        augment: list[Augmentation] = [*([Crop(s.crop)] if s.crop else []), *([Flip()] if s.flip else [])]
        train = Batches(found.train, training.batch_size, seed=training.seed, augment=augment, drop_last=True, **place)
        valid, test = (
            Batches(split, training.eval_batch_size, shuffle=False, **place) for split in (found.valid, found.test)
        )
        return Loaders(train, valid, test)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Outcome:
        x, y = batch
        scores = scores_of(model, x)
        weights = None if self._weights is None else self._weights.to(x.device)
        return Outcome(cross_entropy(scores, y, weights), counts(scores.detach(), y), len(y))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        x, y = batch
        with torch.no_grad():
            before = now(x)
            scores = scores_of(model, x)
            seconds = now(x) - before
        return Outcome(cross_entropy(scores, y), counts(scores, y) | {"predict_seconds": seconds}, len(y))

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """Replace the counts of pixels by accuracy and mean IoU over the whole split."""
        return ratios(means, len(self.settings.names))

    def pretrain(self, model: nn.Module, on: bool) -> None:
        pretraining(model, on)

    def gallery(self, model: nn.Module, root: Path | None, training: Training) -> dict[str, tuple[str, bytes]]:
        """Return pictures as (title, PNG) by name: test images with true and predicted labels, and the IoU per class."""
        found, names, before = self.settings.load(root), self.settings.names, model.training
        device = next(model.parameters()).device
        model.eval()
        try:
            parts = found.test.x.split(training.eval_batch_size)
            predicted = torch.cat([self._labels(model, found.normalize(x).to(device)).cpu() for x in parts])
        finally:
            model.train(before)
        chosen = torch.linspace(0, len(found.test) - 1, min(SHOWN, len(found.test))).round().long()
        pictures = compared(found.test.x[chosen], found.test.y[chosen], predicted[chosen], names)
        by_class = {name: value for name, value in zip(names, overlaps(predicted, found.test.y, len(names)), strict=True)}
        return {
            "segmentation": (f"Images of the test split of {found.name}, their labels and the model's", pictures),
            "classes": ("IoU of every class on the test split, %", bars(by_class)),
        }

    def _labels(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return scores_of(model, x).argmax(dim=1)


def scores_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the model's scores interpolated to the size of the images, (batch, classes, height, width)."""
    return F.interpolate(model(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


def cross_entropy(scores: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the (weighted) mean over the labelled pixels; 0 if there are none."""
    if bool((y == IGNORE).all()):  # torch's mean over no pixels would be nan
        return 0.0 * scores.sum()
    return F.cross_entropy(scores, y, weights, ignore_index=IGNORE)


def class_weights(y: Tensor, classes: int, balance: float) -> Tensor:
    """Return 1 / ln(balance + share of the labelled pixels) of every class, (classes,)."""
    count = torch.bincount(y[y != IGNORE], minlength=classes)
    return 1 / torch.log(balance + count / count.sum())


def confusion(predicted: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix (classes, classes): counts of labelled pixels by label (row) and prediction (column)."""
    known = y != IGNORE
    return torch.bincount(y[known] * classes + predicted[known], minlength=classes**2).view(classes, classes)


def overlaps(predicted: Tensor, y: Tensor, classes: int) -> list[float]:
    """Return the intersection over union of every class; nan for a class that occurs neither in labels nor predictions."""
    both, either = _shared(confusion(predicted, y, classes).double())
    return (both / either).tolist()


def counts(scores: Tensor, y: Tensor) -> dict[str, Tensor | float]:
    """Return numbers of pixels per image: labelled, right, and per class in intersection and union.

    They are means over images, so that their means over batches are exact; `ratios` computes accuracy and IoU from them.
    """
    table = confusion(scores.argmax(dim=1), y, scores.shape[1]).double() / len(y)
    both, either = _shared(table)
    found: dict[str, Tensor | float] = {"labelled": table.sum(), "right": both.sum()}
    for c in range(len(table)):
        found |= {f"both_{c}": both[c], f"either_{c}": either[c]}
    return found


def ratios(means: dict[str, float], classes: int) -> dict[str, float]:
    """Return `means` with accuracy and mean IoU in place of the numbers of `counts`.

    The mean IoU is over the classes that occur in a label or in a prediction.
    """
    used = {"labelled", "right"} | {f"{what}_{c}" for what in ("both", "either") for c in range(classes)}
    kept = {name: value for name, value in means.items() if name not in used}
    if not means.get("labelled"):  # no step was taken, or no pixel has a label
        return kept
    seen = [means[f"both_{c}"] / either for c in range(classes) if (either := means[f"either_{c}"])]
    return kept | {"accuracy": means["right"] / means["labelled"], "mean_iou": sum(seen) / len(seen)}


def _shared(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the intersection and the union of every class from a confusion matrix."""
    both = table.diagonal()
    return both, table.sum(dim=0) + table.sum(dim=1) - both
