"""Loaded datasets: splits of samples, with the names of the classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sized
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import torch
from torch import Tensor

# The label of what has no class: torch's cross_entropy leaves it out by default.
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

    train, valid, test  a `Split`, a tensor of tokens, or a tuple of `Graph`; valid is None where there is no official one
    classes             what the labels stand for: names of classes, or the words of a vocabulary
    mean, std           of the training images' channels on a scale of 0 to 1
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
        """(x - mean) / std per channel, of bytes on a scale of 0 to 1 or of floats as they are."""
        x = x.float().div_(255) if x.dtype == torch.uint8 else x
        if not self.mean:
            return x
        mean, std = (x.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean).div_(std)


def hold_out(dataset: Dataset[Split], count: int, seed: int = 0) -> Dataset[Split]:
    """`count` samples of the training split, drawn at random, as the validation split."""
    if not 0 < count < len(dataset.train):
        raise ValueError(
            f"hold_out takes 1 to {len(dataset.train) - 1} samples of {dataset.name}'s training split, got {count}."
        )
    order = torch.randperm(len(dataset.train), generator=generator(seed, "hold out"))
    return dataclasses.replace(dataset, train=dataset.train[order[count:]], valid=dataset.train[order[:count]])


def cut(name: str, samples: Split, valid: int, test: int, classes: tuple[str, ...]) -> Dataset[Split]:
    """Cut generated samples into splits: the first `test` of them, then `valid`, the rest to train on.

    So the puzzles of test and validation do not change with the number of those to train on. No validation split for 0.
    """
    held = test + valid
    chosen = samples[test:held] if valid else None
    return Dataset(name, samples[held:], samples[:test], chosen, classes)


def stratified_folds(labels: Tensor, folds: int, seed: int = 0) -> Tensor:
    """A fold for each sample: equal in size, and with equal shares of every class, to one sample."""
    shuffled = torch.randperm(len(labels), generator=generator(seed, "folds"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return torch.empty_like(by_class).index_copy_(0, by_class, torch.arange(len(labels)) % folds)


def generator(*parts: int | str) -> torch.Generator:
    """Random numbers that are a function of these parts alone."""
    return torch.Generator().manual_seed(Random(" ".join(map(str, parts))).getrandbits(63))
