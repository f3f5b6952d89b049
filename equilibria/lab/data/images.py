"""Readers of image sets: IDX files, CIFAR's binary version, SVHN's .mat files, and scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria._core.files import optional
from equilibria.lab.data.files import DataError, Paths
from equilibria.lab.data.sets import Dataset, Split, stratified_folds

DIGITS = tuple("0123456789")
# in the order of the labels
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
# in the order of the labels
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def mnist(paths: Paths) -> Dataset[Split]:
    """Read MNIST."""
    return Dataset("mnist", *_idx_splits(paths), classes=DIGITS, mean=(0.1307,), std=(0.3081,))


def fashion_mnist(paths: Paths) -> Dataset[Split]:
    """Read Fashion-MNIST."""
    return Dataset("fashion-mnist", *_idx_splits(paths), classes=CLOTHES, mean=(0.2860,), std=(0.3530,))


def cifar10(paths: Paths) -> Dataset[Split]:
    """Read CIFAR-10. `std` is that of the training set; MDEQ's recipes divide by (0.2023, 0.1994, 0.2010) instead."""
    parts = [_cifar_batch(paths[f"data_batch_{i}.bin"]) for i in range(1, 6)]
    train = Split(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Dataset("cifar10", train, _cifar_batch(paths["test_batch.bin"]), classes=CIFAR, mean=mean, std=std)


def svhn(paths: Paths) -> Dataset[Split]:
    """Read SVHN. This needs scipy, which comes with scikit-learn."""
    train, test = (_svhn_split(paths[f"{split}_32x32.mat"]) for split in ("train", "test"))
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
    return Dataset("svhn", train, test, classes=DIGITS, mean=mean, std=std)


def digits(*, seed: int = 0) -> Dataset[Split]:
    """Load scikit-learn's digits. A fifth is for testing, with equal shares of every class.

    x are floats in [0, 1] rather than bytes, because the pixels have 17 levels.
    """
    found = optional("sklearn.datasets", "train").load_digits()
    x, y = torch.from_numpy(found.images).float().div(16).unsqueeze(1), torch.from_numpy(found.target).long()
    fold = stratified_folds(y, 5, seed)
    train, test = Split(x[fold != 0], y[fold != 0]), Split(x[fold == 0], y[fold == 0])
    return Dataset("digits", train, test, classes=DIGITS, mean=(0.3053,), std=(0.3760,))


def read_idx(path: Path, dims: int) -> Tensor:
    """Read an IDX file of bytes, gzipped or not, with `dims` dimensions."""
    content = _gunzip(path)
    # header: two zeros, 8 for bytes, number of dimensions, then the size of each as a big-endian integer
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise DataError(f"{path} is no IDX file of bytes: it begins with {content[:4].hex() or 'nothing'}, not with 000008.")
    if content[3] != dims or len(content) < 4 + 4 * dims:
        raise DataError(f"{path} holds an array of {content[3]} dimensions, expected {dims}.")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, 4 + 4 * dims, 4)]
    expected = 4 + 4 * dims + math.prod(shape)
    if len(content) != expected:
        raise DataError(f"{path} has {len(content):,} bytes, but its header {shape} needs {expected:,}. Fetch it again.")
    return torch.frombuffer(content, dtype=torch.uint8)[4 + 4 * dims :].view(shape)


def _gunzip(path: Path) -> bytearray:
    """Return the content of a file, decompressed if it is gzipped."""
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return bytearray(content)
    try:
        return bytearray(gzip.decompress(content))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Delete it and fetch it again.") from error


def _idx_splits(paths: Paths) -> tuple[Split, Split]:
    """Return the training and test split of a set in IDX files."""
    train, test = (
        _idx_split(paths[f"{split}-images-idx3-ubyte.gz"], paths[f"{split}-labels-idx1-ubyte.gz"])
        for split in ("train", "t10k")
    )
    return train, test


def _idx_split(images: Path, labels: Path) -> Split:
    """Read images and labels and check that they belong together."""
    x, y = read_idx(images, 3), read_idx(labels, 1).long()
    if x.shape[1:] != (28, 28):
        raise DataError(f"{images} holds images of {x.shape[1]}x{x.shape[2]} pixels, expected 28x28.")
    if len(x) != len(y):
        raise DataError(f"{labels} holds {len(y):,} labels for the {len(x):,} images of {images.name}.")
    return Split(x.unsqueeze(1), checked_labels(y, 10, labels))


def _cifar_batch(path: Path) -> Split:
    """Read a file with rows of a label and 3 x 32 x 32 pixels, one byte each."""
    content = bytearray(path.read_bytes())
    if len(content) == 0 or len(content) % 3073:
        raise DataError(
            f"{path} has {len(content):,} bytes, not a multiple of the 3,073 of an image and its label. Fetch it again."
        )
    rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
    y = checked_labels(rows[:, 0].long(), 10, path)
    return Split(rows[:, 1:].reshape(-1, 3, 32, 32), y)


def _svhn_split(path: Path) -> Split:
    """Read one split from a .mat file of SVHN's format 2."""
    loadmat = optional("scipy.io", "train").loadmat
    try:
        content = loadmat(path, variable_names=("X", "y"))
    except Exception as error:  # scipy raises many types for a damaged file
        raise DataError(f"{path} is damaged or no .mat file: {error}. Delete it and fetch it again.") from error
    x, y = array(content, "X", path), array(content, "y", path)
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[:3] != (32, 32, 3) or y.numel() != x.shape[3]:
        raise DataError(
            f"{path} holds X of {x.dtype} {tuple(x.shape)} and y of shape {tuple(y.shape)}; "
            "expected bytes (32, 32, 3, n) and n labels. Use SVHN in format 2, the cropped digits."
        )
    y = y.flatten().long()
    y = y.masked_fill(y == 10, 0)  # the files label the digit 0 as 10
    return Split(x.permute(3, 2, 0, 1).contiguous(), checked_labels(y, 10, path))


def array(content: Mapping[str, Any], key: str, path: Path) -> Tensor:
    """Return an array of a file's content as a tensor; raises DataError if there is none under `key`."""
    try:
        return torch.from_numpy(content[key])
    except (KeyError, TypeError, ValueError) as error:
        keys = ", ".join(key for key in content if not key.startswith("__")) or "nothing"
        raise DataError(f"{path} has no numbers under {key!r}; it holds {keys}.") from error


def checked_labels(y: Tensor, classes: int, path: Path) -> Tensor:
    """Return y; raises DataError unless all labels are in 0 .. classes - 1."""
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(f"{path} has labels from {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}.")
    return y
