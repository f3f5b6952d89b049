"""Loaded datasets: splits of samples, with the names of the classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sized
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import torch
from torch import Tensor

# The label of pixels and nodes without a class; torch's cross_entropy ignores it by default.
IGNORE = -100

S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Samples x[i] with their targets y[i].

    x  images as uint8 (n, channels, height, width), or anything else with the sample first
    y  labels (n,), labels of every pixel or position, or values to regress on
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"A split needs a target for each sample: got {len(self.x)} samples and {len(self.y)} targets.")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Split:
        return Split(self.x[rows], self.y[rows])

    def __repr__(self) -> str:
        x, y = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (self.x, self.y))
        return f"Split(x: {x}, y: {y})"

    def to(self, device: torch.device | str) -> Split:
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(Generic[S]):
    """A dataset in memory.

    train, valid, test  a `Split`, a tensor of tokens, or a tuple of `Graph`; valid is None if there is no official one
    classes             meaning of the labels: names of classes, or the words of a vocabulary
    mean, std           statistics of the training images per channel, on a scale of 0 to 1
    """

    name: str
    train: S
    test: S
    valid: S | None = None
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={len(s)}" for k in ("train", "valid", "test") if (s := getattr(self, k)) is not None)
        return f"Dataset({self.name!r}, {sizes}, classes={len(self.classes)})"

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std per channel; bytes are first scaled to [0, 1], floats are taken as they are."""
        x = x.float().div_(255) if x.dtype == torch.uint8 else x
        if not self.mean:
            return x
        mean, std = (x.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean).div_(std)  # in place on the difference, not on the argument


def hold_out(dataset: Dataset[Split], count: int, seed: int = 0) -> Dataset[Split]:
    """Return the dataset with `count` random samples of its training split as the validation split."""
    if not 0 < count < len(dataset.train):
        raise ValueError(
            f"hold_out takes 1 to {len(dataset.train) - 1} samples of {dataset.name}'s training split, got {count}."
        )
    order = torch.randperm(len(dataset.train), generator=generator(seed, "hold out"))
    return dataclasses.replace(dataset, train=dataset.train[order[count:]], valid=dataset.train[order[:count]])


def cut(name: str, samples: Split, valid: int, test: int, classes: tuple[str, ...]) -> Dataset[Split]:
    """Cut generated samples into splits: the first `test` samples, the next `valid`, and the rest for training.

    In this order test and validation samples do not change with the number of training samples. With valid=0 there is no
    validation split.
    """
    held = test + valid
    chosen = samples[test:held] if valid else None
    return Dataset(name, samples[held:], samples[:test], chosen, classes)


def stratified_folds(labels: Tensor, folds: int, seed: int = 0) -> Tensor:
    """Return a fold for each sample, (n,); sizes of folds and of classes in them differ by at most one sample."""
    # samples in random order, sorted by class, are dealt to the folds in turn
    shuffled = torch.randperm(len(labels), generator=generator(seed, "folds"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return torch.empty_like(by_class).index_copy_(0, by_class, torch.arange(len(labels)) % folds)


def generator(*parts: int | str) -> torch.Generator:
    """Return a generator whose numbers depend only on these parts."""
    return torch.Generator().manual_seed(Random(" ".join(map(str, parts))).getrandbits(63))
